"""How a run's processes are ended: cleanly with checkpoints, or at once; and its shared memory removed."""

from __future__ import annotations

import shutil
import signal
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from diloco_ds.conductor import marks
from diloco_ds.conductor.part import Part
from diloco_ds.conductor.parts import Parts
from diloco_ds.conductor.shared_memory import remove_shared_memory
from diloco_ds.exchange.failpoint import failpoint
from diloco_ds.rundir import RunDir

CHECKPOINTS_WITHIN_S = 26.0
"""For the learners' and the syncer's checkpoints; a supervisor itself gives its learner a little less."""
CLEANLY_WITHIN_S = 29.0
"""For a clean end as a whole: the user is promised 30 seconds."""
REST_WITHIN_S = 3.0
OBSERVER_WITHIN_S = 15.0
"""For what wandb has still to upload: the observer gives it up a little earlier (observer.FINISH_TIMEOUT_S)."""
POLL_S = 0.05


def end_cleanly(parts: Parts, hurry: Callable[[], bool]) -> None:
    """Ask learners and syncer for checkpoints and wait for them, then end the rest. Returns early when `hurry()` says so.

    What still runs afterwards is for `sweep`.
    """
    deadline = time.monotonic() + CLEANLY_WITHIN_S
    end_chaos(parts, hurry)
    saving = [*parts.supervisors.values(), parts.syncer]
    for part in saving:
        part.signal(signal.SIGTERM)
    failpoint("conductor.stopping")
    # What chaos took is gone from the checkpoints' time; the rest still has its own.
    _wait(saving, min(CHECKPOINTS_WITHIN_S, deadline - REST_WITHIN_S - time.monotonic()), hurry)
    end_rest(parts, hurry, deadline)


def end_chaos(parts: Parts, hurry: Callable[[], bool]) -> None:
    """End the injection of faults: what it holds stopped goes on again, and can end by itself."""
    if parts.chaos is not None:
        parts.chaos.signal(signal.SIGTERM)
        _wait([parts.chaos], REST_WITHIN_S, hurry)


def end_rest(parts: Parts, hurry: Callable[[], bool], deadline: float = float("inf")) -> None:
    """End links, which have nothing to save, and the observer, which may have to upload the rest of what it has logged.

    It is waited for until `deadline` (monotonic seconds) at most, but as long as for the links in any case.
    """
    observer = [parts.observer] if parts.observer else []
    links = [*parts.links.values()]
    began = time.monotonic()
    for part in [*links, *observer]:
        part.signal(signal.SIGTERM)
    _wait(links, REST_WITHIN_S, hurry)
    until = max(began + REST_WITHIN_S, min(began + OBSERVER_WITHIN_S, deadline))
    _wait(observer, until - time.monotonic(), hurry)


def cut_off(parts: Parts) -> str | None:
    """In words, what is not in wandb because its observer has not ended; None if it has, or there is none."""
    if parts.observer is None or not parts.observer.alive():
        return None
    return "wandb had not uploaded all when the run ended; the rest lies in its directory wandb: upload it with wandb sync"


def sweep(run_id: str, *, keep_shared_memory: bool = False, here: RunDir | None = None) -> None:
    """Kill every process of the run that is left on this host and, unless it is to be kept, remove its shared memory.

    `here`: the run's directory, if none of its processes ran elsewhere; what was being written when its writer was
    killed is removed from it.
    """
    marks.kill(lambda: marks.processes_of(run_id))
    if here is not None:
        remove_unfinished(here)
    if not keep_shared_memory:
        remove_shared_memory(run_id)


def remove_unfinished(run: RunDir) -> None:
    """Remove what was written under a hidden name and never renamed. Nobody may be writing."""
    written = ("status", "islands", "checkpoints", "snapshots", "evaluations", "updates")
    for folder in (
        run.root,
        *(path for name in written for path in [run.root / name, *_below(run.root / name)]),
    ):
        for path in folder.glob(".*.partial"):
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


def _below(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_dir()]


def _wait(parts: Iterable[Part], seconds: float, hurry: Callable[[], bool]) -> None:
    deadline = time.monotonic() + seconds
    while any(part.alive() for part in parts) and time.monotonic() < deadline and not hurry():
        time.sleep(POLL_S)
