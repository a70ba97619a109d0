"""Add an island to a live run: it takes the newest global weights and is merged like the others, who do not notice.

It has the run's model, data and DeepSpeed settings. Of its own are the settings of an entry of `islands` in a
run file, given as key=value: ranks=2, threads_per_rank=4, deepspeed.train_micro_batch_size_per_gpu=8.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from diloco_ds.arguments import whole

EXAMPLES = """\
  diloco-ds join runs/quickstart --island c
  diloco-ds join runs/quickstart --island c --ranks 2 deepspeed.zero_optimization.stage=3
  diloco-ds join runs/quickstart --island c --json | jq .joins"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="directory of the run")
    parser.add_argument("settings", nargs="*", metavar="key=value", help="settings of the island")
    parser.add_argument("--island", required=True, metavar="NAME", help="its name, new in the run")
    parser.add_argument("--ranks", type=whole(1), default=1, metavar="N", help="DeepSpeed ranks (default 1)")
    parser.add_argument("--json", action="store_true", help="as one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Let the island join and say how to see it."""
    from diloco_ds.conductor.joining import join
    from diloco_ds.conductor.summary import shown
    from diloco_ds.observe.status import read_status
    from diloco_ds.rundir import RunDir

    settings = [f"name={arguments.island}", f"ranks={arguments.ranks}", *arguments.settings]
    run = RunDir(arguments.run_dir.resolve())
    join(run, settings)
    at_once = read_status(run.root).conductor_pid is not None
    if arguments.json:
        joins = "now" if at_once else "at_resume"
        print(json.dumps({"run_dir": str(run.root), "island": arguments.island, "joins": joins}))
    elif at_once:
        print(f"island {arguments.island} joins; see diloco-ds status {shown(arguments.run_dir)} --watch")
    else:
        print(
            f"island {arguments.island} joins when the run goes on: diloco-ds train --resume {shown(run.root)}"
        )
    return 0
