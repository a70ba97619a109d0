"""Stopping a run from outside: through its conductor, or, where that is gone, in its place."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from diloco_ds.conductor import ending, lock, marks
from diloco_ds.conductor.elsewhere import any_elsewhere
from diloco_ds.conductor.parts import Parts
from diloco_ds.conductor.summary import shown
from diloco_ds.errors import UserError
from diloco_ds.membership import run_config
from diloco_ds.observe.manifest import read_manifest
from diloco_ds.observe.status_files import StatusFile, read_status_file
from diloco_ds.rundir import RunDir, SharedMemory

CONDUCTOR_WITHIN_S = 45.0


@dataclass(frozen=True)
class Stopped:
    """What came of a stop."""

    run_dir: Path
    was_running: bool
    ended: bool
    """Nothing of the run is running any more."""
    state: str | None
    """The run's, as its conductor said last; without a conductor `stopped`, and None if nothing was running."""
    conductor_pid: int | None = None
    """The conductor that has not ended in time."""
    kept: Path | None = None
    """Shared memory that holds what no checkpoint does, for a resume."""
    remark: str | None = None
    """What is not in wandb, and how it gets there."""

    def as_dict(self) -> dict[str, Any]:
        """Everything, as JSON's own types."""
        return {key: str(value) if isinstance(value, Path) else value for key, value in asdict(self).items()}

    def in_words(self) -> Iterator[str]:
        """The same, line by line."""
        root = shown(self.run_dir)
        if self.remark is not None:
            yield f"{root}: {self.remark}"
        if not self.ended:
            yield (
                f"{root}: its conductor (process {self.conductor_pid}) has not ended within {CONDUCTOR_WITHIN_S:.0f} s; "
                f"end everything at once with `diloco-ds stop {root} --now`"
            )
        elif self.state is None and not self.was_running:
            yield f"{root}: nothing of it is running"
            if self.kept is not None:
                yield (
                    f"its state lies in {self.kept}: `diloco-ds train --resume {root}` goes on from it, "
                    f"`diloco-ds stop {root} --now` removes it"
                )
        else:
            kept = f"; the syncer wrote no checkpoint, its state is kept in {self.kept}" if self.kept else ""
            yield f"{root}: {self.state or 'ended'}{kept}"


def stop_run(run: RunDir, *, now: bool) -> Stopped:
    """Stop the run, with checkpoints or (`now`) without. UserError if `run` is no run, or is conducted on another host."""
    run_id = str(read_manifest(run.root)["run_id"])
    conductor = read_status_file(run, "conductor", StatusFile)
    if conductor is not None and conductor.alive and conductor.pid is not None:
        if conductor.elsewhere:
            raise UserError(f"{run.root}: this run is conducted on {conductor.host}; stop it there")
        return _through_conductor(run, conductor.pid, now)
    held = lock.hold(run)
    try:
        return _without_conductor(run, run_id, now)
    finally:
        os.close(held)


def _through_conductor(run: RunDir, pid: int, now: bool) -> Stopped:
    os.kill(pid, signal.SIGTERM)
    if now:
        time.sleep(0.5)  # two signals at one moment would be one
        os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + CONDUCTOR_WITHIN_S
    while time.monotonic() < deadline:
        said = read_status_file(run, "conductor", StatusFile)
        if said is None or not said.alive:
            return Stopped(run.root, was_running=True, ended=True, state=said.state if said else None)
        time.sleep(0.1)
    state = said.state if said else None
    return Stopped(run.root, was_running=True, ended=False, state=state, conductor_pid=pid)


def _without_conductor(run: RunDir, run_id: str, now: bool) -> Stopped:
    memory = SharedMemory(run_id).root
    is_running = bool(marks.processes_of(run_id))
    if not now and not is_running:
        kept = memory if memory.exists() else None
        return Stopped(run.root, was_running=False, ended=True, state=None, kept=kept)
    unsaved, remark = False, None
    if not now:
        parts = Parts.of(run, run_config(run), islands=True)
        parts.take_over(run)
        ending.end_cleanly(parts, lambda: False)
        remark = ending.cut_off(parts)
        said = read_status_file(run, "syncer", StatusFile)
        unsaved = said is None or said.state not in ("stopped", "finished")
    ending.sweep(run_id, keep_shared_memory=unsaved, here=None if any_elsewhere(run) else run)
    return Stopped(
        run.root,
        was_running=is_running,
        ended=True,
        state="stopped",
        kept=memory if unsaved else None,
        remark=remark,
    )
