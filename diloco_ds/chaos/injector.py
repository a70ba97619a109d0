"""Carries out a schedule on a live run, and tells of every fault in the run's metrics with its time."""

from __future__ import annotations

import heapq
import random
import time
from collections.abc import Callable
from typing import Any

from diloco_ds.chaos.faults import Done, get_ready, inject
from diloco_ds.chaos.schedule import Fault, Schedule
from diloco_ds.chaos.targets import NotThere
from diloco_ds.errors import UserError
from diloco_ds.membership import run_config
from diloco_ds.observe.metrics import MetricsFile
from diloco_ds.observe.status import ENDED, read_status
from diloco_ds.rundir import RunDir

LONGEST_SLEEP_S = 0.2
LOOK_EVERY_S = 1.0
"""Between two looks at whether the run still goes on."""

Record = dict[str, Any]


def islands_of(run: RunDir) -> dict[str, int]:
    """The islands of a live run, and the ranks of each. UserError if it is no run, or one that has ended."""
    status = read_status(run.root)
    if status.state in (*ENDED, "stopping"):
        raise UserError(f"{run.root}: the run is {status.state}; faults need a live run")
    return {island.name: island.ranks for island in run_config(run).islands}


class Injector:
    """Injects the faults of `schedule`, those before `first` left out, and hands the record of each to `show`.

    What a fault still has to do (SIGCONT after a hang) is done in time, and at once when `run` ends early.
    """

    def __init__(
        self, run: RunDir, schedule: Schedule, show: Callable[[Record], None], *, first: int = 0
    ) -> None:
        self._run, self._schedule, self._show = run, schedule, show
        self._first = first
        self._rest: list[tuple[float, int, Done]] = []  # heap: due (monotonic), number of the fault
        self.injected = self.missed = 0

    def run(self, stopped: Callable[[], bool]) -> None:
        """Do it all; returns when the last fault is over, `stopped()` says so or the run has ended."""
        faults = list(enumerate(self._schedule.faults))[self._first :]
        get_ready(fault.fault for _, fault in faults)
        start = time.monotonic() - (self._skipped_s() if self._first else 0.0)
        look = 0.0
        try:
            while (faults or self._rest) and not stopped():
                now = time.monotonic()
                if now >= look:
                    look = now + LOOK_EVERY_S
                    if read_status(self._run.root).state in (*ENDED, "stopping"):
                        return
                while faults and now >= start + faults[0][1].at_s:
                    self._begin(*faults.pop(0))
                self._go_on(now)
                time.sleep(self._pause(start + faults[0][1].at_s if faults else None))
        finally:
            for _, number, done in self._rest:
                self._heal(number, done)

    def _skipped_s(self) -> float:
        """How far into the schedule an earlier process came."""
        return self._schedule.faults[self._first - 1].at_s

    def _begin(self, number: int, fault: Fault) -> None:
        choose = random.Random(f"{self._schedule.seed}/{number}")
        try:
            done = inject(self._run, fault, choose)
        except (NotThere, TimeoutError) as error:
            self.missed += 1
            self._tell("chaos_missed", number, fault.fault, fault.target, str(error))
            return
        self.injected += 1
        self._tell("fault", number, fault.fault, done.target, done.what, pids=done.pids)
        if done.rest is not None:
            self._take_turn(number, done)

    def _go_on(self, now: float) -> None:
        while self._rest and self._rest[0][0] <= now:
            _, number, done = heapq.heappop(self._rest)
            self._take_turn(number, done)

    def _take_turn(self, number: int, done: Done) -> None:
        assert done.rest is not None
        seconds = next(done.rest, None)
        if seconds is None:
            self._heal(number, done)
        else:
            heapq.heappush(self._rest, (time.monotonic() + seconds, number, done))

    def _heal(self, number: int, done: Done) -> None:
        if done.rest is not None:
            done.rest.close()
        kind = self._schedule.faults[number].fault
        self._tell("chaos_over", number, kind, done.target, f"over: {done.what}")

    def _pause(self, next_fault: float | None) -> float:
        due = [moment for moment in (next_fault, self._rest[0][0] if self._rest else None) if moment]
        return max(0.0, min([LONGEST_SLEEP_S, *(moment - time.monotonic() for moment in due)]))

    def _tell(self, event: str, number: int, kind: str, target: str, reason: str, **more: Any) -> None:
        island = target.partition(".")[0]
        record = {
            "time": time.time(),
            "event": event,
            "role": "chaos",
            "island": island if island in self._names() else None,
            "fault": kind,
            "target": target,
            "number": number,
            "reason": f"{kind} {target}: {reason}",
            **more,
        }
        with MetricsFile(self._run.metrics) as metrics:
            metrics.write("event", **record)
        self._show(record)

    def _names(self) -> list[str]:
        return [island.name for island in read_status(self._run.root).islands]
