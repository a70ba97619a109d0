"""The ledger by hand. Learners that read what it leases, in all weathers: test_ledger_storm.py."""

from __future__ import annotations

import json

from core.played_ledger import merge, part, report

from diloco_ds.core import events as ev
from diloco_ds.core.ledger import MOST_IN_HAND, NUMBER_GAP, Accounts, Ledger

NOTHING = ()


def hear(ledger, *arguments, serve=True, **changes):
    actions = []
    ledger.hear(report(*arguments, **changes), serve=serve, actions=actions)
    return actions


def settle(ledger, *members, actions=NOTHING, over=False):
    found = list(actions)
    ledger.settle(found, members, over=over)
    return found[len(actions) :]


def given_back(actions):
    return [(a.island, a.lease, a.start, a.size, a.trained) for a in actions if isinstance(a, ev.GiveBack)]


# ---- by hand: 2 fragments, a rotation of 3 steps; a reads 2 blocks a step, so its leases are of 12; epochs of 50 ----


def test_an_island_gets_two_leases_and_a_further_one_when_it_begins_the_second():
    ledger = Ledger(2, 3, 50)
    grants = hear(ledger, "a", phase="starting")
    assert [(g.island, g.lease, g.start, g.size) for g in grants] == [("a", 1, 0, 12), ("a", 2, 12, 12)]
    assert ledger.leases("a") == (1, (1, 0, 12, 2, 12, 12))
    assert hear(ledger, "a", at=(1, 10)) == []
    (third,) = hear(ledger, "a", at=(1, 12))
    assert (third.lease, third.start, third.size) == (3, 24, 12)
    assert ledger.leases("a") == (1, (2, 12, 12, 3, 24, 12)), "what it has read is not named any more"
    assert ledger.accounts() == Accounts(
        50, 1, merged=0, leased=36, free=14, trained_twice=0, reserve=0, lost=0
    )
    grants = hear(ledger, "b", step_blocks=5)
    assert [(g.lease, g.start, g.size) for g in grants] == [(4, 36, 30), (5, 66, 30)], "by its own step"
    assert ledger.accounts() == Accounts(
        50, 2, merged=0, leased=96, free=4, trained_twice=0, reserve=0, lost=0
    )


def test_a_block_is_merged_when_every_fragment_has_merged_an_update_that_had_read_it():
    ledger = Ledger(2, 3, 50)
    hear(ledger, "a")
    merge(ledger, 0, 1, a=(1, 4))
    assert ledger.accounts().merged == 0
    merge(ledger, 1, 1, a=(1, 6))
    assert ledger.accounts().merged == 4
    merge(ledger, 0, 2, a=(2, 2))  # it has read all of lease 1 before
    assert ledger.accounts().merged == 6
    merge(ledger, 1, 2, a=(2, 8))
    assert (ledger.accounts().merged, ledger.accounts().leased) == (14, 10)


def test_a_merge_counts_when_it_is_committed_and_no_block_goes_back_before():
    ledger = Ledger(1, 3, 50)
    hear(ledger, "a")
    hear(ledger, "a", at=(1, 8))
    ledger.merging(0, 1, [part("a", (1, 6))])
    assert ledger.accounts().merged == 0
    ledger.lose("a", "a is silent")
    assert settle(ledger, "a") == []
    assert hear(ledger, "a", 2) == [], "nor is its next incarnation served before"
    ledger.merged(0, 1)
    assert given_back(settle(ledger, "a")) == [("a", 1, 6, 6, 2), ("a", 2, 12, 12, 0)]
    assert ledger.accounts() == Accounts(
        50, 1, merged=6, leased=0, free=44, trained_twice=2, reserve=0, lost=0
    )


def test_what_a_restarted_island_had_is_leased_again_before_anything_new():
    ledger = Ledger(1, 3, 50)
    hear(ledger, "a")
    hear(ledger, "b")  # leases 3 and 4, blocks 24 to 47
    hear(ledger, "a", at=(1, 10))
    merge(ledger, 0, 1, a=(1, 4))
    back, back_too, *grants = hear(ledger, "a", 2)
    assert given_back([back, back_too]) == [("a", 1, 4, 8, 6), ("a", 2, 12, 12, 0)]
    assert [(g.lease, g.start, g.size) for g in grants] == [(5, 4, 12), (6, 16, 8), (7, 48, 12)]
    assert ledger.accounts().trained_twice == 6
    assert ledger.leases("a")[0] == 2
    merge(ledger, 0, 2, a=(1, 8))  # an update of the incarnation before, merged late
    assert ledger.accounts().merged == 4, "its blocks are read again"
    assert hear(ledger, "a", 2, at=(5, 2)) == []


def test_of_an_island_that_leaves_everything_goes_back():
    ledger = Ledger(1, 3, 50)
    hear(ledger, "a")
    hear(ledger, "b")
    gone = ev.Membership("a", False, "left, its last work is merged")
    away = ev.Membership("b", False, "silent for 3 s")
    back = settle(ledger, "b", actions=[gone, away])
    assert given_back(back) == [("a", 1, 0, 12, 0), ("a", 2, 12, 12, 0)]
    assert "its last work is merged" in back[0].reason
    (grant,) = hear(ledger, "b", at=(4, 1))
    assert (grant.lease, grant.start, grant.size) == (5, 0, 12), "and is leased again at once, lowest first"


