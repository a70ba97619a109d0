"""A schedule of faults: what happens to whom at what second. Written by hand, or drawn from a seed and rates.

    seed: 7                                                       # for targets left to chance
    faults:
    - {at_s: 10.0, fault: kill, target: a.supervisor}
    - {at_s: 25.5, fault: hang, target: random, seconds: 8}
    - {at_s: 40.0, fault: garbage, target: b, what: not_finite}

`at_s` counts from the moment the schedule begins (of a run started with one: when its islands step). A target is an
island (`a`: its ranks), a part of one (`a.rank0`, `a.launcher`, `a.supervisor`, `a.agent`, `a.proxy`, `a.mpirun`),
`syncer`, `conductor`, or `random`: an island by chance.
"""

from __future__ import annotations

import difflib
import random
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import yaml
from pydantic import Field, ValidationError, field_validator, model_validator

from diloco_ds.config import Block
from diloco_ds.config_errors import in_words
from diloco_ds.errors import UserError

RANDOM = "random"
ISLAND_ROLES = ("launcher", "supervisor", "agent", "proxy", "mpirun")
RUN_ROLES = ("syncer", "conductor")

Garbage = Literal["malformed", "not_finite", "outlying", "replayed", "wrong_run"]


@dataclass(frozen=True)
class Kind:
    """A kind of fault: what it does, what it may be aimed at, how long it lasts (0: it is over at once)."""

    does: str
    aims_at: Literal["process", "ranks", "island", "run"]
    seconds: float = 0.0
    share: float = 0.0  # of a drawn mix


KINDS = {
    "kill": Kind("SIGKILL", "process", share=0.45),
    "hang": Kind("SIGSTOP, and SIGCONT after `seconds`", "process", seconds=10.0, share=0.12),
    "slow": Kind("an island's ranks run at 1/`factor` of their speed", "ranks", seconds=20.0, share=0.1),
    "cut": Kind("no traffic on an island's link for `seconds`", "island", seconds=10.0, share=0.1),
    "heal": Kind("ends what hangs, slows or cuts an island", "island"),
    "link": Kind("SIGKILL to the mpirun of an island's link", "island", share=0.06),
    "lose": Kind("an island's host: supervisor, ranks, agent and mailbox at once", "island", share=0.06),
    "syncer": Kind("SIGKILL to the syncer", "run", share=0.05),
    "disk": Kind("no process of the run can write to a file for `seconds`", "run", seconds=15.0),
    "garbage": Kind("an update that must not be merged, into an island's outbox", "island", share=0.06),
}
"""All kinds of fault by name. The shares of `disk` and `heal` in a mix are 0: they are asked for by name."""


class Fault(Block):
    """One fault."""

    at_s: float = Field(0.0, ge=0, description="Seconds after the schedule began.")
    fault: str = Field(description="Its kind, a key of KINDS.")
    target: str = Field(RANDOM, description="Whom it hits; a fault of the whole run has no choice.")
    seconds: float | None = Field(
        None, gt=0, description="How long it lasts; none: as is usual for the kind."
    )
    factor: float = Field(4.0, gt=1, description="slow: how many times slower.")
    what: Garbage | None = Field(None, description="garbage: which; none: by chance.")

    @field_validator("fault")
    @classmethod
    def _known(cls, name: str) -> str:
        if name not in KINDS:
            raise ValueError(f"no fault '{name}'; {_nearest(name, KINDS)}")
        return name

    @model_validator(mode="after")
    def _lasts(self) -> Fault:
        if self.seconds is not None and not self.kind.seconds:
            raise ValueError(f"{self.fault} is over at once: it takes no seconds")
        return self

    @property
    def kind(self) -> Kind:
        """What kind of fault this is."""
        return KINDS[self.fault]

    @property
    def lasts(self) -> float:
        """Seconds it lasts, 0 if it is over at once."""
        return self.seconds or self.kind.seconds

    def check(self, islands: Mapping[str, int]) -> None:
        """ValueError unless there is such a target; `islands`: ranks by name."""
        if self.kind.aims_at == "run":
            if self.target not in (RANDOM, "syncer" if self.fault == "syncer" else "run"):
                raise ValueError(f"{self.fault} hits the whole run: it takes no target")
            return
        if self.target == RANDOM:
            return
        if self.target in RUN_ROLES:
            if self.kind.aims_at != "process":
                raise ValueError(f"{self.fault} hits an island, not the {self.target}")
            return
        self._check_island(islands)

    def _check_island(self, islands: Mapping[str, int]) -> None:
        name, _, part = self.target.partition(".")
        if name not in islands:
            raise ValueError(f"no island '{name}'; {_nearest(name, [*islands, *RUN_ROLES, RANDOM])}")
        ranks = [f"rank{rank}" for rank in range(islands[name])]
        parts = {"process": [*ranks, *ISLAND_ROLES], "ranks": ranks}.get(self.kind.aims_at, [])
        if part and not parts:
            raise ValueError(f"{self.fault} hits a whole island: write {name}, not {self.target}")
        if part and part not in parts:
            raise ValueError(f"no '{part}' of island {name}; {_nearest(part, parts)}")


