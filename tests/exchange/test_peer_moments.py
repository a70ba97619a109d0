"""A portion of moments on its way from one island's mailbox to another's: two links, played in one process."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from played_link import NUMELS, Ends, assert_equal_ends, update_header

from diloco_ds.core.events import Orders, Peer
from diloco_ds.core.portions import Portions
from diloco_ds.exchange.wire import MomentsHeader, OrdersRecord, request_version

PORTIONS = Portions(NUMELS)


class TwoIslands:
    """`a` has started without moments, `b` gives its own."""

    def __init__(self, root):
        self.a, self.b = Ends(root, "a"), Ends(root, "b")
        self.given = 0

    def name(self, peer="b", incarnation=2):
        """The syncer tells `a` who gives."""
        orders = Orders("run", 1, 0, (0,) * len(NUMELS), peer=Peer(incarnation, peer, 1))
        self.a.syncer.orders.write(OrdersRecord("run", 1, orders).pack())

    def give(self, request, seed=None, by=None, **changes):
        """`b` writes a portion for a request of `a`; the values of it."""
        header = MomentsHeader("run", "b", 1, "a", 2, request, request - 1, 100, (7, 7, 7), "{}")
        given = (by or self.b).island.given
        values = torch.randn(PORTIONS.numel, generator=torch.Generator().manual_seed(seed or request))
        given.begin(0).copy_(values)
        self.given += 1
        given.commit(0, self.given, dataclasses.replace(header, **changes).pack())
        return values

    def settle(self):
        """Both links, until nothing moves any more."""
        links = (self.a.agent, self.a.proxy, self.b.agent, self.b.proxy)
        for _ in range(100_000):
            if not sum(link.pump() for link in links):
                return
        raise AssertionError("the links never come to rest")

    def taken(self, request, incarnation=2):
        """The values that have come to `a` for its request, None if they have not."""
        version = request_version(incarnation, request)
        box = self.a.island.taken
        if box.version(0) != version:
            return None
        assert MomentsHeader.unpack(box.meta(0, version)).request == request
        return box.payload(0, version)


@pytest.fixture
def islands(tmp_path):
    return TwoIslands(tmp_path)


def test_every_portion_arrives_bit_for_bit(islands):
    islands.name()
    for request in range(1, PORTIONS.count + 1):
        values = islands.give(request)
        islands.settle()
        assert torch.equal(islands.taken(request), values)
    for link in (islands.a.agent, islands.a.proxy, islands.b.agent, islands.b.proxy):
        assert (link.traffic.torn, link.traffic.dropped) == (0, 0)
        assert link.traffic.fragments_sent == link.traffic.bytes_sent == 0, "counted for itself"
    assert islands.a.agent.traffic.moments_received == PORTIONS.count


def test_fragments_go_first_and_are_not_disturbed(islands):
    islands.name()
    values = islands.give(1)
    for fragment in range(len(NUMELS)):
        islands.a.merge(fragment, 5)
        islands.b.answer(fragment, 9, update_header(fragment, 9, island="b"))
    while islands.b.syncer.given.version(0) < 0:
        islands.b.agent.pump()
        islands.b.proxy.pump()
    assert [islands.b.syncer.outbox.version(p) for p in range(3)] == [9, 9, 9]
    islands.settle()
    assert torch.equal(islands.taken(1), values)
    assert_equal_ends(islands.b)


def test_it_goes_to_nobody_else_and_to_no_earlier_life(islands):
    islands.give(1)
    islands.settle()
    assert islands.a.island.taken.version(0) == -1, "nobody is named yet"
    islands.name(incarnation=3)
    islands.settle()
    assert islands.a.island.taken.version(0) == -1, "it was for incarnation 2"
    values = islands.give(1, to_incarnation=3)
    islands.settle()
    assert torch.equal(islands.taken(1, incarnation=3), values)
    islands.give(1, to_island="c", to_incarnation=3)
    islands.settle()
    assert torch.equal(islands.taken(1, incarnation=3), values)


def test_another_giver_goes_on_from_the_next_request(islands, tmp_path):
    c = Ends(tmp_path, "c")
    islands.name("b")
    islands.give(1)
    islands.settle()
    islands.name("c")
    values = islands.give(2, by=c, island="c")
    for _ in range(100):
        c.agent.pump()
        c.proxy.pump()
    islands.settle()
    assert torch.equal(islands.taken(2), values)


@pytest.mark.parametrize("steps", range(0, 60, 3))
def test_links_may_die_at_any_moment(islands, steps):
    islands.name()
    values = islands.give(1)
    links = (islands.b.agent, islands.b.proxy, islands.a.proxy, islands.a.agent)
    for step in range(steps):
        links[step % 4].pump()
    islands.a.relink()
    islands.b.relink()
    islands.settle()
    assert torch.equal(islands.taken(1), values)


@pytest.mark.parametrize("steps", range(0, 60, 3))
def test_overtaken_on_its_way_it_arrives_whole_or_not_at_all(islands, steps):
    """The giver died, another incarnation writes anew while the first portion is read at the syncer's end."""
    islands.name()
    first = islands.give(1)
    links = (islands.b.agent, islands.b.proxy, islands.a.proxy, islands.a.agent)
    for step in range(steps):
        links[step % 4].pump()
    islands.b.agent.pump()
    islands.b.relink()
    islands.give(2)
    last = islands.give(3)
    for step in range(400):
        links = (islands.b.agent, islands.b.proxy, islands.a.proxy, islands.a.agent)
        links[step % 4].pump()
        for request, values in ((1, first), (3, last)):
            taken = islands.taken(request)
            assert taken is None or torch.equal(taken, values)
    islands.settle()
    assert torch.equal(islands.taken(3), last)


def test_what_is_foreign_is_refused(islands):
    islands.name()
    islands.give(1, run_id="another")
    islands.settle()
    islands.give(1, island="c")
    islands.settle()
    assert islands.b.proxy.traffic.dropped == 2
    assert islands.b.syncer.given.version(0) == -1
