"""What rank 0 does for its island: it reads orders and inbox, decides for all ranks, commits answers and
reports.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from diloco_ds.core.events import LearnerPhase, Orders, Report
from diloco_ds.core.learner import Boundary as Plan
from diloco_ds.core.learner import LearnerClock
from diloco_ds.core.lease import Position
from diloco_ds.core.reading import Piece, Reading
from diloco_ds.exchange.mailbox import Mailbox
from diloco_ds.exchange.wire import MomentsHeader, OrdersRecord, ReportRecord, UpdateHeader
from diloco_ds.island.boundary import NOTHING, Adopt, Decision, Then
from diloco_ds.island.giving import Giver, Giving

WAIT_S = 0.02
"""Between two looks at what another process writes, while there is nothing to train on."""
FIRST_LEASE_WITHIN_S = 10.0
"""A syncer that lives answers a report within a second."""


@dataclass(frozen=True)
class Identity:
    """Who reports and answers."""

    run_id: str
    layout_digest: str
    island: str
    index: int  # of the island in the run's list, below 4096
    incarnation: int

    def update_id(self, count: int) -> int:
        """Unique in the run, and rising for the island over all its incarnations."""
        return self.incarnation << 44 | count << 12 | self.index


@dataclass
class Progress:
    """What a report says beside the clock; the training loop keeps it up to date."""

    lr_tokens: int = 0  # where the learning rate's schedule stands; never falls
    step_time: float = 0.0  # seconds, moving average
    tokens_per_s: float = 0.0
    loss: float = float("nan")


class Lead:
    """Rank 0's part in the boundaries. What is committed late is committed from another thread (`finish`)."""

    def __init__(self, identity: Identity, mailbox: Mailbox, clock: LearnerClock) -> None:
        assert mailbox.inbox is not None
        assert mailbox.taken is not None
        self.clock = clock
        self.progress = Progress()
        self.step_tokens = 0
        """Tokens the island trains on in one step."""
        self._identity, self._mailbox = identity, mailbox
        self._inbox, self._outbox = mailbox.inbox, mailbox.outbox
        self.reading: Reading | None = None
        """Which blocks the island reads; None until it is known how many a step takes."""
        self.giving = Giving(Giver(identity.run_id, identity.island, identity.incarnation), mailbox.given)
        """The island's part in giving moments to a peer."""
        self._introduced = 0.0  # when `begin_reading` was called, time.monotonic
        self._asks = (0, 0)  # request and portion of what it asks of a peer
        self._reporting = threading.Lock()  # the heartbeat reports from a thread of its own
        self.routed: Callable[[int, int], tuple[int, ...]] | None = None
        """Of a fragment and an answer's tokens those routed to each expert (`Routing.told`), where they are counted."""
        self._answers = 0
        self._adopting: set[int] = set()  # fragments pinned in the inbox
        self._writing: set[int] = set()  # fragments begun in the outbox
        self._snapshots: dict[int, int] = {}  # outbox version of each fragment's last answer
        self._orders = Orders("run", 0, 0, (0,) * len(self._outbox.numels))
        self._orders_seen = self._orders_of_an_earlier_life()
        self._earlier = self._read_earlier_report()
        self._inbox.clear_pins()
        mailbox.taken.clear_pins()

    @property
    def incarnation(self) -> int:
        """The learner's."""
        return self._identity.incarnation

    def _orders_of_an_earlier_life(self) -> int:
        """An order to stop that lies there before this learner has begun stopped an earlier one: it is void."""
        sequence, payload = self._mailbox.orders.read() or (0, None)
        if payload is None or OrdersRecord.unpack(payload).orders.phase != "stop":
            return 0
        return sequence

    def _read_earlier_report(self) -> ReportRecord | None:
        """The last report of an earlier incarnation, if it left one."""
        _, payload = self._mailbox.report.read() or (0, None)
        record = ReportRecord.unpack(payload) if payload is not None else None
        return record if record and record.run_id == self._identity.run_id else None

    def begin_from_initial_weights(self) -> None:
        """The weights are the run's initial ones: version 0 of every fragment."""
        self.clock.holds([0] * len(self._outbox.numels))

    def continue_from_earlier_report(self) -> None:
        """Never lower the learning rate's tokens, even where the checkpoint is older than the last report."""
        if self._earlier is not None:
            self.progress.lr_tokens = max(self.progress.lr_tokens, self._earlier.lr_tokens)

    def begin_reading(self, step_blocks: int, sequence_length: int) -> None:
        """A step takes `step_blocks` blocks; with the next report the syncer knows, and leases some."""
        self._introduced = time.monotonic()
        self.step_tokens = step_blocks * sequence_length
        self.reading = Reading(self._identity.incarnation, self._identity.index, step_blocks)

    def ask(self, request: int, portion: int) -> None:
        """Ask for this portion of a peer's moments, and say so at once; request 0: for nothing any more."""
        self._asks = (request, portion)
        self.report("starting")

    def wait_for_lease(self) -> None:
        """Wait for the first lease, but no longer than FIRST_LEASE_WITHIN_S since the syncer can know of the island: it then
        begins in the reserve.
        """
        assert self.reading is not None
        deadline = self._introduced + FIRST_LEASE_WITHIN_S
        while time.monotonic() < deadline:
            orders = self.read_orders()
            if orders.phase != "run" or self.reading.has_lease(orders):
                return
            time.sleep(WAIT_S)

    def plan_batch(self) -> tuple[Piece, ...]:
        """What the next batch that is not planned yet is made of."""
        return self.reading.plan_batch(self.read_orders()) if self.reading is not None else ()

    def stepped(self) -> None:
        """All ranks have made a step, on the oldest batch that was planned."""
        self.clock.stepped(self.step_tokens)
        if self.reading is not None:
            self.reading.trained()
        self.giving.stepped()

    def decide(self, stop: bool, answer: bool) -> tuple[Decision, Callable[[], None]]:
        """The decision at this boundary, and what to call when it has been carried out by all ranks.

        `stop`: somebody asked this learner to stop; `answer`: the weights are worth sending. Whether it saves is not
        decided here.
        """
        orders = self.read_orders()
        versions = [self._inbox.version(fragment) for fragment in range(len(self._inbox.numels))]
        plan = self.clock.plan(orders, versions)
        headers = self._begin_answers(plan, orders) if answer and not stop else {}
        adopt = self._begin_adoptions(plan, orders, set(headers))
        # A step's rate is the one at its end: the first step of a warm-up moves already, the last one rests.
        own = self.clock.tokens + self.step_tokens
        self.progress.lr_tokens = max(self.progress.lr_tokens, own, orders.global_tokens)
        then = self._then(plan, stop, answered=len(headers) == len(plan.answer) or not answer)
        read = self.plan_batch() if then is Then.STEP else ()
        gift = self.giving.begin(orders.gift, self.clock.base) if then is Then.STEP and answer else None
        decision = Decision(
            then,
            save=False,
            step=self.clock.step,
            lr_tokens=self.progress.lr_tokens,
            adopt=adopt,
            answer=tuple(headers),
            give=gift.portion if gift else NOTHING,
            read=read,
        )
        return decision, lambda: self._finish(adopt, headers, gift)

    def read_orders(self) -> Orders:
        """The newest orders; those of before the first, where there are none yet."""
        if self._mailbox.orders.sequence() > self._orders_seen:
            sequence, payload = self._mailbox.orders.read() or (0, b"")
            record = OrdersRecord.unpack(payload)
            if record.run_id != self._identity.run_id:
                raise RuntimeError(
                    f"orders of run {record.run_id} in the mailbox of run {self._identity.run_id}"
                )
            self._orders_seen, self._orders = sequence, record.orders
        return self._orders

    def _begin_answers(self, plan: Plan, orders: Orders) -> dict[int, UpdateHeader]:
        """Headers of the answers that are written at this boundary; one whose slot is in use waits for a
        later one.
        """
        headers = {}
        lease, cursor = self._position
        for fragment, round_ in plan.answer:
            if fragment in self._writing or self._outbox.begin(fragment) is None:
                continue
            snapshot = self.clock.answered(fragment, round_)
            self._answers += 1
            self._writing.add(fragment)
            headers[fragment] = UpdateHeader(
                run_id=self._identity.run_id,
                island=self._identity.island,
                incarnation=self._identity.incarnation,
                fragment=fragment,
                round=round_,
                base=snapshot.base,
                steps=snapshot.steps,
                tokens=snapshot.tokens,
                update_id=self._identity.update_id(self._answers),
                lease=lease,
                cursor=cursor,
                numel=self._outbox.numels[fragment],
            )
        return headers

    def _begin_adoptions(self, plan: Plan, orders: Orders, answering: set[int]) -> dict[int, Adopt]:
        """The versions that are adopted at this boundary; one that cannot be pinned, or is measured from an
        answer that is not whole yet, waits for a later one.
        """
        adopt = {}
        for fragment, version in plan.adopt:
            if self.clock.adoption == "none":
                self.clock.adopted(fragment, version, orders)
                continue
            if fragment in self._adopting or (fragment in self._writing and fragment not in answering):
                continue
            if not self._inbox.pin(fragment, version):
                continue
            self._adopting.add(fragment)
            known = self.clock.has_snapshot(fragment) and fragment not in answering
            adopt[fragment] = Adopt(version, self._snapshots[fragment] if known else None)
            self.clock.adopted(fragment, version, orders)
        return adopt

    def _then(self, plan: Plan, stop: bool, answered: bool) -> Then:
        if stop or plan.end == "stop":
            return Then.STOP
        if plan.end == "drain":
            return Then.DRAINED if answered else Then.WAIT
        return Then.STEP

    def _finish(
        self, adopt: dict[int, Adopt], headers: dict[int, UpdateHeader], gift: MomentsHeader | None
    ) -> None:
        """All ranks have written and read: make the answers and the gift visible and give the inbox free."""
        for fragment, header in headers.items():
            if self.routed is not None:
                header = replace(header, expert_tokens=self.routed(fragment, header.tokens))
            # Update ids rise over all incarnations, so they serve as versions of the outbox too.
            self._outbox.commit(fragment, header.update_id, header.pack())
            self._snapshots[fragment] = header.update_id
            self._writing.discard(fragment)
        if gift is not None:
            self.giving.commit(gift)
        for fragment in adopt:
            self._inbox.unpin(fragment)
            self._adopting.discard(fragment)

    @property
    def _position(self) -> Position:
        return self.reading.position if self.reading is not None else (0, 0)

    @property
    def orders(self) -> Orders:
        """The orders of the last boundary."""
        return self._orders

    def report(self, phase: LearnerPhase) -> None:
        """Write the report register."""
        with self._reporting:
            self._mailbox.report.write(self._record(phase).pack())

    def _record(self, phase: LearnerPhase) -> ReportRecord:
        clock, progress, identity, reading = self.clock, self.progress, self._identity, self.reading
        lease, cursor = self._position
        report = Report(
            island=identity.island,
            incarnation=identity.incarnation,
            phase=phase,
            step=clock.step,
            tokens=clock.trained,
            step_time=progress.step_time,
            c_steps=clock.c_steps(),
            c_tokens=clock.c_tokens(),
            base=clock.base,
            lease=lease,
            cursor=cursor,
            reserve=reading.reserve if reading else 0,
            step_blocks=reading.step_blocks if reading else 0,
            gives=int(self.giving.able),
            asks=self._asks[0],
            portion=self._asks[1],
        )
        return ReportRecord(
            run_id=identity.run_id,
            layout_digest=identity.layout_digest,
            report=report,
            loss=progress.loss,
            tokens_per_s=progress.tokens_per_s,
            lr_tokens=progress.lr_tokens,
        )

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps of the exchange: JSON-able."""
        return {
            "clock": self.clock.state(),
            "lr_tokens": self.progress.lr_tokens,
            "step_time": self.progress.step_time,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Take `state()` back."""
        self.clock.restore(state["clock"])
        self.progress.lr_tokens = int(state["lr_tokens"])
        self.progress.step_time = float(state["step_time"])
