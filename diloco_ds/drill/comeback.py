"""From a fault to the first merge after it: how long it took until what was hit took part again."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any

from diloco_ds.drill.outages import Outage, kills_learner, over_at
from diloco_ds.drill.told import Told
from diloco_ds.observe.metrics import Record

LINK_PARTS = ("agent", "proxy", "mpirun")


@dataclass(frozen=True)
class Comeback:
    """`seconds` from the death of `hit` (learner, link, supervisor, syncer), or from the end of what held a link, to
    the first merge afterwards; infinity if there was none.
    """

    hit: str
    island: str | None
    begin: float
    seconds: float

    @property
    def end(self) -> float:
        """When it was merged again, epoch seconds."""
        return self.begin + self.seconds


def comebacks(told: Told, outages: list[Outage]) -> list[Comeback]:
    """One for every fault that something had to recover from, in the order of the faults.

    Where the same thing was hit again before it had recovered, only the last of these faults counts.
    """
    found = []
    for fault in told.chaos:
        if fault["event"] == "fault" and (comeback := _comeback(told, outages, fault)) is not None:
            found.append(comeback)
    return [each for each in found if not _hit_again(each, found)]


def summary(comebacks: list[Comeback]) -> dict[str, Any]:
    """Median and longest, of all and of each kind of victim; `not_back`: those that never were."""
    kinds = dict.fromkeys(each.hit for each in comebacks)
    by_victim = {kind: _numbers([each for each in comebacks if each.hit == kind]) for kind in kinds}
    return {**_numbers(comebacks), "by_victim": by_victim}


def _numbers(comebacks: list[Comeback]) -> dict[str, Any]:
    seconds = [each.seconds for each in comebacks if each.seconds < float("inf")]
    return {
        "n": len(comebacks),
        "median": statistics.median(seconds) if seconds else None,
        "max": max(seconds, default=None),
        "not_back": len(comebacks) - len(seconds),
    }


def _comeback(told: Told, outages: list[Outage], fault: Record) -> Comeback | None:
    island, begin = fault.get("island"), float(fault["time"])
    if fault["target"] == "syncer" and fault["fault"] in ("kill", "syncer"):
        return Comeback("syncer", None, begin, _syncer_back(told, begin) - begin)
    if island is None:
        return None
    if kills_learner(fault):
        back = next(each.end for each in outages if (each.island, each.begin) == (island, begin))
        return Comeback("learner", island, begin, _merged_after(told, island, back) - begin)
    part = fault["target"].partition(".")[2]
    if fault["fault"] == "link" or (fault["fault"] == "kill" and part in LINK_PARTS):
        back = _started_again(told, "link", island, begin)
        return Comeback("link", island, begin, _merged_after(told, island, back) - begin)
    if fault["fault"] == "kill" and part == "supervisor":
        back = _started_again(told, "supervisor", island, begin)
        return Comeback("supervisor", island, begin, _merged_after(told, island, back) - begin)
    if fault["fault"] == "cut" or (fault["fault"] == "hang" and part in LINK_PARTS):
        over = over_at(told, fault)
        return (
            Comeback("link", island, over, _merged_after(told, island, over) - over)
            if over < float("inf")
            else None
        )
    return None


def _merged_after(told: Told, island: str, moment: float) -> float:
    return next((float(merge["time"]) for merge in told.merged_parts(island, moment)), float("inf"))


def _syncer_back(told: Told, moment: float) -> float:
    before = max((merge["generation"] for merge in told.merges if merge["time"] <= moment), default=0)
    later = (float(m["time"]) for m in told.merges if m["time"] > moment and m["generation"] > before)
    return next(later, float("inf"))


def _started_again(told: Told, role: str, island: str, moment: float) -> float:
    """When the conductor next started the part again."""
    for event in told.events:
        named = (event.get("event"), event.get("role"), event.get("island"))
        if event["time"] > moment and named == ("restart", role, island):
            return float(event["time"])
    return float("inf")


def _hit_again(comeback: Comeback, among: list[Comeback]) -> bool:
    return any(
        (other.hit, other.island) == (comeback.hit, comeback.island)
        and comeback.begin < other.begin < comeback.end
        for other in among
    )
