"""The evaluator process: measures one snapshot of a run's global weights and ends.

    python -m diloco_ds.evaluate.evaluator RUN_DIR SNAPSHOT_DIR [--tasks] [--threads N]

The result is written to evaluations/TOKENS.json and, as a record of kind `eval`, to metrics.jsonl. It runs on the CPU
beside the learners and must take neither their cores nor their GPU memory: one thread unless told otherwise, at the
priority it is started with, which the conductor sets low.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from diloco_ds.config_file import load_config
from diloco_ds.errors import UserError
from diloco_ds.evaluate.evaluation import Evaluation, evaluate, prepared_of, table
from diloco_ds.model.initial import load_initial
from diloco_ds.observe.metrics import MetricsFile
from diloco_ds.rundir import RunDir, write_json


def evaluate_snapshot(run_dir: Path, snapshot: Path, *, with_tasks: bool) -> Evaluation:
    """Evaluate `snapshot` (theta.safetensors and state.json) of the run in `run_dir` and record the result.

    `with_tasks`: also the lm-eval tasks of the run's configuration. UserError if the snapshot is not whole.
    """
    run = RunDir(run_dir)
    config = load_config(run.config)
    state = _state(snapshot)
    model = load_initial(run.model_config, snapshot / "theta.safetensors")
    tasks = config.evaluation.tasks if with_tasks else []
    result = evaluate(
        model, run.tokenizer, prepared_of(run), config.evaluation, tasks=tasks, device=torch.device("cpu")
    )
    where = {"tokens": state["tokens"], "global_step": state["global_step"]}
    write_json(run.evaluations / f"{state['tokens']}.json", {**where, **result.as_dict()})
    with MetricsFile(run.metrics) as metrics:
        metrics.write("eval", **where, **result.metrics())
    return result


def main(argv: Sequence[str] | None = None) -> int:
    """Run as a process; the exit code is 0, or 2 for what the user can put right."""
    parser = argparse.ArgumentParser(prog="python -m diloco_ds.evaluate.evaluator")
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("snapshot", type=Path, help="directory with theta.safetensors and state.json")
    parser.add_argument("--tasks", action="store_true", help="run the lm-eval tasks of the configuration too")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads (1)")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(arguments.threads)
    try:
        result = evaluate_snapshot(arguments.run_dir, arguments.snapshot, with_tasks=arguments.tasks)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    Console().print(table(result, title=str(arguments.snapshot)))
    return 0


def _state(snapshot: Path) -> dict[str, Any]:
    path = snapshot / "state.json"
    if not path.is_file():
        raise UserError(f"{snapshot} is no snapshot: it holds no state.json")
    state: dict[str, Any] = json.loads(path.read_text())
    return state


if __name__ == "__main__":
    sys.exit(main())
