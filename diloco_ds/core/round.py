"""One round: the exchange of one fragment at one global step, from its opening to its merge."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from diloco_ds.core.events import Answer


@dataclass
class Round:
    """An open round. Times are the driver's clock in seconds."""

    step: int  # global step t it serves
    fragment: int
    quorum: int  # K
    opened: float
    expires: float  # without a quorum by then it is skipped
    asked: dict[str, None] = field(default_factory=dict)  # islands asked, in order
    heard: dict[str, None] = field(default_factory=dict)  # islands that answered, whatever became of it
    contributors: dict[str, None] = field(default_factory=dict)  # whose answer is admitted or kept
    answers: dict[str, Answer] = field(default_factory=dict)  # admitted: on the fragment's newest version
    closes: float | None = None  # end of the grace window; None before the quorum
    grace: float = 0.0  # seconds, once the quorum is there

    def start_grace(self, now: float, seconds: float) -> None:
        """The quorum is there: wait `seconds` more for others."""
        self.grace, self.closes = seconds, now + seconds

    def why_merge(self, now: float, is_alive: Callable[[str], bool]) -> str | None:
        """The reason to merge now, or None."""
        if self.closes is None:
            return None
        if now >= self.closes:
            return f"quorum of {self.quorum} and a grace window of {self.grace:.3f} s"
        if any(is_alive(island) for island in self.asked if island not in self.heard):
            return None
        return "everybody asked has answered"

    def why_skip(self, now: float, possible: int) -> str | None:
        """The reason to give up, or None; `possible` is how many islands have answered or still can."""
        if self.closes is not None:
            return None
        if possible < self.quorum:
            return f"{possible} islands can still answer, the quorum is {self.quorum}"
        if now >= self.expires:
            seconds, count = now - self.opened, len(self.contributors)
            return f"no quorum within {seconds:.1f} s: {count} of {self.quorum} answered"
        return None


@dataclass
class FragmentState:
    """The syncer's account of one fragment."""

    version: int = 0
    round: int = 0  # global step of its newest merge
    merged_tokens: int = 0
    kept: dict[str, Answer] = field(default_factory=dict)  # late answers under their own base, by island
    committed: bool = True  # whether learners can see `version`

    def merge(self, step: int, tokens: int) -> None:
        """The round of global step `step` makes the next version of what was answered and kept: `tokens` in all."""
        self.kept.clear()
        self.version += 1
        self.round = step
        self.merged_tokens += tokens
        self.committed = False
