"""Virtual time: the syncer and learner clocks of a live run, driven by an event queue. Deterministic by seed."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from diloco_ds.config import Exchange
from diloco_ds.core.events import Answer, Drop, Joined, Keep, Leave, Merge, Merged, Phase, Report, Tick, Want
from diloco_ds.core.fragments import FragmentLayout
from diloco_ds.core.syncer import Syncer
from diloco_ds.sim.learner import Direction, SimLearner

BYTES = 4
"""Bytes of an element on the wire (fp32)."""


_Event = Report | Answer | Joined | Leave | Merged | Tick
"""What the syncer takes in."""
_Item = _Event | SimLearner | Direction
"""What is due at a virtual time: an event; the end of a learner's step; a wire that can carry more."""


class Weights:
    """What happens to weights in a simulation: nothing here, just times and counts. Real ones: sim/real_weights.py."""

    def train(self, island: str) -> None:
        """One inner step of `island`."""

    def snapshot(self, island: str, fragment: int) -> tuple[int, ...]:
        """Remember the island's fragment as of now: it is being answered. Returns the tokens of each of its experts."""
        return ()

    def sent(self, answer: Answer) -> None:
        """The newest snapshot of this island and fragment is the payload of `answer`."""

    def adopt(self, island: str, fragment: int, version: int) -> None:
        """The island adopts this version."""

    def keep(self, action: Keep) -> None:
        """Turn a late payload into an outer gradient against its base."""

    def drop(self, action: Drop) -> None:
        """Forget a payload."""

    def merge(self, action: Merge) -> None:
        """Carry out a merge."""


@dataclass
class Tally:
    """What a simulation counted."""

    steps: dict[str, int] = field(default_factory=dict)
    merges: list[Merge] = field(default_factory=list)
    merge_times: list[float] = field(default_factory=list)
    drops: list[Drop] = field(default_factory=list)
    last_step: float = 0.0  # virtual time of the newest step of anybody
    idle: float = 0.0  # seconds in which no learner ended a step for longer than `idle_after`
    finished: float | None = None  # virtual time at which the run was finished


