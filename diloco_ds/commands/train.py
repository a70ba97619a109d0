"""Train: start the run that a YAML file describes, or go on with one.

Ctrl-C once stops it with checkpoints, within 30 seconds; twice ends it at once. When the program itself is
killed, training goes on without it; --resume takes it over. key=value replaces a setting of the file, however
deep: exchange.quorum=2, islands.a.ranks=2, deepspeed.zero_optimization.stage=3.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from diloco_ds.errors import UserError

if TYPE_CHECKING:
    from rich.console import Console

    from diloco_ds.chaos.schedule import Schedule
    from diloco_ds.conductor.stops import Stops
    from diloco_ds.config import RunConfig

EXAMPLES = """\
  diloco-ds train launch/quickstart.yaml
  diloco-ds train launch/quickstart.yaml budget.tokens=1000000 --run-dir /scratch/short
  diloco-ds train launch/quickstart.yaml --chaos storm.yaml
  diloco-ds train --resume runs/quickstart"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    parser.add_argument("run_file", nargs="?", type=Path, metavar="RUN.yaml", help="the run, as a YAML file")
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="settings that replace those of the file"
    )
    parser.add_argument(
        "--run-dir", type=Path, metavar="DIR", help="directory of the run (default: runs/NAME, NAME-2, ...)"
    )
    parser.add_argument(
        "--resume", type=Path, metavar="RUN_DIR", help="go on with this run, or take it over if it still runs"
    )
    parser.add_argument(
        "--no-islands",
        action="store_true",
        help="start syncer and links alone; the islands are started where they live, with diloco-ds island",
    )
    parser.add_argument(
        "--chaos",
        type=Path,
        metavar="S.yaml",
        help="inject this schedule of faults from the start (diloco-ds chaos)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Conduct a run to its end."""
    from rich.console import Console

    from diloco_ds.conductor.stops import Stops

    stops, console = Stops(), Console()
    if arguments.resume is not None:
        return _resume(arguments, stops, console)
    if arguments.run_file is None:
        raise UserError("train: name a run file, for example launch/quickstart.yaml, or --resume RUN_DIR")
    return _start(arguments, stops, console)


def _start(arguments: argparse.Namespace, stops: Stops, console: Console) -> int:
    from diloco_ds.conductor.conductor import Conductor
    from diloco_ds.conductor.prepare import new_run
    from diloco_ds.conductor.summary import shown
    from diloco_ds.config_file import load_config
    from diloco_ds.rundir import write_atomically

    config = load_config(arguments.run_file, arguments.overrides)
    schedule = _schedule(arguments.chaos, config)
    islands = not arguments.no_islands
    run = new_run(config, arguments.run_dir, sys.argv, console, islands=islands)
    console.print(f"run directory: {shown(run.root)}", highlight=False)
    if schedule is not None:
        write_atomically(run.chaos, schedule.to_yaml())
    stops.interrupting = False
    return Conductor(run, config, stops, console, islands=islands).conduct()


def _schedule(path: Path | None, config: RunConfig) -> Schedule | None:
    """The schedule in `path`, checked before anything starts."""
    from diloco_ds.chaos.schedule import load_schedule

    if path is None:
        return None
    return load_schedule(path, {island.name: island.ranks for island in config.islands})


def _resume(arguments: argparse.Namespace, stops: Stops, console: Console) -> int:
    from diloco_ds.conductor.conductor import Conductor
    from diloco_ds.conductor.preflight import check_host
    from diloco_ds.conductor.summary import shown
    from diloco_ds.membership import run_config
    from diloco_ds.observe.manifest import manifest_to_go_on
    from diloco_ds.observe.status_files import StatusFile, read_status_file
    from diloco_ds.rundir import RunDir

    if any(given is not None for given in (arguments.run_file, arguments.run_dir, arguments.chaos)):
        raise UserError("train: --resume goes on with a run as it was configured; give nothing beside it")
    run = RunDir(arguments.resume.resolve())
    manifest_to_go_on(run.root)
    config = run_config(run)
    before = read_status_file(run, "conductor", StatusFile)
    if before is not None and before.state == "finished" and not before.alive:
        console.print(f"{shown(run.root)} is finished: there is nothing to go on with", highlight=False)
        return 0
    islands = not arguments.no_islands
    check_host(config, islands=islands)
    stops.interrupting = False
    return Conductor(run, config, stops, console, islands=islands).conduct()
