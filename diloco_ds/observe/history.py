"""What happened in a run, gathered from its metrics: the numbers behind the report."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from diloco_ds.observe.metrics import Record

BUCKETS = ("data", "forward", "backward", "optimizer", "exchange", "other")
INTERRUPTION_STEPS = 3.0
"""A pause between two steps of more than this many usual steps is an interruption."""


def _column() -> array[float]:
    return array("d")


@dataclass
class IslandHistory:
    """Every step of one island, as columns (NaN where a record lacks the number), in the order of time."""

    name: str
    time: array[float] = field(default_factory=_column)  # epoch seconds
    step: array[float] = field(default_factory=_column)
    tokens: array[float] = field(default_factory=_column)  # the island's own
    loss: array[float] = field(default_factory=_column)
    step_tokens: array[float] = field(default_factory=_column)
    step_s: array[float] = field(default_factory=_column)
    bucket_s: dict[str, float] = field(default_factory=lambda: dict.fromkeys(BUCKETS, 0.0))
    incarnations: set[int] = field(default_factory=set)
    resumptions: Sequence[float] = ()  # when the run was resumed after a stop, epoch seconds

    def add(self, record: Record) -> None:
        """Take in one step."""
        self.time.append(record["time"])
        for name in ("step", "tokens", "loss", "step_tokens", "step_s"):
            getattr(self, name).append(_number(record.get(name)))
        for bucket, seconds in (record.get("buckets") or {}).items():
            self.bucket_s[bucket] = self.bucket_s.get(bucket, 0.0) + (seconds or 0.0)
        if record.get("incarnation") is not None:
            self.incarnations.add(record["incarnation"])

    @property
    def usual_step_s(self) -> float | None:
        """Median seconds between two steps; None before there are two."""
        gaps = np.diff(np.asarray(self.time))
        return float(np.median(gaps)) if gaps.size else None

    @property
    def longest_gap_s(self) -> float | None:
        """Longest time between two steps, restarts included; while the run was stopped does not count."""
        gaps = [
            later - earlier for earlier, later in pairwise(self.time) if not self._stopped(earlier, later)
        ]
        return max(gaps, default=None)

    def stretches(self) -> list[tuple[float, float]]:
        """Begin and end (epoch seconds) of the times in which the island stepped without an interruption."""
        if not self.time:
            return []
        usual = self.usual_step_s or 0.0
        stretches = [[self.time[0] - usual, self.time[0]]]
        for moment in self.time:
            if usual and moment - stretches[-1][1] > INTERRUPTION_STEPS * usual:
                stretches.append([moment - usual, moment])
            stretches[-1][1] = moment
        return [(begin, end) for begin, end in stretches]

    def goodput(self, until: float) -> float | None:
        """Share of the time from the first step to `until` in which the island stepped; None before two.

        While the run was stopped does not count as time.
        """
        if len(self.time) < 2 or until <= self.time[0]:
            return None
        stretches = self.stretches()
        pauses = [(earlier[1], later[0]) for earlier, later in pairwise(stretches)]
        if until - self.time[-1] > INTERRUPTION_STEPS * (self.usual_step_s or 0.0):
            pauses.append((self.time[-1], until))
        stopped = sum(end - begin for begin, end in pauses if self._stopped(begin, end))
        lost = sum(end - begin for begin, end in pauses) - stopped
        return 1.0 - lost / (until - stretches[0][0] - stopped)

    def _stopped(self, begin: float, end: float) -> bool:
        """The run itself was stopped, and resumed, between these moments."""
        return any(begin < moment <= end for moment in self.resumptions)


@dataclass
class History:
    """Everything of a run that the report shows."""

    islands: dict[str, IslandHistory] = field(default_factory=dict)
    merges: dict[str, array[float]] = field(default_factory=dict)
    merged_updates: dict[str, int] = field(default_factory=dict)  # per island: updates of it that were merged
    evaluations: list[Record] = field(default_factory=list)
    events: list[Record] = field(default_factory=list)

    @property
    def first_step(self) -> float | None:
        """Epoch seconds of the first step of any island."""
        return min((island.time[0] for island in self.islands.values()), default=None)

    @property
    def last_step(self) -> float | None:
        """Epoch seconds of the last step of any island."""
        return max((island.time[-1] for island in self.islands.values()), default=None)

    @property
    def goodput(self) -> float | None:
        """Mean goodput of the islands over the run; None before there are steps."""
        shares = [share for island in self.islands.values() if (share := self.goodput_of(island)) is not None]
        return sum(shares) / len(shares) if shares else None

    def goodput_of(self, island: IslandHistory) -> float | None:
        """`IslandHistory.goodput` until the last step of the run."""
        return island.goodput(self.last_step) if self.last_step is not None else None

    def longest_gap_steps(self) -> float | None:
        """The longest gap of any island, in usual steps of that island."""
        gaps = [
            island.longest_gap_s / island.usual_step_s
            for island in self.islands.values()
            if island.longest_gap_s and island.usual_step_s
        ]
        return max(gaps, default=None)

    def final(self, key: str) -> float | None:
        """`key` of the newest evaluation that has it."""
        values = [evaluation[key] for evaluation in self.evaluations if evaluation.get(key) is not None]
        return values[-1] if values else None

    def mean_of_merges(self, key: str) -> float | None:
        """Mean of a merge's number over all merges that have it."""
        values = np.asarray(self.merges.get(key, ()))
        values = values[~np.isnan(values)]
        return float(values.mean()) if values.size else None


