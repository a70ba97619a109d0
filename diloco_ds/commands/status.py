"""Show what a run is doing: islands, losses, tokens per second, merges."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

EXAMPLES = """\
  diloco-ds status runs/quickstart
  diloco-ds status runs/quickstart --watch
  diloco-ds status runs/quickstart --json | jq .tokens"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="directory of the run")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--watch", action="store_true", help="keep showing it until the run has ended")
    how.add_argument("--json", action="store_true", help="as one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Print the status once, or until the run has ended."""
    from rich.console import Console

    from diloco_ds.observe.picture import picture
    from diloco_ds.observe.progress import watch
    from diloco_ds.observe.status import read_status

    if arguments.watch:
        watch(arguments.run_dir)
        return 0
    status = read_status(arguments.run_dir)
    if arguments.json:
        print(json.dumps(status.model_dump(mode="json"), indent=1))
        return 0
    console = Console()
    console.print(picture(status, [], {}, console.width, console.height))
    return 0
