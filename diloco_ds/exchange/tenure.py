"""Who may advance a run: one syncer at a time, each with a generation of its own.

The file ``syncer.generation`` of the run directory holds the generation of the newest syncer and is locked
(flock) by it for as long as its process lives. The kernel drops the lock when the process is dead, and only
then: a syncer that was stopped (SIGSTOP) keeps it, so nobody can take over while it might come back. Where
a file system does not keep that promise (some network file systems), or the run directory was replaced,
`check` finds the newer generation before every commit and the old syncer writes nothing more.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from types import TracebackType

from diloco_ds.errors import UserError
from diloco_ds.exchange.failpoint import failpoint

_WIDTH = 20  # a fixed width, so that the number is replaced by one write within a block


class Superseded(Exception):
    """A newer syncer advances this run; this one must not write any more."""


class Tenure:
    """The right to advance the run in `run_dir`, held until `release` or the death of the process.

    Raises UserError when another syncer holds it. `generation` is one above that of the syncer before, and on disk.
    """

    def __init__(self, run_dir: Path) -> None:
        self.path = run_dir / "syncer.generation"
        self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._fd)
            raise UserError(
                f"{run_dir}: a syncer (generation {_read(self.path)}) already advances this run; "
                "stop it first (diloco-ds stop)"
            ) from None
        self.generation = _read(self.path) + 1
        os.pwrite(self._fd, b"%0*d\n" % (_WIDTH, self.generation), 0)
        os.fsync(self._fd)
        failpoint("tenure.taken")

    def check(self) -> None:
        """Raise Superseded if a newer syncer has taken the run."""
        try:
            newest = _read(self.path)
        except FileNotFoundError:
            raise Superseded(f"{self.path} is gone: the run directory was removed") from None
        if newest != self.generation:
            raise Superseded(
                f"generation {newest} advances this run, this syncer is generation {self.generation}"
            )

    def release(self) -> None:
        """Let another syncer take the run."""
        os.close(self._fd)

    def __enter__(self) -> Tenure:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def _read(path: Path) -> int:
    return int(path.read_text() or 0)
