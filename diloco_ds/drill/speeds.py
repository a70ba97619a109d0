"""Mixed speeds: of two islands one is throttled. What the fast one notices, and what becomes of the slow one's work."""

from __future__ import annotations

from typing import Any

from diloco_ds.drill.told import Told
from diloco_ds.errors import UserError
from diloco_ds.observe.metrics import Record

CASES = {
    "K = 1 with grace": ["exchange.quorum=1"],
    "K = 1 without grace": ["exchange.quorum=1", "exchange.grace.safety=0"],
    "K = M": ["exchange.quorum=2"],
}
"""Name and settings; all with the same seed and the same budget."""


def measure(told: Told, fast: str, slow: str, fragments: int, calm_since: float) -> dict[str, Any]:
    """The measures of one case, ready for JSON.

    The pace of `fast` before the other one was throttled, from `calm_since` on, is 1.00. UserError if it was never
    throttled or the pace before it is not known.
    """
    throttled = next((e["time"] for e in told.chaos if (e["event"], e["fault"]) == ("fault", "slow")), None)
    end = told.draining_at()
    if throttled is None or end == float("inf"):
        raise UserError(f"{slow} was not throttled before the budget was merged: nothing to measure")
    before = {name: told.pace(name, calm_since, throttled) for name in (fast, slow)}
    after = {name: told.pace(name, throttled, end) for name in (fast, slow)}
    paces = [*before.values(), *after.values()]
    if any(pace is None for pace in paces):
        raise UserError("too few steps before or after the throttling to tell a pace")
    rates = {
        n: (b.tokens_per_s, a.tokens_per_s)
        for n, b, a in zip(before, before.values(), after.values(), strict=True)
        if a and b
    }
    merges = [merge for merge in told.merges if throttled < merge["time"] <= end]
    of_slow = [(m, part) for m in merges for part in m["parts"] if part["island"] == slow]
    return {
        "goodput_fast": rates[fast][1] / rates[fast][0],
        "slowed_by": rates[slow][0] / rates[slow][1],
        "seconds": end - throttled,
        "merges": len(merges),
        "merged_mean": sum(merge["merged"] for merge in merges) / len(merges),
        "merges_with_slow": sum(slow in _islands(merge) for merge in merges) / len(merges),
        "late_of_slow": sum(bool(part["late"]) for _, part in of_slow),
        "fragments": fragments,
        "fragments_of_slow_merged": len({merge["fragment"] for merge, _ in of_slow}),
        "token_share": merges[-1]["token_share"],
        "loss": told.loss,
    }


def _islands(merge: Record) -> set[str]:
    """Those that are in the merge; one may be in it twice, with a late answer and one in time."""
    return {part["island"] for part in merge["parts"]}