MERGE_COLUMNS = (
    "time",
    "tokens",
    "alive",
    "eligible",
    "merged",
    "token_share",
    "round_s",
    "grace_s",
    "merge_s",
    "expert_load",
)


def gather(records: Iterable[Record]) -> History:
    """The history told by `records`; some may be missing, and those of different processes out of order."""
    history = History(merges={name: _column() for name in MERGE_COLUMNS})
    for record in records:
        if record["kind"] == "step" and record.get("island"):
            name = record["island"]
            history.islands.setdefault(name, IslandHistory(name)).add(record)
        elif record["kind"] == "merge":
            _add_merge(history, record)
        elif record["kind"] == "eval":
            history.evaluations.append(record)
        elif record["kind"] == "event":
            history.events.append(record)
    history.events.sort(key=lambda event: event["time"])
    resumptions = _resumptions(history.events)
    for island in history.islands.values():
        island.resumptions = resumptions
    history.islands = dict(sorted(history.islands.items()))
    return history


def binned(
    x: Sequence[float], y: Sequence[float], bins: int = 240
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Means of `y` over at most `bins` equal spans of `x`; spans without a number are left out."""
    xs, ys = np.asarray(x, dtype=float), np.asarray(y, dtype=float)
    known = ~(np.isnan(xs) | np.isnan(ys))
    xs, ys = xs[known], ys[known]
    if xs.size <= bins:
        order = np.argsort(xs, kind="stable")
        return xs[order], ys[order]
    edges = np.linspace(xs.min(), xs.max(), bins + 1)
    span = np.clip(np.digitize(xs, edges) - 1, 0, bins - 1)
    counts = np.bincount(span, minlength=bins)
    filled = counts > 0
    mean_x = np.bincount(span, weights=xs, minlength=bins)[filled] / counts[filled]
    mean_y = np.bincount(span, weights=ys, minlength=bins)[filled] / counts[filled]
    return mean_x, mean_y


def rate(time: Sequence[float], amount: Sequence[float], bins: int = 80) -> tuple[list[float], list[float]]:
    """Amount per second over equal spans of time: their middles, and the rates (0 where nothing came)."""
    times, amounts = np.asarray(time, dtype=float), np.nan_to_num(np.asarray(amount, dtype=float))
    if times.size < 2 or times.max() <= times.min():
        return [], []
    spans = max(min(bins, times.size // 10), 1)
    sums, edges = np.histogram(times[1:], bins=spans, range=(times.min(), times.max()), weights=amounts[1:])
    return list((edges[:-1] + edges[1:]) / 2), list(sums / np.diff(edges))


def _resumptions(events: Sequence[Record]) -> list[float]:
    """When the conductor started the run again after it had stopped it. After a crash it has not stopped it."""
    of_conductor = [event for event in events if event.get("role") == "conductor"]
    turns = [event for event in of_conductor if event.get("event") in ("started", "stop")]
    return [
        later["time"]
        for earlier, later in pairwise(turns)
        if (earlier["event"], later["event"]) == ("stop", "started")
    ]


def _add_merge(history: History, record: Record) -> None:
    for name, column in history.merges.items():
        column.append(_number(record.get(name)))
    for part in record.get("parts") or []:
        island = str(part.get("island"))
        history.merged_updates[island] = history.merged_updates.get(island, 0) + 1


def _number(value: Any) -> float:
    """`value`, or NaN where a record has none."""
    return float(value) if isinstance(value, (int, float)) else float("nan")
