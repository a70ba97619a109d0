"""Time of the parts of a step, and its loss, read without making the device wait; and of the parts of a boundary.

On a CPU a point in time is a clock reading. On a GPU it is an event in the stream, and the loss travels to
pinned memory behind it; both are read when the device has passed them, usually during the step after.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class StepResult:
    """A finished step: its number (the first since the start is 1), its mean loss over all ranks, and seconds
    of its parts.
    """

    step: int
    loss: float
    forward: float
    backward: float
    optimizer: float


@dataclass(slots=True)
class _Pending:
    step: int
    points: list[tuple[str, Any]]  # (part that ends at this point, point)
    loss: Tensor | None = None


class Laps:
    """Seconds of the parts of a boundary, on the host's clock.

    decide (rank 0 reads orders and inbox), agree (the decision reaches all ranks), answer and adopt (copies of fragments:
    on a GPU only their launch), complete (what is done is committed).
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = 0.0

    def begin(self) -> None:
        """A boundary begins."""
        self.seconds = {}
        self._last = time.perf_counter()

    def lap(self, part: str) -> None:
        """A part ends here; it began where the last one ended."""
        now = time.perf_counter()
        self.seconds[part] = now - self._last
        self._last = now


class StepTimer:
    """Follows one step after another: `begin`, a `lap` at the end of each part, `end`; then `finished` gives
    the results.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._pending: deque[_Pending] = deque()
        self._steps = 0

    def begin(self) -> None:
        """A step begins."""
        self._steps += 1
        self._pending.append(_Pending(self._steps, [("", self._point())]))

    def lap(self, part: str) -> None:
        """A `part` (forward, backward or optimizer) ends here; it began where the last one ended."""
        self._pending[-1].points.append((part, self._point()))

    def end(self, loss: Tensor) -> None:
        """The step ends; `loss` is a scalar on the device."""
        pending = self._pending[-1]
        if not self._cuda:
            pending.loss = loss
            return
        pending.loss = torch.empty((), dtype=torch.float32, pin_memory=True)
        pending.loss.copy_(loss, non_blocking=True)
        pending.points.append(("", self._point()))  # behind the copy: when it is passed, the loss is there

    def finished(self, wait: bool = False) -> list[StepResult]:
        """Results not given out before, oldest first: of the steps the device has ended, or with `wait` of
        all.
        """
        results = []
        while self._pending and self._passed(self._pending[0], wait):
            results.append(self._result(self._pending.popleft()))
        return results

    def _point(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _passed(self, pending: _Pending, wait: bool) -> bool:
        if pending.loss is None:
            return False
        if self._cuda and wait:
            pending.points[-1][1].synchronize()
        return not self._cuda or bool(pending.points[-1][1].query())

    def _result(self, pending: _Pending) -> StepResult:
        seconds = dict.fromkeys(("forward", "backward", "optimizer", ""), 0.0)
        for (_, before), (part, after) in zip(pending.points, pending.points[1:], strict=False):
            seconds[part] += before.elapsed_time(after) / 1000 if self._cuda else after - before
        assert pending.loss is not None
        return StepResult(
            pending.step, float(pending.loss), seconds["forward"], seconds["backward"], seconds["optimizer"]
        )
