"""Inject real faults into a live run: kill, hang, slow, cut, lose, ... processes of it, and see it go on.

One fault, a schedule from a file, or one drawn from a seed and rates (Poisson). Every fault is told of in the
run's metrics.jsonl with its time. TARGET is an island (a), a part of one (a.rank0, a.launcher, a.supervisor,
a.agent, a.proxy, a.mpirun), syncer, conductor, or random.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diloco_ds.arguments import number, whole
from diloco_ds.errors import UserError

if TYPE_CHECKING:
    from diloco_ds.chaos.schedule import Schedule

EXAMPLES = """\
  diloco-ds chaos runs/quickstart --fault kill --target a
  diloco-ds chaos runs/quickstart --fault hang --target b.rank0 --seconds 30
  diloco-ds chaos runs/quickstart --seed 7 --rate 125 --minutes 20 --dry-run > storm.yaml
  diloco-ds chaos runs/quickstart --schedule storm.yaml
  diloco-ds chaos runs/quickstart --seed 7 --rate kill=60 --rate slow=20 --minutes 5 --json"""

FAILED = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="directory of the run")
    one = parser.add_argument_group("one fault, now")
    one.add_argument(
        "--fault", metavar="KIND", help="kill, hang, slow, cut, heal, link, lose, syncer, disk, garbage"
    )
    one.add_argument("--target", help="whom it hits (default: random)")
    one.add_argument("--seconds", type=number(above=0), metavar="S", help="how long it lasts")
    one.add_argument(
        "--factor", type=number(above=1), metavar="F", help="slow: how many times slower (default 4)"
    )
    one.add_argument("--what", help="garbage: malformed, not_finite, outlying, replayed, wrong_run")
    many = parser.add_argument_group("many")
    many.add_argument("--schedule", type=Path, metavar="S.yaml", help="faults from a file (docs/faults.md)")
    many.add_argument(
        "--rate",
        action="append",
        metavar="N|KIND=N",
        help="draw them: N per hour in all, or of one kind (may be given again)",
    )
    many.add_argument(
        "--minutes",
        type=number(above=0),
        default=10.0,
        metavar="N",
        help="draw them for so long (default 10)",
    )
    parser.add_argument(
        "--seed", type=whole(0), default=0, metavar="N", help="for everything left to chance (default 0)"
    )
    parser.add_argument("--dry-run", action="store_true", help="print the schedule as YAML, inject nothing")
    parser.add_argument("--json", action="store_true", help="a JSON object a line for each fault")


def run(arguments: argparse.Namespace) -> int:
    """Inject, and wait until every fault is over. 1 if none found its target."""
    from diloco_ds.chaos.injector import Injector, islands_of
    from diloco_ds.chaos.process import EndRequest
    from diloco_ds.rundir import RunDir

    run_dir = RunDir(arguments.run_dir.resolve())
    schedule = _schedule(arguments, islands_of(run_dir))
    if arguments.dry_run:
        print(schedule.to_yaml(), end="")
        return 0
    injector = Injector(run_dir, schedule, _show_json if arguments.json else _show)
    injector.run(EndRequest())
    return FAILED if injector.missed and not injector.injected else 0


def _schedule(arguments: argparse.Namespace, islands: dict[str, int]) -> Schedule:
    from diloco_ds.chaos.schedule import generate, load_schedule

    ways = [name for name in ("fault", "schedule", "rate") if getattr(arguments, name) is not None]
    if len(ways) != 1:
        raise UserError("chaos: give one of --fault KIND, --schedule S.yaml and --rate N")
    if ways == ["schedule"]:
        return load_schedule(arguments.schedule, islands)
    if ways == ["rate"]:
        return generate(arguments.seed, _rates(arguments.rate), 60 * arguments.minutes, islands)
    return _one(arguments, islands)


def _one(arguments: argparse.Namespace, islands: dict[str, int]) -> Schedule:
    from pydantic import ValidationError

    from diloco_ds.chaos.schedule import Fault, Schedule, check_fault
    from diloco_ds.config_errors import in_words

    names = ("fault", "target", "seconds", "factor", "what")
    given: dict[str, Any] = {
        name: getattr(arguments, name) for name in names if getattr(arguments, name) is not None
    }
    try:
        fault = Fault.model_validate(given)
    except ValidationError as error:
        raise UserError(f"chaos: --{in_words(error, Fault)}") from None
    check_fault(fault, islands, f"chaos: --fault {fault.fault}")
    return Schedule(seed=arguments.seed, faults=[fault])


def _rates(given: list[str]) -> dict[str, float]:
    """Faults per hour by kind."""
    from diloco_ds.chaos.schedule import check_kind, mix

    rates: dict[str, float] = {}
    for text in given:
        kind, equals, number = text.rpartition("=")
        try:
            rate = float(number)
        except ValueError:
            rate = -1.0
        if not 0 <= rate < float("inf"):
            raise UserError(f"chaos: --rate {text}: write faults per hour, 125 or kill=60")
        if equals:
            rates[check_kind(kind, "chaos: --rate")] = rate
        else:
            rates.update(mix(rate))
    return rates


def _show(record: dict[str, Any]) -> None:
    print(record["reason"], flush=True)


def _show_json(record: dict[str, Any]) -> None:
    print(json.dumps(record), flush=True)
