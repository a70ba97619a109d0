"""The syncer's half of the algorithm (Algorithm 2 of the paper) as a pure state machine: `step(event, now) -> actions`.

It reads no clock, does no I/O and holds no weights. Its drivers are the live syncer process, the simulator and the
replay of a tape. How a round works where the paper is silent: docs/architecture.md, "The core".
"""

from __future__ import annotations

from collections.abc import Mapping

from diloco_ds.config import Exchange
from diloco_ds.core.admission import refusal
from diloco_ds.core.events import (
    Action,
    Answer,
    Drain,
    Drop,
    Event,
    Joined,
    Leave,
    Left,
    Merge,
    Merged,
    Orders,
    Part,
    Phase,
    Report,
    RunPhase,
    Skip,
    Stop,
    Tick,
    Want,
)
from diloco_ds.core.fragments import FragmentLayout
from diloco_ds.core.givers import Givers
from diloco_ds.core.grace import MovingAverage, grace_window
from diloco_ds.core.leaving import ask_to_leave, give_up, remove_left
from diloco_ds.core.ledger import Ledger
from diloco_ds.core.member import STEPS_OF_SILENCE, Counts, Member
from diloco_ds.core.roster import Roster
from diloco_ds.core.round import Round
from diloco_ds.core.rounds import Rounds
from diloco_ds.core.view import View, view_of
from diloco_ds.core.weights import learner_weight, normalised