class World:
    """A syncer and its learners in virtual time.

    merge_s: seconds a merge takes in the syncer. keep_history: keep every merge and drop (studies and tests; not for
    long runs). idle_after: seconds without any learner's step after which the time counts as idle (not uptime).
    """

    def __init__(
        self,
        layout: FragmentLayout,
        exchange: Exchange,
        learners: Sequence[SimLearner],
        *,
        budget: int,
        lease: float = 10.0,
        merge_s: float = 0.0,
        weights: Weights | None = None,
        keep_history: bool = True,
        idle_after: float = float("inf"),
    ) -> None:
        self.layout = layout
        self.syncer = Syncer(layout, exchange, budget=budget, lease=lease)
        self.learners = {learner.name: learner for learner in learners}
        self.rounds_in_flight = max(1, exchange.overlap)
        self.tally = Tally(steps=dict.fromkeys(self.learners, 0))
        self.now = 0.0
        self._weights: Weights = weights or Weights()
        self._merge_s = merge_s
        self._keep_history = keep_history
        self._idle_after = idle_after
        self._horizon = 0.0
        self._heap: list[tuple[float, int, _Item]] = []
        self._up = {name: Direction(each.wire, self._deliver_up) for name, each in self.learners.items()}
        self._down = {name: Direction(each.wire, _deliver_down(each)) for name, each in self.learners.items()}
        self._pushed = 0
        self._tick_at = float("inf")

    def run(self, until: float) -> Tally:
        """Run until virtual time `until` (seconds) or until the run is finished. May be called once."""
        self._horizon = until
        for learner in self.learners.values():
            self._push(learner.joins, Joined(learner.name))
            if learner.leaves < until:
                self._push(learner.leaves, Leave(learner.name))
        while self._heap and self.syncer.phase != "finished":
            time, _, item = heapq.heappop(self._heap)
            if time > until:
                break
            self.now = time
            if isinstance(item, SimLearner):
                self._end_step(item)
            elif isinstance(item, Direction):
                self._carry(item)
            else:
                self._feed(item)
        if self.syncer.phase == "finished":
            self.tally.finished = self.now
        else:
            self.now = until
        self._note_idle(self.now)
        return self.tally

    def _push(self, time: float, item: _Item) -> None:
        self._pushed += 1
        heapq.heappush(self._heap, (time, self._pushed, item))

    def _feed(self, event: _Event) -> None:
        if isinstance(event, Tick):
            if self.now != self._tick_at:
                return  # an earlier one has taken its place
            self._tick_at = float("inf")
        for action in self.syncer.step(event, self.now):
            match action:
                case Want():
                    self._ask(action)
                case Merge():
                    self._merge(action)
                case Keep():
                    self._weights.keep(action)
                case Drop():
                    self._weights.drop(action)
                    if self._keep_history:
                        self.tally.drops.append(action)
                case Phase():
                    self._announce()
        if isinstance(event, Merged):
            self._broadcast(event)
        elif isinstance(event, Joined):
            self._start(self.learners[event.island])
        elif isinstance(event, Leave):
            self._announce()
        self._schedule_tick()

    def _start(self, learner: SimLearner) -> None:
        """A joining learner takes every global fragment first, then steps."""
        self.learners[learner.name] = learner
        versions = [self.syncer.version(p) for p in range(self.layout.fragments)]
        learner.clock.holds(versions)
        for p, version in enumerate(versions):
            self._weights.adopt(learner.name, p, version)
        self._push(learner.finish_step(self.now, self._horizon), learner)

    def _end_step(self, learner: SimLearner) -> None:
        name = learner.name
        self._note_idle(self.now)
        self.tally.steps[name] += 1
        self._weights.train(name)
        learner.clock.stepped(learner.tokens)
        learner.global_step = self.syncer.global_step
        answers = learner.boundary(
            self.now,
            lambda p: self._weights.snapshot(name, p),
            lambda p, version: self._weights.adopt(name, p, version),
        )
        self._push(self.now + learner.wire.latency_s, learner.report())
        for answer in answers:
            self._weights.sent(answer)
            self._send_up(answer)
        if learner.phase == "running":
            self._push(learner.finish_step(self.now, self._horizon), learner)

    def _ask(self, want: Want) -> None:
        self.learners[want.island].request(want.fragment, want.round, self.now)

    def _announce(self) -> None:
        """Phase and requests of everybody, as the orders record carries them together."""
        for member in self.syncer.view().islands:
            orders, learner = self.syncer.orders(member), self.learners[member]
            learner.tell_phase(orders.phase, self.now)
            for p, round_ in enumerate(orders.want):
                if round_:
                    learner.request(p, round_, self.now)

    def _merge(self, merge: Merge) -> None:
        self._weights.merge(merge)
        if self._keep_history:
            self.tally.merges.append(merge)
            self.tally.merge_times.append(self.now)
        merged = Merged(merge.fragment, merge.round, merge.version, self._merge_s)
        self._push(self.now + self._merge_s, merged)

    # ---- on the wire ----

    def _send_up(self, answer: Answer) -> None:
        direction = self._up[answer.island]
        replaced = direction.put(answer.fragment, answer, BYTES * self.layout.numel(answer.fragment))
        if replaced is not None:
            reason = "replaced in the outbox before it was sent"
            self._weights.drop(Drop(answer.island, answer.fragment, replaced.update_id, reason))
        self._carry(direction)

    def _broadcast(self, merged: Merged) -> None:
        nbytes = BYTES * self.layout.numel(merged.fragment)
        for name, learner in self.learners.items():
            if learner.joins <= self.now and learner.phase == "running":
                self._down[name].put(merged.fragment, merged, nbytes)
                self._carry(self._down[name])

    def _carry(self, direction: Direction) -> None:
        again = direction.carry(self.now)
        if again is not None and again > direction.wakes:
            direction.wakes = again
            self._push(again, direction)

    def _deliver_up(self, answer: Answer, at: float) -> None:
        self._push(at, answer)

    def _schedule_tick(self) -> None:
        deadline = self.syncer.next_deadline()
        if deadline is not None and deadline < self._tick_at:
            self._tick_at = max(deadline, self.now)
            self._push(self._tick_at, Tick())

    def _note_idle(self, now: float) -> None:
        gap = now - self.tally.last_step
        if gap > self._idle_after:
            self.tally.idle += gap
        self.tally.last_step = now


def _deliver_down(learner: SimLearner) -> Callable[[Merged, float], None]:
    return lambda merged, at: learner.arrives(merged.fragment, merged.version, at)
