"""Train: start the run that a YAML file describes, or go on with one.

Ctrl-C once stops it with checkpoints, within 30 seconds; twice ends it at once. When the program itself is
killed, training goes on without it; --resume takes it over. key=value replaces a setting of the file, however
deep: exchange.quorum=2, islands.a.ranks=2, deepspeed.zero_optimization.stage=3. Beside --resume it changes where
and how the islands of a stopped run compute: ranks, DeepSpeed settings, threads; docs/checkpoints.md says what
carries over.
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
    from diloco_ds.rundir import RunDir

EXAMPLES = """\
  diloco-ds train launch/quickstart.yaml
  diloco-ds train launch/quickstart.yaml budget.tokens=1000000 --run-dir /scratch/short
  diloco-ds train launch/quickstart.yaml --chaos storm.yaml
  diloco-ds train --resume runs/quickstart
  diloco-ds train --resume runs/quickstart islands.a.ranks=2 islands.a.deepspeed.zero_optimization.stage=3"""


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
    from diloco_ds import changes
    from diloco_ds.conductor.conductor import Conductor
    from diloco_ds.conductor.preflight import check_checkpoints, check_host
    from diloco_ds.conductor.summary import shown
    from diloco_ds.membership import run_config
    from diloco_ds.observe.manifest import manifest_to_go_on
    from diloco_ds.observe.status_files import StatusFile, read_status_file
    from diloco_ds.rundir import RunDir

    settings = _settings_beside_resume(arguments)
    run = RunDir(arguments.resume.resolve())
    manifest_to_go_on(run.root)
    config = run_config(run, settings)
    before = read_status_file(run, "conductor", StatusFile)
    if before is not None and before.state == "finished" and not before.alive:
        console.print(f"{shown(run.root)} is finished: there is nothing to go on with", highlight=False)
        return 0
    islands = not arguments.no_islands
    changed = _checked_changes(run, config) if settings else []
    check_host(config, islands=islands)
    check_checkpoints(run, config)
    stops.interrupting = False
    conductor = Conductor(run, config, stops, console, islands=islands)  # it alone has the run from here on
    if changed:
        changes.record(run, settings, sys.argv)
        conductor.tell_changes(changed)
    return conductor.conduct()


def _settings_beside_resume(arguments: argparse.Namespace) -> list[str]:
    """The key=value beside --resume; argparse takes the first one for the run file."""
    given = [*([str(arguments.run_file)] if arguments.run_file is not None else []), *arguments.overrides]
    others = [each for each in given if "=" not in each]
    if others or arguments.run_dir is not None or arguments.chaos is not None:
        raise UserError(
            "train: --resume goes on with a run as it was configured; beside it only key=value can stand, "
            "for example islands.a.ranks=2"
        )
    return given


def _checked_changes(run: RunDir, config: RunConfig) -> list[str]:
    """What `config` changes of the run, in words. UserError if that cannot be changed, or not now."""
    from diloco_ds import changes
    from diloco_ds.conductor.preflight import check_changed
    from diloco_ds.membership import run_config

    before = run_config(run)
    changes.check_changes(before, config)
    check_changed(run, config)
    return [f"{key}: {old} -> {new}" for key, (old, new) in changes.differences(before, config).items()]
