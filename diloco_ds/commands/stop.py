"""Stop a run with checkpoints, so that train --resume goes on from there.

With --now it is ended at once: what came after the last checkpoints is lost. Works with and without a living conductor.
"""

from __future__ import annotations

import argparse
from pathlib import Path

EXAMPLES = """\
  diloco-ds stop runs/quickstart
  diloco-ds stop runs/quickstart --now"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="directory of the run")
    parser.add_argument("--now", action="store_true", help="kill everything at once, without checkpoints")


def run(arguments: argparse.Namespace) -> int:
    """Stop the run and say how it ended."""
    from diloco_ds.conductor.stopping import stop_run
    from diloco_ds.rundir import RunDir

    return stop_run(RunDir(arguments.run_dir.resolve()), now=arguments.now)
