"""Rank 0's side of the training loop: what it decides, records and reports for the island."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from diloco_ds.core.events import LearnerPhase
from diloco_ds.island.boundary import Decision, Then
from diloco_ds.island.lead import Lead
from diloco_ds.island.saving import Saver
from diloco_ds.island.step_log import StepLog
from diloco_ds.island.timing import StepResult
from diloco_ds.island.writing import Writing

UNSOUND_STEPS = 20
"""After so many steps in a row without a finite loss the learner ends, and is started again from its last
checkpoint.
"""


@dataclass(frozen=True)
class StepTimes:
    """Seconds of one step of the loop, from the end of the step before to its own."""

    wall: float
    data: float
    exchange: dict[
        str, float
    ]  # parts of the boundary (timing.Laps), and report: the step before's record and report
    saving: float  # that a checkpoint held the loop up, within `wall`


class RankZero:
    """Exists on rank 0 only. `smoothing`: weight of the newest step in the average of step times."""

    def __init__(self, lead: Lead, log: StepLog, saver: Saver, smoothing: float) -> None:
        self.lead, self.log, self.saver = lead, log, saver
        self._step_tokens, self._smoothing = lead.step_tokens, smoothing
        self._unsound = 0
        self._steps = 0
        self._step_clock = 0
        self._unsaved = False  # whether a step was made since the last checkpoint

    def decide(self, stop: bool) -> tuple[Decision, Callable[[], None]]:
        """The decision at this boundary, and what to call when it was carried out."""
        decision, finish = self.lead.decide(stop, answer=not self._unsound)
        return replace(decision, save=self._is_worth_saving(decision.then)), finish

    def _is_worth_saving(self, then: Then) -> bool:
        if self._unsound or not (self._unsaved or self.saver.failed):
            return False
        if then is Then.STEP:
            return self.saver.due()
        if then is Then.WAIT:
            return False
        return self.saver.busy() or self.saver.has_room()  # the one under way will have made room

    def stepped(self, results: Sequence[StepResult]) -> None:
        """A step was made. `results` are those that the device has given since."""
        self._steps += 1
        self._unsaved = True
        self.lead.stepped()
        self._step_clock = self.lead.clock.step
        for result in results:
            self._look_at(result.loss)

    def record(self, times: StepTimes, decision: Decision, lr: float, results: Sequence[StepResult]) -> None:
        """Log the step that `stepped` told of, with the boundary after it, and report."""
        self._measure(times.wall - times.saving)
        clock, orders = self.lead.clock, self.lead.orders
        self.log.add(
            self._steps,
            wall=times.wall,
            data=times.data,
            exchange=times.exchange,
            fields={
                "step": self._step_clock,
                "tokens": clock.tokens,
                "global_step": orders.global_step,
                "global_tokens": orders.global_tokens,
                "lr": lr,
                "step_tokens": self._step_tokens,
                "tokens_per_s": self.lead.progress.tokens_per_s,
                "adopted": list(decision.adopt),
                "answered": list(decision.answer),
            },
        )
        self.log.results(results)
        self.lead.report("running")

    def saving(self, tag: str, seconds: float, writing: Writing) -> None:
        """The ranks write the checkpoint `tag`; beginning it has held the loop up for `seconds`."""
        clock, progress = self.lead.clock, self.lead.progress
        facts = {
            "step": clock.step,
            "tokens": clock.tokens,
            "lr_tokens": progress.lr_tokens,
            "time": time.time(),
        }
        self.saver.begun(tag, facts, seconds, writing)
        self._unsaved = False

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps beside the inner state."""
        return {"lead": self.lead.state()}

    def end(self, results: Sequence[StepResult], then: Then) -> None:
        """The loop has ended, `results` are the device's last: write out what the log holds, then the last
        report.
        """
        phase: LearnerPhase = "drained" if then is Then.DRAINED else "stopped"
        self.saver.wait()
        self.log.results(results)
        self.log.event(phase, f"at step {self.lead.clock.step}, as it was asked to")
        self.log.close()
        self.lead.report(phase)

    def _measure(self, step_time: float) -> None:
        progress = self.lead.progress
        weight = self._smoothing if progress.step_time else 1.0
        progress.step_time += weight * (step_time - progress.step_time)
        progress.tokens_per_s = self._step_tokens / progress.step_time

    def _look_at(self, loss: float) -> None:
        """A loss that is not finite: say so once, send nothing meanwhile, and give up if it stays."""
        self.lead.progress.loss = loss
        if math.isfinite(loss):
            if self._unsound:
                self.log.event("loss_finite", f"after {self._unsound} steps")
            self._unsound = 0
            return
        self._unsound += 1
        if self._unsound == 1:
            self.log.event("loss_not_finite", f"the loss is {loss}: no answers until it is finite again")
        if self._unsound >= UNSOUND_STEPS:
            raise FloatingPointError(f"the loss was not finite for {self._unsound} steps")
