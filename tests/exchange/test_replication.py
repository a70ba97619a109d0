"""The link's replication, without MPI: whatever happens in whatever order, both ends become equal and nothing
is mixed.
"""

from __future__ import annotations

import itertools
import logging

import pytest
from played_link import (
    IDENTITY,
    NUMELS,
    ON_THE_WAY,
    Ends,
    assert_equal_ends,
    orders,
    report,
    theta_header,
    update_header,
)

from diloco_ds.errors import UserError
from diloco_ds.exchange.channel import InProcessChannel
from diloco_ds.exchange.fragment_box import FragmentBox
from diloco_ds.exchange.link_ends import agent_link, proxy_link
from diloco_ds.exchange.mailbox import META_CAPACITY
from diloco_ds.exchange.replication import LinkIdentity


@pytest.fixture
def ends(tmp_path):
    return Ends(tmp_path)


def test_both_ways(ends):
    ends.island.report.write(report(3))
    ends.syncer.orders.write(orders(4))
    ends.answer(1, 10)
    ends.merge(2, 20)
    ends.settle()
    assert ends.syncer.report.read()[1] == report(3)
    assert ends.island.orders.read()[1] == orders(4)
    assert ends.syncer.outbox.read_header(1) == (10, update_header(1, 10))
    assert ends.island.inbox.read_header(2) == (20, theta_header(20, extra=ON_THE_WAY)), (
        "the rest stays at home"
    )
    assert_equal_ends(ends)
    for link in (ends.agent, ends.proxy):
        assert link.traffic.fragments_sent == link.traffic.fragments_received == 1
        assert link.traffic.dropped == link.traffic.torn == 0
    assert ends.agent.traffic.bytes_sent == 4 * NUMELS[1]
    assert ends.agent.traffic.bytes_received == 4 * NUMELS[2]


def test_only_what_is_newer_travels_after_a_restart(ends):
    ends.island.report.write(report(3))
    for fragment in range(3):
        ends.answer(fragment, 10)
        ends.merge(fragment, 20)
    ends.settle()
    ends.relink()
    ends.answer(1, 11)
    ends.settle()
    assert ends.agent.traffic.fragments_sent == 1
    assert ends.proxy.traffic.fragments_sent == 0
    assert ends.agent.traffic.records_sent == 0
    assert ends.syncer.report.sequence() == 1
    assert_equal_ends(ends)


def test_a_report_written_while_the_link_was_down(ends):
    ends.island.report.write(report(3))
    ends.settle()
    ends.island.report.write(report(4))
    ends.relink()
    ends.settle()
    assert ends.syncer.report.read() == (2, report(4))


def test_the_same_report_again_is_a_heartbeat(ends):
    for _ in range(3):
        ends.island.report.write(report(3))
        ends.settle()
    assert ends.syncer.report.sequence() == 3


def test_old_reports_do_not_queue_up(ends):
    ends.settle()
    for step in range(100):
        ends.island.report.write(report(step))
        ends.agent.pump()
    ends.settle()
    assert ends.syncer.report.read()[1] == report(99)
    assert ends.syncer.report.sequence() == 2, "one under way, and the newest"


def pump_until_begun(ends, version):
    """Run the link until the first chunk of fragment 1 has arrived in the inbox."""
    for _ in range(1000):
        ends.agent.pump()
        ends.proxy.pump()
        if ends.island.inbox.begun(1)[0] == version:
            return
    raise AssertionError("the transfer never began")


def test_a_fragment_overwritten_on_its_way_is_given_up_and_the_newer_one_sent(ends):
    ends.merge(1, 1)
    ends.merge(1, 2)
    ends.settle()
    ends.merge(1, 3)
    pump_until_begun(ends, 3)
    ends.merge(1, 4)
    ends.merge(1, 5)
    ends.settle()
    assert ends.proxy.traffic.torn == ends.agent.traffic.torn == 1
    assert ends.island.inbox.version(1) == 5
    assert_equal_ends(ends)


@pytest.mark.parametrize("fragment", [0, 1])
def test_a_fragment_may_be_overwritten_at_any_moment(tmp_path, fragment):
    """Twice in a row, so that the slot on its way is filled anew, after every possible number of steps."""
    for steps in range(40):
        root = tmp_path / str(steps)
        root.mkdir()
        ends = Ends(root)
        ends.merge(fragment, 1)
        pumps = itertools.cycle((ends.agent.pump, ends.proxy.pump))
        for step in range(400):
            if step == steps:
                ends.merge(fragment, 2)
                ends.merge(fragment, 3)
            next(pumps)()
            held = ends.island.inbox.version(fragment)
            assert held < 0 or (ends.island.inbox.payload(fragment, held) == held).all()
        assert ends.island.inbox.version(fragment) == 3


def test_an_update_on_its_way_is_pinned(ends):
    ends.answer(1, 1)
    ends.settle()
    assert ends.answer(1, 2)
    while ends.syncer.outbox.begun(1)[0] != 2:
        ends.agent.pump()
        ends.proxy.pump()
    assert ends.answer(1, 3), "the other slot is free"
    assert not ends.answer(1, 4), "the slot on its way is not"
    ends.settle()
    assert ends.agent.traffic.torn == 0
    assert ends.syncer.outbox.version(1) == 3
    assert ends.answer(1, 4), "the pin is gone with the transfer"


