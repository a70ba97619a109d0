"""An evaluation: held-out loss and benchmarks of one set of weights, as rows to print, store and compare."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from transformers import AutoModelForCausalLM, PreTrainedModel

from diloco_ds.config import Evaluation as Settings
from diloco_ds.config_file import load_config
from diloco_ds.data.prepared import Prepared
from diloco_ds.errors import UserError
from diloco_ds.evaluate.heldout import heldout_loss
from diloco_ds.evaluate.tasks import Row, find_tasks, run_tasks
from diloco_ds.model.initial import load_initial
from diloco_ds.observe.manifest import read_manifest
from diloco_ds.rundir import RunDir

HELDOUT = "held-out text"


@dataclass(frozen=True)
class Evaluation:
    """What was measured on one set of weights."""

    heldout: Mapping[str, float | int | None] | None
    """As `heldout_loss` gives it; None where there is no held-out text."""
    tasks: Sequence[Row]
    seconds: float

    def rows(self) -> list[Row]:
        """Everything in the form of lm-eval's results; `n` of the held-out rows counts predicted tokens."""
        rows: list[Row] = []
        if self.heldout is not None:
            loss, tokens = float(self.heldout["loss"] or 0), int(self.heldout["tokens"] or 0)
            bits, stderr = float(self.heldout["bits_per_byte"] or 0), self.heldout["stderr"]
            bits_stderr = stderr * bits / loss if stderr is not None and loss else None
            rows.append(Row(HELDOUT, "loss (nats/token)", loss, stderr, tokens))
            rows.append(Row(HELDOUT, "bits per byte", bits, bits_stderr, tokens))
        return [*rows, *self.tasks]

    def metrics(self) -> dict[str, Any]:
        """The fields of an `eval` record in metrics.jsonl (docs/observing.md)."""
        fields: dict[str, Any] = {"seconds": round(self.seconds, 3)}
        if self.heldout is not None:
            fields |= {key: self.heldout[key] for key in ("loss", "bits_per_byte", "stderr")}
            fields["n"] = self.heldout["tokens"]
        if self.tasks:
            fields["tasks"] = _by_task(self.tasks)
        return fields

    def as_dict(self) -> dict[str, Any]:
        """Everything, as JSON's own types."""
        return {
            "heldout": dict(self.heldout) if self.heldout is not None else None,
            "tasks": [row._asdict() for row in self.tasks],
            "seconds": self.seconds,
        }


def evaluate(
    model: PreTrainedModel,
    tokenizer: Path | str,
    prepared: Prepared | None,
    settings: Settings,
    *,
    tasks: Sequence[str],
    device: torch.device | str,
) -> Evaluation:
    """Evaluate `model` on the held-out part of `prepared` and on `tasks`, as `settings` say. UserError as `run_tasks`."""
    start = time.monotonic()
    task_dirs = [Path(directory) for directory in settings.task_dirs]
    find_tasks(tasks, task_dirs)
    heldout = prepared.open_heldout() if prepared is not None else None
    loss = None
    if heldout is not None:
        loss = heldout_loss(model, heldout, settings.batch_size, settings.heldout_tokens, device)
    rows: list[Row] = []
    if tasks:
        torch.nn.Module.to(model, device)
        rows = run_tasks(
            model, tokenizer, tasks, task_dirs, limit=settings.limit, batch_size=settings.batch_size
        )
    return Evaluation(loss, rows, time.monotonic() - start)


def evaluate_model(
    target: str,
    *,
    tasks: Sequence[str] | None = None,
    task_dirs: Sequence[str] | None = None,
    limit: int | None = None,
    batch_size: int | None = None,
    heldout_tokens: int | None = None,
    device: str | None = None,
) -> Evaluation:
    """`diloco-ds eval`: evaluate the newest global weights of a run directory, or a Hugging Face model.

    What is not given is taken from the run's configuration (of a model: the defaults, and no held-out text).
    UserError for a directory that is neither, for a run without weights yet, for a model with no tasks, and for a device
    that this host has not.
    """
    where = device_named(device) if device is not None else default_device()
    run = RunDir(Path(target))
    is_run = run.manifest.is_file()
    settings = load_config(run.config).evaluation if is_run else Settings()
    given = {
        "task_dirs": task_dirs,
        "limit": limit,
        "batch_size": batch_size,
        "heldout_tokens": heldout_tokens,
    }
    settings = Settings.model_validate(
        {**settings.model_dump(), **{key: value for key, value in given.items() if value is not None}}
    )
    chosen = list(settings.tasks if tasks is None else tasks)
    if not is_run and not chosen:
        raise UserError(f"eval: {target} is a model, not a run: there is no held-out text; name tasks for it")
    find_tasks(chosen, [Path(directory) for directory in settings.task_dirs])
    model, tokenizer = _run_model(run) if is_run else (_hf_model(target), target)
    prepared = prepared_of(run) if is_run else None
    return evaluate(model, tokenizer, prepared, settings, tasks=chosen, device=where)


def table(evaluation: Evaluation, title: str) -> Table:
    """The rows of `evaluation` for the terminal."""
    shown = Table(title=title, title_justify="left")
    for name in ("task", "metric"):
        shown.add_column(name)
    for name in ("value", "standard error", "n"):
        shown.add_column(name, justify="right")
    for row in evaluation.rows():
        stderr = "" if row.stderr is None else f"± {row.stderr:.4f}"
        shown.add_row(row.task, row.metric, f"{row.value:.4f}", stderr, f"{row.n:,}")
    return shown


def prepared_of(run: RunDir) -> Prepared:
    """The prepared data of a run. UserError if it is no longer where the manifest says."""
    prepared = Prepared.from_dict(read_manifest(run.root)["data"])
    if not prepared.directory.is_dir():
        raise UserError(
            f"{run.root}: its prepared data is no longer at {prepared.directory}; prepare the same configuration again"
        )
    return prepared


def default_device() -> torch.device:
    """The GPU if there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def device_named(name: str) -> torch.device:
    """The device `name`: cpu, cuda or cuda:N. UserError if this host has no such device."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    known = ["cpu", *(["cuda"] if gpus else []), *(f"cuda:{index}" for index in range(gpus))]
    if name not in known:
        raise UserError(f"--device: there is no '{name}' on this host; there is {', '.join(known)}")
    return torch.device(name)


def _run_model(run: RunDir) -> tuple[PreTrainedModel, Path]:
    """The global weights of a run: the export at its end, else its newest checkpoint."""
    if run.export.is_dir():
        return _hf_model(str(run.export)), run.tokenizer
    checkpoints = [path for path in run.syncer_checkpoints.glob("*") if path.name.isdigit()]
    if not checkpoints:
        raise UserError(
            f"{run.root} holds no global weights yet: neither an export nor a checkpoint of the syncer"
        )
    newest = max(checkpoints, key=lambda path: int(path.name))
    return load_initial(run.model_config, newest / "theta.safetensors"), run.tokenizer


def _hf_model(name: str) -> PreTrainedModel:
    try:
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(name)
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())[:300]
        raise UserError(
            f"eval: {name} is neither a run directory nor a causal Hugging Face model: {reason}"
        ) from error
    return model


def _by_task(rows: Sequence[Row]) -> dict[str, dict[str, Any]]:
    """Rows by name: a task's first metric under the task's name, further ones with the metric added to it."""
    named: dict[str, dict[str, Any]] = {}
    for row in rows:
        name = row.task if row.task not in named else f"{row.task} ({row.metric})"
        named[name] = {"metric": row.metric, "value": row.value, "stderr": row.stderr, "n": row.n}
    return named