class Syncer:
    """Quorum, grace, weights, pace, admission, membership and the ledger of one run.

    layout gives P, H and the rotation; `budget` is in merged tokens; `lease` is the least number of seconds of
    silence after which an island counts as away; `epoch_blocks` is the number of blocks of data, 0 for a run without.
    """

    def __init__(
        self, layout: FragmentLayout, exchange: Exchange, *, budget: int, lease: float, epoch_blocks: int = 0
    ) -> None:
        self._layout = layout
        self._exchange = exchange
        self._budget = budget
        self._in_flight = max(1, exchange.overlap)
        self._roster = Roster(layout.fragments, lease)
        self._givers = Givers(self._roster)
        self._rounds = Rounds(layout.fragments, exchange.quorum)
        self.ledger = Ledger(layout.fragments, layout.period, epoch_blocks)
        """Who reads which blocks."""
        self._sync_time = MovingAverage(exchange.grace.smoothing)
        self._phase: RunPhase = "run"
        self._global_step = 0
        self._next = self._layout.next_step(0)  # global step of the next round
        self._global_tokens = 0
        self._settled = float("-inf")  # driver's clock: everything due by then is done

    def step(self, event: Event, now: float) -> list[Action]:
        """Take in one event at time `now` (seconds, never falling) and say what is to be done, in order."""
        actions: list[Action] = []
        match event:
            case Report():
                if not self._hear(event, now, actions):
                    return actions
            case Answer():
                self._receive(event, now, actions)
            case Merged():
                self._sync_time.add(event.seconds)
                self._rounds.fragments[event.fragment].committed = True
                self.ledger.merged(event.fragment, event.version)
            case Tick():
                self._estimate_global_tokens()
            case Joined():
                self._roster.member(event.island)
            case Leave():
                ask_to_leave(self._roster, event.island, self._next)
            case Left():
                give_up(self._roster, self._rounds, event.island, event.reason, actions)
            case Drain():
                if self._phase == "run":
                    self._estimate_global_tokens()
                    self._start_drain(now, actions)
            case Stop():
                self._rounds.clear()
                self._set_phase("stop", event.reason, actions)
        for member in self._roster.expire(now, actions):
            self.ledger.lose(member.name, f"{member.name} is silent")
        if self._phase == "run":
            self._run_rounds(now, actions)
        elif self._phase == "drain":
            self._finish_when_drained(now, actions)
        remove_left(self._roster, self._rounds, now, actions)
        self.ledger.settle(actions, self._roster, over=self._phase == "finished")
        self._settled = now
        return actions

    def orders(self, island: str) -> Orders:
        """What `island` needs to know now. KeyError if it does not belong to the run."""
        member = self._roster[island]
        reader, leases = self.ledger.leases(island)
        return Orders(
            phase="drain" if member.leaving and self._phase == "run" else self._phase,
            global_step=self._global_step,
            global_tokens=self._global_tokens,
            want=tuple(member.want),
            reader=reader,
            leases=leases,
            peer=self._givers.peer(island),
            gift=self._givers.gift(island),
        )

    def has(self, island: str) -> bool:
        """Whether `island` belongs to the run."""
        return island in self._roster

    def next_deadline(self) -> float | None:
        """When `step(Tick(), ...)` is due though nothing else happens (driver's clock, seconds)."""
        times = [self._roster.next_expiry]
        if self._phase == "run":
            times += [r.expires if r.closes is None else r.closes for r in self._rounds]
        times += [
            m.last_heard + m.lease(self._roster.lease)
            for m in self._roster
            if (m.leaving and not self._rounds.hold_work_of(m.name))
            or (self._phase == "drain" and m.phase == "drained")
        ]
        deadline = min((time for time in times if time > self._settled), default=float("inf"))
        return None if deadline == float("inf") else deadline

    def restore(
        self,
        fragment: int,
        *,
        version: int,
        round: int,
        merged_tokens: int,
        merged_base: Mapping[str, int],
        counts: Mapping[str, Counts],
    ) -> None:
        """Take back, before the first event, what the store says of a fragment: all that must not be forgotten."""
        state = self._rounds.fragments[fragment]
        state.version, state.round, state.merged_tokens = version, round, merged_tokens
        self._roster.restore(fragment, merged_base, counts)
        self._global_step = max(self._global_step, round)
        self._next = self._layout.next_step(self._global_step)
        self._global_tokens = max(self._global_tokens, self.merged_tokens)

    def version(self, fragment: int) -> int:
        """The newest version of `fragment`."""
        return self._rounds.fragments[fragment].version

    def open_fragment(self, step: int) -> int | None:
        """The fragment of the open round that serves global step `step`; None if there is none."""
        return next((r.fragment for r in self._rounds if r.step == step), None)

    def obstacles(self, fragment: int) -> dict[str, str | None]:
        """Per island why it could not contribute to `fragment` now; None if it could."""
        return {m.name: m.obstacle(fragment, self.version(fragment)) for m in self._roster}

    @property
    def merged_tokens(self) -> int:
        """Tokens merged into the global model: mean over the fragments."""
        return sum(f.merged_tokens for f in self._rounds.fragments) // len(self._rounds.fragments)

    @property
    def global_step(self) -> int:
        """t of the newest opened round."""
        return self._global_step

    @property
    def phase(self) -> RunPhase:
        """The run's phase."""
        return self._phase

    def view(self) -> View:
        """The account of the run as of now."""
        return view_of(
            phase=self._phase,
            global_step=self._global_step,
            merged_tokens=self.merged_tokens,
            global_tokens=self._global_tokens,
            waiting=self._waiting_for(),
            open_rounds=tuple(round_.step for round_ in self._rounds),
            fragments=self._rounds.fragments,
            trained=self.ledger.trained(),
            members=self._roster,
        )

    # ---- a round: Algorithm 2 ----

    def _run_rounds(self, now: float, actions: list[Action]) -> None:
        self._close_due(now, actions)
        while self._can_open():
            self._estimate_global_tokens()
            if self._global_tokens >= self._budget:
                if self._rounds.all_committed():  # else last answers would start from a version just merged
                    self._start_drain(now, actions)
                return
            self._open(now, actions)

    def _can_open(self) -> bool:
        """K learners have reached the next global step, its fragment is free, and fewer than tau rounds are in flight."""
        if len(self._rounds) >= self._in_flight or self._rounds.of(self._next_fragment) is not None:
            return False
        return self._roster.ready(self._next) >= self._exchange.quorum

    def _open(self, now: float, actions: list[Action]) -> None:
        """Open the next round and ask everybody who can contribute, ready or not."""
        step, fragment = self._next, self._next_fragment
        slowest = max((m.step_time for m in self._roster if m.alive), default=0.0)
        patience = max(self._roster.lease, STEPS_OF_SILENCE * slowest)
        round_ = self._rounds.open(step, fragment, now, patience)
        self._global_step = step
        self._next = self._layout.next_step(step)
        for member in self._roster:
            member.limit_lead(self._most_reached())
            self._ask(round_, member, actions)

    def _ask(self, round_: Round, member: Member, actions: list[Action]) -> None:
        p = round_.fragment
        if member.name in round_.asked or member.obstacle(p, self._rounds.fragments[p].version) is not None:
            return
        round_.asked[member.name] = None
        member.want[p] = round_.step
        reason = f"{member.name} made {member.c_steps[p]} steps on version {member.base[p]}"
        actions.append(Want(member.name, p, round_.step, reason))

    def _receive(self, answer: Answer, now: float, actions: list[Action]) -> None:
        """An update has arrived: it counts in the open round, or is kept as late, or is dropped; always with a reason."""
        round_ = self._rounds.of(answer.fragment)
        if round_ is not None:
            round_.heard[answer.island] = None
        member = self._roster.get(answer.island)
        version = self.version(answer.fragment)
        reason = refusal(
            answer, member, version=version, phase=self._phase, keeps_late=self._keeps_late(member)
        )
        if reason is not None:
            actions.append(Drop(answer.island, answer.fragment, answer.update_id, reason))
            return
        self._roster[answer.island].last_heard = now
        self._rounds.forget_kept(answer, actions, bases=(answer.base,))
        if round_ is not None and answer.base == version:
            round_.answers[answer.island] = answer
        else:
            self._rounds.keep(answer, actions)
        if round_ is not None:
            self._note_quorum(round_, answer.island, now)

    def _keeps_late(self, member: Member | None) -> bool:
        """The last answers of an island that ends are kept whatever the setting."""
        ends = self._phase == "drain" or (member is not None and member.leaving)
        return ends or self._exchange.merge.late == "merge_next"

    def _note_quorum(self, round_: Round, island: str, now: float) -> None:
        """Count the island in; the K-th opens the grace window (Eq. 3)."""
        round_.contributors[island] = None
        if round_.closes is not None or len(round_.contributors) < self._exchange.quorum:
            return
        grace = grace_window(
            safety=self._exchange.grace.safety,
            overlap=self._exchange.overlap,
            step_time=max(
                self._roster[name].step_time for name in round_.contributors if name in self._roster
            ),
            quorum_time=now - round_.opened,
            sync_time=self._sync_time.value or 0.0,
        )
        round_.start_grace(now, grace)

    def _close_due(self, now: float, actions: list[Action]) -> None:
        for round_ in self._rounds:
            possible = sum(m.alive or m.name in round_.contributors for m in self._roster)
            merge, skip = round_.why_merge(now, self._roster.is_alive), round_.why_skip(now, possible)
            if merge is None and skip is None:
                continue
            contributed = sum(name in self._roster for name in self._rounds.contributed(round_))
            if merge is None and contributed >= self._exchange.quorum:
                merge = f"{skip}; with what was kept before, a quorum"
            self._rounds.close(round_)
            if merge is not None:
                self._merge(round_, merge, actions)
            elif skip is not None:
                self._skip(round_, skip, actions)

    def _skip(self, round_: Round, reason: str, actions: list[Action]) -> None:
        """What was answered waits for the fragment's next merge."""
        for answer in round_.answers.values():
            if answer.island in self._roster:
                self._rounds.keep(answer, actions)
        actions.append(Skip(round_.fragment, round_.step, reason))

    def _merge(self, round_: Round, reason: str, actions: list[Action]) -> None:
        """Everything admitted and everything kept, with normalised weights (Sec. 3.2), makes the next version."""
        state = self._rounds.fragments[round_.fragment]
        chosen = [(answer, False) for answer in round_.answers.values() if answer.island in self._roster]
        chosen += [(answer, True) for answer in state.kept.values() if answer.island in self._roster]
        rule = self._exchange.merge.weights
        weights = normalised([learner_weight(a.steps, a.tokens, rule) for a, _ in chosen])
        parts = tuple(Part.of(a, weight, late) for (a, late), weight in zip(chosen, weights, strict=True))
        lr_tokens = self.merged_tokens
        state.merge(round_.step, sum(part.tokens for part in parts))
        missed = self._roster.account(round_.fragment, round_.asked, parts)
        self.ledger.merging(round_.fragment, state.version, parts)
        shares = ", ".join(f"{p.island} {p.weight:.2f}{' (late)' if p.late else ''}" for p in parts)
        reason = f"{reason}: {shares}"
        of_it = (round_.fragment, round_.step, state.version)
        actions.append(Merge(*of_it, parts, lr_tokens, missed, round_.grace, reason))

    # ---- the end of the run ----

    def _start_drain(self, now: float, actions: list[Action]) -> None:
        """The budget is reached with what is in hand: every island writes every fragment once more and ends."""
        for round_ in self._rounds:
            self._rounds.close(round_)
            self._skip(round_, "the run drains: taken up by the last round", actions)
        for p in range(len(self._rounds.fragments)):
            round_ = self._rounds.open(self._next + p, p, now, float("inf"))
            for member in self._roster:
                member.want[p] = round_.step
        self._global_step = self._next + len(self._rounds.fragments) - 1
        self._next = self._layout.next_step(self._global_step)
        reason = f"{self._global_tokens} tokens are merged or in hand, the budget is {self._budget}"
        self._set_phase("drain", reason, actions)

    def _finish_when_drained(self, now: float, actions: list[Action]) -> None:
        """Merge every fragment a last time when all islands have handed in what they have, or are silent."""
        if any(self._rounds.still_expect(member, now, self._roster.lease) for member in self._roster):
            return
        quorum = self._exchange.quorum
        for round_ in self._rounds:
            self._rounds.close(round_)
            count = len(self._rounds.contributed(round_))
            if count >= quorum:
                self._merge(round_, "last round of the run", actions)
            else:
                actions.append(
                    Skip(round_.fragment, round_.step, f"last round: {count} answers, the quorum is {quorum}")
                )
        self._set_phase("finished", f"{self.merged_tokens} tokens are merged", actions)

    # ---- membership ----

    def _hear(self, report: Report, now: float, actions: list[Action]) -> bool:
        """Take in a report; returns whether it can change more than the member's own account (most reports do not)."""
        member = self._roster.hear(report, now, self._most_reached(), actions)
        if member is None:
            return False
        if report.step_blocks:
            serve = self._phase == "run" and not member.leaving and report.phase in ("starting", "running")
            self.ledger.hear(report, serve=serve, actions=actions)
        self._givers.hear(member, self._rounds, now, actions)
        if self._phase == "run":
            for round_ in self._rounds:
                self._ask(round_, member, actions)
        due = member.reached >= self._next or now >= self._roster.next_expiry
        return due or bool(actions) or member.leaving or self._phase != "run"

    def _most_reached(self) -> int:
        """How far an island may be ahead for pacing: no burst of rounds pays back steps made while none could open."""
        return self._next - 1 + self._in_flight

    @property
    def _next_fragment(self) -> int:
        fragment = self._layout.fragment_at(self._next)
        assert fragment is not None, "the next global step always serves a fragment"
        return fragment

    def _estimate_global_tokens(self) -> None:
        in_hand = sum(member.in_hand() for member in self._roster)
        self._global_tokens = max(self._global_tokens, self.merged_tokens + int(in_hand))

    def _set_phase(self, phase: RunPhase, reason: str, actions: list[Action]) -> None:
        self._phase = phase
        actions.append(Phase(phase, reason))

    def _waiting_for(self) -> str:
        if self._rounds or self._phase != "run":
            return ""
        ready = self._roster.ready(self._next)
        return f"{ready} of a quorum of {self._exchange.quorum} have reached step {self._next}"