def test_who_reads_on_in_a_lease_that_went_to_another_is_counted():
    ledger = Ledger(1, 3, 50)
    hear(ledger, "a")
    hear(ledger, "a", at=(1, 4))
    ledger.lose("a", "a is silent")
    settle(ledger, "a")
    assert ledger.accounts().trained_twice == 4
    hear(ledger, "b")
    hear(ledger, "a", at=(2, 2))  # it was only cut off, and has read 8 + 2 blocks meanwhile
    assert ledger.accounts().trained_twice == 4 + 10
    assert ledger.leases("a") == (1, (5, 24, 12, 6, 36, 12))
    hear(ledger, "a", at=(5, 6))
    assert ledger.accounts().trained_twice == 4 + 10, "the rest of what it lost it does not read"


def test_the_reserve_is_trained_twice_and_counted_by_incarnation():
    ledger = Ledger(1, 3, 50)
    hear(ledger, "a", reserve=6)
    hear(ledger, "a", reserve=8)
    hear(ledger, "a", 2, reserve=2)
    assert (ledger.accounts().reserve, ledger.accounts().trained_twice) == (10, 10)


def test_tokens_trained_on_only_grow_over_incarnations_syncers_and_leaving():
    ledger = Ledger(1, 3, 50)
    hear(ledger, "a", tokens=100)
    hear(ledger, "a", tokens=250)
    hear(ledger, "b", tokens=70)
    hear(ledger, "a", 2)
    assert ledger.trained() == {"a": 250, "b": 70}
    hear(ledger, "a", 2, tokens=40)
    ledger.lose("b", "it left")
    settle(ledger, "a")
    again = Ledger(1, 3, 50)
    again.restore(json.loads(json.dumps(ledger.state())), [{}])
    hear(again, "a", 2, tokens=60)
    assert again.trained() == {"a": 310, "b": 70}


def test_when_the_run_is_finished_everything_is_merged_or_free_and_nothing_is_called_trained_twice():
    ledger = Ledger(1, 3, 50)
    hear(ledger, "a")
    hear(ledger, "a", at=(1, 8))
    ledger.merging(0, 1, [part("a", (1, 6))])
    assert settle(ledger, "a", over=True) == []
    ledger.merged(0, 1)
    assert len(settle(ledger, "a", over=True)) == 2
    assert ledger.accounts() == Accounts(
        50, 1, merged=6, leased=0, free=44, trained_twice=0, reserve=0, lost=0
    )


def test_an_island_that_leaves_or_a_run_that_drains_is_not_served():
    ledger = Ledger(1, 3, 50)
    assert hear(ledger, "a", serve=False) == []
    assert ledger.leases("a") == (1, ())
    assert ledger.leases("stranger") == (0, ())


def test_a_position_in_no_lease_of_this_ledger_is_not_believed():
    ledger = Ledger(1, 3, 50)
    hear(ledger, "a", at=(10**12, 5))
    merge(ledger, 0, 1, a=(10**12, 5))
    assert ledger.accounts().merged == 0
    assert ledger.leases("a") == (1, (1, 0, 12, 2, 12, 12))


def test_many_small_pieces_do_not_fill_the_orders():
    ledger = Ledger(1, 1, 1000)
    for number in range(40):  # every second block of 80 goes back
        hear(ledger, f"gone{number}", step_blocks=1)
        merge(ledger, 0, number, **{f"gone{number}": (2 * number + 2, 1)})
        ledger.lose(f"gone{number}", "gone")
    settle(ledger)
    ledger.hear(report("a", step_blocks=100), serve=True, actions=(actions := []))
    assert len(actions) == MOST_IN_HAND
    assert len(ledger.leases("a")[1]) == 3 * MOST_IN_HAND


def test_restored_it_goes_on_and_reopened_it_leases_everything_anew():
    ledger = Ledger(2, 3, 50)
    hear(ledger, "a")
    hear(ledger, "a", at=(1, 8))
    merge(ledger, 0, 1, a=(1, 4))
    state = json.loads(json.dumps(ledger.state()))
    # both fragments were merged once more after the state was written: the marks know
    cursors = [{"a": (1, 6)}, {"a": (1, 8)}]
    again = Ledger(2, 3, 50)
    again.restore(state, cursors)
    assert again.accounts() == Accounts(
        50, 1, merged=6, leased=18, free=26, trained_twice=0, reserve=0, lost=0
    )
    assert hear(again, "a", at=(1, 10)) == []
    anew = Ledger(2, 3, 50)
    anew.restore(state, cursors)
    anew.reopen(2)
    assert anew.accounts() == Accounts(50, 1, merged=6, leased=0, free=44, trained_twice=2, reserve=0, lost=0)
    grants = hear(anew, "a", at=(1, 12))
    assert [(g.lease, g.start) for g in grants] == [
        (2 * NUMBER_GAP + n, start) for n, start in ((3, 6), (4, 18), (5, 24))
    ]
    untouched = Ledger(2, 3, 50)
    untouched.restore({}, [{}, {}])
    assert untouched.state() == Ledger(2, 3, 50).state()
