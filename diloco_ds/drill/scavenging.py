"""Scavenging: an island joins a live run and leaves it again. What the run gains by it, and what the other one notices."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from diloco_ds.drill.told import Told
from diloco_ds.errors import UserError


def measure(told: Told, alone: Told, stays: str, guest: str) -> dict[str, Any]:
    """The measures of the run `told`, in which `guest` joined and left, beside one of the same budget without it.

    Rates are merged tokens per second: `one` before the guest joined, `two` from its first merge until it had left,
    `one_again` afterwards. UserError if it did not come and go.
    """
    joined, left = (_happened(told, event, guest) for event in ("joined", "left"))
    with_it = [merge["time"] for merge in told.merged_parts(guest, joined)]
    if not with_it:
        raise UserError(f"{guest} was never merged")
    starts = {"together": told.merges[0]["time"], "alone": alone.merges[0]["time"]}
    ends = {"together": told.merges[-1]["time"], "alone": alone.merges[-1]["time"]}
    rates = {
        "one": _rate(told, starts["together"], joined),
        "two": _rate(told, with_it[0], left),
        "one_again": _rate(told, left, ends["together"]),
    }
    pace = told.pace(stays, starts["together"], joined)
    steps = [step.time for step in told.steps[stays]]
    gaps = [later - earlier for earlier, later in pairwise(steps)]
    return {
        "tokens_per_s": rates,
        "speed_up": rates["two"] / rates["one"],
        "seconds": {name: ends[name] - starts[name] for name in ends},
        "sooner": 1 - (ends["together"] - starts["together"]) / (ends["alone"] - starts["alone"]),
        "join_to_merge_s": with_it[0] - joined,
        "longest_gap_steps": max(gaps) / pace.step_s if pace else None,
        "loss": {"together": told.loss, "alone": alone.loss},
    }


def _happened(told: Told, event: str, island: str) -> float:
    for each in told.events:
        if (each.get("event"), each.get("island")) == (event, island):
            return float(each["time"])
    raise UserError(f"{island} has not {event}: nothing to measure")


def _rate(told: Told, since: float, until: float) -> float:
    """Merged tokens per second between two moments."""
    merges = [merge for merge in told.merges if since <= merge["time"] <= until]
    if len(merges) < 2:
        raise UserError("too few merges to tell a rate: take a larger budget")
    return float((merges[-1]["tokens"] - merges[0]["tokens"]) / (merges[-1]["time"] - merges[0]["time"]))
