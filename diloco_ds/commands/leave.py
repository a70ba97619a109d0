"""Let an island leave a live run: it writes its last updates, they are merged, and it ends. The others do not notice."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

EXAMPLES = """\
  diloco-ds leave runs/quickstart b
  diloco-ds leave runs/quickstart b --json"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="directory of the run")
    parser.add_argument("island", metavar="NAME", help="the island")
    parser.add_argument("--json", action="store_true", help="as one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Ask for it and say how to see it."""
    from diloco_ds.conductor.joining import leave
    from diloco_ds.conductor.summary import shown
    from diloco_ds.rundir import RunDir

    run = RunDir(arguments.run_dir.resolve())
    leave(run, arguments.island)
    if arguments.json:
        print(json.dumps({"run_dir": str(run.root), "island": arguments.island, "leaves": True}))
    else:
        print(f"island {arguments.island} leaves; see diloco-ds status {shown(arguments.run_dir)} --watch")
    return 0
