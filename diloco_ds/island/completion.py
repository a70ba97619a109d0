"""When the copies of all ranks that belong to a boundary are done: known through shared memory, with no
collective.

Every rank has a word on the board: the number of the last boundary whose copies it has finished. Copies on a
GPU run on while the next step computes; a thread of each rank watches its own and moves its word, and rank
0's thread, when all words are there, finishes the boundary: answers are committed and inbox slots given back
as soon as they can be, not at the next boundary.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from diloco_ds.exchange.mapping import PAGE, WORD, aligned, create_mapped_file, fence, map_file
from diloco_ds.island.transfer import DeviceCopy

_MAGIC = int.from_bytes(b"DDS-BRD\0", "little")
_FORMAT = 1
_FIRST = 8
_POLL_S = 0.0005


class RankBoard:
    """One int64 per rank in the file `path`; each is written by its rank alone."""

    def __init__(self, path: Path) -> None:
        self._mapping, self._words = map_file(path, _MAGIC, _FORMAT)
        self.ranks = self._words[2]

    @classmethod
    def renew(cls, path: Path, ranks: int) -> RankBoard:
        """A new board of zeros in place of an older one."""
        path.unlink(missing_ok=True)
        create_mapped_file(path, aligned((_FIRST + ranks) * WORD, PAGE), (_MAGIC, _FORMAT, ranks))
        return cls(path)

    def mark(self, rank: int, boundary: int) -> None:
        """Rank's copies up to `boundary` are done."""
        fence()
        self._words[_FIRST + rank] = boundary

    def reached(self, boundary: int) -> bool:
        """Whether the copies of all ranks up to `boundary` are done."""
        done = min(self._words[_FIRST : _FIRST + self.ranks]) >= boundary
        fence()
        return done


class Completion:
    """Follows the copies of one rank, boundary by boundary, and on rank 0 those of all."""

    def __init__(self, board: RankBoard, rank: int) -> None:
        self._board, self._rank = board, rank
        self._boundary = 0
        self._given = self._finished = 0  # boundaries given to the thread, and those it has finished
        self._jobs: queue.SimpleQueue[tuple[int, Sequence[DeviceCopy], Callable[[], None] | None] | None] = (
            queue.SimpleQueue()
        )
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._follow, name="completion", daemon=True)
        self._thread.start()

    def boundary(self, transfers: Sequence[DeviceCopy], finish: Callable[[], None] | None) -> None:
        """The copies of the next boundary; every rank calls this at every boundary at which there are any.

        `finish` (rank 0's, None on the others) is called once they are done on all ranks: here, if they are,
        else from the thread.
        """
        self.check()
        self._boundary += 1
        if self._given == self._finished and self._done(self._boundary, transfers):
            if finish is not None:
                finish()
            return
        self._given += 1
        self._jobs.put((self._boundary, transfers, finish))

    def check(self) -> None:
        """Raise what went wrong in the thread."""
        if self._error is not None:
            raise RuntimeError("an answer could not be completed") from self._error

    def wait(self) -> None:
        """Return when everything given so far is finished."""
        while self._given != self._finished:
            self.check()
            time.sleep(_POLL_S)
        self.check()

    def close(self) -> None:
        """Finish and end the thread."""
        self.wait()
        self._jobs.put(None)
        self._thread.join()

    def _done(self, boundary: int, transfers: Sequence[DeviceCopy]) -> bool:
        """Move this rank's word when its copies are done; whether nothing is left to wait for."""
        if not all(transfer.done() for transfer in transfers):
            return False
        self._board.mark(self._rank, boundary)
        return self._rank != 0 or self._board.reached(boundary)

    def _follow(self) -> None:
        try:
            while (job := self._jobs.get()) is not None:
                boundary, transfers, finish = job
                while not self._done(boundary, transfers):
                    time.sleep(_POLL_S)
                if finish is not None:
                    finish()
                self._finished += 1
        except BaseException as error:  # handed to the loop by `check`
            self._error = error
