"""Let an island leave a live run: it writes its last updates, they are merged, and it ends. The others do not notice."""

from __future__ import annotations

import argparse
from pathlib import Path

EXAMPLES = "  diloco-ds leave runs/quickstart b"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="directory of the run")
    parser.add_argument("island", metavar="NAME", help="the island")


def run(arguments: argparse.Namespace) -> int:
    """Ask for it and say how to see it."""
    from diloco_ds.conductor.joining import leave
    from diloco_ds.conductor.summary import shown
    from diloco_ds.rundir import RunDir

    leave(RunDir(arguments.run_dir.resolve()), arguments.island)
    print(f"island {arguments.island} leaves; see diloco-ds status {shown(arguments.run_dir)} --watch")
    return 0
