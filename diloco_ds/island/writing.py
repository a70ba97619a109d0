"""A checkpoint on its way to disk: in a thread of every rank, while steps are made, or there and then."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable


class WriteError(RuntimeError):
    """A checkpoint could not be written, and it was not the disk."""


class Writing:
    """`work` writes this rank's part, and waits for those of the others; `background`: in a thread."""

    def __init__(self, work: Callable[[], None], background: bool) -> None:
        self._work: Callable[[], None] | None = work
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._write, name="write checkpoint", daemon=True)
        if background:
            self._thread.start()
        else:
            self._thread.run()

    def check(self) -> None:
        """Raise what went wrong that was not the disk, as WriteError; never blocks."""
        error = self._error
        if error is not None and not isinstance(error, OSError):
            raise WriteError(f"a checkpoint could not be written: {type(error).__name__}: {error}") from error

    def wait(self) -> None:
        """Return when the checkpoint is there. OSError, on all ranks, if the disk did not take it on one of them."""
        if self._thread.is_alive():
            self._thread.join()
        self.check()
        if self._error is not None:
            raise self._error

    def _write(self) -> None:
        work, self._work = self._work, None  # what it holds is free when it is written
        assert work is not None
        try:
            work()
        except BaseException as error:  # handed to who waits, or looks, for it
            work = None
            _forget_locals(error)
            self._error = error


def _forget_locals(error: BaseException | None) -> None:
    """A traceback keeps what the functions held, here all of a checkpoint."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__
