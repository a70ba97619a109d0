"""Measure the global weights of a run, or a Hugging Face model: held-out loss and lm-eval tasks.

What is not given is taken from the run's configuration.
"""

from __future__ import annotations

import argparse

EXAMPLES = """\
  diloco-ds eval runs/quickstart
  diloco-ds eval runs/quickstart --tasks arc_easy,hellaswag --limit 200
  diloco-ds eval google/gemma-3-270m --tasks piqa"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    parser.add_argument("target", metavar="RUN_DIR_OR_MODEL", help="a run, or a model: directory or hub name")
    parser.add_argument("--tasks", metavar="A,B,...", help="lm-eval tasks by name; '' for none")
    parser.add_argument(
        "--task-dir", action="append", metavar="DIR", help="directory with task YAMLs (may be given again)"
    )
    parser.add_argument("--limit", type=int, metavar="N", help="examples per task")
    parser.add_argument("--batch-size", type=int, metavar="N", help="sequences at a time")
    parser.add_argument("--heldout-tokens", type=int, metavar="N", help="most held-out tokens to measure on")
    parser.add_argument("--device", help="torch device; by default the GPU if there is one")


def run(arguments: argparse.Namespace) -> int:
    """Evaluate and print a table."""
    from rich.console import Console

    from diloco_ds.evaluate.evaluation import evaluate_model

    tasks = None if arguments.tasks is None else [name for name in arguments.tasks.split(",") if name]
    evaluate_model(
        arguments.target,
        Console(),
        tasks=tasks,
        task_dirs=arguments.task_dir,
        limit=arguments.limit,
        batch_size=arguments.batch_size,
        heldout_tokens=arguments.heldout_tokens,
        device=arguments.device,
    )
    return 0
