"""The simulator's results as tables for a terminal. They take what the JSON holds, so that both say the same."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.table import Table

from diloco_ds.observe.units import count, fixed

_KINDS = {"dp": "not elastic", "elastic": "elastic"}
"""Data parallel."""


def goodput(value: dict[str, Any]) -> list[Table]:
    """Goodput and lost time of a system and its baselines."""
    system = value["system"]
    title = (
        f"{count(system['chips'])} chips, M = {system['learners']}, {system['hours']:g} h, "
        f"a chip fails every {system['weather']['mtbi_days']} days"
    )
    columns = ("", "Decoupled DiLoCo", "elastic", "not elastic")
    table = _table(title, columns)
    alone = value["baselines"]
    others = [alone["elastic"], alone["dp"]]
    table.add_row("goodput, %", fixed(value["goodput"], 1), *(fixed(each["goodput"], 1) for each in others))
    table.add_row("uptime, %", fixed(value["uptime"], 2), "", "")
    for cause, share in value["lost"].items():
        cells = [fixed(each["lost"].get(cause, 0.0), 2) for each in others]
        table.add_row(f"lost: {cause.replace('_', ' ')}, %", fixed(share, 2), *cells)
    table.add_row("failures", str(value["failures"]), "", "")
    table.add_row("inner steps, merges", f"{value['steps']}, {value['merges']}", "", "")
    table.add_row("trained tokens in the global weights, %", fixed(value["merged"], 1), "", "")
    return [table]


def table1(value: dict[str, Any]) -> list[Table]:
    """Table 1: ours, the paper's in brackets, the difference."""
    title = f"Table 1, goodput in %: ours (paper) difference; mean error {value['mean_error']:.2f} points, "
    title += f"worst {value['worst_error']:.2f}"
    table = _table(title, ["", *(count(chips) for chips in value["chips"])])
    for row in value["rows"]:
        cells = [
            f"{ours:.1f} ({paper}) {difference:+.1f}"
            for ours, paper, difference in zip(row["goodput"], row["paper"], row["difference"], strict=True)
        ]
        name = f"M = {row['learners']}" if row["kind"] == "diloco" else _KINDS[row["kind"]]
        table.add_row(name, *cells)
    return [table]


def scavenge(value: dict[str, Any]) -> list[Table]:
    """Time with extra compute, relative to without."""
    table = _table(
        "Extra learners for half of the FLOPs: relative time",
        ("extra", "learners", "ours", "ideal", "paper"),
    )
    for point in value["points"]:
        ours, ideal, paper = (fixed(point[name], 3) for name in ("time", "ideal", "paper"))
        table.add_row(f"+{100 * point['extra']:g} %", str(point["learners"]), ours, ideal, paper)
    return [table]


def hetero(value: dict[str, Any]) -> list[Table]:
    """Goodput by quorum and grace."""
    columns = ("quorum", "goodput, %", "paper, %", "slowest: share of merged tokens, %", "slowest in time, %")
    table = _table("Mixed hardware", columns)
    for case in value["cases"]:
        numbers = (
            case["result"]["goodput"],
            case["paper"],
            case["slowest_share"],
            case["in_time"],
        )
        table.add_row(f"{case['name']} (K = {case['quorum']})", *(fixed(each, 1) for each in numbers))
    return [table]


def bandwidth(value: dict[str, Any]) -> list[Table]:
    """One table a sweep, and the bandwidth each method needs."""
    sweeps = {"Gbit/s": "over_gbit", "step, s": "over_step_s", "fragments": "over_fragments"}
    tables = [_sweep(name, value[key]) for name, key in sweeps.items()]
    table = _table(f"Gbit/s each way for {100 * value['target']:g} % utilisation", ("method", "Gbit/s"))
    for method, gbit in value["needed"].items():
        table.add_row(method.replace("_", " "), f"{gbit:.3g}")
    return [*tables, table]


def train(value: dict[str, Any]) -> list[Table]:
    """Held-out loss over tokens."""
    table = _table(value["what"], ("tokens", "held-out loss, nats", "bits per byte"))
    for point in value["curve"]:
        table.add_row(count(point["tokens"]), fixed(point["loss"], 4), fixed(point["bits_per_byte"], 4))
    return [table]


def study(value: dict[str, Any]) -> list[Table]:
    """A row a case: mean and spread over the seeds at equal trained tokens, the distance to data parallel where
    it was run, and how the run ended; of mixtures the tokens of a learner's busiest expert over the mean, and how much
    the learners' routing differs.
    """
    baseline = next((case["mean"] for case in value["cases"] if case["group"] == "baseline"), None)
    title = f"Held-out loss, nats per byte, after {value['steps']} steps, {len(value['seeds'])} seeds"
    columns = ["group", "case", "mean", "spread", "to data parallel", "at its end", "trained"]
    mixtures = any(case["expert_load"] for case in value["cases"])
    table = _table(title, columns + ["busiest expert of each learner", "apart"] * mixtures)
    for case in value["cases"]:
        away = None if baseline is None else case["mean"] - baseline
        numbers = (fixed(case["mean"], 4), fixed(case["spread"], 4), fixed(away, 4))
        ending = (fixed(case["end_mean"], 4), count(case["trained_tokens"]))
        routing = (" ".join(fixed(load, 2) for load in case["expert_load"]), fixed(case["apart"], 3))
        table.add_row(case["group"], case["name"], *numbers, *ending, *(routing if mixtures else ()))
    return [table]


def _sweep(name: str, points: Sequence[dict[str, Any]]) -> Table:
    methods = list(points[0]["utilisation"])
    columns = [name, *(f"{method.replace('_', ' ')}, %" for method in methods), "steps between merges"]
    table = _table(f"Compute utilisation over {name}", columns)
    for point in points:
        cells = [fixed(100 * point["utilisation"][method], 1) for method in methods]
        table.add_row(f"{point['at']:g}", *cells, fixed(point["period"], 1))
    return table


def _table(title: str, columns: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left")
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number == 0 else "right")
    return table
