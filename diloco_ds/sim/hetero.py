"""Mixed hardware: what a quorum costs when one learner is slower than the others.

Our learners never wait, so that no quorum slows a chip down. What the paper's lockstep loses shows in another place: a
global clock that waits for K = M learners keeps the pace of the slowest, and the steps that the faster ones make
meanwhile are not counted as useful (goodput.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from diloco_ds.config import Grace
from diloco_ds.sim.fleet import Weather
from diloco_ds.sim.goodput import Goodput, System, judge, percent, run_world

NO_FAILURES = Weather(mtbi_days=float("inf"))
PAPER = {"all": 84.0, "one": 100.0, "one, no grace": 100.0}
"""Goodput in percent, with 8 learners, the slowest 18 % behind, 10 % variance."""


@dataclass(frozen=True)
class Case:
    """One setting of quorum and grace.

    slowest_share: of the merged tokens, what the slowest learner brought. in_time: of the slowest learner's rounds, those
    it was merged in.
    """

    name: str
    quorum: int
    grace: float  # gamma, the safety factor; 0 = no grace window
    result: Goodput
    slowest_share: float
    in_time: float
    paper: float

    def to_json(self) -> dict[str, Any]:
        """Shares in percent."""
        value = asdict(self) | {"result": self.result.to_json()}
        return value | {"slowest_share": percent(self.slowest_share), "in_time": percent(self.in_time)}


def mixed_hardware(learners: int = 8, **settings: Any) -> System:
    """The paper's mixed hardware: a slowest learner 18 % behind, steps that vary by 10 %, no failures."""
    defaults: dict[str, Any] = {"slowest": 0.18, "step_variance": 0.10, "hours": 6.0}
    return System(chips=learners, learners=learners, weather=NO_FAILURES, **(defaults | settings))


def compute(system: System) -> list[Case]:
    """A quorum of all, and of one with and without grace; the other settings are those of `system`."""
    safety = system.exchange.grace.safety
    return [
        _case(system, "all", system.learners, safety),
        _case(system, "one", 1, safety),
        _case(system, "one, no grace", 1, 0.0),
    ]


def to_json(cases: Sequence[Case]) -> dict[str, Any]:
    """All cases."""
    return {"cases": [case.to_json() for case in cases]}


def _case(system: System, name: str, quorum: int, safety: float) -> Case:
    grace = Grace(safety=safety, smoothing=system.exchange.grace.smoothing)
    exchange = system.exchange.model_copy(update={"quorum": quorum, "grace": grace})
    world, fleets = run_world(replace(system, exchange=exchange))
    slowest = list(world.syncer.view().islands.values())[-1]
    asked = slowest.merged + slowest.missed
    return Case(
        name=name,
        quorum=quorum,
        grace=safety,
        result=judge(world, fleets),
        slowest_share=slowest.token_share,
        in_time=slowest.merged / asked if asked else 0.0,
        paper=PAPER[name],
    )
