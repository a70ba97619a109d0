"""A learner in virtual time: how long its steps take, what it does at a boundary, and what is on the way to and from it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from zlib import crc32

import numpy as np

from diloco_ds.core.events import Answer, LearnerPhase, Orders, Report, RunPhase
from diloco_ds.core.learner import LearnerClock
from diloco_ds.errors import UserError
from diloco_ds.sim.fleet import Stretch, TimeAccount


@dataclass(frozen=True)
class Speed:
    """How fast a learner steps. `variance`: standard deviation of a step's duration relative to its mean."""

    step_s: float
    variance: float = 0.0

    def __post_init__(self) -> None:
        if not self.step_s > 0:
            raise UserError(f"a step takes more than 0 s, not {self.step_s}")
        if not 0 <= self.variance < 1:
            raise UserError(f"variance is a share of the step's duration, 0 to 1, not {self.variance}")

    def draw(self, rng: np.random.Generator) -> float:
        """Seconds of full-speed work the next step takes."""
        if self.variance == 0.0:
            return self.step_s
        return self.step_s * max(0.1, 1.0 + self.variance * float(rng.standard_normal()))


@dataclass(frozen=True)
class Wire:
    """A learner's connection to the syncer: latency in seconds, bytes per second in each direction (inf: no limit)."""

    latency_s: float = 0.0
    bytes_s: float = float("inf")

    def __post_init__(self) -> None:
        if self.latency_s < 0 or not self.bytes_s > 0:
            raise UserError(
                f"a wire has latency >= 0 s and bandwidth > 0, not {self.latency_s} s and {self.bytes_s} bytes/s"
            )


@dataclass
class SimLearner:
    """One learner: its clock is the product's own; only time, chips and network are modelled.

    stretches: when it runs and at what share of its speed (sim/fleet.py); None: always. tokens: tokens of one inner step.
    joins, leaves: virtual seconds at which it belongs to the run.
    """

    name: str
    clock: LearnerClock
    speed: Speed
    tokens: int
    wire: Wire
    rng: np.random.Generator
    fragments: int
    stretches: Iterator[Stretch] | None = None
    joins: float = 0.0
    leaves: float = float("inf")
    phase: LearnerPhase = "running"
    account: TimeAccount = field(default_factory=TimeAccount)
    step_time: float = 0.0
    _stretch: Stretch | None = None
    _up_free: float = 0.0
    _down_free: float = 0.0
    _updates: int = 0

    def __post_init__(self) -> None:
        self.step_time = self.speed.step_s
        self._want = [0] * self.fragments
        self._want_seen = [0.0] * self.fragments  # virtual time from which the request is visible here
        self._inbox = [0] * self.fragments
        self._arrivals: list[list[tuple[float, int]]] = [[] for _ in range(self.fragments)]
        self._run_phase: tuple[float, RunPhase] = (0.0, "run")
        self.global_step = 0

    def finish_step(self, now: float, horizon: float) -> float:
        """When the step that starts now will be done, given chips that come and go; time is accounted up to `horizon`."""
        work = self.speed.draw(self.rng)
        self.step_time += 0.1 * (work - self.step_time)
        if self.stretches is None:
            return now + work
        time = now
        while True:
            stretch = self._stretch
            if stretch is None or stretch.end <= time:
                stretch = self._stretch = next(self.stretches)
                self.account.add(stretch, horizon)
                continue
            if stretch.training > 0:
                available = (stretch.end - time) * stretch.training
                if available >= work:
                    return time + work / stretch.training
                work -= available
            time = stretch.end
            if time > horizon:
                return time

    def request(self, fragment: int, round_: int, now: float) -> None:
        """The syncer asks now; the learner sees it one latency later."""
        self._want[fragment], self._want_seen[fragment] = round_, now + self.wire.latency_s

    def tell_phase(self, phase: RunPhase, now: float) -> None:
        """The run's phase changes; visible one latency later."""
        self._run_phase = (now + self.wire.latency_s, phase)

    def send_down(self, fragment: int, version: int, nbytes: int, now: float) -> float:
        """A new global fragment starts on its way; returns when it is whole in the inbox."""
        start = max(now, self._down_free)
        self._down_free = start + nbytes / self.wire.bytes_s
        arrival = self._down_free + self.wire.latency_s
        self._arrivals[fragment].append((arrival, version))
        return arrival

    def send_up(self, nbytes: int, now: float) -> float:
        """An answer starts on its way; returns when it is whole at the syncer."""
        start = max(now, self._up_free)
        self._up_free = start + nbytes / self.wire.bytes_s
        return self._up_free + self.wire.latency_s

    def boundary(
        self, now: float, snapshot: Callable[[int], None], adopt: Callable[[int, int], None]
    ) -> list[Answer]:
        """The boundary after a step at virtual time `now`; returns the answers to send.

        snapshot(fragment) and adopt(fragment, version) act on real weights where there are any.
        """
        orders = self._orders(now)
        for p, arrivals in enumerate(self._arrivals):
            while arrivals and arrivals[0][0] <= now:
                self._inbox[p] = arrivals.pop(0)[1]
        plan = self.clock.plan(orders, self._inbox)
        answers = []
        for p, round_ in plan.answer:
            snapshot(p)
            said = self.clock.answered(p, round_)
            self._updates += 1
            update_id = crc32(self.name.encode()) << 31 | self._updates
            answers.append(Answer(self.name, 1, p, round_, said.base, said.steps, said.tokens, update_id))
        for p, version in plan.adopt:
            adopt(p, version)
            self.clock.adopted(p, version, orders)
        if plan.end is not None:
            self.phase = "drained" if plan.end == "drain" else "stopped"
        return answers

    def report(self) -> Report:
        """Its metadata as of now."""
        clock = self.clock
        return Report(
            self.name,
            1,
            self.phase,
            clock.step,
            clock.tokens,
            self.step_time,
            clock.c_steps(),
            clock.c_tokens(),
            clock.base,
        )

    def _orders(self, now: float) -> Orders:
        seen, phase = self._run_phase
        want = tuple(
            round_ if time <= now else 0 for round_, time in zip(self._want, self._want_seen, strict=True)
        )
        return Orders(phase if seen <= now else "run", self.global_step, 0, want)
