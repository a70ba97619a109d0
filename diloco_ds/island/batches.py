"""The island's batches, read and pinned by a thread before the step needs them."""

from __future__ import annotations

import queue
import threading
from dataclasses import dataclass

from torch import Tensor

from diloco_ds.data.blocks import BlockFile
from diloco_ds.data.shard import Shard

AHEAD = 2


@dataclass(frozen=True)
class Batch:
    """One rank's share of the island's batch: int64 [sequences, length], and the shard's position behind the
    batch.
    """

    rows: Tensor
    position: int


class Batches:
    """Takes `ranks * sequences` blocks a step from `shard` and gives rank `rank` its `sequences` of them, in
    order.

    All ranks read the same shard, each only its own rows. What was read ahead is not counted as read: the
    position to save is that of the last batch that was trained on.
    """

    def __init__(
        self, blocks: BlockFile, shard: Shard, rank: int, ranks: int, sequences: int, pinned: bool
    ) -> None:
        self._blocks, self._shard = blocks, shard
        self._rank, self._ranks, self._sequences = rank, ranks, sequences
        self._pinned = pinned
        self._ready: queue.Queue[Batch | BaseException] = queue.Queue(AHEAD)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._read, name="batches", daemon=True)
        self._thread.start()

    def next(self) -> Batch:
        """The next batch; waits only if reading is slower than training."""
        batch = self._ready.get()
        if isinstance(batch, BaseException):
            raise RuntimeError("the training data cannot be read") from batch
        return batch

    def close(self) -> None:
        """Stop reading ahead."""
        self._ended.set()
        while self._thread.is_alive():
            while not self._ready.empty():
                self._ready.get_nowait()
            self._thread.join(0.01)

    def _read(self) -> None:
        try:
            while not self._ended.is_set():
                self._ready.put(self._batch())
        except BaseException as error:  # handed to the loop by `next`
            self._ready.put(error)

    def _batch(self) -> Batch:
        indices = self._shard.take(self._ranks * self._sequences)
        start = self._rank * self._sequences
        rows = self._blocks.batch(indices[start : start + self._sequences])
        return Batch(rows.pin_memory() if self._pinned else rows, self._shard.position)
