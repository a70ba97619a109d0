"""Compute utilisation over bandwidth, step time and fragments, for the family of methods.

With t the step time, B the bandwidth of a learner in each direction, N parameters of b bits, A = 2 (M - 1) / M the
volume of a ring all-reduce, H the period, P the fragments and tau the overlap:

    data parallel   t / (t + A b N / B)                           every step waits for its gradients
    DiLoCo          H t / (H t + A b N / B)                       every H steps wait for all weights
    Streaming       u / max(u, c, u + c - tau t)                  u = H t / P between two fragments, c = A b N / (P B)
    Decoupled       1                                             a learner never waits

What bandwidth does to a Decoupled run is not idle chips but rarer merges: `period` tells how many inner steps lie between
two merges of a fragment, measured on the product's own syncer in virtual time. The bandwidth the paper asks for is
b N / (P tau t): a fragment, in one direction, within tau steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from diloco_ds.config import Exchange
from diloco_ds.errors import UserError
from diloco_ds.sim.goodput import even_layout, new_learner
from diloco_ds.sim.learner import Speed, Wire, check_learners
from diloco_ds.sim.world import BYTES, World

METHODS = ("data_parallel", "diloco", "streaming", "decoupled")
GBITS = (0.1, 0.3, 1.0, 1.7, 3.4, 10.0, 30.0, 100.0, 300.0, 1000.0)
STEP_TIMES = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
FRAGMENTS = (1, 2, 3, 4, 6, 8, 12, 24)
_PERIODS = 12
"""Periods that a run for the `period` of Decoupled DiLoCo lasts."""


@dataclass(frozen=True)
class Setup:
    """Model, learners and network. gbit: Gbit/s of a learner in each direction. diloco_period: H of DiLoCo."""

    parameters: int = 5_000_000_000
    bits: float = 16.0
    step_s: float = 1.0
    gbit: float = 1.7
    learners: int = 8
    exchange: Exchange = field(default_factory=Exchange)
    diloco_period: int = 500

    def __post_init__(self) -> None:
        for name in ("parameters", "bits", "step_s", "gbit", "learners", "diloco_period"):
            if not getattr(self, name) > 0:
                raise UserError(f"{name} must be above 0, not {getattr(self, name):g}")
        check_learners(self.learners, self.exchange)
        if self.parameters < self.exchange.fragments:
            raise UserError(f"{self.parameters} parameters cannot make {self.exchange.fragments} fragments")

    @property
    def model_gbits(self) -> float:
        """b N, in Gbit."""
        return self.bits * self.parameters / 1e9

    @property
    def all_reduce(self) -> float:
        """A: what a ring all-reduce moves in each direction, in multiples of its tensor."""
        return 2.0 * (self.learners - 1) / self.learners


@dataclass(frozen=True)
class Point:
    """Utilisation (0..1) of each method at `at`; `period`: of Decoupled DiLoCo, None if nothing was merged."""

    at: float
    utilisation: dict[str, float]
    period: float | None


@dataclass(frozen=True)
class Study:
    """Utilisation over bandwidth, step time and fragments; `needed`: Gbit/s for `target` utilisation."""

    over_gbit: list[Point]
    over_step_s: list[Point]
    over_fragments: list[Point]
    target: float
    needed: dict[str, float]

    def to_json(self) -> dict[str, Any]:
        """All of it; utilisation as shares, 0..1."""
        return asdict(self)


def compute(setup: Setup, gbits: Sequence[float] = GBITS, target: float = 0.95) -> Study:
    """The three sweeps; what is not swept is as in `setup`."""
    if not 0 < target < 1:
        raise UserError(f"the target utilisation is above 0 and below 1, not {target:g}")
    period = setup.exchange.period
    return Study(
        over_gbit=[_point(replace(setup, gbit=each), each) for each in gbits],
        over_step_s=[_point(replace(setup, step_s=each), each) for each in STEP_TIMES],
        over_fragments=[_point(_with_fragments(setup, each), each) for each in FRAGMENTS if each <= period],
        target=target,
        needed={method: needed(setup, method, target) for method in METHODS},
    )


def utilisation(setup: Setup, method: str) -> float:
    """Share of a learner's time that computes, 0..1 (the formulas above)."""
    t, seconds = setup.step_s, setup.all_reduce * setup.model_gbits / setup.gbit
    if method == "data_parallel":
        return t / (t + seconds)
    if method == "diloco":
        return setup.diloco_period * t / (setup.diloco_period * t + seconds)
    if method == "streaming":
        between, fragment = _between(setup), seconds / setup.exchange.fragments
        return between / max(between, fragment, between + fragment - setup.exchange.overlap * t)
    return 1.0


def needed(setup: Setup, method: str, target: float) -> float:
    """Gbit/s per learner and direction for a utilisation of `target`; for Decoupled DiLoCo the paper's b N / (P tau t)."""
    t, volume = setup.step_s, setup.all_reduce * setup.model_gbits
    overlap = setup.exchange.overlap * t
    if method == "data_parallel":
        return volume / (t * (1.0 / target - 1.0))
    if method == "diloco":
        return volume / (setup.diloco_period * t * (1.0 / target - 1.0))
    if method == "streaming":
        longest = _between(setup) / target  # of a fragment's turn, waiting included
        return volume / setup.exchange.fragments / min(longest, longest - _between(setup) + overlap)
    return setup.model_gbits / setup.exchange.fragments / max(overlap, t)


def merge_period(setup: Setup) -> float | None:
    """Inner steps between two merges of a fragment in a Decoupled run; None if nothing was merged."""
    exchange = setup.exchange
    elements = int(setup.bits * setup.parameters / (8 * BYTES))
    wire = Wire(bytes_s=setup.gbit * 1e9 / 8)
    learners = [
        new_learner(f"learner{m:02d}", exchange, Speed(setup.step_s), np.random.default_rng(m), wire=wire)
        for m in range(max(exchange.quorum, min(setup.learners, 2)))
    ]
    per_fragment = setup.model_gbits / exchange.fragments / setup.gbit / setup.step_s  # steps on the wire
    steps = int(_PERIODS * max(exchange.period, per_fragment * exchange.fragments))
    world = World(even_layout(exchange, elements), exchange, learners, budget=2**62, keep_history=False)
    world.run(steps * setup.step_s)
    merges = world.syncer.view().merges
    return steps * exchange.fragments / merges if merges else None


def _point(setup: Setup, at: float) -> Point:
    return Point(at, {method: utilisation(setup, method) for method in METHODS}, merge_period(setup))


def _between(setup: Setup) -> float:
    return setup.exchange.period * setup.step_s / setup.exchange.fragments


def _with_fragments(setup: Setup, fragments: int) -> Setup:
    return replace(setup, exchange=setup.exchange.model_copy(update={"fragments": fragments}))
