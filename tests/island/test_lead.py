"""What rank 0 decides, over a real mailbox; the weights are the test's."""

import pytest

from diloco_ds.core.events import Gift, Orders
from diloco_ds.core.learner import LearnerClock
from diloco_ds.exchange.fragment_box import FragmentBox
from diloco_ds.exchange.mailbox import Mailbox
from diloco_ds.exchange.wire import MomentsHeader, OrdersRecord, ReportRecord, UpdateHeader
from diloco_ds.island.boundary import Adopt, Then
from diloco_ds.island.giving import Giver, Giving
from diloco_ds.island.lead import Identity, Lead
from diloco_ds.island.portioned_moments import OwnMoments

STEP_TOKENS = 100


class Island:
    """A lead with its mailbox; `decide` is a boundary, which all ranks have carried out unless `finish` is False."""

    def __init__(self, folder, adoption="overwrite", late="merge_next", incarnation=1):
        self.mailbox = Mailbox.open(folder) if folder.exists() else Mailbox.create(folder, [2, 3], inbox=True)
        clock = LearnerClock(2, adoption, late)
        self.lead = Lead(Identity("run-1", "digest", "a", 5, incarnation), self.mailbox, clock)
        self.lead.step_tokens = STEP_TOKENS
        self.lead.begin_from_initial_weights()
        self.lead.continue_from_earlier_report()

    def order(self, phase="run", global_step=0, global_tokens=0, want=(0, 0), run_id="run-1", **more):
        orders = Orders(phase, global_step, global_tokens, want, **more)
        self.mailbox.orders.write(OrdersRecord(run_id, 1, orders).pack())

    def put(self, fragment, version):
        self.mailbox.inbox.begin(fragment).fill_(version)
        self.mailbox.inbox.commit(fragment, version, b"")

    def step(self):
        self.lead.clock.stepped(STEP_TOKENS)

    def decide(self, stop=False, answer=True, finish=True):
        decision, finished = self.lead.decide(stop, answer)
        if finish:
            finished()
        return decision if finish else (decision, finished)

    def header(self, fragment):
        return UpdateHeader.unpack(self.mailbox.outbox.read_header(fragment)[1])


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "box"


def test_without_orders_it_trains(folder):
    decision = Island(folder).decide()
    assert (decision.then, decision.adopt, decision.answer) == (Then.STEP, {}, ())


def test_an_answer_says_what_it_is(folder):
    island = Island(folder, incarnation=3)
    island.order(want=(0, 7))
    island.step()
    assert island.decide().answer == (1,)
    header = island.header(1)
    assert (header.run_id, header.island, header.incarnation, header.fragment) == ("run-1", "a", 3, 1)
    assert (header.round, header.base, header.steps, header.tokens) == (7, 0, 1, 100)
    assert (header.lease, header.cursor, header.numel) == (0, 0, 3)
    assert island.decide().answer == ()  # once is enough
    island.order(want=(8, 8))
    island.step()
    island.decide()
    later = [island.header(fragment).update_id for fragment in (0, 1)]
    assert header.update_id < later[0] < later[1]


def test_update_ids_rise_over_incarnations_and_differ_between_islands():
    first, other, later = (
        Identity("r", "d", name, index, incarnation)
        for name, index, incarnation in (("a", 0, 1), ("b", 1, 1), ("a", 0, 2))
    )
    assert first.update_id(1) < first.update_id(2) < first.update_id(2**31) < later.update_id(1)
    assert first.update_id(9) != other.update_id(9)
    assert Identity("r", "d", "a", 4095, 2**18).update_id(2**32 - 1) < 2**63


def test_nothing_is_visible_before_all_ranks_have_written(folder):
    island = Island(folder)
    island.order(want=(4, 0))
    island.put(1, 2)
    island.step()
    decision, finish = island.decide(finish=False)
    assert (decision.answer, decision.adopt) == ((0,), {1: Adopt(2)})
    assert island.mailbox.outbox.version(0) == -1
    island.order(want=(8, 0))
    island.put(1, 3)  # into the other slot: the one that is being read is pinned
    assert island.mailbox.inbox.begin(1) is None
    island.step()
    again, _ = island.decide(finish=False)
    assert (again.answer, again.adopt) == ((), {})  # both wait for the copies under way
    finish()
    assert island.header(0).round == 4
    later = island.decide()
    assert (later.answer, later.adopt) == ((0,), {1: Adopt(3)})


