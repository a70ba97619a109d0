"""One of several learners that train by turns on the same machine: only one of them runs at any time.

Turns are what makes a comparison fair on a machine that is not quiet: its noise hits all alike. A learner that
waits for its turn is stopped (SIGSTOP) in the midst of whatever it does, and goes on as if nothing had been; only
steps that lie within a turn as a whole are counted.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass

import psutil

from diloco_ds.bench.kept_log import kept_log
from diloco_ds.errors import UserError
from diloco_ds.island.learner_processes import LearnerProcesses
from diloco_ds.observe.metrics import MetricsFollower, Record
from diloco_ds.rundir import RunDir

LONGEST_WAIT_S = 600.0
"""Without a single step; compiling a large model takes minutes."""
POLL_S = 0.05


@dataclass(frozen=True)
class Turn:
    """The whole steps of one turn: their records, oldest first."""

    steps: list[Record]

    @property
    def tokens_per_s(self) -> float:
        """Tokens of the steps by their wall clock."""
        seconds = sum(step["step_s"] for step in self.steps)
        return float(sum(step["step_tokens"] for step in self.steps) / seconds)


class Contestant:
    """The learner `name`, as its process tree; `others` are processes that serve it and rest when it rests."""

    def __init__(
        self,
        run: RunDir,
        name: str,
        learner: LearnerProcesses,
        others: Callable[[], list[psutil.Process]] = list,
    ) -> None:
        self.name = name
        self._run, self._learner, self._others = run, learner, others
        self._metrics = MetricsFollower(run.metrics)
        self._steps: list[Record] = []

    def warm_up(self, is_warm: Callable[[list[Record]], bool]) -> None:
        """Wait until `is_warm` says so of its steps, and stop it."""
        self._wait_for(lambda: is_warm(self._steps))
        self._pause()

    def turn(self, steps: int) -> Turn:
        """Let it run until it has made `steps` whole steps, and stop it again."""
        began = time.time()
        self._signal(signal.SIGCONT)

        def within() -> list[Record]:
            return [step for step in self._steps if step["time"] - step["step_s"] >= began]

        self._wait_for(lambda: len(within()) >= steps)
        self._pause()
        return Turn(within())

    def _pause(self) -> None:
        self._signal(signal.SIGSTOP)

    def _signal(self, number: signal.Signals) -> None:
        for process in [*self._learner.members(), *self._others()]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)

    def _wait_for(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + LONGEST_WAIT_S
        while not condition():
            new = [
                record
                for record in self._metrics.read()
                if record["kind"] == "step" and record["island"] == self.name
            ]
            self._steps += new
            if new:
                deadline = time.monotonic() + LONGEST_WAIT_S
            if self._learner.exit_code() is not None or time.monotonic() > deadline:
                raise UserError(f"bench island: '{self.name}' {self._how_it_failed()}")
            time.sleep(POLL_S)

    def _how_it_failed(self) -> str:
        code = self._learner.exit_code()
        how = f"made no step in {LONGEST_WAIT_S:.0f} s" if code is None else f"ended with exit code {code}"
        return f"{how}; {kept_log(self._run.log(self.name))}"
