"""How much of the chips' time trains: a whole Decoupled DiLoCo system in virtual time, and its two baselines.

The chips of every learner (fleet.py) decide when it steps; the product's own syncer and learner clocks (world.py)
decide what its steps are worth.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from typing import Any

import numpy as np

from diloco_ds.config import Exchange
from diloco_ds.core.fragments import FragmentLayout, TensorSpec, balance
from diloco_ds.core.learner import LearnerClock
from diloco_ds.errors import UserError
from diloco_ds.sim.fleet import ElasticChips, RigidChips, TimeAccount, Weather, account, common_pause
from diloco_ds.sim.learner import SimLearner, Speed, Wire, check_learners
from diloco_ds.sim.world import World

_NEVER = 2**62
"""A budget that no simulation reaches: it ends by its hours."""


@dataclass(frozen=True)
class System:
    """A Decoupled DiLoCo system. Learners are equal but for their speed.

    slowest: how far the slowest learner is behind, 0..1; the other learners run at full speed.
    """

    chips: int = 2_400_000
    learners: int = 16
    hours: float = 24.0
    weather: Weather = field(default_factory=Weather)
    step_s: float = 5.0
    step_variance: float = 0.0
    slowest: float = 0.0
    exchange: Exchange = field(default_factory=Exchange)
    parameters: int = 24_000  # of the model, for the time fragments spend on the wire
    wire: Wire = field(default_factory=lambda: Wire(latency_s=0.05))
    seed: int = 0

    def __post_init__(self) -> None:
        check_learners(self.learners, self.exchange)
        if self.chips < self.learners:
            raise UserError(
                f"{self.chips} chips cannot make {self.learners} learners: each needs at least one"
            )
        if not self.hours > 0:
            raise UserError(f"hours must be above 0, not {self.hours:g}")
        if not 0 <= self.slowest < 1:
            raise UserError(f"slowest is a share, at least 0 and below 1, not {self.slowest:g}")
        if self.parameters < self.exchange.fragments:
            raise UserError(f"{self.parameters} parameters cannot make {self.exchange.fragments} fragments")


@dataclass(frozen=True)
class Goodput:
    """What became of the allocated chip time. All but `failures`, `steps` and `merges` are shares, 0..1.

    goodput = training * useful. training: chips present and stepping. useful: steps that the global clock kept up
    with; below 1 only where a quorum above 1 holds the clock back while faster learners run ahead of it.
    merged: trained tokens that are in the global weights. lost: 1 - goodput by cause.
    """

    goodput: float
    training: float
    useful: float
    merged: float
    uptime: float
    failures: int
    steps: int
    merges: int
    lost: dict[str, float]

    def to_json(self) -> dict[str, Any]:
        """Shares in percent."""
        value = asdict(self)
        for name in ("goodput", "training", "useful", "merged", "uptime"):
            value[name] = percent(value[name])
        value["lost"] = _percent_of(self.lost)
        return value


def simulate(system: System) -> Goodput:
    """Run `system` for its hours. Deterministic by its seed."""
    world, fleets = run_world(system)
    return judge(world, fleets)


def to_json(system: System, result: Goodput, alone: dict[str, TimeAccount]) -> dict[str, Any]:
    """The result, its baselines and every parameter it was computed with; shares in percent."""
    return {
        **result.to_json(),
        "baselines": {
            name: {"goodput": percent(each.goodput), "lost": _percent_of(each.lost())}
            for name, each in alone.items()
        },
        "system": {each.name: _plain(getattr(system, each.name)) for each in fields(system)},
    }


def run_world(system: System) -> tuple[World, list[ElasticChips]]:
    """The world of `system` after its hours, and the chips of its learners."""
    learners, fleets = learners_of(system)
    layout = even_layout(system.exchange, system.parameters)
    world = World(layout, system.exchange, learners, budget=_NEVER, keep_history=False)
    world.run(system.hours * 3600.0)
    return world, fleets


def judge(world: World, fleets: Sequence[ElasticChips]) -> Goodput:
    """The goodput of a world that has run."""
    learners, steps = list(world.learners.values()), world.tally.steps
    clock = world.syncer.global_step + world.rounds_in_flight  # the newest steps' rounds are still to come
    accounts = [learner.account for learner in learners]
    times, made = sum_accounts(accounts), sum(steps.values())
    useful = sum(min(count, clock) for count in steps.values()) / made if made else 1.0
    lost = times.lost() | {"ahead_of_quorum": times.goodput * (1.0 - useful)}
    return Goodput(
        goodput=times.goodput * useful,
        training=times.goodput,
        useful=useful,
        merged=_merged_share(world, learners),
        uptime=1.0 - common_pause(accounts, world.now) / world.now,
        failures=sum(fleet.failures for fleet in fleets),
        steps=made,
        merges=world.syncer.view().merges,
        lost=lost,
    )


def baselines(system: System, hours: float | None = None) -> dict[str, TimeAccount]:
    """Data parallel over the same chips, not elastic (`dp`) and elastic (`elastic`)."""
    hours = system.hours if hours is None else hours
    rigid, elastic = (np.random.default_rng(each) for each in np.random.SeedSequence(system.seed).spawn(2))
    return {
        "dp": account(RigidChips(system.chips, system.weather, rigid), hours),
        "elastic": account(ElasticChips(system.chips, system.weather, elastic), hours),
    }


def learners_of(system: System) -> tuple[list[SimLearner], list[ElasticChips]]:
    """The learners of `system` and their chips; every one has random numbers of its own."""
    learners, fleets = [], []
    seeds = np.random.SeedSequence(system.seed).spawn(2 * system.learners)
    for m in range(system.learners):
        chips = system.chips // system.learners + (m < system.chips % system.learners)
        fleet = ElasticChips(chips, system.weather, np.random.default_rng(seeds[2 * m]))
        is_slowest = m == system.learners - 1
        step_s = system.step_s / (1.0 - system.slowest) if is_slowest else system.step_s
        fleets.append(fleet)
        learners.append(
            new_learner(
                f"learner{m:02d}",
                system.exchange,
                Speed(step_s, system.step_variance),
                np.random.default_rng(seeds[2 * m + 1]),
                wire=system.wire,
                stretches=fleet.stretches(),
            )
        )
    return learners, fleets


def new_learner(
    name: str, exchange: Exchange, speed: Speed, rng: np.random.Generator, **settings: Any
) -> SimLearner:
    """A simulated learner under `exchange`; `settings` are further fields of SimLearner."""
    clock = LearnerClock(exchange.fragments, exchange.adoption.how, exchange.merge.late)
    settings = {"tokens": 1_000, "wire": Wire(), **settings}
    return SimLearner(name, clock, speed, rng=rng, fragments=exchange.fragments, **settings)


def even_layout(exchange: Exchange, parameters: int) -> FragmentLayout:
    """Fragments of equal size."""
    size = parameters // exchange.fragments
    specs = [TensorSpec(f"tensor{p}", (size,), embedding=False) for p in range(exchange.fragments)]
    return balance(specs, exchange.fragments, exchange.period)


def sum_accounts(accounts: Sequence[TimeAccount]) -> TimeAccount:
    """The seconds of all learners together (pauses are not joined)."""
    names = [each.name for each in fields(TimeAccount) if each.name != "pauses"]
    return TimeAccount(**{name: sum(getattr(each, name) for each in accounts) for name in names})


def _percent_of(shares: dict[str, float]) -> dict[str, float]:
    return {cause: percent(share) for cause, share in shares.items()}


def percent(share: float) -> float:
    """A share as percent, to three decimals."""
    return round(100.0 * share, 3)


def _merged_share(world: World, learners: Sequence[SimLearner]) -> float:
    trained = sum(learner.clock.tokens for learner in learners)
    return world.syncer.merged_tokens / trained if trained else 1.0


def _plain(value: Any) -> Any:
    if isinstance(value, Exchange):
        return value.model_dump(mode="json")
    value = asdict(value) if is_dataclass(value) and not isinstance(value, type) else value
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    return "inf" if value == float("inf") else value  # JSON has no infinity
