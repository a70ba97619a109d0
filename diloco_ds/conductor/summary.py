"""The last lines of a run in the terminal: how it went, and where everything lies."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from diloco_ds.observe.metrics import last_record
from diloco_ds.observe.status import RunState
from diloco_ds.rundir import RunDir


def summary(run: RunDir, state: RunState, reason: str) -> Iterator[str]:
    """The lines, for a run that ended as `state` with `reason`."""
    root = shown(run.root)
    if state != "finished":
        yield f"{state}: {reason}"
        yield f"go on with: diloco-ds train --resume {root}"
        return
    yield f"finished{': ' + reason if reason else ''}"
    yield from _evaluation(last_record(run.metrics, "eval"))
    for what, path in _places(run):
        if path.exists():
            yield f"  {what:12} {shown(path)}"


def shown(path: Path) -> str:
    """`path` from the working directory if that is shorter."""
    relative = os.path.relpath(path)
    return relative if len(relative) < len(str(path)) else str(path)


def _evaluation(record: dict[str, Any] | None) -> Iterator[str]:
    if record is None:
        return
    if record.get("loss") is not None:
        yield f"  {'held-out':12} loss {record['loss']:.4f}, {record['bits_per_byte']:.4f} bits per byte"
    for task, score in (record.get("tasks") or {}).items():
        error = f" ± {score['stderr']:.3f}" if score.get("stderr") is not None else ""
        yield f"  {task:24} {score['metric']} {score['value']:.3f}{error} (n = {score['n']})"


def _places(run: RunDir) -> list[tuple[str, Path]]:
    return [
        ("model", run.export),
        ("report", run.report),
        ("evaluations", run.evaluations),
        ("metrics", run.metrics),
        ("wandb", run.root / "wandb"),
        ("checkpoints", run.syncer_checkpoints.parent),
        ("logs", run.root / "logs"),
    ]
