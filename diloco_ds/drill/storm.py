"""What a storm of faults cost: goodput, gaps, participation, recovery, loss; from the records of the run alone.

Nothing that was done to an island's own learner is held against the others or against the system's reaction: while a
learner is down (outages.py) neither its time nor its tokens count. All else does: a learner of which supervisor, link or
syncer died is expected to step on as if nothing had happened.

    goodput = tokens trained while live / (tokens per second without faults * seconds live), over all islands

`goodput_of_all_time` divides by the whole time of the storm instead: what the faults cost altogether.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from diloco_ds.drill.comeback import comebacks, summary
from diloco_ds.drill.outages import Interval, down, outages, overlap
from diloco_ds.drill.told import Pace, Told
from diloco_ds.errors import UserError
from diloco_ds.observe.status_files import LedgerFile

AFTERMATH_S = 20.0
"""The storm is taken to last so long after the last fault, or its end."""
GOALS: dict[str, tuple[str, float]] = {
    "goodput": ("at least", 0.99),
    "longest_gap_steps": ("at most", 3.0),
    "participation": ("at least", 0.9),
    "recovery_s": ("at most", 20.0),
    "blocks_lost": ("exactly", 0),
}


def measure(storm: Told, calm: Told | None, ledger: LedgerFile | None = None) -> dict[str, Any]:
    """The measures, ready for JSON. Without a calm run of the same configuration the pace without faults is that before
    the storm. UserError if there is not enough to tell.

    `ledger`: the accounts of the data blocks at the end, as `status --json` has them; None if they are not known.
    """
    begin, end = window(storm)
    paces = calm_paces(storm, calm)
    its_outages = outages(storm)
    spans = {island: down(its_outages, island) for island in paces}
    back = [each for each in comebacks(storm, its_outages) if begin <= each.begin]
    faults = [event for event in storm.chaos if event["event"] == "fault"]
    result = {
        "seconds": end - begin,
        "faults": len(faults),
        "faults_by_kind": dict(Counter(fault["fault"] for fault in faults)),
        "faults_missed": sum(event["event"] == "chaos_missed" for event in storm.chaos),
        "goodput": goodput(storm, paces, spans, begin, end),
        "goodput_of_all_time": goodput(storm, paces, {island: [] for island in paces}, begin, end),
        "longest_gap_steps": longest_gap_steps(storm, paces, spans, begin, end),
        "usual_step_s": {island: pace.step_s for island, pace in paces.items()},
        "participation": participation(storm, begin, end),
        "recovery_s": summary(back),
        "blocks_lost": ledger.lost if ledger else None,
        "blocks_trained_twice": ledger.trained_twice if ledger else None,
        "ledger": ledger.model_dump() if ledger else None,
        "loss": storm.loss,
        "loss_without_faults": calm.loss if calm else None,
    }
    return {**result, "goals_met": goals_met(result)}


def window(storm: Told) -> Interval:
    """From the first fault until a little after the last, or until the islands were told to end."""
    times = [float(event["time"]) for event in storm.chaos]
    if not times:
        raise UserError("there was no fault: nothing to measure")
    return times[0], min(times[-1] + AFTERMATH_S, storm.draining_at())


def calm_paces(storm: Told, calm: Told | None) -> dict[str, Pace]:
    """Every island's pace without faults: from the calm run, else from before the storm."""
    told, until = (calm, calm.draining_at()) if calm else (storm, window(storm)[0])
    since = told.all_merged_at()
    paces = {island: told.pace(island, since or until, until) for island in storm.steps}
    known = {island: pace for island, pace in paces.items() if pace is not None}
    if missing := sorted(paces.keys() - known.keys()):
        where = "the calm run" if calm else "the run before its first fault"
        raise UserError(f"{where} has too few steps of {', '.join(missing)} to tell their pace")
    return known


def goodput(
    storm: Told, paces: Mapping[str, Pace], spans: Mapping[str, list[Interval]], begin: float, end: float
) -> float:
    """Tokens of the islands while they were live, over what they make in that time without faults.

    `spans`: when each was down. What is trained then, up to the first step after a restart, does not count.
    """
    tokens = possible = 0.0
    for island, pace in paces.items():
        possible += pace.tokens_per_s * (end - begin - overlap(spans[island], begin, end))
        tokens += sum(
            step.tokens
            for step in storm.steps[island]
            if begin < step.time <= end
            and not any(since < step.time <= until for since, until in spans[island])
        )
    return tokens / possible if possible else 0.0


def longest_gap_steps(
    storm: Told, paces: Mapping[str, Pace], spans: Mapping[str, list[Interval]], begin: float, end: float
) -> float:
    """The longest time without the end of a step of any island, less its own outages, in its usual steps."""
    longest = 0.0
    for island, pace in paces.items():
        ends = [begin, *(step.time for step in storm.steps[island] if begin < step.time < end), end]
        for earlier, later in pairwise(ends):
            gap = later - earlier - overlap(spans[island], earlier, later)
            longest = max(longest, gap / pace.step_s)
    return longest


def participation(storm: Told, begin: float, end: float) -> dict[str, float | None]:
    """Means over the merges of the storm; `share`: merged islands of those alive."""
    merges = [merge for merge in storm.merges if begin < merge["time"] <= end]
    if not merges:
        return {
            "merges": 0,
            "alive": None,
            "eligible": None,
            "merged": None,
            "share": None,
            "token_share": None,
        }
    sums = {key: sum(merge[key] for merge in merges) for key in ("alive", "eligible", "merged")}
    means = {key: total / len(merges) for key, total in sums.items()}
    shares = [merge["token_share"] for merge in merges if merge["token_share"] is not None]
    return {
        "merges": len(merges),
        **means,
        "share": sums["merged"] / sums["alive"],
        "token_share": shares[-1] if shares else None,
    }


def goals_met(result: Mapping[str, Any]) -> dict[str, bool | None]:
    """Which of `GOALS` are; None where nothing was measured."""
    recovery = result["recovery_s"]
    measured = {
        "goodput": result["goodput"],
        "longest_gap_steps": result["longest_gap_steps"],
        "participation": result["participation"]["share"],
        "recovery_s": float("inf") if recovery["not_back"] else recovery["max"],
        "blocks_lost": result["blocks_lost"],
    }
    return {name: None if value is None else _met(value, *GOALS[name]) for name, value in measured.items()}


def _met(value: float, how: str, bound: float) -> bool:
    return bool({"at least": value >= bound, "at most": value <= bound, "exactly": value == bound}[how])
