"""The learner's half of the ledger: which blocks the island's next batch is made of, and how far it has trained."""

from __future__ import annotations

from collections import deque

from diloco_ds.core.events import Orders
from diloco_ds.core.lease import Lease, Position, unflat

Piece = tuple[int, int]
"""(position in the block order, blocks): a piece of a batch."""

PIECES = 4
"""A batch is put together from at most so many pieces, since a decision that all ranks share has a fixed length. Leases
are whole batches but for what others have given back, so one piece is the rule and two are the exception.
"""

_RESERVE_BITS = 32


class Reading:
    """The leases of one incarnation of an island, read in order, a batch at a time.

    It never waits. Where no lease is in hand, because the syncer is away, it reads on in the *reserve*: positions below
    0, which are further epochs of the block order that no lease covers. Those blocks are trained on in excess of
    everybody's leases; they are counted, and the syncer's accounts call them trained twice.

    step_blocks: blocks of one batch of the whole island. index: the island's place among those of the run, below 4096.
    """

    def __init__(self, incarnation: int, index: int, step_blocks: int) -> None:
        if step_blocks < 1:
            raise ValueError(f"a batch of {step_blocks} blocks")
        self.step_blocks = step_blocks
        self.position: Position = (0, 0)
        """Behind the last block that was trained on."""
        self.reserve = 0
        """Blocks of the reserve that were trained on."""
        self._incarnation = incarnation
        self._planned: Position = (0, 0)
        self._next_reserve = -((incarnation << 12 | index) + 1 << _RESERVE_BITS)
        # planned, not trained on: the position behind the batch, and blocks of it that are of the reserve
        self._batches: deque[tuple[Position, int]] = deque()

    def has_lease(self, orders: Orders) -> bool:
        """Whether `orders` hold a lease of this incarnation that is not planned to its end."""
        return any(lease.before(self._planned) < lease.size for lease in self._leases(orders))

    def plan_batch(self, orders: Orders) -> tuple[Piece, ...]:
        """The pieces of the next batch, `step_blocks` blocks in all. A lease that `orders` name no more is left."""
        missing = self.step_blocks
        pieces: list[Piece] = []
        for lease in self._leases(orders):
            read = lease.before(self._planned)
            count = min(missing, lease.size - read)
            if count == 0:
                continue
            pieces.append((lease.start + read, count))
            self._planned = (lease.number, read + count)
            missing -= count
            if missing == 0 or len(pieces) == PIECES - 1:
                break
        if missing:
            pieces.append((self._next_reserve, missing))
            self._next_reserve += missing
        self._batches.append((self._planned, missing))
        return tuple(pieces)

    def trained(self) -> None:
        """A step was made on the oldest batch that was planned."""
        self.position, reserve = self._batches.popleft()
        self.reserve += reserve

    def _leases(self, orders: Orders) -> list[Lease]:
        return unflat(orders.leases) if orders.reader == self._incarnation else []
