"""Scavenging: extra learners help for the second half of a run's training and shorten it.

The ideal is 0.5 + 0.5 / (1 + x) of the time with a share x of extra compute (Decoupled DiLoCo, the paper's scavenging
curve). Ours is what the product's own syncer makes of it: learners join a run that goes on, in virtual time, and the run
ends by its token budget.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from diloco_ds.config import Exchange
from diloco_ds.errors import UserError
from diloco_ds.sim.goodput import even_layout, new_learner
from diloco_ds.sim.learner import Speed, Wire, check_learners
from diloco_ds.sim.world import World

TOKENS = 1_000
"""Tokens of an inner step."""
PAPER = {0.25: 0.90, 0.5: 0.83, 1.0: 0.75, 3.0: 0.62}
"""Time with extra compute over time without, by the share of extra compute."""


@dataclass(frozen=True)
class Scavenging:
    """A run of `learners` for `steps` inner steps of each, and the shares of extra learners to try."""

    learners: int = 4
    steps: int = 2_000
    extra: tuple[float, ...] = tuple(PAPER)
    step_s: float = 5.0
    step_variance: float = 0.0
    exchange: Exchange = field(default_factory=Exchange)
    parameters: int = 24_000  # of the model, for the time fragments spend on the wire
    wire: Wire = field(default_factory=lambda: Wire(latency_s=0.05))
    seed: int = 0

    def __post_init__(self) -> None:
        check_learners(self.learners, self.exchange)
        if self.steps < 2 * self.exchange.period:
            raise UserError(
                f"steps must be at least two periods ({2 * self.exchange.period}), not {self.steps}"
            )
        for share in self.extra:
            if share < 0 or abs(share * self.learners - round(share * self.learners)) > 1e-9:
                raise UserError(f"extra compute of {share:g} is no whole number of {self.learners} learners")


@dataclass(frozen=True)
class Point:
    """One share of extra compute; times relative to the run without. `paper` is None where it gives no number."""

    extra: float
    learners: int  # in the second half
    time: float
    ideal: float
    paper: float | None


def compute(study: Scavenging) -> list[Point]:
    """A point for every share of extra compute. Deterministic by the study's seed."""
    alone = _finish(study, 0, joins=0.0)
    return [_point(study, share, alone) for share in study.extra]


def to_json(points: list[Point]) -> dict[str, Any]:
    """All points."""
    return {"points": [asdict(point) for point in points]}


def _point(study: Scavenging, share: float, alone: float) -> Point:
    extra = round(share * study.learners)
    time = _finish(study, extra, joins=alone / 2) / alone
    return Point(share, study.learners + extra, round(time, 4), 0.5 + 0.5 / (1.0 + share), PAPER.get(share))


def _finish(study: Scavenging, extra: int, joins: float) -> float:
    """Virtual seconds until the run is finished, with `extra` learners from second `joins` on."""
    seeds = np.random.SeedSequence(study.seed).spawn(study.learners + extra)
    learners = [
        new_learner(
            f"learner{m:02d}",
            study.exchange,
            Speed(study.step_s, study.step_variance),
            np.random.default_rng(seed),
            tokens=TOKENS,
            wire=study.wire,
            joins=0.0 if m < study.learners else joins,
        )
        for m, seed in enumerate(seeds)
    ]
    budget = study.learners * study.steps * TOKENS
    layout = even_layout(study.exchange, study.parameters)
    world = World(layout, study.exchange, learners, budget=budget, keep_history=False)
    finished = world.run(10.0 * study.steps * study.step_s).finished
    if finished is None:
        raise RuntimeError(f"{study} does not finish")
    return finished
