import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco_ds.config import Merge
from diloco_ds.core import flat
from diloco_ds.core.fragments import TensorSpec, balance
from diloco_ds.core.merge import MergePart, late_payload, merge_fragment
from diloco_ds.core.weights import learner_weight


def layout_of(*tensors):
    """One fragment of (size, embedding) tensors."""
    return balance([TensorSpec(f"t{i}", (n,), e) for i, (n, e) in enumerate(tensors)], 1, 1)


ONE = layout_of((1, False))
TWO = layout_of((2, False))


def merged(layout, theta, parts, **rule):
    """Each part: (weight, values), or a MergePart."""
    parts = [
        part if isinstance(part, MergePart) else MergePart(part[0], *map(vector, part[1:])) for part in parts
    ]
    out = torch.full((layout.numel(0),), math.nan)
    merge_fragment(layout, 0, vector(theta), parts, Merge(**rule), out)
    return out.tolist()


def vector(values):
    return values if isinstance(values, torch.Tensor) else torch.tensor(values, dtype=torch.float32)


# Numbers by hand


@pytest.mark.parametrize("rule", ["mean", "rda"])
def test_the_outer_gradient_points_from_the_learner_to_the_anchor(rule):
    # The learner went from 10 to 8: v = 10 - 8 = +2, and a step Theta - lr * 2 goes down with it.
    assert merged(ONE, [10.0], [(1.0, [8.0])], matrices=rule) == [2.0]


def test_weighted_mean_of_two_learners():
    # Weights 60^2/3 = 1200 and 30^2/3 = 300, so 0.8 and 0.2; v = 10-8 = 2 and 10-13 = -3: 1.6 - 0.6 = 1.0
    weights = [learner_weight(3, tokens, "tokens") for tokens in (60, 30)]
    parts = [(weights[0], [8.0]), (weights[1], [13.0])]
    assert merged(ONE, [10.0], parts, matrices="mean") == pytest.approx([1.0])


def test_rda_of_one_parameter_votes_on_the_sign_and_keeps_the_size():
    # As above. Mean norm 0.8*2 + 0.2*3 = 2.2; mean direction 0.8*1 - 0.2*1 = 0.6 > 0, so +2.2
    assert merged(ONE, [10.0], [(0.8, [8.0]), (0.2, [13.0])]) == pytest.approx([2.2])


def test_rda_of_two_orthogonal_gradients_keeps_their_norm():
    # v = (3, 0) and (0, 3): the mean (1.5, 1.5) has norm 2.12, RDA has norm 3: (3/sqrt 2, 3/sqrt 2)
    parts = [(1.0, [-3.0, 0.0]), (1.0, [0.0, -3.0])]
    assert merged(TWO, [0.0, 0.0], parts, matrices="mean") == pytest.approx([1.5, 1.5])
    assert merged(TWO, [0.0, 0.0], parts) == pytest.approx([3 / math.sqrt(2)] * 2)


def test_rda_with_unequal_weights_and_norms():
    # w = 3/4, 1/4; v = (4, 0), (0, 8). Norm 0.75*4 + 0.25*8 = 5; direction (0.75, 0.25)/sqrt(0.625)
    result = merged(TWO, [0.0, 0.0], [(3.0, [-4.0, 0.0]), (1.0, [0.0, -8.0])])
    assert result == pytest.approx([5 * 0.75 / math.sqrt(0.625), 5 * 0.25 / math.sqrt(0.625)])


def test_norm_per_tensor_and_per_fragment():
    # Two tensors of one element. v1 = (1, 0), v2 = (1, 2), equal weights.
    # Per tensor: first (1+1)/2 * sign = 1; second (0+2)/2 * sign = 1.
    # Per fragment: norm (1 + sqrt 5)/2; direction ((1 + 1/sqrt 5)/2, (2/sqrt 5)/2), normalised.
    layout = layout_of((1, False), (1, False))
    parts = [(1.0, [-1.0, 0.0]), (1.0, [-1.0, -2.0])]
    assert merged(layout, [0.0, 0.0], parts) == pytest.approx([1.0, 1.0])
    direction = np.array([0.5 + 0.5 / math.sqrt(5), 1 / math.sqrt(5)])
    expected = (1 + math.sqrt(5)) / 2 * direction / np.linalg.norm(direction)
    assert merged(layout, [0.0, 0.0], parts, norm="fragment") == pytest.approx(expected.tolist())


