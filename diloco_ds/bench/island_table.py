"""What `bench island` has measured, as numbers and as tables."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from statistics import fmean, median
from typing import Any

from rich.console import Group
from rich.table import Table

from diloco_ds.bench.contestant import Turn
from diloco_ds.bench.island import ALONE, EXCHANGE, LOOPS, PLAIN, Measured
from diloco_ds.observe.history import BUCKETS
from diloco_ds.observe.units import count

PARTS = ("decide", "agree", "answer", "adopt", "complete", "report")
RATIOS = ((ALONE, PLAIN), (EXCHANGE, ALONE), (EXCHANGE, PLAIN))
EXCHANGE_GOAL, DEEPSPEED_GOAL = 0.01, 0.95


def numbers(measured: Measured) -> dict[str, Any]:
    """Everything as JSON's own types; seconds are means over all steps of a loop, rates medians over its turns.

    A ratio is taken turn by turn, between turns that were made one after the other.
    """
    config, turns = measured.config, measured.turns
    loops = {name: _loop(turns[name]) for name in LOOPS}
    step = turns[EXCHANGE][0].steps[0]
    return {
        "run": {
            "parameters": sum(measured.layout.numels),
            "fragments": measured.layout.fragments,
            "period": measured.layout.period,
            "device": measured.device,
            "ranks": config.island(EXCHANGE).ranks,
            "threads_per_rank": config.island(EXCHANGE).threads_per_rank,
            "step_tokens": step["step_tokens"],
            "turns": len(turns[EXCHANGE]),
        },
        "loops": loops,
        "ratios": {f"{over}/{under}": _ratio(turns[over], turns[under]) for over, under in RATIOS},
        "exchange_share": loops[EXCHANGE]["buckets"]["exchange"] / loops[EXCHANGE]["step_s"],
    }


def _loop(turns: list[Turn]) -> dict[str, Any]:
    steps = [step for turn in turns for step in turn.steps]
    result = {
        "tokens_per_s": _spread(turn.tokens_per_s for turn in turns),
        "steps": len(steps),
        "step_s": fmean(step["step_s"] for step in steps),
        "buckets": {name: fmean(step["buckets"][name] for step in steps) for name in BUCKETS},
    }
    if "answered" not in steps[0]:  # the plain loop has no boundary
        return result
    parts = {name: fmean(step["exchange_parts"].get(name, 0.0) for step in steps) for name in PARTS}
    fragments = {name: fmean(len(step[name]) for step in steps) for name in ("answered", "adopted")}
    return {**result, "exchange_parts": parts, "fragments_per_step": fragments}


def _ratio(over: list[Turn], under: list[Turn]) -> dict[str, float]:
    return _spread(a.tokens_per_s / b.tokens_per_s for a, b in zip(over, under, strict=True))


def _spread(values: Iterable[float]) -> dict[str, float]:
    found = list(values)
    return {"median": median(found), "lowest": min(found), "highest": max(found)}


def tables(value: dict[str, Any]) -> Group:
    """`numbers` for people."""
    run, loops = value["run"], value["loops"]
    title = (
        f"{count(run['parameters'])} parameters, {run['fragments']} fragments, {run['ranks']} rank(s) on {run['device']}, "
        f"{run['threads_per_rank']} thread(s) each, {count(run['step_tokens'])} tokens a step, {run['turns']} turns"
    )
    speeds = _table(title, "", "tokens/s", "lowest - highest", "ms a step", "of plain torch")
    for name, label in LOOPS.items():
        rate = loops[name]["tokens_per_s"]
        ratio = value["ratios"].get(f"{name}/{PLAIN}")
        speeds.add_row(
            label,
            f"{rate['median']:.0f}",
            f"{rate['lowest']:.0f} - {rate['highest']:.0f}",
            _ms(loops[name]["step_s"]),
            f"{ratio['median']:.3f} ({ratio['lowest']:.3f} - {ratio['highest']:.3f})" if ratio else "",
        )
    where = _table("Where a step goes, ms", "", *LOOPS.values())
    for bucket in BUCKETS:
        where.add_row(bucket, *(_ms(loops[name]["buckets"][bucket]) for name in LOOPS))
    return Group(speeds, where, _parts_table(loops), *_verdicts(value))


def _parts_table(loops: dict[str, Any]) -> Table:
    with_exchange = (ALONE, EXCHANGE)
    table = _table(
        "The exchange's parts, ms a step (share of it)", "", *(LOOPS[name] for name in with_exchange)
    )

    def row(label: str, cell: Callable[[dict[str, Any]], str]) -> None:
        table.add_row(label, *(cell(loops[name]) for name in with_exchange))

    for part in PARTS:
        row(part, lambda loop, part=part: _with_share(loop["exchange_parts"][part], loop["step_s"]))  # type: ignore[misc]
    row("all", lambda loop: _with_share(sum(loop["exchange_parts"].values()), loop["step_s"]))
    for what in ("answered", "adopted"):
        row(f"fragments {what} a step", lambda loop, what=what: f"{loop['fragments_per_step'][what]:.2f}")  # type: ignore[misc]
    return table


def _verdicts(value: dict[str, Any]) -> list[str]:
    share, ratio = value["exchange_share"], value["ratios"][f"{ALONE}/{PLAIN}"]["median"]
    both = value["ratios"][f"{EXCHANGE}/{ALONE}"]
    return [
        f"exchange: {100 * share:.2f} % of the step (goal: at most {100 * EXCHANGE_GOAL:.0f} %)",
        f"with against without the exchange, all it takes on this host included: {both['median']:.3f} "
        f"({both['lowest']:.3f} - {both['highest']:.3f})",
        f"DeepSpeed against plain torch: {ratio:.3f} (goal at one rank: at least {DEEPSPEED_GOAL:.2f})",
    ]


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left")
    return table


def _with_share(seconds: float, step_s: float) -> str:
    return f"{_ms(seconds)} ({100 * seconds / step_s:.2f} %)"


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.3f}" if seconds < 0.01 else f"{1000 * seconds:.1f}"
