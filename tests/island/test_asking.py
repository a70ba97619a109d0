"""A learner without moments asks for those of a peer: what it takes, what it refuses, and that it does not wait for ever."""

import pytest

from diloco_ds.core.events import Orders, Peer
from diloco_ds.core.learner import LearnerClock
from diloco_ds.exchange.mailbox import Mailbox
from diloco_ds.exchange.wire import MomentsHeader, OrdersRecord, ReportRecord, request_version
from diloco_ds.island.asking import Asking, take_from_peer
from diloco_ds.island.lead import Identity, Lead

NUMELS = (5, 7)
PORTIONS = 4
ME = 2
"""Incarnation of the learner that asks."""
PEER = Peer(ME, "b", 1, 0.0, (7, 7), "b trains")
NOBODY = Peer(ME, reason="no other island has moments to give")


class Island:
    """Rank 0 of an island that asks, the only rank. The test answers each request while it waits for it."""

    def __init__(self, folder, patience_s=60.0):
        self.mailbox = Mailbox.create(folder, NUMELS, inbox=True)
        lead = Lead(
            Identity("run-1", "digest", "a", 5, ME), self.mailbox, LearnerClock(2, "overwrite", "drop")
        )
        self.stopped = False
        fits = lambda optimizer: optimizer == "adam"  # noqa: E731
        self.asking = Asking(lead, self.mailbox.taken, PORTIONS, patience_s, fits, self.stops)
        self.answers = {}
        """By request: what is done when it is waited for, once."""
        self.taken = []
        self.forgotten = False

    # -- in place of the syncer and the link

    def stops(self):
        report = ReportRecord.unpack(self.mailbox.report.read()[1]).report
        self.answers.pop(report.asks, lambda: None)()
        return self.stopped

    def order(self, peer, phase="run", reader=ME):
        orders = Orders(phase, 0, 0, (0, 0), reader, peer=peer)
        self.mailbox.orders.write(OrdersRecord("run-1", 1, orders).pack())

    def put(self, request, portion, value=1.0, **changes):
        given = {"island": "b", "incarnation": 1, "steps": 100 + request, "base": (7, 8), "optimizer": "adam"}
        header = MomentsHeader(
            run_id="run-1",
            to_island="a",
            to_incarnation=ME,
            request=request,
            portion=portion,
            **{**given, **changes},
        )
        self.mailbox.taken.begin(0).fill_(value)
        self.mailbox.taken.commit(0, header.version, header.pack())

    # -- in place of the engine

    def broadcast_start(self, values):
        self.values = values

    def broadcast_wait(self):
        return self.values

    def take_moments(self, portion, source, steps):
        self.taken.append((portion, source[0].item(), steps))

    def forget_moments(self):
        self.forgotten = True

    def least(self, values):
        return values

    def take(self):
        take_from_peer(self, self.mailbox.taken, self.asking)
        report = ReportRecord.unpack(self.mailbox.report.read()[1]).report
        assert report.asks == 0, "nobody is asked any more"
        assert self.mailbox.taken.begin(0) is not None, "nothing is pinned"
        return self.asking


@pytest.fixture
def island(tmp_path):
    return Island(tmp_path / "box")


def test_all_portions_of_the_peer_are_taken(island):
    island.order(PEER)
    for request in range(1, PORTIONS + 1):
        island.answers[request] = lambda n=request: island.put(n, n - 1, float(n))
    asking = island.take()
    assert island.taken == [(0, 1, 101), (1, 2, 101), (2, 3, 101), (3, 4, 101)], "the steps of the first one"
    assert asking.told == "optimizer moments of b, of 104 steps, with versions 7 to 8"
    assert (asking.why_not, island.forgotten) == ("", False)


def test_where_nobody_gives_it_goes_on_at_once(island):
    island.order(NOBODY)
    asking = island.take()
    assert (asking.told, asking.why_not) == ("", NOBODY.reason)
    assert island.taken == []


def test_the_words_for_an_earlier_life_are_not_for_this_one(island):
    island.order(Peer(ME - 1, reason="no other island has moments to give"))
    island.answers[1] = lambda: island.order(Peer(ME, reason="nobody now"))
    assert island.take().why_not == "nobody now"


def test_of_another_peer_all_is_asked_anew(island):
    island.order(PEER)
    island.answers[1] = lambda: island.put(1, 0)
    island.answers[2] = lambda: island.order(Peer(ME, "c", 4, 0.0, (8, 8)))
    for request in range(3, 3 + PORTIONS):
        island.answers[request] = lambda n=request: island.put(
            n, n - 3, float(n), island="c", incarnation=4, base=(8, 8)
        )
    asking = island.take()
    assert island.taken == [(0, 1, 101), (0, 3, 103), (1, 4, 103), (2, 5, 103), (3, 6, 103)]
    assert asking.told.startswith("optimizer moments of c")


def test_a_peer_that_is_lost_in_the_middle_leaves_fresh_moments(island):
    island.order(PEER)
    island.answers[1] = lambda: island.put(1, 0)
    island.answers[2] = lambda: island.order(NOBODY)
    asking = island.take()
    assert len(island.taken) == 1
    assert (island.forgotten, asking.told, asking.why_not) == (True, "", NOBODY.reason)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"optimizer": "sgd"}, "another optimizer, sgd"),
        ({"base": (7, 6)}, "of versions (7, 6), older than (7, 7)"),
        ({"value": float("nan")}, "not finite"),
    ],
)
def test_what_does_not_fit_is_refused_with_all_the_rest(island, changes, why):
    island.order(PEER)
    island.answers[1] = lambda: island.put(1, 0)
    island.answers[2] = lambda: island.put(2, 1, **changes)
    asking = island.take()
    assert island.forgotten
    assert asking.told == ""
    assert why in asking.why_not
    assert len(island.taken) == 1


def test_what_another_life_of_the_peer_gave_is_left_alone(island):
    island.order(PEER)
    island.answers[1] = lambda: (island.put(1, 0, incarnation=9), island.order(NOBODY))
    island.take()
    assert island.taken == []


@pytest.mark.parametrize("reader", [ME, ME - 1])
def test_it_does_not_wait_for_ever(tmp_path, reader):
    island = Island(tmp_path / "box", patience_s=0.05)
    island.order(PEER, reader=reader)
    island.answers[1] = lambda: island.put(1, 0)
    asking = island.take()
    assert asking.why_not == "nothing came from b for 0 s"
    assert island.forgotten


@pytest.mark.parametrize("how", ["stopped", "orders"])
def test_a_stop_ends_the_wait(island, how):
    island.order(PEER)

    def stop():
        if how == "stopped":
            island.stopped = True
        else:
            island.order(PEER, phase="stop")

    island.answers[1] = stop
    assert island.take().why_not == "it is to end"


def test_a_request_is_never_taken_for_another():
    assert request_version(2, 1) > request_version(1, 2**31)
