"""Weights of experts by the tokens routed to them: numbers by hand, and what must not matter."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco_ds.config import Merge
from diloco_ds.core.events import Part
from diloco_ds.core.expert_load import expert_load
from diloco_ds.core.fragments import FragmentLayout, TensorSpec, balance
from diloco_ds.core.merge import MergePart, merge_fragment
from diloco_ds.errors import UserError


def layout_of(*tensors):
    """One fragment of (shape, layer of experts or None) tensors."""
    return balance(
        [TensorSpec(f"t{i}", shape, False, layer) for i, (shape, layer) in enumerate(tensors)], 1, 1
    )


TWO_EXPERTS = layout_of(((2, 2), 0), ((1,), None))


def part(island, steps, tokens, experts, values):
    """A Part with `tokens` tokens, `experts` of them routed to each expert, and its outer gradient."""
    told = Part(island, 1, 0, steps, tokens, tokens * tokens / steps, False, expert_tokens=experts)
    return MergePart.of(told, torch.tensor(values), is_gradient=True)


def merged(layout, parts, **rule):
    out = torch.full((layout.numel(0),), math.nan)
    merge_fragment(
        layout, 0, torch.zeros_like(out), parts, Merge(**{"weights": "expert_tokens", **rule}), out
    )
    return out.tolist()


@pytest.mark.parametrize("matrices", ["mean", "rda"])
def test_an_expert_that_only_one_island_trained_takes_its_gradient_alone(matrices):
    # Both: 10 tokens in 2 steps. A routes 10 to expert 0 and 2 to expert 1, B 0 and 6: expert 0 is A's, bit for bit;
    # expert 1 counts 2^2/2 = 2 of A and 6^2/2 = 18 of B: 0.1 * 3 + 0.9 * 1 = 1.2; the rest a half each.
    a = part("a", 2, 10, (10, 2), [0.3, 0.7, 3.0, 0.0, 4.0])
    b = part("b", 2, 10, (0, 6), [9.0, 9.0, 1.0, 0.0, 2.0])
    assert merged(TWO_EXPERTS, [a, b], matrices=matrices) == pytest.approx([0.3, 0.7, 1.2, 0.0, 3.0])
    ordinary = merged(TWO_EXPERTS, [a, b], matrices="mean", weights="tokens")
    assert ordinary == pytest.approx([4.65, 4.85, 2.0, 0.0, 3.0])


def test_the_norm_is_an_experts_own():
    # Expert 0: (3, 0) and (0, 3) at equal weights keep norm 3; expert 1, of norms 1 and 0, has 0.5.
    a = part("a", 1, 4, (2, 2), [3.0, 0.0, 1.0, 0.0, 1.0])
    b = part("b", 1, 4, (2, 2), [0.0, 3.0, 0.0, 0.0, 1.0])
    root = 3 / math.sqrt(2)
    assert merged(TWO_EXPERTS, [a, b]) == pytest.approx([root, root, 0.5, 0.0, 1.0])


def test_per_fragment_the_norm_is_over_all_that_the_fragment_holds_of_an_expert():
    # Expert 0 is the first element of each tensor: (3, 0) and (0, 3); expert 1 (1, 1) of both.
    layout = layout_of(((2, 1), 4), ((2, 1), 4))
    a = part("a", 1, 4, (2, 2), [3.0, 1.0, 0.0, 1.0])
    b = part("b", 1, 4, (2, 2), [0.0, 1.0, 3.0, 1.0])
    root = 3 / math.sqrt(2)
    assert merged(layout, [a, b], norm="fragment") == pytest.approx([root, 1.0, root, 1.0])
    assert merged(layout, [a, b], norm="tensor") == pytest.approx([1.5, 1.0, 1.5, 1.0])


def test_two_layers_are_told_of_by_ascending_layer_wherever_their_tensors_lie():
    layout = layout_of(((2, 1), 7), ((3, 1), 2))
    assert layout.expert_layers(0) == {2: 3, 7: 2}
    a = part("a", 1, 9, (1, 0, 0, 1, 0), [1.0] * 5)
    b = part("b", 1, 9, (0, 1, 1, 0, 1), [2.0] * 5)
    assert merged(layout, [a, b]) == [1.0, 2.0, 1.0, 2.0, 2.0]


@pytest.mark.parametrize("experts", [[(0, 4), (0, 4)], [(4, 4), ()]])
def test_an_expert_that_nobody_trained_or_somebody_does_not_tell_of_counts_as_the_rest(experts):
    # 8 and 4 tokens in one step: weights 64 and 16, so 0.8 and 0.2 of 1 and 6 are 2.
    a = part("a", 1, 8, experts[0], [1.0] * 5)
    b = part("b", 1, 4, experts[1], [6.0] * 5)
    result = merged(TWO_EXPERTS, [a, b], matrices="mean")
    assert [result[0], result[4]] == pytest.approx([2.0, 2.0])


def test_who_made_no_step_does_not_keep_the_others_from_telling():
    a, idle = part("a", 1, 4, (4, 0), [1.0] * 5), MergePart(0.0, torch.full((5,), math.nan), is_gradient=True)
    assert merged(TWO_EXPERTS, [a, idle]) == [1.0] * 5


def test_another_number_of_experts_is_refused():
    with pytest.raises(ValueError, match="weights for 3 experts, the fragment has 2"):
        merged(TWO_EXPERTS, [part("a", 1, 4, (1, 1, 2), [1.0] * 5)])


@st.composite
def mixtures(draw):
    """A fragment with experts and parts of any steps and tokens, their gradients random."""
    experts, size = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    layout = layout_of(((experts, size), 0), ((size,), None))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    steps = draw(st.lists(st.integers(1, 30), min_size=1, max_size=5))
    gradients = [torch.randn(layout.numel(0), generator=generator).tolist() for _ in steps]
    tokens = draw(st.lists(st.integers(1, 10**4), min_size=len(steps), max_size=len(steps)))
    return layout, experts, list(zip(steps, tokens, gradients, strict=True))


@settings(max_examples=60)
@given(mixtures(), st.integers(1, 8))
def test_with_the_same_share_for_every_expert_it_is_the_ordinary_mean(case, share):
    layout, experts, learners = case
    parts = [part(str(i), s, n, (n * share,) * experts, v) for i, (s, n, v) in enumerate(learners)]
    expected = merged(layout, parts, matrices="mean", weights="tokens")
    assert merged(layout, parts, matrices="mean") == pytest.approx(expected, rel=1e-5, abs=1e-6)


@settings(max_examples=60)
@given(mixtures(), st.randoms(use_true_random=False), st.sampled_from(["mean", "rda"]))
def test_the_order_of_learners_does_not_matter(case, random, matrices):
    layout, experts, learners = case
    parts = [
        part(str(i), s, n, tuple(random.randint(0, n) for _ in range(experts)), v)
        for i, (s, n, v) in enumerate(learners)
    ]
    expected = merged(layout, parts, matrices=matrices)
    shuffled = random.sample(parts, len(parts))
    assert merged(layout, shuffled, matrices=matrices) == pytest.approx(expected, rel=1e-3, abs=1e-4)


def test_the_layout_remembers_layers_of_experts_and_is_as_before_without_any():
    text = TWO_EXPERTS.to_json()
    again = FragmentLayout.from_json(text)
    assert (again, again.experts) == (TWO_EXPERTS, (2,))
    assert "expert_layer" not in layout_of(((2, 2), None)).to_json()
    assert layout_of(((2, 2), None)).experts == (0,)
    with pytest.raises(UserError, match="'t1' has another number of experts than its layer 0"):
        FragmentLayout.from_json(layout_of(((2, 3), 0), ((3, 2), 0)).to_json())


def test_how_even_the_load_is_by_hand():
    # Layer one: 6 of 8 at two experts is 1.5 times the mean; layer two, of four: 2 of 8 each is even
    assert expert_load([2, 4], [6, 2, 2, 2, 2, 2]) == 1.25
    assert expert_load([2], []) is None
    assert expert_load([], []) is None
