"""How the optimizer's moments of a whole model are divided for the way from one island to another.

All fragments, one behind the other, are cut into portions of equal size, whatever the fragments' own sizes are: so what
a portion takes, of shared memory and of a step boundary, is known beforehand.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

VALUES = ("exp_avg", "exp_avg_sq")
"""What travels for each weight: the moments of Adam and its kin."""
LEAST = 4
"""Portions at least, so that those of a model of one fragment are small beside it."""
MOST_WEIGHTS = 1 << 27
"""Weights of a portion at most: 1 GiB of moments."""


class Piece(NamedTuple):
    """Weights low .. high - 1 of `fragment`, which lie in the portion from weight `at` on."""

    fragment: int
    low: int
    high: int
    at: int


class Portions:
    """The portions of a model whose fragment p has `numels[p]` weights."""

    def __init__(self, numels: Sequence[int]) -> None:
        self._numels = tuple(numels)
        total = sum(numels)
        self.weights = min(-(-total // max(len(numels), LEAST)), MOST_WEIGHTS)
        """Weights of a portion; the last one may have fewer."""
        self.count = -(-total // self.weights)

    @property
    def numel(self) -> int:
        """fp32 values of a portion: first one of VALUES for all its weights, then the next."""
        return len(VALUES) * self.weights

    def pieces(self, portion: int) -> Iterator[Piece]:
        """The parts of fragments that `portion`, 0 .. count - 1, is made of, in order."""
        first, start = portion * self.weights, 0
        for fragment, numel in enumerate(self._numels):
            low, high = max(first - start, 0), min(first + self.weights - start, numel)
            if low < high:
                yield Piece(fragment, low, high, start + low - first)
            start += numel
