"""The syncer as a process names who gives moments to an island that has none, and so does the next one after its death."""

from functools import partial

from syncer_run import PlayedLearner, both, events, play, tape, versions_at_least

from diloco_ds.core.events import Gift


def test_a_giver_is_named_by_each_syncer_and_what_is_asked_for_reaches_it(new_run):
    run = new_run()
    first = run.start()
    learners = both(run)
    giver = learners[1]
    giver.report = partial(giver.report, gives=1)
    play(run, learners, versions_at_least(learners[0], 2))
    asker = PlayedLearner(run, "a", incarnation=2)
    asker.step = lambda: None
    for portion in (0, 1):
        asker.report(phase="starting", asks=portion + 1, portion=portion)
        play(run, [giver, asker], lambda: giver.orders.gift.request == portion + 1)  # noqa: B023
        assert giver.orders.gift == Gift("a", 2, portion + 1, portion, asker.orders.peer.clock)
    assert min(asker.orders.peer.clock) >= 2
    assert (asker.orders.peer.name, asker.orders.peer.giver_incarnation) == ("b", 1)

    run.kill(first)
    run.start()
    asker.report(phase="starting", asks=3, portion=2)
    asker.step = lambda: asker.report(phase="starting", asks=3, portion=2)  # its heartbeat
    play(run, [giver, asker], lambda: giver.orders.gift.request == 3)
    assert giver.orders.gift == Gift("a", 2, 3, 2, asker.orders.peer.clock)
    assert asker.orders.peer.name == "b"

    giver.phase = "stopped"
    giver.report()
    play(run, [asker], lambda: not asker.orders.peer.name)
    assert asker.orders.peer.reason == "no other island has moments to give"
    assert giver.orders.gift == Gift()
    assert [value.giver for kind, value, _ in tape(run) if kind == "NameGiver"] == ["b", "b", ""]
    assert len(events(run, "moments")) == 2
