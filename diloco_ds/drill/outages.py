"""When an island was down because something was done to its own learner."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from diloco_ds.drill.told import Told
from diloco_ds.observe.metrics import Record

Interval = tuple[float, float]


@dataclass(frozen=True)
class Outage:
    """From a fault to the end of the first step after it (epoch seconds; infinity: there was none)."""

    island: str
    begin: float
    end: float


def kills_learner(fault: Record) -> bool:
    """Whether the learner has to be started again after this fault."""
    part = _part(fault)
    return fault["fault"] == "lose" or (
        fault["fault"] == "kill" and (part == "" or part == "launcher" or part.startswith("rank"))
    )


def holds_learner(fault: Record) -> bool:
    """Whether the learner stands still, or is slow, until this fault is over."""
    part = _part(fault)
    return fault["fault"] in ("hang", "slow") and (part == "" or part.startswith("rank"))


def outages(told: Told) -> list[Outage]:
    """Every outage, in the order of the faults; those of one island may overlap.

    A learner that was killed is back with the end of the first step that a later incarnation made; one that was held
    when the fault is over.
    """
    found = []
    for fault in told.chaos:
        if fault["event"] != "fault" or fault.get("island") is None:
            continue
        island, begin = fault["island"], fault["time"]
        if kills_learner(fault):
            found.append(Outage(island, begin, _first_step_of_a_later_incarnation(told, island, begin)))
        elif holds_learner(fault):
            found.append(Outage(island, begin, over_at(told, fault)))
    return found


def over_at(told: Told, fault: Record) -> float:
    """When a fault that lasts was over; infinity if nobody said so."""
    ends = (e["time"] for e in told.chaos if (e["event"], e["number"]) == ("chaos_over", fault["number"]))
    return next((end for end in ends if end >= fault["time"]), float("inf"))


def down(outages: Iterable[Outage], island: str) -> list[Interval]:
    """The times in which the island was down, without overlap."""
    spans: list[Interval] = []
    for outage in sorted((each for each in outages if each.island == island), key=lambda each: each.begin):
        if spans and outage.begin <= spans[-1][1]:
            spans[-1] = (spans[-1][0], max(spans[-1][1], outage.end))
        else:
            spans.append((outage.begin, outage.end))
    return spans


def overlap(spans: Iterable[Interval], begin: float, end: float) -> float:
    """Seconds of [begin, end] that lie in `spans`, which do not overlap."""
    return sum(max(0.0, min(end, until) - max(begin, since)) for since, until in spans)


def _first_step_of_a_later_incarnation(told: Told, island: str, moment: float) -> float:
    steps = told.steps.get(island, [])
    before = max((step.incarnation for step in steps if step.time <= moment), default=0)
    return next((s.time for s in steps if s.time > moment and s.incarnation > before), float("inf"))


def _part(fault: Record) -> str:
    return str(fault["target"]).partition(".")[2]
