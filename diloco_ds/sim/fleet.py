"""Chips that fail and come back: when a learner made of many chips runs, and with how many of them.

Every chip fails as a Poisson process. A learner is divided into slices; a failed chip takes its slice out
until it returns. What the learner
does about it is its *elasticity*:

- elastic (Decoupled DiLoCo inside a learner, and elastic data parallel): it pauses to shrink, goes on without
the slice, and pauses to grow when
  slices have come back. Whatever happens during a pause is absorbed by that pause; returning slices are
  gathered for a window before it grows.
- not elastic: every failure stops all of it for a restart.

The pauses, the window and the return time are not published; the defaults were fitted once to Table 1 of the
paper (docs/simulator.md).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from diloco_ds.errors import UserError

DAY_S = 86_400.0

Cause = Literal["running", "shrink", "grow", "restart"]


@dataclass(frozen=True)
class Weather:
    """What happens to chips, and how long a learner takes to react. Times in seconds."""

    mtbi_days: float = 365.0  # mean time between interruptions of one chip
    slice_chips: int = 256  # chips that go and come together
    shrink_s: float = 15.0  # pause to go on without a slice
    grow_s: float = 15.0  # pause to take slices back
    grow_window_s: float = 20.0  # returned slices are gathered this long before the learner grows
    restart_s: float = 76.0  # pause of a learner that is not elastic
    # exponentiated Weibull time until a slice returns: (1 - exp(-(x/scale)^shape))^power
    return_scale_s: float = 600.0
    return_shape: float = 1.0
    return_power: float = 1.0

    def __post_init__(self) -> None:
        for name in ("mtbi_days", "slice_chips", "return_scale_s", "return_shape", "return_power"):
            if not getattr(self, name) > 0:
                raise UserError(f"{name} must be above 0, not {getattr(self, name)}")
        for name in ("shrink_s", "grow_s", "grow_window_s", "restart_s"):
            if not getattr(self, name) >= 0:
                raise UserError(f"{name} must not be negative, not {getattr(self, name)}")

    @property
    def failures_per_chip_s(self) -> float:
        """Failures of one chip per second."""
        return 1.0 / (self.mtbi_days * DAY_S)

    def return_time(self, rng: np.random.Generator) -> float:
        """Seconds until a slice that just went comes back (inverse of the exponentiated Weibull
        distribution).
        """
        quantile = rng.random() ** (1.0 / self.return_power)
        return float(self.return_scale_s * (-np.log1p(-quantile)) ** (1.0 / self.return_shape))


@dataclass(frozen=True, slots=True)
class Stretch:
    """A stretch of a learner's life with nothing changing: `share` of its chips present; it trains only
    while `cause` is running.
    """

    start: float
    end: float
    cause: Cause
    share: float

    @property
    def training(self) -> float:
        """Share of the learner's full speed at which it trains."""
        return self.share if self.cause == "running" else 0.0


@dataclass
class ElasticChips:
    """The chips of one elastic learner; `stretches` tells its life from second 0 on, without end."""

    chips: int
    weather: Weather
    rng: np.random.Generator
    failures: int = 0
    _away: list[float] = field(default_factory=list)  # return times of slices that are out, a heap

    def __post_init__(self) -> None:
        self.slices = max(1, round(self.chips / self.weather.slice_chips))
        self._present = self.slices

    def stretches(self) -> Iterator[Stretch]:
        """Yields the stretches in order. A learner without a slice left waits (cause 'grow') for the first
        to return.
        """
        now = 0.0
        while True:
            failure, grow = self._next_failure(now), self._next_grow(now)
            end, cause = (grow, "grow") if grow <= failure else (failure, "shrink")
            yield Stretch(now, end, "running", self._present / self.slices)
            if cause == "shrink":
                self._lose_slice(end)
            now = end
            pause = self.weather.grow_s if cause == "grow" else self.weather.shrink_s
            for stretch in self._pause(now, now + pause, cause):
                now = stretch.end
                yield stretch

    def _pause(self, start: float, end: float, cause: str) -> Iterator[Stretch]:
        """A pause takes in all that fails or returns meanwhile; with no slice left it lasts until one is
        back.
        """
        failure = self._next_failure(start)
        while failure < end:
            self._lose_slice(failure)
            failure = self._next_failure(failure)
        if self._present == 0:
            end = max(end, self._away[0])
        yield Stretch(start, end, "grow" if cause == "grow" else "shrink", self._present / self.slices)
        self._take_back(end)

    def _next_failure(self, now: float) -> float:
        rate = self._present / self.slices * self.chips * self.weather.failures_per_chip_s
        return now + self.rng.exponential(1.0 / rate) if rate > 0 else float("inf")

    def _next_grow(self, now: float) -> float:
        return max(now, self._away[0] + self.weather.grow_window_s) if self._away else float("inf")

    def _lose_slice(self, now: float) -> None:
        self.failures += 1
        if self._present > 0:
            self._present -= 1
            heapq.heappush(self._away, now + self.weather.return_time(self.rng))

    def _take_back(self, now: float) -> None:
        while self._away and self._away[0] <= now:
            heapq.heappop(self._away)
            self._present += 1


