"""What a replay came to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from diloco_ds.core.events import Merge
from diloco_ds.core.tape import Torn
from diloco_ds.replay.decisions import Generation, Moment, Recording, replayed
from diloco_ds.replay.explain import Explanation
from diloco_ds.replay.weights import Comparison, Weights
from diloco_ds.rundir import RunDir


@dataclass(frozen=True)
class Verdict:
    """difference: the first decision that is not the tape's. weights: None where updates were not kept or decisions
    differ."""

    events: int
    merges: int
    generations: int
    torn: Torn | None
    difference: str | None
    weights: Comparison | None

    @property
    def identical(self) -> bool:
        """Whether decisions, and weights where they were recomputed, are the live run's."""
        return self.difference is None and (self.weights is None or self.weights.identical)

    def to_json(self) -> dict[str, Any]:
        """identical, events, merges, and the details."""
        weights = None
        if self.weights is not None:
            weights = {
                "identical": self.weights.identical,
                "against": self.weights.against,
                "fragments": self.weights.fragments,
                "differing": list(self.weights.differing),
            }
        return {
            "identical": self.identical,
            "events": self.events,
            "merges": self.merges,
            "generations": self.generations,
            "torn_at": None if self.torn is None else self.torn.offset,
            "difference": self.difference,
            "weights": weights,
        }


def replay(run: RunDir) -> Verdict:
    """Replay the tape of `run`, up to the first decision that differs. UserError for a tape that cannot be read."""
    recording = Recording.of(run)
    weights = Weights(recording) if recording.config.syncer.keep_updates else None
    events = merges = generations = 0
    torn: Torn | None = None
    for moment, _ in replayed(recording):
        if isinstance(moment, Torn):
            torn = moment
            continue
        if isinstance(moment, Moment):
            events += 1
            merges += sum(isinstance(action, Merge) for action in moment.recorded)
            if moment.difference is not None:
                return Verdict(events, merges, generations, torn, moment.difference, None)
        generations += isinstance(moment, Generation)
        if weights is not None:
            weights.take(moment)
    return Verdict(events, merges, generations, torn, None, None if weights is None else weights.compare())


def explain(run: RunDir, step: int) -> list[str]:
    """The story of every round that served global step `step`. UserError if there was none."""
    explanation = Explanation(step)
    for moment, core in replayed(Recording.of(run)):
        explanation.take(moment, core)
    return explanation.lines()
