"""The link's replication under any interleaving of writers, readers, both ends and kill -9: both ends become equal."""

from __future__ import annotations

import itertools
import shutil
import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from played_link import (
    NUMELS,
    Ends,
    assert_equal_ends,
    orders,
    report,
)

from diloco_ds.exchange.wire import OrdersRecord, ReportRecord

FRAGMENTS = st.integers(0, len(NUMELS) - 1)


class AnyInterleaving(RuleBasedStateMachine):
    """Writers, readers, both ends of the link and kill -9 in any order."""

    def __init__(self):
        super().__init__()
        self.root = Path(tempfile.mkdtemp())
        self.ends = Ends(self.root)
        self.count = itertools.count(1)
        self.begun = set()

    def teardown(self):
        for box in (self.ends.syncer.outbox, self.ends.island.inbox):
            box.clear_pins()
        self.ends.settle()
        assert_equal_ends(self.ends)
        shutil.rmtree(self.root)

    @rule()
    def learner_reports(self):
        self.ends.island.report.write(report(next(self.count)))

    @rule()
    def syncer_orders(self):
        self.ends.syncer.orders.write(orders(next(self.count)))

    @rule(fragment=FRAGMENTS)
    def learner_answers(self, fragment):
        self.ends.answer(fragment, next(self.count))

    @rule(fragment=FRAGMENTS)
    def learner_dies_while_it_answers(self, fragment):
        slot = self.ends.island.outbox.begin(fragment)
        if slot is not None:
            slot[: len(slot) // 2] = -7

    @rule(fragment=FRAGMENTS)
    def syncer_merges(self, fragment):
        self.ends.merge(fragment, next(self.count))

    @rule(fragment=FRAGMENTS)
    def syncer_dies_while_it_merges(self, fragment):
        slot = self.ends.theta.begin(fragment)
        slot[: len(slot) // 2] = -7

    @rule(fragment=FRAGMENTS)
    def syncer_reads_an_update(self, fragment):
        box = self.ends.syncer.outbox
        box.pin(fragment, box.version(fragment))

    @rule(fragment=FRAGMENTS)
    def syncer_has_read(self, fragment):
        self.ends.syncer.outbox.unpin(fragment)

    @rule(fragment=FRAGMENTS)
    def learner_adopts(self, fragment):
        box = self.ends.island.inbox
        box.pin(fragment, box.version(fragment))

    @rule(fragment=FRAGMENTS)
    def learner_has_adopted(self, fragment):
        self.ends.island.inbox.unpin(fragment)

    @rule(times=st.integers(1, 30))
    def agent_runs(self, times):
        for _ in range(times):
            self.ends.agent.pump()

    @rule(times=st.integers(1, 30))
    def proxy_runs(self, times):
        for _ in range(times):
            self.ends.proxy.pump()

    @rule(times=st.integers(1, 30))
    def both_run(self, times):
        for _ in range(times):
            self.ends.agent.pump()
            self.ends.proxy.pump()

    @rule()
    def link_is_killed_and_made_anew(self):
        self.ends.relink()

    @invariant()
    def nothing_is_mixed(self):
        for _, copy in self.ends.copies():
            for fragment in range(len(NUMELS)):
                version = copy.version(fragment)
                if version >= 0:
                    assert (copy.payload(fragment, version) == version).all()

    @invariant()
    def records_are_whole(self):
        for mailbox in (self.ends.syncer, self.ends.island):
            for record, kind in ((mailbox.report, ReportRecord), (mailbox.orders, OrdersRecord)):
                newest = record.read()
                assert newest is None or kind.unpack(newest[1])


TestAnyInterleaving = AnyInterleaving.TestCase
TestAnyInterleaving.settings = settings(max_examples=60, stateful_step_count=40)