@dataclass
class RigidChips:
    """The chips of a learner that is not elastic: any failure stops all for a restart, after which all are
    there (spares).
    """

    chips: int
    weather: Weather
    rng: np.random.Generator
    failures: int = 0

    def stretches(self) -> Iterator[Stretch]:
        """Yields the stretches in order; failures during a restart are absorbed by it."""
        now = 0.0
        mean = 1.0 / (self.chips * self.weather.failures_per_chip_s)
        while True:
            end = now + self.rng.exponential(mean)
            yield Stretch(now, end, "running", 1.0)
            self.failures += 1
            now = end + self.weather.restart_s
            yield Stretch(end, now, "restart", 1.0)


@dataclass
class TimeAccount:
    """Where the allocated time of a learner went, in seconds of the whole learner."""

    training: float = 0.0
    shrink: float = 0.0
    grow: float = 0.0
    restart: float = 0.0
    missing_slices: float = 0.0
    pauses: list[tuple[float, float]] = field(default_factory=list)  # start and end of what is not training

    def add(self, stretch: Stretch, horizon: float) -> None:
        """Account for the part of `stretch` before `horizon` (s)."""
        seconds = max(0.0, min(stretch.end, horizon) - stretch.start)
        if stretch.cause == "running":
            self.training += seconds * stretch.share
            self.missing_slices += seconds * (1.0 - stretch.share)
        else:
            setattr(self, stretch.cause, getattr(self, stretch.cause) + seconds)
            if seconds > 0:
                self.pauses.append((stretch.start, stretch.start + seconds))

    def lost(self) -> dict[str, float]:
        """What did not train: every cause's share of the allocated time."""
        names = ("shrink", "grow", "restart", "missing_slices")
        return {name: getattr(self, name) / self.total for name in names}

    @property
    def total(self) -> float:
        """All seconds accounted for."""
        return self.training + self.shrink + self.grow + self.restart + self.missing_slices

    @property
    def goodput(self) -> float:
        """Share of the allocated time spent training, 0 to 1."""
        return self.training / self.total


def account(chips: ElasticChips | RigidChips, hours: float) -> TimeAccount:
    """Run `chips` alone for `hours` and tell where the time went (the data-parallel baselines)."""
    result, horizon = TimeAccount(), hours * 3600.0
    for stretch in chips.stretches():
        if stretch.start >= horizon:
            return result
        result.add(stretch, horizon)
    raise AssertionError("stretches never end")


def common_pause(accounts: Sequence[TimeAccount], horizon: float) -> float:
    """Seconds before `horizon` in which every learner was paused: nobody made a step."""
    changes = sorted(
        (time, change)
        for each in accounts
        for start, end in each.pauses
        for time, change in ((start, 1), (min(end, horizon), -1))
    )
    seconds, paused, since = 0.0, 0, 0.0
    for time, change in changes:
        if paused == len(accounts):
            seconds += time - since
        paused, since = paused + change, time
    return seconds
