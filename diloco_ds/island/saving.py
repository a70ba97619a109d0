"""When an island saves a checkpoint, and what is done about it beside the step."""

from __future__ import annotations

import threading
import time
from typing import Any

from diloco_ds.island.checkpoints import IslandCheckpoints
from diloco_ds.island.step_log import StepLog
from diloco_ds.island.writing import WriteError, Writing

BYTES_PER_PARAMETER = 13
"""What a checkpoint takes until the first one is measured: fp32 master, two moments, and some more."""

SLOW = 3.0
"""A checkpoint that takes so many times as long as there should be between two is told of."""


class Saver:
    """Rank 0's side of saving.

    The ranks write while the next steps are made, or between two steps (writing.py). Bringing the files to disk, the
    mark that makes them count, and removing older ones come after that, in a thread of rank 0.
    """

    def __init__(self, checkpoints: IslandCheckpoints, every_s: float, parameters: int, log: StepLog) -> None:
        self._checkpoints, self._every_s, self._log = checkpoints, every_s, log
        self._least_bytes = BYTES_PER_PARAMETER * parameters
        self._last = time.monotonic()
        self._completing: threading.Thread | None = None
        self._paused = False
        self._told_slow = False
        checkpoints.remove_leavings()
        self.failed = False
        """Whether the last checkpoint could not be written."""

    def due(self) -> bool:
        """Whether it is time for a checkpoint, the last one is complete and the disk has room."""
        if time.monotonic() - self._last < self._every_s:
            return False
        if self.busy():
            self._look_at_slow_one()
            return False
        self._last = time.monotonic()
        return self.has_room()

    def has_room(self) -> bool:
        """Whether the disk has room for another checkpoint; says so once where it has not."""
        no_room = self._checkpoints.room_for_another(self._least_bytes)
        if no_room and not self._paused:
            self._log.event("checkpoint_paused", no_room)
        self._paused = no_room is not None
        return not self._paused

    def begun(self, tag: str, facts: dict[str, Any], seconds: float, writing: Writing) -> None:
        """The ranks write `tag`, which has held the loop up for `seconds`: complete it when they have. The one before must
        have been waited for. If the disk does not take it training goes on, and the next one is tried when it is due.
        """
        self._last = time.monotonic()
        self.failed = self._told_slow = False
        self._completing = threading.Thread(
            target=self._complete, args=(tag, facts, seconds, writing), name="checkpoint", daemon=True
        )
        self._completing.start()

    def wait(self) -> None:
        """Return when the last checkpoint is complete, or has failed."""
        if self._completing is not None:
            self._completing.join()

    def busy(self) -> bool:
        """Whether a checkpoint is not complete yet."""
        return self._completing is not None and self._completing.is_alive()

    def _look_at_slow_one(self) -> None:
        seconds = time.monotonic() - self._last
        if seconds > SLOW * self._every_s and not self._told_slow:
            self._told_slow = True
            self._log.event(
                "checkpoint_slow", f"not written after {seconds:.0f} s; there is no other meanwhile"
            )

    def _complete(self, tag: str, facts: dict[str, Any], seconds: float, writing: Writing) -> None:
        began = time.monotonic()
        try:
            writing.wait()
            nbytes = self._checkpoints.size(tag)
            self._checkpoints.complete(tag, {**facts, "bytes": nbytes})
        except OSError as error:
            self.failed = True
            self._log.event("checkpoint_failed", f"{tag}: {error}")
            return
        except WriteError:
            return  # the learner ends by it: its loop looks at the same writing
        within = time.monotonic() - began
        self._log.event("checkpoint", f"{tag} is complete", seconds=seconds, written_s=within, bytes=nbytes)
