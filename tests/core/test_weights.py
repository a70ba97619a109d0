import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco_ds.core.weights import learner_weight, normalised


def test_quantity_times_quality_by_hand():
    # 3 steps over 60 tokens: 60 * 60 / 3 = 1200. The same tokens in 6 smaller steps count half.
    assert learner_weight(3, 60, "tokens") == 1200
    assert learner_weight(6, 60, "tokens") == 600
    assert normalised([1200, 600]) == [2 / 3, 1 / 3]


def test_uniform_counts_who_made_a_step():
    assert [learner_weight(steps, 10 * steps, "uniform") for steps in (0, 1, 9)] == [0, 1, 1]


@pytest.mark.parametrize("rule", ["tokens", "uniform"])
def test_no_steps_no_weight(rule):
    assert learner_weight(0, 0, rule) == 0
    assert learner_weight(0, 512, rule) == 0


@given(st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 10**12)), min_size=1, max_size=20))
def test_weights_sum_to_one(counts):
    weights = [learner_weight(steps, tokens, "tokens") for steps, tokens in counts]
    if not any(weights):
        with pytest.raises(ValueError, match="all weights are zero"):
            normalised(weights)
        return
    shares = normalised(weights)
    assert math.fsum(shares) == pytest.approx(1, abs=1e-12)
    assert all(share >= 0 for share in shares)


@pytest.mark.parametrize("weights", [[], [0.0, 0.0], [1.0, -1.0], [math.nan], [math.inf, 1.0]])
def test_what_cannot_be_normalised_is_refused(weights):
    with pytest.raises(ValueError, match="weights"):
        normalised(weights)
