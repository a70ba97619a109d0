"""The ledger with learners that read what it leases, whatever happens to them: the accounts balance."""

from __future__ import annotations

from collections import Counter

from core.played_ledger import ROTATION, Island, Story, report
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco_ds.core import events as ev

ACTS = (
    "step",
    "step",
    "step",
    "step",
    "rotation",
    "tell",
    "tell",
    "restart",
    "cut",
    "heal",
    "silent",
    "join",
    "syncer",
)


@given(st.lists(st.tuples(st.sampled_from(ACTS), st.integers(0, 3)), max_size=120))
@settings(max_examples=200)
def test_whatever_happens_the_accounts_balance_and_no_block_is_leased_or_merged_twice(acts):
    story = Story()
    cut_reads = Counter()
    for act, which in acts:
        if act == "join" and which not in story.islands:
            story.islands[which] = island = Island("abcd"[which], which, which + 1)
            story.hear(island)
            story.tell(island)
        island = story.islands.get(which)
        if island is None:
            continue
        match act:
            case "step":
                story.step(island)
            case "rotation":
                for _ in range(ROTATION):
                    story.step(island)
                    story.tell(island)
            case "tell":
                story.tell(island)
            case "restart":
                story.fault(island)
                island.restart()
                island.cut = False
                story.hear(island)
                story.tell(island)
            case "cut":
                story.fault(island)
                island.cut = True
            case "heal":
                island.cut = False
                story.hear(island)
            case "silent":
                story.lose(island)
            case "syncer":
                story.restart_syncer()
        story.check()
        if island.cut and act in ("step", "rotation"):
            cut_reads[which] += island.step_blocks * (ROTATION if act == "rotation" else 1)
    accounts = story.ledger.accounts()
    assert accounts.trained_twice - accounts.reserve <= story.lost_blocks + cut_reads.total()
    for island in story.islands.values():
        for start, blocks in island.read:
            assert start < 0 or set(range(start, start + blocks)) <= story.ever_leased[island.name]


@given(st.lists(st.sampled_from("abc"), min_size=60, max_size=200), st.integers(0, 2**16))
@settings(max_examples=60)
def test_in_the_end_every_block_of_an_epoch_is_merged_once_though_islands_die_at_any_moment(turns, dice):
    """Three islands take turns, one in ten of which is a death; then the living ones read on until two epochs are merged."""
    story = Story()
    for index, name in enumerate("abc"):
        story.islands[index] = island = Island(name, index, index + 1)
        story.hear(island)
        story.tell(island)
    by_name = {island.name: island for island in story.islands.values()}
    for turn, name in enumerate(turns):
        island = by_name[name]
        if (dice + 7 * turn * turn) % 10 == 0:
            story.fault(island)
            island.restart()
            story.hear(island)
        else:
            story.step(island)
        story.tell(island)
        story.check()
    for _ in range(400):
        for island in story.islands.values():
            story.step(island)
            story.tell(island)
        if all(story.merged_blocks[place] for place in range(80)):
            break
    story.check()
    assert all(story.merged_blocks[place] == 1 for place in range(80))
    accounts = story.ledger.accounts()
    assert accounts.reserve == 0, "nobody was ever without a lease"
    assert accounts.trained_twice <= story.lost_blocks
    trained = Counter()
    for island in story.islands.values():
        for start, blocks in island.read:
            trained.update(range(start, start + blocks))
    again = sum(count - 1 for count in trained.values())
    assert again <= accounts.trained_twice, "nothing was trained on twice that was not counted"


def test_an_epoch_is_read_to_its_end_before_the_next_is_begun():
    """No block at or behind an epoch's end is leased while one before it is free."""
    story = Story()
    for index, name in enumerate("ab"):
        story.islands[index] = island = Island(name, index, 2)
        story.hear(island)
        story.tell(island)
    a, b = story.islands.values()
    for turn in range(60):
        if turn % 9 == 4:
            a.restart()
        for island in (a, b):
            free_before = min((start for start, _ in story.ledger.state()["free"]), default=None)
            granted = []
            story.ledger.hear(
                report(island.name, island.incarnation, at=island.reading.position, step_blocks=2),
                serve=True,
                actions=granted,
            )
            story.carry_out(granted)
            starts = [action.start for action in granted if isinstance(action, ev.Grant)]
            assert starts == sorted(starts)
            if free_before is not None and starts:
                assert starts[0] <= free_before
            story.tell(island)
            story.step(island)
    assert story.ledger.accounts().epochs > 3