def test_a_slot_that_is_read_puts_the_answer_off(folder):
    island = Island(folder)
    for round_ in (4, 8):
        island.order(want=(round_, 0))
        island.step()
        island.decide()
        if round_ == 4:
            assert island.mailbox.outbox.pin(0, island.mailbox.outbox.version(0))
    island.order(want=(12, 0))
    island.step()
    assert island.decide().answer == ()
    island.mailbox.outbox.unpin(0)
    island.step()
    assert island.decide().answer == (0,)
    assert island.header(0).steps == 4  # all of them, up to the moment it was written


def test_a_drain_waits_for_the_slot_and_then_ends(folder):
    island = Island(folder)
    for round_ in (4, 8):
        island.order(want=(round_, round_))
        island.step()
        island.decide()
        if round_ == 4:
            assert island.mailbox.outbox.pin(1, island.mailbox.outbox.version(1))
    island.order(phase="drain", want=(12, 12))
    island.step()
    first = island.decide()
    assert (first.then, first.answer) == (Then.WAIT, (0,))
    assert island.decide().then is Then.WAIT
    island.mailbox.outbox.unpin(1)
    last = island.decide()
    assert (last.then, last.answer) == (Then.DRAINED, (1,))


def test_a_stop_answers_nothing(folder):
    island = Island(folder)
    island.order(want=(4, 4))
    island.step()
    decision = island.decide(stop=True)
    assert (decision.then, decision.answer) == (Then.STOP, ())
    island.order(phase="stop", want=(4, 4))
    assert island.decide().then is Then.STOP


def test_an_order_to_stop_from_before_its_life_is_void(folder):
    island = Island(folder)
    island.order(phase="stop")
    successor = Island(folder, incarnation=2)
    assert successor.decide().then is Then.STEP
    island.order(phase="stop", global_step=1)
    assert successor.decide().then is Then.STOP


def test_orders_of_another_run_are_an_error(folder):
    island = Island(folder)
    island.order(run_id="run-2")
    with pytest.raises(RuntimeError, match="run-2"):
        island.decide()


def test_weights_that_are_unsound_are_not_sent(folder):
    island = Island(folder)
    island.order(want=(4, 0))
    island.step()
    assert island.decide(answer=False).answer == ()
    island.step()
    assert island.decide().answer == (0,)
    assert island.header(0).steps == 2


def test_rebase_is_measured_from_the_last_answer(folder):
    island = Island(folder, adoption="rebase")
    island.order(want=(4, 0))
    island.step()
    island.decide()
    sent = island.mailbox.outbox.version(0)
    island.step()
    island.put(0, 1)
    island.put(1, 1)
    assert island.decide().adopt == {0: Adopt(1, sent), 1: Adopt(1, None)}
    assert island.lead.clock.c_steps() == [1, 0]


def test_what_is_sent_and_replaced_at_once_leaves_nothing_to_rebase(folder):
    island = Island(folder, adoption="rebase")
    island.order(want=(4, 0))
    island.step()
    island.put(0, 1)
    decision = island.decide()
    assert (decision.answer, decision.adopt) == ((0,), {0: Adopt(1, None)})
    assert island.header(0).base == 0
    assert island.lead.clock.c_steps()[0] == 0


def test_with_adoption_none_a_version_is_taken_note_of_alone(folder):
    island = Island(folder, adoption="none")
    island.step()
    island.put(0, 1)
    assert island.decide().adopt == {}
    assert island.lead.clock.base == [1, 0]
    assert island.mailbox.inbox.begin(0) is not None  # not pinned


