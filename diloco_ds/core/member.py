"""One island as the syncer knows it: alive, how far, and what it could contribute to."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from diloco_ds.core.events import LearnerPhase, Report

STEPS_OF_SILENCE = 10
"""An island is given at least this many of its own steps before its silence counts."""


class Counts(NamedTuple):
    """Of one island in the merges of one fragment."""

    merged: int = 0  # merges it had a part in
    missed: int = 0  # merges for which it was asked in vain
    tokens: int = 0  # merged

    def plus(self, more: Counts) -> Counts:
        """Both together."""
        return Counts(self.merged + more.merged, self.missed + more.missed, self.tokens + more.tokens)


@dataclass
class Member:
    """What the syncer knows of one island, all of it from the island's own reports."""

    name: str
    fragments: int
    incarnation: int = 0
    phase: LearnerPhase = "starting"
    alive: bool = False
    leaving: bool = False
    last_heard: float = float("-inf")  # driver's clock, seconds
    silent: bool = True  # past its lease since then
    step: int = 0  # step clock as reported
    shift: int = 0  # steps of lead that do not count (see `reached`)
    step_time: float = 0.0  # seconds
    c_steps: tuple[int, ...] = ()
    c_tokens: tuple[int, ...] = ()
    base: tuple[int, ...] = ()
    gives: int = 0  # as in Report, like the next two
    asks: int = 0
    portion: int = 0
    want: list[int] = field(default_factory=list)  # per fragment: newest round asked for
    merged_base: list[int] = field(default_factory=list)  # per fragment: newest base merged, -1 none
    merged: int = 0  # rounds it was merged in
    missed: int = 0  # rounds it was asked for and was not merged in
    merged_tokens: int = 0  # c_tokens merged, summed over fragments
    reason: str = "has not reported yet"

    def __post_init__(self) -> None:
        nothing = (0,) * self.fragments
        self.c_steps, self.c_tokens, self.base = nothing, nothing, (-1,) * self.fragments
        self.want = [0] * self.fragments
        self.merged_base = [-1] * self.fragments

    def hear(self, report: Report, now: float) -> None:
        """Take in a report; a new incarnation forgets the lead of the old one."""
        if report.incarnation != self.incarnation:
            self.incarnation = report.incarnation
            self.shift = 0
        self.phase = report.phase
        self.last_heard = now
        self.silent = False
        self.step, self.step_time = report.step, report.step_time
        self.gives, self.asks, self.portion = report.gives, report.asks, report.portion
        self.c_steps, self.c_tokens, self.base = (
            tuple(report.c_steps),
            tuple(report.c_tokens),
            tuple(report.base),
        )

    def count(self, more: Counts) -> None:
        """Add to its account what came of merges."""
        self.merged += more.merged
        self.missed += more.missed
        self.merged_tokens += more.tokens

    def lease(self, least: float) -> float:
        """Seconds of silence it is allowed: `least`, or 10 of its own steps if that is longer."""
        return max(least, STEPS_OF_SILENCE * self.step_time)

    @property
    def reached(self) -> int:
        """The global step this island has reached, as far as it counts for pacing."""
        return self.step - self.shift

    def limit_lead(self, most: int) -> None:
        """Let no more than `most` be reached: steps made while no round could open are not paid back in a burst."""
        self.shift = max(self.shift, self.step - most)

    def obstacle(self, fragment: int, version: int) -> str | None:
        """Why it cannot contribute to a round of `fragment` at global `version`; None if it can (it is *eligible*).

        Steps need not have been made yet: it answers after its next step, so one will have been.
        """
        base = self.base[fragment]
        if not self.alive:
            return f"{self.name} is not alive: {self.reason}"
        if self.leaving:
            return f"{self.name} is leaving"
        if base < 0:
            return f"{self.name} holds no global version of fragment {fragment}"
        if base < version - 1:
            return f"{self.name} works on version {base}, too old for version {version}"
        if base <= self.merged_base[fragment]:
            return f"{self.name}'s work on version {base} is merged already"
        return None

    def in_hand(self) -> float:
        """Tokens trained and not yet merged, mean over fragments."""
        return sum(self.c_tokens) / self.fragments if self.alive else 0.0

    def owed(self, fragment: int) -> bool:
        """Whether its last report promises an answer for `fragment` that has not been merged."""
        return self.c_steps[fragment] > 0 and self.base[fragment] > self.merged_base[fragment]
