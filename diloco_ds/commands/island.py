"""Run one island of a run on this host, and keep it running until the run has ended.

For clusters: the run is started elsewhere with `train --no-islands`, on a file system that both hosts
see. `train` without that option does all of this itself.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from diloco_ds.errors import UserError

EXAMPLES = """\
  diloco-ds island /shared/runs/big a
  diloco-ds island /shared/runs/big a --host 10.0.0.7"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="directory of the run")
    parser.add_argument("island", metavar="NAME", help="the island, as the run file names it")
    parser.add_argument(
        "--host",
        help="name or address under which the syncer's host reaches this one (default: its own name)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Supervise the island; the supervisor's exit code."""
    from diloco_ds.conductor.elsewhere import announce
    from diloco_ds.conductor.shared_memory import remove_island_memory
    from diloco_ds.island import supervisor
    from diloco_ds.membership import run_config
    from diloco_ds.observe.manifest import read_manifest
    from diloco_ds.rundir import RunDir

    run_dir = RunDir(arguments.run_dir.resolve())
    read_manifest(run_dir.root)
    islands = [island.name for island in run_config(run_dir).islands]
    if arguments.island not in islands:
        raise UserError(f"{run_dir.root} has no island '{arguments.island}'; it has {', '.join(islands)}")
    announce(run_dir, arguments.island, arguments.host)
    try:
        return supervisor.main([str(run_dir.root), arguments.island])
    finally:
        remove_island_memory(run_dir.run_id(), arguments.island)