class Schedule(Block):
    """Faults in the order of their time, and the seed for whatever is left to chance in them."""

    seed: int = Field(0, ge=0, description="Seed of what is left to chance: targets, and kinds of garbage.")
    faults: list[Fault] = Field([], description="What happens, in any order.")

    @field_validator("faults")
    @classmethod
    def _in_order(cls, faults: list[Fault]) -> list[Fault]:
        return sorted(faults, key=lambda fault: fault.at_s)

    def to_yaml(self) -> str:
        """As `load_schedule` reads it."""
        faults = [fault.model_dump(exclude_defaults=True) for fault in self.faults]
        return yaml.safe_dump({"seed": self.seed, "faults": faults}, sort_keys=False, default_flow_style=None)


def load_schedule(path: Path, islands: Mapping[str, int]) -> Schedule:
    """The schedule in the YAML file `path`, for a run with these islands (ranks by name). UserError, one line."""
    try:
        tree = yaml.safe_load(path.read_text())
    except OSError as error:
        raise UserError(f"{path}: the schedule cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(tree, dict):
        raise UserError(f"{path}: a schedule is a YAML mapping with the key faults, and perhaps seed")
    try:
        schedule = Schedule.model_validate(tree)
    except ValidationError as error:
        raise UserError(f"{path}: {in_words(error, Schedule)}") from None
    for fault in schedule.faults:
        check_fault(fault, islands, f"{path}: {fault.fault} at {fault.at_s:g} s")
    return schedule


def check_fault(fault: Fault, islands: Mapping[str, int], where: str) -> None:
    """UserError that begins with `where` unless the fault can be aimed at one of these islands."""
    try:
        fault.check(islands)
    except ValueError as error:
        raise UserError(f"{where}: {error}") from None


def check_kind(name: str, where: str) -> str:
    """`name`; UserError that begins with `where` unless it is a kind of fault."""
    if name not in KINDS:
        raise UserError(f"{where}: no fault '{name}'; {_nearest(name, KINDS)}")
    return name


def generate(
    seed: int, per_hour: Mapping[str, float], duration_s: float, islands: Mapping[str, int]
) -> Schedule:
    """Faults that come independently of each other (Poisson), `per_hour` of each kind on average.

    The same seed gives the same schedule; the faults of one kind do not depend on the rates of the others.
    `islands`: ranks by name.
    """
    faults: list[Fault] = []
    for kind, rate in per_hour.items():
        choose = random.Random(f"{seed}/{kind}")
        faults += (_drawn(kind, at, choose, islands) for at in _arrivals(rate / 3600, duration_s, choose))
    return Schedule(seed=seed, faults=faults)


def mix(per_hour: float) -> dict[str, float]:
    """`per_hour` faults in all, divided among the kinds."""
    return {name: per_hour * kind.share for name, kind in KINDS.items() if kind.share}


def _arrivals(per_second: float, duration_s: float, choose: random.Random) -> Iterator[float]:
    at = choose.expovariate(per_second) if per_second > 0 else duration_s
    while at < duration_s:
        yield round(at, 3)
        at += choose.expovariate(per_second)


def _drawn(name: str, at_s: float, choose: random.Random, islands: Mapping[str, int]) -> Fault:
    kind = KINDS[name]
    island = choose.choice(sorted(islands))
    ranks = [f"rank{rank}" for rank in range(islands[island])]
    part = {"kill": choose.choice([*ranks, *ISLAND_ROLES]), "hang": choose.choice([*ranks, "agent", "proxy"])}
    return Fault(
        at_s=at_s,
        fault=name,
        target=RANDOM if kind.aims_at == "run" else f"{island}.{part[name]}" if name in part else island,
        seconds=round(kind.seconds * choose.uniform(0.5, 1.5), 1) if kind.seconds else None,
        what=choose.choice(get_args(Garbage)) if name == "garbage" else None,
    )


def _nearest(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, known := list(known), n=1)
    return f"did you mean '{near[0]}'?" if near else f"there are {', '.join(known)}"
