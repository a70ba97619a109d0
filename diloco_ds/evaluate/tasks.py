"""Benchmarks by lm-eval: stock tasks by their names, and the local tasks of `task_dirs`."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lm_eval import simple_evaluate
from lm_eval.api.group import Group
from lm_eval.api.task import Task
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from transformers import AutoTokenizer, PreTrainedModel

from diloco_ds.data.sources import quiet_datasets
from diloco_ds.data.tokenizer import leading_bos
from diloco_ds.errors import UserError
from diloco_ds.evaluate.heldout import evaluating

log = logging.getLogger(__name__)

_BOOTSTRAPS = 1000


class Row(NamedTuple):
    """One metric of one task (or group of tasks)."""

    task: str
    metric: str
    value: float
    stderr: float | None
    n: int


def find_tasks(tasks: Sequence[str], task_dirs: Sequence[Path]) -> TaskManager:
    """What lm-eval runs `tasks` with. UserError for a directory or a task name that is not there."""
    for directory in task_dirs:
        if not directory.is_dir():
            raise UserError(f"evaluation.task_dirs: there is no directory {directory}")
    manager = _manager(tasks, [str(directory) for directory in task_dirs])
    for task in tasks:
        if task not in manager.task_index:
            near = difflib.get_close_matches(task, manager.all_tasks, n=1)
            hint = f"; did you mean '{near[0]}'?" if near else ""
            where = f" or in {', '.join(map(str, task_dirs))}" if task_dirs else ""
            raise UserError(f"evaluation.tasks: there is no task '{task}' in lm-eval{where}{hint}")
    return manager


def run_tasks(
    model: PreTrainedModel,
    tokenizer: Path | str,
    tasks: Sequence[str],
    task_dirs: Sequence[Path] = (),
    *,
    limit: int | None = None,
    batch_size: int = 8,
) -> list[Row]:
    """Run `tasks` on `model` where it is, on the first `limit` examples of each (None: all).

    Texts begin with BOS if `tokenizer` (directory or hub name) puts it there by itself, as in training and as
    Gemma needs it. UserError for unknown tasks, before anything runs, and for tasks whose data cannot be had.
    """
    manager = find_tasks(tasks, task_dirs)
    with quiet_datasets(), evaluating(model):
        loaded = _load(manager, tasks)
        results = simple_evaluate(
            model=_wrapped(model, tokenizer, batch_size),
            tasks=loaded,
            task_manager=manager,
            limit=limit,
            bootstrap_iters=_BOOTSTRAPS,
            log_samples=False,
        )
    return [row for name, scores in results["results"].items() for row in _rows(name, scores)]


def _manager(tasks: Sequence[str], directories: list[str]) -> TaskManager:
    """Of the local directories if they hold all that is asked for, else of lm-eval's thousands as well."""
    local = TaskManager(include_path=directories, include_defaults=False)
    index = local.task_index
    members = {member for name in local.all_groups for member in (index[name].cfg or {}).get("task", [])}
    if all(task in index for task in tasks) and all(member in index for member in members):
        return local
    return TaskManager(include_path=directories)


def _load(manager: TaskManager, tasks: Sequence[str]) -> list[Task | Group]:
    """The tasks, with their data."""
    built: list[Task | Group] = []
    try:
        for name in tasks:
            loaded = manager.load([name])
            group = loaded["groups"].get(name)
            built += list(loaded["tasks"].values()) if group is None else [group]
        manager.load(built)  # refuses a task that was asked for twice
    except (OSError, ValueError) as error:  # without a hub: ConnectionError, FileNotFoundError
        reason = " ".join(str(error).split())[:300]
        raise UserError(f"evaluation.tasks: '{name}' cannot be run: {reason}") from error
    return built


def _wrapped(model: PreTrainedModel, tokenizer: Path | str, batch_size: int) -> HFLM:
    loaded = AutoTokenizer.from_pretrained(tokenizer)
    adds_bos = leading_bos(loaded) is not None
    if not adds_bos and str(model.config.model_type).startswith("gemma"):
        log.warning(
            "the tokenizer %s puts no BOS before a text; a published Gemma model needs one", tokenizer
        )
    return HFLM(
        pretrained=model, tokenizer=loaded, batch_size=batch_size, backend="causal", add_bos_token=adds_bos
    )


def _rows(task: str, scores: Mapping[str, Any]) -> list[Row]:
    """The metrics in lm-eval's scores of a task: keys like 'acc,none', with 'acc_stderr,none' beside it."""
    rows = []
    for key, value in scores.items():
        metric, _, filtering = key.partition(",")
        if not filtering or metric.endswith("_stderr"):
            continue
        stderr = scores.get(f"{metric}_stderr,{filtering}")
        name = metric if filtering == "none" else f"{metric} ({filtering})"
        rows.append(
            Row(task, name, float(value), stderr if isinstance(stderr, float) else None, scores["sample_len"])
        )
    return rows
