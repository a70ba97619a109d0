"""Merging the learners' outer gradients: the weighted mean, and Radial-Directional Averaging.

Everything works on flat fp32 fragments, in place and piece by piece (flat.py): beside the result no more
memory is needed than a few pieces.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from diloco_ds.config import Merge
from diloco_ds.core import flat
from diloco_ds.core.fragments import FragmentLayout
from diloco_ds.core.weights import normalised

_CANCELLED = 1e-6  # directions whose mean is shorter than this (of 1) cancel up to fp32 rounding
_NO_DIRECTION = 1e-30  # a vector this much shorter than the mean norm could not be scaled to it in fp32


@dataclass(frozen=True)
class MergePart:
    """One learner's share. `values`: flat fp32, its fragment, or its outer gradient if `is_gradient`."""

    weight: float
    values: Tensor
    is_gradient: bool = False


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
    ValueError if all weights are zero. `out` must share no memory with the inputs.
    """
    weights = normalised([part.weight for part in parts])
    scratch = theta.new_empty(flat.PIECE)
    gradients = [
        _Gradient(weight, part.values, None if part.is_gradient else theta, scratch)
        for weight, part in zip(weights, parts, strict=True)
        if weight > 0
    ]
    for spans, kind in _groups(layout, fragment, rule):
        if kind == "rda":
            _rda(spans, gradients, out)
        else:
            _mean(spans, gradients, out)


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


def _groups(layout: FragmentLayout, fragment: int, rule: Merge) -> Iterator[tuple[list[slice], str]]:
    """The spans of the flat fragment over which one norm is taken, with their merge."""
    by_embedding: dict[bool, list[slice]] = {False: [], True: []}
    for placed in layout.tensors_of(fragment):
        span = slice(placed.offset, placed.offset + placed.spec.numel)
        by_embedding[placed.spec.embedding].append(span)
    for embedding, spans in by_embedding.items():
        kind = rule.embedding if embedding else rule.matrices
        if rule.norm == "tensor":
            yield from (([span], kind) for span in spans)
        elif spans:
            yield spans, kind


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
