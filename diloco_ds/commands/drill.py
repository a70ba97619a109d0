"""Drill: whole runs in which something happens, measured: a storm of faults, mixed speeds, an island that comes and goes.

The runs are ordinary runs (train, chaos, join, leave) in new directories below --out, with the results in result.json.
docs/faults.md says what is measured, and how.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from diloco_ds.arguments import add_part, folder, number, whole

SUBCOMMANDS = True

EXAMPLES = """\
  diloco-ds drill storm launch/storm.yaml --minutes 20 --rate 125 --seed 1
  diloco-ds drill storm launch/storm.yaml --minutes 3 --without-calm --json
  diloco-ds drill speeds launch/speeds.yaml
  diloco-ds drill scavenge launch/scavenge.yaml budget.tokens=500000"""

GOAL_MISSED = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    parts = parser.add_subparsers(dest="part", required=True, metavar="DRILL")
    storm = _part(
        parts, "storm", _storm, "a seeded storm of faults, beside the same run without; 1 if a goal is missed"
    )
    storm.add_argument(
        "--minutes", type=number(above=0), default=20.0, metavar="N", help="how long faults come (default 20)"
    )
    storm.add_argument(
        "--rate", type=number(above=0), default=125.0, metavar="N", help="faults per hour (default 125)"
    )
    storm.add_argument("--seed", type=whole(0), default=0, metavar="N", help="of the storm (default 0)")
    storm.add_argument(
        "--without-calm",
        action="store_true",
        help="leave out the run without faults: the pace is measured before the storm, and there is no loss to compare",
    )
    speeds = _part(
        parts, "speeds", _speeds, "of two islands one is throttled: three ways to wait for it, or not"
    )
    speeds.add_argument(
        "--factor", type=number(above=1), default=4.0, metavar="F", help="how many times slower (default 4)"
    )
    _part(
        parts,
        "scavenge",
        _scavenge,
        "an island joins and leaves a run of one island, beside the same run without",
    )


def run(arguments: argparse.Namespace) -> int:
    """Carry out one drill and show what was measured. Interrupted, also by SIGTERM, it stops the run it conducts."""
    from diloco_ds.conductor.stops import Stops

    Stops()
    return int(arguments.drill(arguments))


def _part(
    parts: Any, name: str, drill: Callable[[argparse.Namespace], int], text: str
) -> argparse.ArgumentParser:
    part = add_part(parts, "drill", name, text, EXAMPLES)
    part.set_defaults(drill=drill)
    part.add_argument(
        "run_file", type=Path, metavar="RUN.yaml", help=f"the run: launch/{name}.yaml, or one like it"
    )
    part.add_argument(
        "overrides", nargs="*", metavar="key=value", help="settings that replace those of the file"
    )
    out = f"runs/{name}"
    part.add_argument(
        "--out", type=folder, default=out, metavar="DIR", help=f"directory of the runs ({out}, {out}-2, ...)"
    )
    part.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    return part


def _storm(arguments: argparse.Namespace) -> int:
    from diloco_ds.drill.conduct import weather_storm
    from diloco_ds.drill.tables import storm_table

    result = weather_storm(
        arguments.run_file,
        arguments.overrides,
        arguments.out,
        minutes=arguments.minutes,
        rate=arguments.rate,
        seed=arguments.seed,
        with_calm=not arguments.without_calm,
        say=_say,
    )
    _show(arguments, result, storm_table)
    return GOAL_MISSED if False in result["goals_met"].values() else 0


def _speeds(arguments: argparse.Namespace) -> int:
    from diloco_ds.drill.conduct import mix_speeds
    from diloco_ds.drill.tables import speeds_table

    result = mix_speeds(
        arguments.run_file, arguments.overrides, arguments.out, factor=arguments.factor, say=_say
    )
    _show(arguments, result, speeds_table)
    return 0


def _scavenge(arguments: argparse.Namespace) -> int:
    from diloco_ds.drill.conduct import scavenge
    from diloco_ds.drill.tables import scavenge_table

    result = scavenge(arguments.run_file, arguments.overrides, arguments.out, say=_say)
    _show(arguments, result, scavenge_table)
    return 0


def _show(
    arguments: argparse.Namespace, result: dict[str, Any], table: Callable[[dict[str, Any]], str]
) -> None:
    print(json.dumps(result) if arguments.json else table(result))


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
