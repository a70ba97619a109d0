"""Stop a run with checkpoints, so that train --resume goes on from there.

With --now it is ended at once: what came after the last checkpoints is lost. Works with and without a living conductor.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

EXAMPLES = """\
  diloco-ds stop runs/quickstart
  diloco-ds stop runs/quickstart --now
  diloco-ds stop runs/quickstart --json | jq .state"""

FAILED = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="directory of the run")
    parser.add_argument("--now", action="store_true", help="kill everything at once, without checkpoints")
    parser.add_argument("--json", action="store_true", help="as one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Stop the run and say how it ended; 1 if its conductor does not end."""
    from diloco_ds.conductor.stopping import stop_run
    from diloco_ds.rundir import RunDir

    stopped = stop_run(RunDir(arguments.run_dir.resolve()), now=arguments.now)
    if arguments.json:
        print(json.dumps(stopped.as_dict()))
    else:
        for line in stopped.in_words():
            print(line, file=sys.stdout if stopped.ended else sys.stderr)
    return 0 if stopped.ended else FAILED
