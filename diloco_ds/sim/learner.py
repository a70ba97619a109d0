"""A learner in virtual time: how long its steps take, what it does at a boundary, and what is on the way to and from it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from zlib import crc32

import numpy as np

from diloco_ds.config import Exchange
from diloco_ds.core.events import Answer, LearnerPhase, Orders, Report, RunPhase
from diloco_ds.core.learner import LearnerClock
from diloco_ds.errors import UserError
from diloco_ds.sim.fleet import Stretch, TimeAccount


def check_learners(learners: int, exchange: Exchange) -> None:
    """UserError for M = `learners` below 1 or below the quorum."""
    if learners < 1:
        raise UserError(f"learners (M) must be at least 1, not {learners}")
    if exchange.quorum > learners:
        raise UserError(
            f"quorum (K = {exchange.quorum}) must not exceed the number of learners (M = {learners})"
        )


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
class Direction:
    """One direction of a learner's wire. It carries registers, one after the other: a newer value takes the place of one
    of the same fragment that still waits.

    deliver: hears of a value and the virtual time at which it is whole at the other end.
    """

    wire: Wire
    deliver: Callable[[Any, float], None]
    free: float = 0.0  # virtual time from which the next value can start
    wakes: float = -1.0  # virtual time for which its driver has planned to carry more
    _waiting: dict[int, tuple[Any, int]] = field(default_factory=dict)

    def put(self, fragment: int, value: Any, nbytes: int) -> Any:
        """`value` is to be carried; returns the one it takes the place of, or None."""
        replaced = self._waiting.get(fragment)
        self._waiting[fragment] = (value, nbytes)
        return None if replaced is None else replaced[0]

    def carry(self, now: float) -> float | None:
        """Start what can be started; returns when to call again, None if nothing waits."""
        while self._waiting and self.free <= now:
            value, nbytes = self._waiting.pop(next(iter(self._waiting)))
            self.free = now + nbytes / self.wire.bytes_s
            self.deliver(value, self.free + self.wire.latency_s)
        return self.free if self._waiting else None


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

    def arrives(self, fragment: int, version: int, at: float) -> None:
        """A global fragment will be whole in the inbox at virtual time `at`."""
        self._arrivals[fragment].append((at, version))

    def boundary(
        self, now: float, snapshot: Callable[[int], tuple[int, ...]], adopt: Callable[[int, int], None]
    ) -> list[Answer]:
        """The boundary after a step at virtual time `now`; returns the answers to send.

        snapshot(fragment), which returns its `Answer.expert_tokens`, and adopt(fragment, version) act on real weights
        where there are any.
        """
        orders = self._orders(now)
        for p, arrivals in enumerate(self._arrivals):
            while arrivals and arrivals[0][0] <= now:
                self._inbox[p] = arrivals.pop(0)[1]
        plan = self.clock.plan(orders, self._inbox)
        answers = []
        for p, round_ in plan.answer:
            expert_tokens = snapshot(p)
            said = self.clock.answered(p, round_)
            self._updates += 1
            update_id = crc32(self.name.encode()) << 31 | self._updates
            told = said.base, said.steps, said.tokens, update_id
            answers.append(Answer(self.name, 1, p, round_, *told, expert_tokens=expert_tokens))
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
            clock.trained,
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
