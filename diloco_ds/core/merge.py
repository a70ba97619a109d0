"""Merging the learners' outer gradients: the weighted mean, and Radial-Directional Averaging.

Everything works on flat fp32 fragments, in place and piece by piece (flat.py): beside the result no more
memory is needed than a few pieces.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Literal

import torch
from torch import Tensor

from diloco_ds.config import Merge
from diloco_ds.core import flat
from diloco_ds.core.events import Part
from diloco_ds.core.fragments import FragmentLayout, Placed
from diloco_ds.core.weights import expert_weights, normalised

_CANCELLED = 1e-6  # directions whose mean is shorter than this (of 1) cancel up to fp32 rounding
_NO_DIRECTION = 1e-30  # a vector this much shorter than the mean norm could not be scaled to it in fp32


@dataclass(frozen=True)
class MergePart:
    """One learner's share. `values`: flat fp32, its fragment, or its outer gradient if `is_gradient`.

    expert_weights: its weight for each of the fragment's experts (`FragmentLayout.expert_layers`); none: not known.
    """

    weight: float
    values: Tensor
    is_gradient: bool = False
    expert_weights: Sequence[float] = ()

    @classmethod
    def of(cls, part: Part, values: Tensor, is_gradient: bool) -> MergePart:
        """What `part` of a merge counts, with its payload."""
        own = expert_weights(part.steps, part.expert_tokens)
        return cls(part.weight, values, is_gradient, own)


def late_payload(anchor: Literal["global", "base"], base: Tensor, values: Tensor) -> tuple[Tensor, bool]:
    """What is kept of an answer that waits for its fragment's next merge, in memory of its own; is it a gradient?

    `base`, `values`: flat fp32, the version the answer started from and the learner's fragment. Anchor `base`: the outer
    gradient base - values. Anchor `global`: the values, to be measured from the fragment as it will be at the merge.
    """
    if anchor == "base":
        return base - values, True
    return values.clone(), False


def merge_fragment(
    layout: FragmentLayout, fragment: int, theta: Tensor, parts: Sequence[MergePart], rule: Merge, out: Tensor
) -> None:
    """Write the merged outer gradient of a fragment into `out` (flat fp32, like `theta` and every part).

    A learner's outer gradient v is `theta`, the syncer's current fragment, minus its values, so that a descent step
    follows the learners. Weights are normalised here. RDA (Decoupled DiLoCo, App. D.2), with phi(x) = x / ||x||:
        sum_m w_m ||v_m|| * phi(sum_m w_m phi(v_m))
    keeps the mean norm where a plain mean of nearly orthogonal gradients would shrink. It is taken over each
    tensor or over all non-embedding and all embedding tensors of the fragment (`rule.norm`). Where vectors
    are zero or their directions cancel there is no direction: the weighted mean is taken.
    With weights `expert_tokens` each expert is merged by itself: by the parts' own weights for it, and where none has
    any, or one of the parts does not know them, by their ordinary ones. RDA's norm is then over the expert's slice of
    each tensor, or over all its slices in the fragment.
    ValueError if all weights are zero, or not as many as there are experts. `out` must share no memory with the inputs.
    """
    weigh = _Weights(layout.experts[fragment], parts)
    scratch = theta.new_empty(flat.PIECE)
    anchors = [None if part.is_gradient else theta for part in parts]
    for group in _groups(layout, fragment, rule):
        gradients = [
            _Gradient(weight, part.values, anchor, scratch)
            for weight, part, anchor in zip(weigh.of(group.expert), parts, anchors, strict=True)
            if weight > 0
        ]
        if group.kind == "rda":
            _rda(group.spans, gradients, out)
        else:
            _mean(group.spans, gradients, out)


class _Weights:
    """Normalised weights of the parts, for what all learners trained and for each expert."""

    def __init__(self, experts: int, parts: Sequence[MergePart]) -> None:
        self._ordinary = normalised([part.weight for part in parts])
        told = [part.expert_weights for part in parts if part.weight > 0]
        self._of_experts = list(zip(*told, strict=True)) if all(told) else []
        self._counts = [part.weight > 0 for part in parts]
        if len(self._of_experts) not in (0, experts):
            raise ValueError(f"weights for {len(self._of_experts)} experts, the fragment has {experts}")

    def of(self, expert: int | None) -> list[float]:
        """A weight for each part; `expert`: which of the fragment's experts, None for any other tensor."""
        if expert is None or not self._of_experts or not any(self._of_experts[expert]):
            return self._ordinary
        own = iter(normalised(self._of_experts[expert]))
        return [next(own) if counts else 0.0 for counts in self._counts]


