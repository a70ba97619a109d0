"""How a run's processes are ended: cleanly with checkpoints, or at once; and its shared memory removed."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterable

from diloco_ds.conductor import marks
from diloco_ds.conductor.part import Part
from diloco_ds.conductor.parts import Parts
from diloco_ds.conductor.shared_memory import remove_shared_memory

CHECKPOINTS_WITHIN_S = 26.0
"""For the learners' and the syncer's checkpoints; a supervisor itself gives its learner a little less."""
REST_WITHIN_S = 3.0
POLL_S = 0.05


def end_cleanly(parts: Parts, hurry: Callable[[], bool]) -> None:
    """Ask learners and syncer for checkpoints and wait for them, then end the rest. Returns early when `hurry()` says so.

    What still runs afterwards is for `sweep`.
    """
    end_chaos(parts, hurry)
    saving = [*parts.supervisors.values(), parts.syncer]
    for part in saving:
        part.signal(signal.SIGTERM)
    _wait(saving, CHECKPOINTS_WITHIN_S, hurry)
    end_rest(parts, hurry)


def end_chaos(parts: Parts, hurry: Callable[[], bool]) -> None:
    """End the injection of faults: what it holds stopped goes on again, and can end by itself."""
    if parts.chaos is not None:
        parts.chaos.signal(signal.SIGTERM)
        _wait([parts.chaos], REST_WITHIN_S, hurry)


def end_rest(parts: Parts, hurry: Callable[[], bool]) -> None:
    """End links and observer, which have nothing to save that is not on disk."""
    rest = [*parts.links.values(), *([parts.observer] if parts.observer else [])]
    for part in rest:
        part.signal(signal.SIGTERM)
    _wait(rest, REST_WITHIN_S, hurry)


def sweep(run_id: str, *, keep_shared_memory: bool = False) -> None:
    """Kill every process of the run that is left on this host and, unless it is to be kept, remove its shared memory."""
    marks.kill(lambda: marks.processes_of(run_id))
    if not keep_shared_memory:
        remove_shared_memory(run_id)


def _wait(parts: Iterable[Part], seconds: float, hurry: Callable[[], bool]) -> None:
    deadline = time.monotonic() + seconds
    while any(part.alive() for part in parts) and time.monotonic() < deadline and not hurry():
        time.sleep(POLL_S)