def test_a_dead_agents_pin_goes_with_its_successor(ends):
    ends.answer(1, 1)
    ends.settle()
    ends.answer(1, 2)
    while ends.syncer.outbox.begun(1)[0] != 2:
        ends.agent.pump()
        ends.proxy.pump()
    ends.answer(1, 3)
    assert not ends.answer(1, 4)
    ends.relink()
    assert ends.answer(1, 4)
    ends.settle()
    assert ends.syncer.outbox.version(1) == 4


def test_a_pinned_fragment_does_not_hold_up_the_others(ends):
    for version in (1, 2):
        ends.answer(1, version)
        ends.settle()
        assert ends.syncer.outbox.pin(1, 1)
    ends.answer(1, 3)
    ends.settle()
    assert ends.syncer.outbox.version(1) == 2, "version 1 is pinned, so there is no room for 3"
    ends.answer(0, 4)
    ends.island.report.write(report(9))
    ends.settle()
    assert ends.syncer.outbox.version(0) == 4
    assert ends.syncer.report.read()[1] == report(9)
    ends.syncer.outbox.unpin(1)
    ends.settle()
    assert_equal_ends(ends)


def test_records_pass_between_the_chunks_of_a_fragment(ends):
    ends.merge(1, 1)
    pump_until_begun_first(ends)
    ends.syncer.orders.write(orders(5))
    while ends.island.orders.sequence() == 0:
        ends.agent.pump()
        ends.proxy.pump()
    assert ends.island.inbox.version(1) == -1


def pump_until_begun_first(ends):
    while ends.proxy.traffic.fragments_sent == 0 and ends.island.inbox.begun(1)[0] != 1:
        ends.agent.pump()
        ends.proxy.pump()


@pytest.mark.parametrize(
    "other",
    [
        LinkIdentity("other-run", "layout", "a", NUMELS),
        LinkIdentity("run", "other-layout", "a", NUMELS),
    ],
)
def test_an_end_of_another_run_or_layout_is_not_listened_to(ends, other, caplog):
    ends.relink(agent_identity=other)
    ends.island.report.write(report(1))
    ends.answer(0, 1)
    ends.merge(0, 1)
    ends.settle()
    assert not ends.proxy.connected
    assert not ends.agent.connected
    assert ends.proxy.traffic.dropped == ends.agent.traffic.dropped == 1
    assert ends.syncer.report.sequence() == 0
    assert ends.syncer.outbox.version(0) == ends.island.inbox.version(0) == -1
    assert "other" in caplog.text


@pytest.mark.parametrize(
    "foreign",
    [
        report(2, run_id="other"),
        report(2, layout="other"),
        report(2, island="b"),
        report(2)[:-1],
        b"noise",
        orders(2),
    ],
)
def test_a_foreign_report_is_dropped_counted_and_said_once(ends, foreign, caplog):
    ends.island.report.write(report(1))
    ends.settle()
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            ends.island.report.write(foreign)
            ends.settle()
    assert ends.syncer.report.read()[1] == report(1)
    assert ends.proxy.traffic.dropped == 3
    assert len(caplog.records) == 1
    ends.island.report.write(report(2))
    ends.settle()
    assert ends.syncer.report.read()[1] == report(2)


@pytest.mark.parametrize(
    "foreign",
    [
        update_header(1, 1, run_id="other"),
        update_header(1, 1, island="b"),
        update_header(0, 1),
        update_header(1, 1, numel=39),
        b"noise",
    ],
)
def test_a_foreign_update_is_dropped(ends, foreign):
    ends.answer(1, 1, meta=foreign)
    ends.settle()
    assert ends.syncer.outbox.version(1) == -1
    assert ends.proxy.traffic.dropped == 1
    ends.answer(1, 2)
    ends.settle()
    assert ends.syncer.outbox.version(1) == 2


@pytest.mark.parametrize("foreign", [theta_header(1, run_id="other"), b"noise"])
def test_a_foreign_global_fragment_is_dropped(ends, foreign):
    ends.merge(1, 1, meta=foreign)
    ends.settle()
    assert ends.island.inbox.version(1) == -1
    assert ends.agent.traffic.dropped + ends.proxy.traffic.dropped == 1
    ends.merge(1, 2)
    ends.settle()
    assert ends.island.inbox.version(1) == 2


def test_orders_of_a_replaced_syncer_are_dropped(ends):
    for generation, step in ((2, 10), (1, 11), (2, 12)):
        ends.syncer.orders.write(orders(step, generation=generation))
        ends.settle()
        expected = 10 if generation == 1 else step
        assert ends.island.orders.read()[1] == orders(expected, generation=2)
    assert ends.agent.traffic.dropped == 1


def test_an_end_that_does_not_fit_the_layout_is_refused(tmp_path, ends):
    one, _ = InProcessChannel.pair()
    with pytest.raises(UserError, match="not those of the run's layout"):
        agent_link(one, ends.island, LinkIdentity("run", "layout", "a", (3, 40)))
    with pytest.raises(UserError, match="has no inbox"):
        agent_link(one, ends.syncer, IDENTITY)
    small = FragmentBox.create(tmp_path / "small", [n - 1 for n in NUMELS], META_CAPACITY)
    with pytest.raises(UserError, match="not those of the run's layout"):
        proxy_link(one, ends.syncer, small, IDENTITY)