@pytest.mark.parametrize("norm", ["tensor", "fragment"])
def test_the_embedding_has_a_rule_of_its_own(norm):
    # v = +2 and -1, equal weights, in both tensors: mean 0.5; RDA: direction 0, so the mean as well;
    # with weights 3 : 1 mean 0.75*2 - 0.25 = 1.25, RDA 0.75*2 + 0.25*1 = 1.75
    layout = layout_of((1, True), (1, False))
    parts = [(3.0, [-2.0, -2.0]), (1.0, [1.0, 1.0])]
    assert merged(layout, [0.0, 0.0], parts, norm=norm) == pytest.approx([1.25, 1.75])
    swapped = {"matrices": "mean", "embedding": "rda"}
    assert merged(layout, [0.0, 0.0], parts, norm=norm, **swapped) == pytest.approx([1.75, 1.25])


@pytest.mark.parametrize(("anchor", "late"), [("base", 1.0), ("global", 3.0)])
def test_a_late_answer_is_measured_from_its_base_or_from_the_fragment_at_the_merge(anchor, late):
    # Base 4, learner at 3, the global fragment meanwhile at 6: 4 - 3 = 1, or 6 - 3 = 3. Fresh, at 4: 6 - 4 = 2.
    values = vector([3.0])
    part = MergePart(1.0, *late_payload(anchor, vector([4.0]), values))
    values.fill_(9.0)  # the outbox is written anew: what is kept stays
    assert merged(ONE, [6.0], [part]) == [late]
    assert merged(ONE, [6.0], [part, (1.0, [4.0])], matrices="mean") == [(late + 2.0) / 2]


# Vectors without direction


def test_who_did_not_move_pulls_the_norm_but_not_the_direction():
    # v = (0, 0) and (0, 4), equal weights: norm 2, direction (0, 1)
    assert merged(TWO, [0.0, 0.0], [(1.0, [0.0, 0.0]), (1.0, [0.0, -4.0])]) == pytest.approx([0.0, 2.0])


def test_nobody_moved():
    assert merged(TWO, [5.0, 5.0], [(1.0, [5.0, 5.0])] * 2) == [0.0, 0.0]


def test_directions_that_cancel_give_the_weighted_mean():
    # Directions +1 and -1 at equal weights cancel; mean (6 - 2)/2 = 2
    assert merged(ONE, [0.0], [(1.0, [-6.0]), (1.0, [2.0])]) == [2.0]
    third = [math.cos(2 * math.pi / 3), math.sin(2 * math.pi / 3)]
    star = [[1.0, 0.0], third, [third[0], -third[1]]]
    parts = [(1.0, [scale * x for x in arm]) for scale, arm in zip((1, 1, 4), star, strict=True)]
    mean = -sum(np.array(values) for _, values in parts) / 3
    assert merged(TWO, [0.0, 0.0], parts) == pytest.approx(mean.tolist(), abs=1e-6)


def test_a_part_of_weight_zero_does_not_count_whatever_it_holds():
    parts = [(1.0, [1.0, 2.0]), (0.0, [math.nan, math.inf])]
    for rule in ("mean", "rda"):
        assert merged(TWO, [0.0, 0.0], parts, matrices=rule) == [-1.0, -2.0]


def test_only_weights_of_zero_are_refused():
    with pytest.raises(ValueError, match="all weights are zero"):
        merged(ONE, [0.0], [(0.0, [1.0])])


def test_very_unequal_and_very_small_norms_stay_finite():
    tiny, large = [1e-38, 0.0], [0.0, 1e18]
    assert all(map(math.isfinite, merged(TWO, [0.0, 0.0], [(1.0, tiny), (1.0, large)])))
    assert merged(TWO, [0.0, 0.0], [(1.0, tiny), (1.0, tiny)]) == pytest.approx([-1e-38, 0.0])


# Properties


def reference(layout, theta, parts, rule):
    """RDA and weighted mean over lists of (weight, gradient), in numpy float64."""
    weights = np.array([weight for weight, _ in parts]) / sum(weight for weight, _ in parts)
    out = np.empty(layout.numel(0))
    spans = {}
    for placed in layout.tensors_of(0):
        key = placed.spec.name if rule.norm == "tensor" else placed.spec.embedding
        span = np.arange(placed.offset, placed.offset + placed.spec.numel)
        spans.setdefault((key, placed.spec.embedding), []).append(span)
    for (_, embedding), group in spans.items():
        index = np.concatenate(group)
        vectors = np.stack(
            [theta.double().numpy()[index] - values.double().numpy()[index] for _, values in parts]
        )
        out[index] = weights @ vectors
        if (rule.embedding if embedding else rule.matrices) == "rda":
            norms = np.linalg.norm(vectors, axis=1)
            direction = weights @ (vectors / norms[:, None])
            out[index] = weights @ norms * direction / np.linalg.norm(direction)
    return out


