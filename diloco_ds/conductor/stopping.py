"""Stopping a run from outside: through its conductor, or, where that is gone, in its place."""

from __future__ import annotations

import os
import signal
import sys
import time

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
FAILED = 1


def stop_run(run: RunDir, *, now: bool) -> int:
    """Stop the run, with checkpoints or (`now`) without; 0 if it has stopped or was not running.

    UserError if `run` is no run.
    """
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


def _through_conductor(run: RunDir, pid: int, now: bool) -> int:
    os.kill(pid, signal.SIGTERM)
    if now:
        time.sleep(0.5)  # two signals at one moment would be one
        os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + CONDUCTOR_WITHIN_S
    while time.monotonic() < deadline:
        said = read_status_file(run, "conductor", StatusFile)
        if said is None or not said.alive:
            print(f"{shown(run.root)}: {said.state if said else 'ended'}")
            return 0
        time.sleep(0.1)
    print(
        f"diloco-ds: the conductor (process {pid}) has not ended within {CONDUCTOR_WITHIN_S:.0f} s; "
        f"end everything at once with `diloco-ds stop {shown(run.root)} --now`",
        file=sys.stderr,
    )
    return FAILED


def _without_conductor(run: RunDir, run_id: str, now: bool) -> int:
    root, memory = shown(run.root), SharedMemory(run_id).root
    if not now and not marks.processes_of(run_id):
        print(f"{root}: nothing of it is running")
        if memory.exists():
            print(
                f"its state lies in {memory}: `diloco-ds train --resume {root}` goes on from it, "
                f"`diloco-ds stop {root} --now` removes it"
            )
        return 0
    unsaved = False
    if not now:
        parts = Parts.of(run, run_config(run), islands=True)
        parts.take_over(run)
        ending.end_cleanly(parts, lambda: False)
        if reason := ending.cut_off(parts):
            print(f"{root}: {reason}")
        said = read_status_file(run, "syncer", StatusFile)
        unsaved = said is None or said.state not in ("stopped", "finished")
    ending.sweep(run_id, keep_shared_memory=unsaved, here=None if any_elsewhere(run) else run)
    print(
        f"{root}: stopped"
        + (f"; the syncer wrote no checkpoint, its state is kept in {memory}" if unsaved else "")
    )
    return 0
