"""The learner's own record of its steps: time divided into parts, written to the metrics file beside the
step, never in it.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from diloco_ds.island.timing import StepResult
from diloco_ds.observe.metrics import MetricsFile

_DEVICE = ("forward", "backward", "optimizer")
_HOST = ("data", "exchange")


def divide(wall: float, parts: dict[str, float]) -> dict[str, float]:
    """The seconds `wall` of a step as {data, forward, backward, optimizer, exchange, other}, which add up to
    it.

    `parts` are the measured ones, without other. On a GPU the host works while the device computes: what of
    data and exchange was hidden in that way is no part of the wall clock and is left out, and the device's
    parts never exceed the whole.
    """
    parts = dict(parts)
    excess = sum(parts.values()) - wall
    for name in _HOST:
        hidden = min(max(excess, 0.0), parts[name])
        parts[name] -= hidden
        excess -= hidden
    if excess > 0:
        scale = wall / sum(parts[name] for name in _DEVICE)
        parts.update({name: parts[name] * scale for name in _DEVICE})
    parts["other"] = max(0.0, wall - sum(parts.values()))
    return parts


class StepLog:
    """Writes one record for every step, and events, from a thread of its own.

    What the loop knows of a step (`add`) and what the device reports of it (`results`) may come at different
    times.
    """

    def __init__(self, path: Path, island: str, incarnation: int) -> None:
        self._always = {"island": island, "incarnation": incarnation}
        self._waiting: dict[int, dict[str, Any]] = {}
        self._records: queue.SimpleQueue[tuple[str, dict[str, Any]] | None] = queue.SimpleQueue()
        self._metrics = MetricsFile(path)
        self._writer = threading.Thread(target=self._write, name="metrics", daemon=True)
        self._writer.start()
        self.loss: float | None = None
        """Loss of the newest step whose result is known."""

    def add(
        self, number: int, wall: float, data: float, exchange: dict[str, float], fields: dict[str, Any]
    ) -> None:
        """The loop's share of the record of the engine's step `number`; times in seconds, `exchange` in its parts."""
        now = {"time": time.time(), "step_s": wall, "data": data, "exchange": sum(exchange.values())}
        self._waiting[number] = {**now, "exchange_parts": exchange, **fields}

    def results(self, results: Sequence[StepResult]) -> None:
        """The device's share; a record that is now whole goes out."""
        for result in results:
            self.loss = result.loss
            record = self._waiting.pop(result.step)
            parts = {name: getattr(result, name) for name in _DEVICE}
            parts |= {name: record.pop(name) for name in _HOST}
            buckets = divide(record["step_s"], parts)
            self._records.put(("step", {**self._always, **record, "loss": result.loss, "buckets": buckets}))

    def event(self, event: str, reason: str, **fields: Any) -> None:
        """Something happened, on change only."""
        named = {"event": event, "role": "learner", "reason": reason}
        self._records.put(("event", {"time": time.time(), **named, **self._always, **fields}))

    def close(self) -> None:
        """Write what is left; returns when it is in the file."""
        self._records.put(None)
        self._writer.join()
        self._metrics.close()

    def _write(self) -> None:
        while (record := self._records.get()) is not None:
            kind, fields = record
            self._metrics.write("step" if kind == "step" else "event", **fields)
