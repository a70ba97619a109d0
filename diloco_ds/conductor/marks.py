"""The processes of a run, known by marks in their environment.

Whatever the conductor starts carries the run's id and the role it was started for, and hands both down to its
children. So every process of a run is found, and no other, whoever else has died: ranks below a dead mpirun,
learners below a dead supervisor.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable

import psutil

from diloco_ds.island.learner_processes import MARK as LEARNER_MARK

RUN_MARK = "DILOCO_DS_RUN"
ROLE_MARK = "DILOCO_DS_ROLE"
KILLED_WITHIN_S = 10.0
POLL_S = 0.02


def marked(environment: dict[str, str], run_id: str, role: str) -> dict[str, str]:
    """`environment` with the marks of a process of the run."""
    return {**environment, RUN_MARK: run_id, ROLE_MARK: role}


def processes_of(run_id: str, role: str | None = None) -> list[psutil.Process]:
    """Live processes of the run, learners among them; with `role`: those started for it, learners left out."""
    return [
        process for process, environment in _of_run(run_id) if role is None or _has_role(environment, role)
    ]


def strays(run_id: str, known: set[int]) -> list[psutil.Process]:
    """Live processes of the run, learners left out, that are neither among the `known` ids nor below one of them."""
    found = []
    for process, environment in _of_run(run_id):
        if LEARNER_MARK in environment:
            continue
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.pid not in known and not any(parent.pid in known for parent in process.parents()):
                found.append(process)
    return found


def kill(find: Callable[[], list[psutil.Process]]) -> None:
    """SIGKILL to all that `find` finds, until it finds none. OSError if one withstands."""
    deadline = time.monotonic() + KILLED_WITHIN_S
    while processes := find():
        if time.monotonic() > deadline:
            raise OSError(f"processes {[process.pid for process in processes]} withstand SIGKILL")
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        time.sleep(POLL_S)


def _of_run(run_id: str) -> list[tuple[psutil.Process, dict[str, str]]]:
    found = []
    for process in psutil.process_iter():
        environment = _environment(process)
        if environment.get(RUN_MARK) == run_id and process.pid != os.getpid():
            found.append((process, environment))
    return found


def _has_role(environment: dict[str, str], role: str) -> bool:
    return environment.get(ROLE_MARK) == role and LEARNER_MARK not in environment


def _environment(process: psutil.Process) -> dict[str, str]:
    """The environment a process was started with; empty for another user's, a dead one and a zombie."""
    try:
        return process.environ()
    except (psutil.Error, OSError):
        return {}
