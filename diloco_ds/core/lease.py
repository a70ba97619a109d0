"""A lease: consecutive blocks of the run's block order that one island may read; and how far it has read."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

Position = tuple[int, int]
"""(number of a lease, blocks of it): how far an island has come. It reads its leases by rising number, so positions
are compared as pairs. (0, 0): it has read nothing.
"""


class Lease(NamedTuple):
    """Blocks start .. start + size - 1 of the block order (data/shard.py). Numbers rise and are used once in a run."""

    number: int
    start: int
    size: int

    def before(self, position: Position) -> int:
        """How many of its blocks lie before `position`."""
        number, blocks = position
        if number == self.number:
            return min(blocks, self.size)
        return self.size if self.number < number else 0


def flat(leases: Iterable[Lease]) -> tuple[int, ...]:
    """number, start and size of each, one after the other, as orders carry them."""
    return tuple(value for lease in leases for value in lease)


def unflat(values: Sequence[int]) -> list[Lease]:
    """The inverse of `flat`."""
    return [Lease(*values[at : at + 3]) for at in range(0, len(values), 3)]
