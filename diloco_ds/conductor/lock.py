"""One conductor per run directory."""

from __future__ import annotations

import fcntl
import os

from diloco_ds.errors import UserError
from diloco_ds.observe.status_files import StatusFile, read_status_file
from diloco_ds.rundir import RunDir


def hold(run: RunDir) -> int:
    """Hold the run until this process ends or the descriptor returned is closed; children do not inherit it.

    UserError if another process holds it.
    """
    path = run.status("conductor").with_suffix(".lock")
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        holder = read_status_file(run, "conductor", StatusFile)
        raise UserError(
            f"{run.root}: this run is conducted by another diloco-ds already"
            + (f" (process {holder.pid})" if holder is not None else "")
            + f"; see it with `diloco-ds status {run.root}`, end it with `diloco-ds stop {run.root}`"
        ) from None
    return descriptor
