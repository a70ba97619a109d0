"""The island's batches, read and pinned by a thread before the step needs them."""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence

from torch import Tensor

from diloco_ds.core.reading import Piece
from diloco_ds.data.blocks import BlockFile
from diloco_ds.data.shard import BlockOrder

AHEAD = 2
"""Batches that are read, or being read, while a step is made."""


class Batches:
    """Of every batch of the island rank `rank` of `ranks` gets `sequences` blocks: a share of its own, in order.

    A batch is read when `read` names its pieces of the block order; all ranks are given the same ones, so each knows
    its rows and they never meet.
    """

    def __init__(
        self, blocks: BlockFile, order: BlockOrder, rank: int, ranks: int, sequences: int, pinned: bool
    ) -> None:
        self._blocks, self._order = blocks, order
        self._first, self._size = rank * sequences, ranks * sequences
        self._sequences, self._pinned = sequences, pinned
        self._asked: queue.SimpleQueue[Sequence[Piece] | None] = queue.SimpleQueue()
        self._ready: queue.SimpleQueue[Tensor | BaseException] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="batches", daemon=True)
        self._thread.start()

    def read(self, pieces: Sequence[Piece]) -> None:
        """Read a further batch ahead: `pieces` of the block order, `ranks * sequences` blocks in all."""
        self._asked.put(pieces)

    def next(self) -> Tensor:
        """This rank's share of the oldest batch, int64 [sequences, length].

        Waits only if reading is slower than training. RuntimeError if the data cannot be read.
        """
        batch = self._ready.get()
        if isinstance(batch, BaseException):
            raise RuntimeError("the training data cannot be read") from batch
        return batch

    def close(self) -> None:
        """Stop reading ahead."""
        self._asked.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (pieces := self._asked.get()) is not None:
            try:
                self._ready.put(self._batch(pieces))
            except BaseException as error:  # handed to the loop by `next`
                self._ready.put(error)

    def _batch(self, pieces: Sequence[Piece]) -> Tensor:
        places = [place for start, blocks in pieces for place in range(start, start + blocks)]
        if len(places) != self._size:
            raise ValueError(f"pieces {pieces} for a batch of {self._size} blocks")
        rows = self._blocks.batch(
            [self._order[place] for place in places[self._first : self._first + self._sequences]]
        )
        return rows.pin_memory() if self._pinned else rows
