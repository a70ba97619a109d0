"""The tape on disk: append-only, written as the syncer acts, brought to disk with every checkpoint.

A disk that is full must not stop the syncer, and a tape with a hole could not be replayed: what does not go
out is held back, in order, and written before anything newer as soon as the disk takes it. Beyond
`MOST_HELD_BACK` bytes, or at the end of the syncer, the tape ends for this generation, which is told.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable
from pathlib import Path

from diloco_ds.core.events import Action, Event
from diloco_ds.core.tape import Header, encode, encode_header
from diloco_ds.errors import UserError
from diloco_ds.exchange.failpoint import failpoint

MOST_HELD_BACK = 64 * 2**20

_READ = 1 << 16

log = logging.getLogger(__name__)


class TapeFile:
    """The writing end of the tape at `path`, for one generation of the syncer. One `write(2)` per `append`.

    `tell(event, reason)` tells an event of the run: `tape_ended` where a part of the tape is lost for good.
    """

    def __init__(self, path: Path, header: Header, tell: Callable[[str, str], None]) -> None:
        """Cuts off what a killed syncer left unfinished and begins a generation. UserError if the file cannot be written."""
        self.path = path
        self._generation, self._tell = header.generation, tell
        self._held_back = b""
        self._ended = False
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            self._end = _sound_length(self._fd)
            os.ftruncate(self._fd, self._end)
        except OSError as error:
            raise UserError(f"{path}: the tape cannot be written ({error.strerror})") from error
        self._put(encode_header(header))

    def append(self, now: float, event: Event, actions: list[Action]) -> None:
        """Record `event`, taken in at `now` (seconds, this generation's clock), and the `actions` it led to."""
        self._put(encode(now, event) + b"".join(encode(now, action) for action in actions))
        failpoint("tape.appended")

    def sync(self) -> None:
        """Bring everything to disk. OSError if it cannot."""
        os.fsync(self._fd)

    def close(self) -> None:
        """End the tape of this generation."""
        if self._held_back:
            self._put(b"")
        if self._held_back:
            self._give_up("the syncer ends")
        os.close(self._fd)

    def _put(self, data: bytes) -> None:
        if self._ended:
            return
        data = self._held_back + data
        try:
            written = os.pwrite(self._fd, data, self._end)
        except OSError as error:
            written = 0
            if not self._held_back:
                log.warning(
                    "%s cannot be written (%s); events are held back until it can", self.path, error.strerror
                )
        self._end += written
        self._held_back = data[written:]
        if len(self._held_back) > MOST_HELD_BACK:
            self._give_up("more is not held back")

    def _give_up(self, why: str) -> None:
        lost = len(self._held_back)
        self._ended, self._held_back = True, b""
        with contextlib.suppress(OSError):  # a torn last line is cut off by the next generation in any case
            os.ftruncate(self._fd, _sound_length(self._fd))
        self._tell(
            "tape_ended",
            f"the tape of generation {self._generation} ends here: the disk did not take {lost} bytes, and {why}; "
            "what follows of it cannot be replayed",
        )


def tells_of_a_merge(path: Path) -> bool:
    """Whether anything was merged according to the tape at `path`; False where there is none."""
    if not path.is_file():
        return False
    with path.open("rb") as lines:
        return any(b'"kind":"Merged"' in line for line in lines)


def _sound_length(fd: int) -> int:
    """Bytes up to the end of the last whole line."""
    end = os.fstat(fd).st_size
    while end > 0:
        start = max(0, end - _READ)
        newline = os.pread(fd, end - start, start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        end = start
    return 0
