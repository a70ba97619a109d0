"""The grace window: by hand, its bounds, and that the syncer keeps to them."""

import pytest
from core.played_syncer import answer, of, report, syncer_of
from hypothesis import given
from hypothesis import strategies as st

from diloco_ds.config import Grace
from diloco_ds.core import events as ev
from diloco_ds.core.grace import grace_window

seconds = st.floats(0, 1e4)
safeties = st.floats(0, 1, exclude_max=True)


def window(safety, overlap, step_time, quorum_time, sync_time):
    return grace_window(
        safety=safety, overlap=overlap, step_time=step_time, quorum_time=quorum_time, sync_time=sync_time
    )


def test_by_hand():
    assert window(0.5, 2, 3.0, 1.0, 1.0) == 2.0  # slack 2*3 - 2 = 4, half of it
    assert window(1.0, 2, 3.0, 1.0, 1.0) == 3.0  # all of it would be 4: never more than a step
    assert window(0.8, 1, 1.0, 0.75, 0.5) == 0.0  # no slack is left
    assert window(0.8, 1, 0.0, 0.0, 0.0) == 0.0  # nothing is known of the steps yet


@given(safeties, st.integers(1, 64), seconds, seconds, seconds)
def test_never_longer_than_its_share_of_the_slack_nor_than_a_step(safety, overlap, step, quorum, sync):
    grace = window(safety, overlap, step, quorum, sync)
    assert 0 <= grace <= safety * max(overlap * step - quorum - sync, 0) * (1 + 1e-12)
    assert grace <= step


@given(safeties, st.floats(0.01, 100), st.floats(0, 150), st.integers(1, 3))
def test_the_syncer_merges_no_later_than_that_after_the_quorum(safety, step_time, quorum_time, overlap):
    """`a` answers `quorum_time` after the round opened and is the quorum; `b` is asked and never answers."""
    syncer = syncer_of(fragments=4, quorum=1, overlap=overlap, grace=Grace(safety=safety))
    opened = 1.0
    syncer.step(report("b", 1, base=(0,) * 4, step_time=step_time), 0.0)
    wants = of(ev.Want, syncer.step(report("a", 1, base=(0,) * 4, step_time=step_time), opened))
    want = next(want for want in wants if want.island == "a")
    now = opened + quorum_time
    merged = of(ev.Merge, syncer.step(answer("a", want.fragment, want.round, 0, 1), now))
    grace = safety * max(overlap * step_time - quorum_time, 0.0)
    if not merged:
        latest = now + min(grace, step_time)
        assert syncer.next_deadline() <= latest * (1 + 1e-9)
        merged = of(ev.Merge, syncer.step(ev.Tick(), latest * (1 + 1e-9)))
    (merge,) = merged
    assert [part.island for part in merge.parts] == ["a"]
    assert merge.fragment == want.fragment


@pytest.mark.parametrize("quorum_time", [0.0, 0.5])
def test_within_the_window_the_syncer_does_wait(quorum_time):
    syncer = syncer_of(fragments=2, quorum=1, overlap=1, grace=Grace(safety=0.8))
    syncer.step(report("b", 1), 0.0)
    want = of(ev.Want, syncer.step(report("a", 1), 0.0))[0]
    grace = 0.8 * (1.0 - quorum_time)
    assert not of(ev.Merge, syncer.step(answer("a", want.fragment, want.round, 0, 1), quorum_time))
    assert not of(ev.Merge, syncer.step(ev.Tick(), quorum_time + 0.99 * grace))
    assert of(ev.Merge, syncer.step(ev.Tick(), quorum_time + 1.01 * grace))
