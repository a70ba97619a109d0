"""What a run's metrics tell of it, as drills look at it: steps by island, merges, faults, and the run's phases."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise

from diloco_ds.observe.metrics import Record


@dataclass(frozen=True)
class Step:
    """One inner step: its end (epoch seconds), its tokens, and the learner's incarnation."""

    time: float
    tokens: int
    incarnation: int


@dataclass(frozen=True)
class Pace:
    """How an island steps when nothing happens to it."""

    tokens_per_s: float
    step_s: float  # median


@dataclass(frozen=True)
class Told:
    """The records of a run, sorted out; each list in the order of time."""

    steps: dict[str, list[Step]] = field(default_factory=dict)
    merges: list[Record] = field(default_factory=list)
    events: list[Record] = field(default_factory=list)
    evaluations: list[Record] = field(default_factory=list)

    @property
    def chaos(self) -> list[Record]:
        """Faults, their ends, and those that missed."""
        return [event for event in self.events if event.get("role") == "chaos" and "number" in event]

    @property
    def loss(self) -> float | None:
        """Held-out loss of the newest evaluation, nats per token."""
        losses = [float(each["loss"]) for each in self.evaluations if each.get("loss") is not None]
        return losses[-1] if losses else None

    def all_merged_at(self) -> float | None:
        """When the last of the islands that step was merged for the first time; None if one never was."""
        first: dict[str, float] = {}
        for merge in self.merges:
            for part in merge["parts"]:
                first.setdefault(part["island"], merge["time"])
        return max(first.values()) if first and first.keys() >= self.steps.keys() else None

    def draining_at(self) -> float:
        """When the budget was as good as merged and the islands were told to end; infinity if they were not."""
        return next((e["time"] for e in self.events if e.get("phase") == "drain"), float("inf"))

    def pace(self, island: str, since: float, until: float) -> Pace | None:
        """Of the island's steps between two moments; None if there are fewer than three."""
        steps = [step for step in self.steps.get(island, []) if since <= step.time <= until]
        if len(steps) < 3:
            return None
        tokens = sum(step.tokens for step in steps[1:])
        gaps = [later.time - earlier.time for earlier, later in pairwise(steps)]
        return Pace(tokens / (steps[-1].time - steps[0].time), statistics.median(gaps))

    def merged_parts(self, island: str, since: float, until: float = float("inf")) -> list[Record]:
        """The merges between two moments that the island is in with an answer that was not late."""
        return [
            merge
            for merge in self.merges
            if since < merge["time"] <= until
            and any(part["island"] == island and not part["late"] for part in merge["parts"])
        ]


def sort_out(records: Iterable[Record]) -> Told:
    """The records of a run's metrics.jsonl, which those of different processes may have written out of order."""
    told = Told()
    kinds = {"merge": told.merges, "event": told.events, "eval": told.evaluations}
    for record in sorted(records, key=lambda record: float(record["time"])):
        if record["kind"] == "step":
            step = Step(record["time"], record["step_tokens"], record["incarnation"])
            told.steps.setdefault(record["island"], []).append(step)
        else:
            kinds[record["kind"]].append(record)
    return told
