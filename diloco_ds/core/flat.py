"""Flat fp32 vectors, worked on in pieces that stay in the processor's cache; norms are summed in float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

PIECE = 1 << 18  # elements: 1 MiB of fp32


def pieces(spans: Sequence[slice]) -> Iterator[slice]:
    """The spans cut into pieces of at most PIECE elements, in order."""
    for span in spans:
        for start in range(span.start, span.stop, PIECE):
            yield slice(start, min(start + PIECE, span.stop))


def norm(spans: Sequence[slice], at: Callable[[slice], Tensor], like: Tensor) -> float:
    """The Euclidean norm over the spans of the vector whose pieces `at` gives, on the device of `like`."""
    total = torch.zeros((), dtype=torch.float64, device=like.device)
    scratch = like.new_empty(PIECE, dtype=torch.float64)
    for piece in pieces(spans):
        wide = scratch[: piece.stop - piece.start].copy_(at(piece))
        total += torch.dot(wide, wide)
    return math.sqrt(float(total))
