"""Who gives its optimizer's moments to an island that starts without any: decided by the syncer, each time with a reason."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco_ds.config import Exchange
from diloco_ds.core import events as ev
from diloco_ds.core.fragments import TensorSpec, balance
from diloco_ds.core.syncer import Syncer

LEASE = 10.0
LAYOUT = balance([TensorSpec(f"w{i}", (8,), embedding=False) for i in range(2)], 2, 2)


def running_for_long(*islands, versions=(7, 7)):
    """A syncer that goes on from these versions, and has heard of nobody yet."""
    syncer = Syncer(LAYOUT, Exchange(fragments=2, period=2, overlap=1), budget=10**9, lease=LEASE)
    for island in islands:
        syncer.step(ev.Joined(island), 0.0)
    for fragment, version in enumerate(versions):
        syncer.restore(fragment, version=version, round=20, merged_tokens=100, merged_base={}, counts={})
    return syncer


def report(island, phase="running", base=(7, 7), incarnation=1, **more):
    step = 30 if phase == "running" else 0
    return ev.Report(island, incarnation, phase, step, 10 * step, 1.0, (1, 1), (10, 10), base, **more)


def able(island, **changes):
    return replace(report(island, gives=1), **changes)


def starting(island, **more):
    return report(island, "starting", (0, 0), **more)


def asking(island, request=1, portion=0, incarnation=2):
    return starting(island, incarnation=incarnation, asks=request, portion=portion)


def named(syncer, event, now=1.0):
    """Who is named in answer to the event: None as long as it is open, '' for nobody."""
    actions = syncer.step(event, now)
    return next((action.giver for action in actions if isinstance(action, ev.NameGiver)), None)


def test_the_peer_that_has_seen_most_is_named_and_told_what_to_give():
    syncer = running_for_long("a", "b", "c")
    syncer.step(able("b", base=(6, 7)), 0.0)
    syncer.step(able("c", step_time=0.5), 0.0)
    (action,) = [a for a in syncer.step(asking("a", portion=1), 1.0) if isinstance(a, ev.NameGiver)]
    assert (action.island, action.giver) == ("a", "c")
    assert action.reason == "c trains, and holds every fragment in the newest version"
    peer = syncer.orders("a").peer
    assert (peer.incarnation, peer.name, peer.giver_incarnation) == (2, "c", 1)
    assert (peer.clock, peer.step_time) == ((7, 7), 0.5)
    assert syncer.orders("c").gift == ev.Gift("a", 2, 1, 1, (7, 7))
    assert syncer.orders("b").gift == ev.Gift()
    assert named(syncer, asking("a", request=2, portion=0)) is None, "said once"
    assert syncer.orders("c").gift == ev.Gift("a", 2, 2, 0, (7, 7))
    syncer.step(asking("a", request=0), 2.0)
    assert syncer.orders("c").gift == ev.Gift(), "it has all it asked for"


def test_in_a_run_that_has_just_begun_nobody_waits():
    syncer = running_for_long("a", "b", versions=(1, 0))
    syncer.step(able("b", base=(1, 0)), 0.0)
    assert named(syncer, asking("a", incarnation=1)) == ""
    assert syncer.orders("a").peer.reason == "the run has just begun"


@pytest.mark.parametrize(
    "other",
    [
        report("b"),  # of an optimizer that has nothing to give
        able("b", phase="drained"),
        asking("b", incarnation=1),
    ],
)
def test_where_nobody_can_ever_give_it_is_said_at_once(other):
    syncer = running_for_long("a", "b")
    syncer.step(other, 0.0)
    assert named(syncer, asking("a")) == ""
    assert syncer.orders("a").peer == ev.Peer(incarnation=2, reason="no other island has moments to give")


@pytest.mark.parametrize("other", [able("b", base=(5, 7)), starting("b")])
def test_who_may_be_able_soon_is_waited_for(other):
    syncer = running_for_long("a", "b")
    syncer.step(other, 0.0)
    assert named(syncer, asking("a")) is None
    assert syncer.orders("a").peer == ev.Peer(), "open"
    syncer.step(able("b"), 1.5)
    assert named(syncer, asking("a"), 2.0) == "b"


def test_a_new_syncer_waits_one_lease_for_those_it_has_not_heard_of():
    syncer = running_for_long("a", "b")
    assert named(syncer, asking("a"), 1.0) is None
    assert named(syncer, asking("a"), 0.9 + LEASE) is None
    assert named(syncer, asking("a"), 1.1 + LEASE) == ""


def test_one_gives_to_one_at_a_time():
    syncer = running_for_long("a", "b", "c")
    syncer.step(able("b"), 0.0)
    assert named(syncer, asking("a")) == "b"
    assert named(syncer, asking("c")) is None
    syncer.step(able("a", incarnation=2), 2.0)
    syncer.step(able("b"), 2.0)
    assert named(syncer, asking("c"), 2.0) in ("a", "b")


def test_when_the_giver_is_lost_another_one_is_named():
    syncer = running_for_long("a", "b", "c")
    syncer.step(able("b"), 0.0)
    syncer.step(able("c", base=(6, 7)), 0.0)
    assert named(syncer, asking("a")) == "b"
    syncer.step(starting("b", incarnation=2), 2.0)
    assert named(syncer, asking("a"), 2.0) == "c"
    assert syncer.orders("b").gift == ev.Gift()
    syncer.step(ev.Left("c", "gone"), 3.0)
    syncer.step(asking("b"), 3.0)
    assert named(syncer, asking("a"), 3.0) == ""


def test_who_asked_and_died_holds_nobody():
    syncer = running_for_long("a", "b", "c")
    syncer.step(able("b"), 0.0)
    assert named(syncer, asking("a")) == "b"
    syncer.step(able("b"), 2.0 + LEASE)
    assert named(syncer, asking("c"), 2.0 + LEASE) == "b"
    assert syncer.orders("b").gift.island == "c"


peers = st.builds(
    lambda base, gives, phase: (base, gives, phase),
    st.tuples(st.integers(-1, 7), st.integers(-1, 7)),
    st.booleans(),
    st.sampled_from(["starting", "running", "drained", "stopped"]),
)


@given(st.lists(peers, min_size=1, max_size=5), st.booleans())
def test_only_who_has_seen_the_clock_is_named(others, leaves):
    names = "bcdefg"[: len(others)]
    syncer = running_for_long("a", *names)
    for name, (base, gives, phase) in zip(names, others, strict=True):
        syncer.step(report(name, phase, base, gives=int(gives)), 0.0)
    if leaves:
        syncer.step(ev.Leave("b"), 0.0)
    fit = [
        name
        for name, (base, gives, phase) in zip(names, others, strict=True)
        if phase == "running" and gives and min(base) >= 6 and not (leaves and name == "b")
    ]
    giver = named(syncer, asking("a"))
    assert (giver in fit) if fit else not giver
    assert [name for name in names if syncer.has(name) and syncer.orders(name).gift.request] == (
        [giver] if fit else []
    )
    if fit:
        assert syncer.orders("a").peer.clock == (7, 7)
