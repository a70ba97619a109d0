"""The live syncer: drives the core with what the mailboxes bring, and carries out what the core decides.

One thread reads reports and updates, merges, commits and writes orders; nothing in it waits for an island
or a link. A second one writes checkpoints (saver.py). What must survive kill -9 lies in the store.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, replace

from diloco_ds.config import RunConfig
from diloco_ds.core.events import (
    Action,
    Drain,
    Drop,
    Event,
    GiveBack,
    Joined,
    Keep,
    Membership,
    Merge,
    Merged,
    NameGiver,
    Orders,
    Phase,
    Skip,
    Stop,
    Tick,
    Want,
)
from diloco_ds.core.fragments import FragmentLayout
from diloco_ds.core.screen import OutlierScreen, is_finite, norm
from diloco_ds.core.syncer import Syncer
from diloco_ds.exchange.failpoint import failpoint
from diloco_ds.exchange.intake import Intake, Refusal
from diloco_ds.exchange.kept_updates import KeptUpdates
from diloco_ds.exchange.ledger_record import LedgerRecord
from diloco_ds.exchange.members import Members
from diloco_ds.exchange.merging import Merger
from diloco_ds.exchange.payloads import Payloads
from diloco_ds.exchange.saver import Saver
from diloco_ds.exchange.store import Store
from diloco_ds.exchange.syncer_account import Account
from diloco_ds.exchange.syncer_checkpoint import Facts
from diloco_ds.exchange.tape_file import TapeFile
from diloco_ds.exchange.tenure import Tenure
from diloco_ds.exchange.wire import OrdersRecord, UpdateHeader
from diloco_ds.rundir import RunDir

_BUSY_PAUSE_S = 0.5e-3
_IDLE_PAUSE_S = 5e-3
_TICK_EVERY_S = 0.5
_STATUS_EVERY_S = 0.5
STOP_LIMIT_S = 15.0
"""How long a stop waits for islands that do not say that they have stopped."""


@dataclass(frozen=True, slots=True)
class Parts:
    """What a live syncer is made of; syncer_process.py puts it together."""

    run: RunDir
    run_id: str
    config: RunConfig
    layout: FragmentLayout
    tenure: Tenure
    core: Syncer
    merger: Merger
    store: Store
    members: Members
    tape: TapeFile
    account: Account


class LiveSyncer:
    """The syncer of one run. `run` returns when the run is over; `request_stop` may be called by a signal handler."""

    def __init__(self, parts: Parts) -> None:
        self._core, self._store, self._members = parts.core, parts.store, parts.members
        self._intakes: dict[str, Intake] = {}
        self._merger, self._tenure, self._tape, self._account = (
            parts.merger,
            parts.tenure,
            parts.tape,
            parts.account,
        )
        self._record = LedgerRecord(parts.core.ledger, parts.store, parts.tenure, parts.account.tell)
        self._run_id = parts.run_id
        self._payloads = Payloads(parts.layout.fragments, self._release, parts.config.exchange.merge.anchor)
        self._marks = [parts.store.mark(p) for p in range(parts.layout.fragments)]
        self._account.merges = sum(mark.merges for mark in self._marks)
        self._outliers = OutlierScreen(parts.config.exchange.merge.outlier_factor)
        for p, mark in enumerate(self._marks):
            self._outliers.restore(p, mark.norms)
        self._updates = (
            KeptUpdates(parts.run, self._account.tell) if parts.config.syncer.keep_updates else None
        )
        self._saver = Saver(parts.run, parts.config, parts.store, parts.tape, self._facts, self._account.tell)
        self._orders: dict[str, Orders | None] = {}
        self._opened: dict[int, float] = {}  # by round
        self._base_lr = parts.config.exchange.outer.args.get("lr")
        self._stop_reason: str | None = None
        self._stop_limit: float | None = None
        self._next_tick = self._next_status = 0.0

    def request_stop(self, reason: str) -> None:
        """Stop cleanly as soon as the loop comes by."""
        self._stop_reason = self._stop_reason or reason

    def run(self) -> bool:
        """Serve the islands until the run is finished or stopped; False if the disk did not take the last checkpoint."""
        self._account.tell(
            "started", f"generation {self._tenure.generation}, {self._facts().tokens} tokens merged"
        )
        self._look_at_members()
        if self._store.drain_reason() is not None:
            self._poll()
            self._take(Drain(f"the syncer before was draining: {self._store.drain_reason()}"))
        pause = _BUSY_PAUSE_S
        while not self._is_over():
            busy = self._poll()
            self._look_at_the_clock()
            pause = _BUSY_PAUSE_S if busy else min(1.5 * pause, _IDLE_PAUSE_S)
            time.sleep(pause)
        return self._end()

    # -- what comes in -------------------------------------------------------------------------------------------

    def _poll(self) -> bool:
        """Take in what is new in the mailboxes; whether anything was."""
        busy = False
        for intake in list(self._intakes.values()):
            busy |= self._poll_report(intake)
            for fragment in intake.changed_fragments():
                try:
                    busy |= self._poll_update(intake, fragment)
                except Refusal as refusal:
                    self._account.drop(intake.name, refusal.kind, str(refusal))
        return busy

    def _poll_report(self, intake: Intake) -> bool:
        try:
            record = intake.new_report()
        except Refusal as refusal:
            self._account.drop(intake.name, refusal.kind, str(refusal))
            return True
        if record is not None:
            self._take(record.report)
        return record is not None

    def _poll_update(self, intake: Intake, fragment: int) -> bool:
        header = intake.header(fragment)
        if header is None or self._comes_too_early(header):
            return False
        if self._payloads.holds(intake.name, fragment, header.update_id):
            intake.skip(fragment)
            return False
        self._payloads.set_aside(intake.name, fragment)
        values = intake.take(fragment)
        if values is None:
            return False
        failpoint("syncer.taken")
        self._payloads.add(header.to_answer(), values)
        try:
            self._screen(header)
        except Refusal:
            self._payloads.drop(intake.name, fragment, header.update_id)
            raise
        self._take(header.to_answer())
        return True

    def _comes_too_early(self, header: UpdateHeader) -> bool:
        """Whether the update answers a round that this syncer has not asked for yet.

        After a restart the outboxes hold answers to the rounds that were in flight: they count when those
        rounds are opened again.
        """
        return (
            self._core.phase == "run"
            and header.round > self._core.orders(header.island).want[header.fragment]
        )

    def _screen(self, header: UpdateHeader) -> None:
        """Refusal for values that must not be merged. What the core turns away in any case is not looked at."""
        fragment, name = header.fragment, f"update {header.update_id} of fragment {header.fragment}"
        values = self._payloads.values(header.island, fragment, header.update_id)
        if not is_finite(values):
            raise Refusal("not_finite", f"{name} holds values that are not finite")
        base = self._store.theta_of(fragment, header.base)
        if base is not None:
            why = self._outliers.check(fragment, norm(base, values))
            if why is not None:
                raise Refusal("outlier", f"{name}: {why}")
        elif header.base == self._marks[fragment].version - 1:
            raise Refusal("base_gone", f"{name}: version {header.base} was lost with the syncer before")

    def _release(self, island: str, fragment: int) -> None:
        """What lies in the island's outbox is settled; of one that has just left there is nothing to give free."""
        if island in self._intakes:
            self._intakes[island].release(fragment)

    # -- what is done --------------------------------------------------------------------------------------------

    def _take(self, event: Event) -> None:
        """Let the core take in `event` and carry out what it decides, and what follows from that."""
        events = deque([event])
        while events:
            event = events.popleft()
            now = time.monotonic()
            actions = self._core.step(event, now)
            self._tape.append(now, event, actions)
            self._record.take(actions)
            self._write_orders()
            for action in actions:
                if isinstance(action, Merge):
                    events.append(self._merge(action))
                else:
                    self._carry_out(action, event)

    def _carry_out(self, action: Action, event: Event) -> None:
        match action:
            case Want():
                self._opened.setdefault(action.round, time.monotonic())
            case Keep():
                base = self._store.theta_of(action.fragment, action.base)
                if base is None:
                    raise RuntimeError(
                        f"version {action.base} of fragment {action.fragment} is gone: {action}"
                    )
                self._payloads.keep(action, base)
            case Drop():
                self._payloads.drop(action.island, action.fragment, action.update_id)
                self._account.drop(action.island, "not_admitted", action.reason)
            case Skip():
                self._forget_round(action.round)
                self._account.tell("skip", action.reason, fragment=action.fragment, round=action.round)
            case Membership():
                self._account.tell(
                    "membership",
                    f"{action.island}: {action.reason}",
                    island=action.island,
                    alive=action.alive,
                )
            case GiveBack() if action.trained:
                reason = f"{action.trained} blocks are to be trained on again: lease {action.lease}, {action.reason}"
                self._account.tell("blocks_back", reason, island=action.island, blocks=action.trained)
            case NameGiver() if action.giver:
                reason = f"{action.giver} gives its optimizer's moments to {action.island}: {action.reason}"
                self._account.tell("moments", reason, island=action.island, giver=action.giver)
            case Phase():
                self._change_phase(action)

    def _merge(self, action: Merge) -> Merged:
        """Merge, outer step, commit: the fragment's next version is there, or everything is as before."""
        started = time.monotonic()
        p, mark = action.fragment, self._marks[action.fragment]
        payloads = self._payloads.of(action)
        if self._updates is not None:
            self._updates.save(action, payloads)
        theta = self._store.theta(p)
        delta = self._merger.outer_gradient(action, payloads, theta)
        self._tenure.check()
        new = self._store.begin(p)
        failpoint("store.begun")
        mark, outer = self._merger.outer_step(action, delta, (theta, self._store.outer(p)), mark, new)
        mark = replace(mark, norms=self._outliers.history(p))
        self._tenure.check()
        self._store.commit(p, mark, self._tenure.generation)
        self._marks[p] = mark
        self._payloads.clear(p)
        seconds, view = time.monotonic() - started, self._core.view()
        self._account.merged(
            action,
            view,
            norm=outer.norm,
            outer_lr=None if self._base_lr is None else outer.lr_scale * self._base_lr,
            grace_s=action.grace,
            round_s=started - self._opened.get(action.round, started),
            merge_s=seconds,
        )
        self._forget_round(action.round)
        return Merged(p, action.round, action.version, seconds)

    def _change_phase(self, action: Phase) -> None:
        self._account.tell("phase", f"{action.phase}: {action.reason}", phase=action.phase)
        if action.phase == "finished":
            self._saver.checkpoint_soon()
        if action.phase in ("finished", "stop"):
            for p in range(len(self._marks)):
                self._payloads.clear(p)

    def _forget_round(self, round_: int) -> None:
        self._opened.pop(round_, None)

    def _write_orders(self) -> None:
        """Bring every island's orders up to date: levels, so only what changed is written."""
        for name, written in list(self._orders.items()):
            if not self._core.has(name):  # it has left, and nothing of it is held any more
                del self._orders[name], self._intakes[name]
                continue
            orders = self._record.allowed(self._core.orders(name), written)
            if orders != written:
                self._orders[name] = orders
                record = OrdersRecord(self._run_id, self._tenure.generation, orders)
                self._intakes[name].mailbox.orders.write(record.pack())

    # -- the clock, and the end ----------------------------------------------------------------------------------

    def _look_at_the_clock(self) -> None:
        now = time.monotonic()
        if self._stop_reason is not None and self._stop_limit is None:
            self._stop_limit = now + STOP_LIMIT_S
            self._take(Stop(self._stop_reason))
        deadline = self._core.next_deadline()
        if now >= self._next_tick or (deadline is not None and now >= deadline):
            self._next_tick = now + _TICK_EVERY_S
            self._take(Tick())
        self._saver.poll(now)
        if now >= self._next_status:
            self._next_status = now + _STATUS_EVERY_S
            self._look_at_members()
            self._record.write()
            self._write_status(self._state())

    def _look_at_members(self) -> None:
        """Islands that have joined, shall leave or have left since the last look."""
        for event in self._members.changes(self._core.has):
            if isinstance(event, Joined):
                self._intakes[event.island] = self._members.intakes.pop(event.island)
                failpoint("syncer.joining")
                self._orders[event.island] = None
            self._take(event)

    def _is_over(self) -> bool:
        """Nothing more will be merged, and every island has ended, is silent, or was waited for long enough."""
        if self._stop_limit is None and self._core.phase != "finished":
            return False
        waited = self._stop_limit is not None and time.monotonic() >= self._stop_limit
        return waited or not any(island.alive for island in self._core.view().islands.values())

    def _end(self) -> bool:
        failpoint("syncer.ending")
        self._record.write()
        saved = self._saver.finish()
        state = "failed" if not saved else "finished" if self._core.phase == "finished" else "stopped"
        reason = self._stop_reason if saved else "the last checkpoint could not be written"
        self._account.tell(state, reason or f"{self._core.merged_tokens} tokens merged")
        self._write_status(state, reason)
        self._saver.close()
        self._tape.close()
        self._account.close()
        return saved

    def _state(self) -> str:
        phase = self._core.phase
        if phase == "finished":
            return "finished" if self._saver.idle() else "draining"
        if phase == "run":
            return (
                "running"
                if any(intake.report is not None for intake in self._intakes.values())
                else "starting"
            )
        return {"drain": "draining", "stop": "stopping"}[phase]

    def _write_status(self, state: str, reason: str | None = None) -> None:
        reports = {name: intake.report for name, intake in self._intakes.items()}
        accounts = self._core.ledger.accounts()
        self._account.write_status(state, self._core.view(), accounts, reports, reason)

    def _facts(self) -> Facts:
        return Facts(
            run_id=self._run_id,
            generation=self._tenure.generation,
            global_step=self._core.global_step,
            tokens=self._core.merged_tokens,
            merges=self._account.merges,
            time=time.time(),
        )