@dataclass(frozen=True)
class _Group:
    """Spans of the flat fragment over which one norm is taken, with their merge; of one expert, or of other tensors."""

    kind: str
    expert: int | None
    spans: list[slice] = field(default_factory=list)


@dataclass(frozen=True)
class _Gradient:
    """v = anchor - values, or `values` itself where there is no anchor; computed piece by piece."""

    weight: float
    values: Tensor
    anchor: Tensor | None
    scratch: Tensor  # flat.PIECE elements, shared by all gradients of a merge

    def at(self, piece: slice) -> Tensor:
        """v over `piece`, valid until any gradient is asked again."""
        if self.anchor is None:
            return self.values[piece]
        difference = self.scratch[: piece.stop - piece.start]
        return torch.sub(self.anchor[piece], self.values[piece], out=difference)


def _groups(layout: FragmentLayout, fragment: int, rule: Merge) -> Iterable[_Group]:
    groups: dict[tuple[int | None, bool, int | None], _Group] = {}
    for placed, expert, span in _pieces(layout, fragment, apart=rule.weights == "expert_tokens"):
        tensor = placed.offset if rule.norm == "tensor" else None
        kind = rule.embedding if placed.spec.embedding else rule.matrices
        key = tensor, placed.spec.embedding, expert
        groups.setdefault(key, _Group(kind, expert)).spans.append(span)
    return groups.values()


def _pieces(layout: FragmentLayout, fragment: int, apart: bool) -> Iterator[tuple[Placed, int | None, slice]]:
    """Every tensor, or with `apart` every expert's slice of one: which of the fragment's experts, and where it lies."""
    layers = layout.expert_layers(fragment)
    first = dict(zip(layers, accumulate(layers.values(), initial=0), strict=False))
    for placed in layout.tensors_of(fragment):
        layer, start = placed.spec.expert_layer, placed.offset
        if layer is None or not apart:
            yield placed, None, slice(start, start + placed.spec.numel)
            continue
        size = placed.spec.numel // placed.spec.experts
        for expert in range(placed.spec.experts):
            yield placed, first[layer] + expert, slice(start + expert * size, start + (expert + 1) * size)


def _mean(spans: Sequence[slice], gradients: Sequence[_Gradient], out: Tensor) -> None:
    _combine(spans, gradients, [gradient.weight for gradient in gradients], out)


def _rda(spans: Sequence[slice], gradients: Sequence[_Gradient], out: Tensor) -> None:
    norms = [flat.norm(spans, gradient.at, out) for gradient in gradients]
    mean_norm = math.fsum(gradient.weight * norm for gradient, norm in zip(gradients, norms, strict=True))
    # The unit vectors are scaled to the mean norm at once: numbers stay in the range they came in.
    factors = [
        gradient.weight * mean_norm / norm if norm > _NO_DIRECTION * mean_norm else 0.0
        for gradient, norm in zip(gradients, norms, strict=True)
    ]
    _combine(spans, gradients, factors, out)
    length = flat.norm(spans, lambda piece: out[piece], out)
    if length <= _CANCELLED * mean_norm:
        _mean(spans, gradients, out)
        return
    for span in spans:
        out[span].mul_(mean_norm / length)


def _combine(
    spans: Sequence[slice], gradients: Sequence[_Gradient], factors: Sequence[float], out: Tensor
) -> None:
    """out = sum_m factor_m v_m over the spans, in the order of the gradients."""
    for piece in flat.pieces(spans):
        target = out[piece].zero_()
        for gradient, factor in zip(gradients, factors, strict=True):
            target.add_(gradient.at(piece), alpha=factor)
