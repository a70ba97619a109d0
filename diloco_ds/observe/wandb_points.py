"""What of a metrics record goes into wandb: to which wandb run, and under which names."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from diloco_ds.observe.metrics import Record

SYNCER = "syncer"
_STEP_NAMES = {name: f"train/{name}" for name in ("loss", "lr", "tokens_per_s")} | {"step_s": "time/step_s"}
_NOT_LOGGED = {"time", "kind", "island", "incarnation", "tokens"}


def wandb_run_of(record: Record) -> str | None:
    """Which wandb run a record belongs to: 'island-NAME', 'syncer', or None for what is not logged."""
    if record["kind"] == "step" and record.get("island"):
        return f"island-{record['island']}"
    return SYNCER if record["kind"] in ("merge", "eval") else None


def points(record: Record) -> dict[str, float]:
    """The numbers of a record by their wandb names, with `tokens`, the axis of every plot.

    Of a step: train/*, time/* (seconds), progress/*; of a merge: merge/*, weight/ISLAND, expert_load/ISLAND; of an
    evaluation: eval/*, eval/TASK/METRIC.
    """
    named = {"step": _of_step, "merge": _of_merge, "eval": _of_eval}[record["kind"]](record)
    values = {name: value for name, value in named if _is_number(value)} | {"_timestamp": record["time"]}
    if _is_number(record.get("tokens")):
        values["tokens"] = record["tokens"]
    return values


def _of_step(record: Record) -> Iterator[tuple[str, Any]]:
    for key, value in record.items():
        if key in _NOT_LOGGED:
            continue
        if key == "buckets":
            yield from ((f"time/{bucket}_s", seconds) for bucket, seconds in (value or {}).items())
        elif key == "exchange_parts":
            yield from ((f"time/exchange/{part}_s", seconds) for part, seconds in (value or {}).items())
        else:
            yield _STEP_NAMES.get(key, f"progress/{key}"), value


def _of_merge(record: Record) -> Iterator[tuple[str, Any]]:
    yield from ((f"merge/{key}", value) for key, value in record.items() if key not in _NOT_LOGGED)
    for part in record.get("parts") or []:
        yield f"weight/{part.get('island')}", part.get("weight")
        yield f"expert_load/{part.get('island')}", part.get("expert_load")


def _of_eval(record: Record) -> Iterator[tuple[str, Any]]:
    yield from ((f"eval/{key}", value) for key, value in record.items() if key not in _NOT_LOGGED)
    for task, result in (record.get("tasks") or {}).items():
        yield f"eval/{task}/{result.get('metric', 'value')}", result.get("value")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