def test_the_learning_rates_tokens_never_fall(folder):
    island = Island(folder)
    assert island.decide().lr_tokens == STEP_TOKENS  # where the next step ends
    island.order(global_tokens=5000)
    assert island.decide().lr_tokens == 5000
    island.order(global_tokens=3000)
    assert island.decide().lr_tokens == 5000
    island.lead.report("running")
    successor = Island(folder, incarnation=2)
    assert successor.decide().lr_tokens == 5000


def test_a_report_says_where_the_island_stands(folder):
    island = Island(folder)
    island.step()
    island.put(1, 3)
    island.order(global_step=20)
    island.decide()
    island.lead.report("running")
    record = ReportRecord.unpack(island.mailbox.report.read()[1])
    assert record.layout_digest == "digest"
    report = record.report
    assert (report.island, report.incarnation, report.phase, report.step) == ("a", 1, "running", 20)
    assert (report.tokens, list(report.c_steps), list(report.c_tokens)) == (100, [1, 0], [100, 0])
    assert list(report.base) == [0, 3]


def test_state_goes_through_a_checkpoint(folder):
    island = Island(folder)
    island.step()
    island.decide()
    state = island.lead.state()
    restored = Island(folder.with_name("other"), incarnation=2)
    restored.lead.restore(state)
    assert restored.lead.state() == state
    assert restored.lead.clock.c_steps() == [1, 1]
    restored.step()
    restored.lead.report("running")
    record = ReportRecord.unpack(restored.mailbox.report.read()[1])
    assert (restored.lead.clock.tokens, record.report.tokens) == (200, 100), (
        "its own, and those of this incarnation"
    )


def test_moments_are_given_when_the_clock_is_reached_and_once(folder):
    island = Island(folder, incarnation=3)
    island.lead.giving.own = lambda: OwnMoments("adam", 17)
    gift = Gift("b", 2, request=1, portion=4, clock=(1, 0))
    island.order(gift=gift)
    assert island.decide().give == -1, "version 1 of fragment 0 was not adopted yet"
    island.put(0, 1)
    assert island.decide().give == 4
    header = MomentsHeader.unpack(island.mailbox.given.read_header(0)[1])
    assert header == MomentsHeader("run-1", "a", 3, "b", 2, 1, 4, 17, (1, 0), "adam")
    assert island.decide().give == -1
    island.order(gift=Gift("b", 2, request=2, portion=0, clock=(1, 0)))
    decision, finish = island.decide(finish=False)
    assert decision.give == 0
    island.order(gift=Gift("b", 2, request=3, portion=1, clock=(1, 0)))
    assert island.decide().give == -1, "the ranks still write the one before"
    finish()
    assert island.decide().give == 1


def test_what_is_not_worth_sending_is_not_given(folder):
    island = Island(folder)
    island.order(gift=Gift("b", 2, request=1, portion=0, clock=(0, 0)))
    assert island.decide().give == -1, "there are no moments"
    island.lead.giving.own = lambda: OwnMoments("adam", 17)
    assert island.decide(answer=False).give == -1, "the loss is not finite"
    assert island.decide(stop=True).give == -1
    assert island.decide().give == 0


def test_a_report_says_what_there_is_to_give_and_what_is_asked_for(folder):
    island = Island(folder)
    island.lead.ask(3, 1)
    report = ReportRecord.unpack(island.mailbox.report.read()[1]).report
    assert (report.phase, report.gives, report.asks, report.portion) == ("starting", 0, 3, 1)
    island.lead.giving.own = lambda: OwnMoments("adam", 17)
    island.lead.ask(0, 0)
    island.lead.stepped()
    island.lead.report("running")
    report = ReportRecord.unpack(island.mailbox.report.read()[1]).report
    assert (report.gives, report.asks) == (1, 0)


def test_an_optimizer_that_keeps_no_moments_is_not_looked_at_for_ever(tmp_path):
    looks = []
    giving = Giving(Giver("run", "a", 1), FragmentBox.create(tmp_path / "given", [4], 1024))
    giving.own = lambda: looks.append(None)
    for _ in range(1000):
        giving.stepped()
    assert (giving.able, len(looks)) == (False, 100)
