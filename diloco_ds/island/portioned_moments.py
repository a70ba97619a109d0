"""A rank's part of the optimizer's moments, in the portions in which they travel between islands (core/portions.py).

Like fragments, portions are flat and whole, so that neither side needs to know how the other is sharded.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from diloco_ds.core.fragments import FragmentLayout
from diloco_ds.core.portions import VALUES, Portions
from diloco_ds.island.moments import Moments
from diloco_ds.island.slices import FragmentSlices, Slice

_COUNT = "step"


class OwnMoments(NamedTuple):
    """What an island has to give: its optimizer's kind (Moments.kind) as JSON, and the steps its moments are of."""

    optimizer: str
    steps: int


class PortionedMoments:
    """The moments of the optimizer that DeepSpeed drives. `slices` are this rank's."""

    def __init__(self, optimizer: Any, layout: FragmentLayout, slices: Sequence[FragmentSlices]) -> None:
        self._moments, self._slices = Moments(optimizer), slices
        self._portions = Portions(layout.numels)

    def own(self) -> OwnMoments | None:
        """What there is to give; None where the optimizer is not Adam or its kin, or has made no step yet."""
        if not self._moments.is_adam() or self._moments.values() != dict.fromkeys(VALUES, "float32"):
            return None
        return OwnMoments(json.dumps(self._moments.kind()), int(self._moments.most(_COUNT)))

    def can_take(self, optimizer: str | None = None) -> bool:
        """Whether moments can be taken of an island whose `optimizer` is this, or of any at all."""
        return self._moments.is_adam() and (
            optimizer is None or self._moments.can_go_on_from(json.loads(optimizer))
        )

    def owned(self, portion: int) -> Iterator[Slice]:
        """What this rank gives of `portion`, as ranges of the portion's values: over all ranks, each value once."""
        return self._parts(portion, "owned")

    def begin(self, steps: int) -> None:
        """Make room for all moments, before the first step: zeros, of an optimizer that has made `steps` steps."""
        masters = (master for fragment in self._slices for master in fragment.masters)
        values = dict.fromkeys(VALUES, "float32")
        self._moments.begin(values, ((master, {_COUNT: float(steps)}) for master in masters))

    @torch.no_grad()
    def take(self, portion: int, source: Tensor) -> None:
        """Write this rank's part of `source`, the values of `portion`, flat fp32 in host memory."""
        for part in self._parts(portion, "masters"):
            part.values().copy_(source[part.start : part.stop])

    def forget(self) -> None:
        """Undo `begin`."""
        self._moments.forget()

    def _parts(self, portion: int, which: str) -> Iterator[Slice]:
        for piece in self._portions.pieces(portion):
            for held in getattr(self._slices[piece.fragment], which):
                if part := held.cut(piece.low, piece.high):
                    for index, name in enumerate(VALUES):
                        at = index * self._portions.weights + piece.at - piece.low
                        yield self._moments.beside(part, name).moved(at)
