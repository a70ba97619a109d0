"""What the drills measured, as tables that Markdown takes. They hold what the JSON holds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from diloco_ds.drill.storm import GOALS
from diloco_ds.observe.units import fixed, percent


def storm_table(result: dict[str, Any]) -> str:
    """A line for each measure, with its goal."""
    part, recovery, met = result["participation"], result["recovery_s"], result["goals_met"]
    kinds = ", ".join(f"{kind} {number}" for kind, number in result["faults_by_kind"].items())
    rows = [
        ("faults", f"{result['faults']} in {result['seconds'] / 60:.1f} min: {kinds}", ""),
        (
            f"usual step, s (set: {result['set_step_s']:g})",
            ", ".join(f"{island} {fixed(seconds, 2)}" for island, seconds in result["usual_step_s"].items()),
            "",
        ),
        ("goodput of the live time", fixed(result["goodput"], 4), _goal("goodput", met)),
        ("goodput of all time", fixed(result["goodput_of_all_time"], 4), ""),
        (
            "longest gap of a survivor, steps",
            fixed(result["longest_gap_steps"], 2),
            _goal("longest_gap_steps", met),
        ),
        (
            "islands alive, eligible, merged",
            ", ".join(fixed(part[key], 2) for key in ("alive", "eligible", "merged")),
            "",
        ),
        ("merged of those alive", percent(part["share"]), _goal("participation", met)),
        ("tokens in the global weights", percent(part["token_share"]), ""),
        ("back, all: n, median, longest, s", _times(recovery), _goal("recovery_s", met)),
        *(
            (f"back, {victim}: n, median, longest, s", _times(numbers), "")
            for victim, numbers in recovery["by_victim"].items()
        ),
        ("blocks lost", _or_dash(result["blocks_lost"]), _goal("blocks_lost", met)),
        ("blocks trained twice", _or_dash(result["blocks_trained_twice"]), ""),
        ("held-out loss with the storm", fixed(result["loss"], 4), ""),
        ("held-out loss without", fixed(result["loss_without_faults"], 4), ""),
    ]
    return table(("measure", "value", "goal"), rows)


def speeds_table(result: dict[str, Any]) -> str:
    """A line for each case."""
    rows = [
        (
            name,
            fixed(case["goodput_fast"], 3),
            fixed(case["slowed_by"], 1),
            fixed(case["seconds"], 0),
            percent(case["merges_with_slow"]),
            f"{case['fragments_of_slow_merged']} of {case['fragments']}",
            fixed(case["merged_mean"], 2),
            percent(case["token_share"]),
            fixed(case["loss"], 4),
        )
        for name, case in result["cases"].items()
    ]
    head = (
        "case",
        "goodput of the fast one",
        "the other is slower by",
        "seconds",
        "merges with the slow one",
        "its fragments merged",
        "islands a merge",
        "token share",
        "held-out loss",
    )
    return table(head, rows)


def scavenge_table(result: dict[str, Any]) -> str:
    """A line for each measure."""
    rates, seconds, loss = result["tokens_per_s"], result["seconds"], result["loss"]
    rows = [
        (
            "merged tokens/s with 1, 2, 1 islands",
            ", ".join(fixed(rates[k], 0) for k in ("one", "two", "one_again")),
        ),
        ("two against one", fixed(result["speed_up"], 2)),
        ("seconds to the budget with the guest, alone", f"{seconds['together']:.0f}, {seconds['alone']:.0f}"),
        ("sooner by", percent(result["sooner"])),
        ("from joining to its first merge, s", fixed(result["join_to_merge_s"], 1)),
        ("longest gap of the other island, steps", fixed(result["longest_gap_steps"], 2)),
        ("held-out loss with the guest, alone", f"{fixed(loss['together'], 4)}, {fixed(loss['alone'], 4)}"),
    ]
    return table(("measure", "value"), rows)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table with columns of equal width."""
    lines = [head, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    text = [
        "| " + " | ".join(f"{cell:{w}}" for cell, w in zip(line, widths, strict=True)) + " |"
        for line in lines
    ]
    text.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(text)


def _goal(name: str, met: dict[str, bool | None]) -> str:
    how, bound = GOALS[name]
    words = {True: "met", False: "MISSED", None: "not measured"}
    return f"{how} {bound:g}: {words[met[name]]}"


def _times(numbers: dict[str, Any]) -> str:
    lost = f", {numbers['not_back']} never" if numbers["not_back"] else ""
    return f"{numbers['n']}, {fixed(numbers['median'], 1)}, {fixed(numbers['max'], 1)}{lost}"


def _or_dash(number: int | None) -> str:
    return "–" if number is None else str(number)
