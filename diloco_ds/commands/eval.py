"""Measure the global weights of a run, or a Hugging Face model: held-out loss and lm-eval tasks.

What is not given is taken from the run's configuration.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys

from diloco_ds.arguments import whole

EXAMPLES = """\
  diloco-ds eval runs/quickstart
  diloco-ds eval runs/quickstart --tasks arc_easy,hellaswag --limit 200
  diloco-ds eval runs/quickstart --json | jq .heldout.loss
  diloco-ds eval google/gemma-3-270m --tasks piqa"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    parser.add_argument("target", metavar="RUN_DIR_OR_MODEL", help="a run, or a model: directory or hub name")
    parser.add_argument("--tasks", metavar="A,B,...", help="lm-eval tasks by name; '' for none")
    parser.add_argument(
        "--task-dir", action="append", metavar="DIR", help="directory with task YAMLs (may be given again)"
    )
    parser.add_argument("--limit", type=whole(1), metavar="N", help="examples per task")
    parser.add_argument("--batch-size", type=whole(1), metavar="N", help="sequences at a time")
    parser.add_argument(
        "--heldout-tokens", type=whole(1), metavar="N", help="most held-out tokens to measure on"
    )
    parser.add_argument("--device", help="cpu, cuda or cuda:N; by default the GPU if there is one")
    parser.add_argument("--json", action="store_true", help="as one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Evaluate and print what was measured."""
    from rich.console import Console

    from diloco_ds.evaluate.evaluation import evaluate_model, table

    tasks = None if arguments.tasks is None else [name for name in arguments.tasks.split(",") if name]
    with contextlib.redirect_stdout(sys.stderr):  # DeepSpeed, loaded by lm-eval, logs to stdout
        result = evaluate_model(
            arguments.target,
            tasks=tasks,
            task_dirs=arguments.task_dir,
            limit=arguments.limit,
            batch_size=arguments.batch_size,
            heldout_tokens=arguments.heldout_tokens,
            device=arguments.device,
        )
    if arguments.json:
        print(json.dumps({"target": arguments.target, **result.as_dict()}))
    else:
        Console().print(table(result, title=arguments.target))
    return 0
