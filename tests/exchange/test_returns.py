"""Islands give newer global fragments back to a syncer that has lost its memory, over their own links."""

import threading
import time

import pytest
import torch
from played_link import IDENTITY, NUMELS, Ends, InProcessChannel

from diloco_ds.exchange.gathering import gather
from diloco_ds.exchange.link_ends import agent_link, proxy_link
from diloco_ds.exchange.returns import Returner, Returns
from diloco_ds.exchange.traffic import Traffic

CHUNK = 64


@pytest.fixture
def ends(tmp_path):
    """A link over which versions 3, 5, 4, ... of the fragments have come to the island."""
    ends = Ends(tmp_path)
    for fragment in range(len(NUMELS)):
        ends.merge(fragment, held(fragment))
    ends.settle()
    return ends


def held(fragment):
    return (3, 5, 4)[fragment % 3]


class Again:
    """The link is started again while there is no store: the agent's end as always, the proxy's a Returner."""

    def __init__(self, ends, folder, pause_s=0.0):
        self.pause_s = pause_s
        self.channel, other = InProcessChannel.pair()
        self.agent = agent_link(other, ends.island, IDENTITY, chunk=CHUNK)
        self.returner = Returner(self.channel, IDENTITY, folder, Traffic(), chunk=CHUNK)

    def pump(self):
        time.sleep(self.pause_s)
        self.agent.pump()
        self.returner.pump()


def gathered(returns, saved, islands, links, patience_s=20.0):
    """What `gather` returns; the links of `islands` are pumped meanwhile."""
    found = []
    thread = threading.Thread(target=lambda: found.append(gather(returns, saved, islands, patience_s)))
    thread.start()
    while thread.is_alive():
        for link in links:
            link.pump()
    thread.join()
    return found[0]


def test_what_is_newer_comes_back_and_the_link_goes_on_from_there(ends, tmp_path):
    returns = Returns.create(tmp_path / "returned", NUMELS)
    again = Again(ends, tmp_path / "returned")
    found = gathered(returns, [4] * len(NUMELS), ["a"], [again])
    newer = [fragment for fragment in range(len(NUMELS)) if held(fragment) > 4]
    assert sorted(found) == newer
    for fragment in newer:
        back = found[fragment]
        assert (back.island, back.version, back.round, back.merges, back.tokens) == ("a", 5, 5, 3, 64)
        assert torch.equal(back.weights, torch.full((NUMELS[fragment],), 5.0))
    Returns.remove(tmp_path / "returned")
    for fragment in range(len(NUMELS)):
        ends.merge(fragment, 1000)
    proxy = proxy_link(again.channel, ends.syncer, ends.theta, IDENTITY, chunk=CHUNK)
    proxy.meet(again.returner.hello)
    ends.agent, ends.proxy = again.agent, proxy
    ends.settle()
    assert all(ends.island.inbox.version(fragment) == 1000 for fragment in range(len(NUMELS)))


def test_nobody_is_waited_for_longer_than_the_patience(ends, tmp_path):
    returns = Returns.create(tmp_path / "returned", NUMELS)
    assert gather(returns, [0] * len(NUMELS), ["a", "b"], 0.2) == {}
    again = Again(ends, tmp_path / "returned")
    found = gathered(returns, [4] * len(NUMELS), ["a", "silent"], [again], patience_s=3.0)
    assert {back.island for back in found.values()} == {"a"}


def test_an_island_that_does_not_send_is_replaced_by_the_next_best(ends, tmp_path):
    returns = Returns.create(tmp_path / "returned", NUMELS)
    returns.hold("boaster", [9] * len(NUMELS))
    again = Again(ends, tmp_path / "returned")
    found = gathered(returns, [2] * len(NUMELS), ["a", "boaster"], [again], patience_s=3.0)
    assert {fragment: back.version for fragment, back in found.items()} == {
        fragment: held(fragment) for fragment in range(len(NUMELS))
    }


def test_a_slow_link_is_waited_for_as_long_as_it_moves(ends, tmp_path):
    returns = Returns.create(tmp_path / "returned", NUMELS)
    slow = Again(ends, tmp_path / "returned", pause_s=0.3)
    began = time.monotonic()
    found = gathered(returns, [2] * len(NUMELS), ["a"], [slow], patience_s=3.0)
    assert len(found) == len(NUMELS)
    assert time.monotonic() - began > 3.0, "it was not slow enough to prove anything"


def test_a_syncer_killed_while_it_gathers_is_followed_by_one_that_asks_anew(ends, tmp_path):
    first = Returns.create(tmp_path / "returned", NUMELS)
    again = Again(ends, tmp_path / "returned")
    while first.held("a") is None:
        again.pump()
    second = Returns.create(tmp_path / "returned", NUMELS)
    assert not first.is_current()
    assert len(gathered(second, [2] * len(NUMELS), ["a"], [again])) == len(NUMELS)


def test_values_that_are_not_finite_are_not_taken(ends, tmp_path):
    ends.merge(0, 8)
    ends.theta.payload(0, 8)[0] = float("nan")
    ends.settle()
    returns = Returns.create(tmp_path / "returned", NUMELS)
    found = gathered(returns, [4] * len(NUMELS), ["a"], [Again(ends, tmp_path / "returned")])
    assert 0 not in found


def test_a_folder_that_its_syncer_has_removed_is_told_nothing_and_stays_away(tmp_path):
    """The syncer is done while a proxy is about to speak to it."""
    returns = Returns.create(tmp_path / "returned", NUMELS)
    returns.want("a", {0: 3})
    assert returns.wanted("a") == [3, -1, -1]
    Returns.remove(returns.folder)
    returns.hold("a", [3, 5, 4])
    returns.note_progress("a", 17)
    assert (returns.held("a"), returns.wanted("a"), returns.is_current()) == (None, None, False)
    assert list(tmp_path.iterdir()) == []
