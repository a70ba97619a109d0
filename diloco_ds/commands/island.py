"""Run one island of a run on this host, and keep it running until the run has ended.

For clusters: the run is started elsewhere with `train --no-islands`, on a file system that both hosts
see. `train` without that option does all of this itself.
"""

from __future__ import annotations

import argparse
from pathlib import Path

EXAMPLES = "  diloco-ds island /shared/runs/big a"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="directory of the run")
    parser.add_argument("island", metavar="NAME", help="the island, as the run file names it")


def run(arguments: argparse.Namespace) -> int:
    """Supervise the island; the supervisor's exit code."""
    from diloco_ds.island import supervisor

    return supervisor.main([str(arguments.run_dir.resolve()), arguments.island])