@st.composite
def cases(draw):
    sizes = draw(st.lists(st.tuples(st.integers(1, 9), st.booleans()), min_size=1, max_size=4))
    layout = layout_of(*sizes)
    count = draw(st.integers(1, 5))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    theta = torch.randn(layout.numel(0), generator=generator)
    weights = draw(st.lists(st.floats(0.01, 100), min_size=count, max_size=count))
    parts = [
        (
            weight,
            theta + 0.1 + 10.0 ** draw(st.integers(-2, 2)) * torch.rand(theta.shape, generator=generator),
        )
        for weight in weights
    ]
    rule = {
        "matrices": draw(st.sampled_from(["rda", "mean"])),
        "embedding": draw(st.sampled_from(["rda", "mean"])),
        "norm": draw(st.sampled_from(["tensor", "fragment"])),
    }
    return layout, theta, parts, rule


def close(values, like):
    return np.allclose(values, like, rtol=1e-4, atol=1e-5 * float(np.abs(like).max()))


@settings(max_examples=150)
@given(cases())
def test_against_an_independent_reference(case):
    layout, theta, parts, rule = case
    assert close(merged(layout, theta, parts, **rule), reference(layout, theta, parts, Merge(**rule)))


@settings(max_examples=60)
@given(cases(), st.randoms(use_true_random=False), st.floats(1e-6, 1e6))
def test_order_of_parts_and_scale_of_weights_do_not_matter(case, random, scale):
    layout, theta, parts, rule = case
    shuffled = random.sample(parts, len(parts))
    plain = merged(layout, theta, parts, **rule)
    assert close(merged(layout, theta, shuffled, **rule), np.array(plain))
    scaled = [(weight * scale, values) for weight, values in parts]
    assert close(merged(layout, theta, scaled, **rule), np.array(plain))


@settings(max_examples=60)
@given(st.integers(1, 6), st.integers(2, 40), st.integers(0, 2**31), st.floats(1e-3, 1e3))
def test_rda_keeps_the_norm_that_all_gradients_share(count, size, seed, length):
    generator = torch.Generator().manual_seed(seed)
    gradients = torch.randn(count, size, generator=generator)
    gradients *= length / gradients.norm(dim=1, keepdim=True)
    parts = [MergePart(1.0 + i, gradient, is_gradient=True) for i, gradient in enumerate(gradients)]
    result = merged(layout_of((size, False)), torch.zeros(size), parts)
    assert np.linalg.norm(result) == pytest.approx(length, rel=1e-4)


@pytest.mark.parametrize("rule", ["rda", "mean"])
def test_a_single_learner_is_followed_bit_for_bit(rule):
    theta, values = torch.randn(2, 1000, generator=torch.Generator().manual_seed(3))
    out = merged(layout_of((300, True), (700, False)), theta, [(0.37, values)], matrices=rule, embedding=rule)
    assert out == (theta - values).tolist()


@pytest.mark.parametrize("norm", ["tensor", "fragment"])
def test_pieces_change_nothing_but_rounding(monkeypatch, norm):
    generator = torch.Generator().manual_seed(5)
    theta, a, b = torch.randn(3, 100, generator=generator)
    layout, parts = layout_of((40, False), (60, True)), [(1.0, a), (2.0, b)]
    whole = merged(layout, theta, parts, norm=norm)
    monkeypatch.setattr(flat, "PIECE", 7)
    assert merged(layout, theta, parts, norm=norm) == pytest.approx(whole, rel=1e-6)


def test_the_inputs_stay_as_they_are():
    theta, a, b = torch.randn(3, 50, generator=torch.Generator().manual_seed(9))
    before = [tensor.clone() for tensor in (theta, a, b)]
    merged(layout_of((50, False)), theta, [MergePart(1.0, a), MergePart(1.0, b, is_gradient=True)])
    assert all(torch.equal(old, new) for old, new in zip(before, (theta, a, b), strict=True))
