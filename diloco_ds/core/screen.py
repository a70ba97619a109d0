"""Which updates are sound enough to be merged: finite, and of a plausible size."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from statistics import median

import torch
from torch import Tensor

from diloco_ds.core import flat


def is_finite(vector: Tensor) -> bool:
    """Whether no element of a flat tensor is infinite or not a number."""
    return all(bool(torch.isfinite(piece).all()) for piece in vector.split(flat.PIECE))


def norm(a: Tensor, b: Tensor) -> float:
    """||a - b|| of two flat fp32 tensors, summed in float64, without a temporary of their size."""
    if a.shape != b.shape:
        raise ValueError(f"shapes {list(a.shape)} and {list(b.shape)} differ")
    return flat.norm([slice(0, a.numel())], lambda piece: torch.sub(a[piece], b[piece]), a)


class OutlierScreen:
    """Finds updates whose norm exceeds `factor` times the running median of their fragment.

    The median is over the last `history` norms that passed; until `least` have, nothing is an outlier.
    """

    def __init__(self, factor: float, history: int = 64, least: int = 5) -> None:
        self._factor = factor
        self._history = history
        self._least = least
        self._norms: dict[int, deque[float]] = {}

    def check(self, fragment: int, norm: float) -> str | None:
        """None if an update of this norm may be merged (it then enters the history), else the reason."""
        if not math.isfinite(norm):
            return f"its norm is {norm}"
        seen = self._norms.setdefault(fragment, deque(maxlen=self._history))
        if len(seen) >= self._least:
            usual = median(seen)
            if norm > self._factor * usual > 0:
                return f"its norm {norm:.4g} is over {self._factor:g} times the fragment's median {usual:.4g}"
        seen.append(norm)
        return None

    def history(self, fragment: int) -> tuple[float, ...]:
        """The norms that the next update of `fragment` is compared with, oldest first."""
        return tuple(self._norms.get(fragment, ()))

    def restore(self, fragment: int, norms: Iterable[float]) -> None:
        """Take `history` back."""
        self._norms[fragment] = deque(norms, maxlen=self._history)
