"""The syncer's state machine, driven by hand and, with learner clocks, in virtual time."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from core.played_syncer import answer, exchange_of, layout_of, of, report, syncer_of
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco_ds.config import Adoption, Grace, Merge
from diloco_ds.core import events as ev
from diloco_ds.core.learner import LearnerClock
from diloco_ds.core.member import Counts
from diloco_ds.sim.learner import SimLearner, Speed, Wire
from diloco_ds.sim.world import World


def world_of(
    fragments, speeds, *, budget=10**9, tokens=10, wire=None, overlap=2, seed=0, lease=10.0, **settings_
):
    wire = wire or Wire()
    exchange = exchange_of(fragments, overlap=min(overlap, fragments - 1), **settings_)
    layout = layout_of(fragments, exchange.period)
    learners = [
        SimLearner(
            name=f"l{i}",
            clock=LearnerClock(layout.fragments, exchange.adoption.how, exchange.merge.late),
            speed=Speed(float(speed)),
            tokens=tokens,
            wire=wire,
            rng=np.random.default_rng(seed + i),
            fragments=layout.fragments,
        )
        for i, speed in enumerate(speeds)
    ]
    return World(layout, exchange, learners, budget=budget, lease=lease)


# ---- one round by hand ----


def test_a_round_opens_at_the_quorum_asks_all_eligible_and_merges_after_the_grace_window():
    """K = 1, tau = 2, gamma = 0.8, steps of 1 s. Quorum at once: slack = 2*1 - 0, grace = min(0.8*2, 1) = 1 s."""
    syncer = syncer_of(quorum=1, overlap=1, grace=Grace(safety=0.8))
    assert of(ev.Want, syncer.step(report("b", 0), 0.0)) == [], "nobody has reached step 1"
    actions = syncer.step(report("a", 1), 1.0)
    round_ = syncer.global_step
    assert [(w.island, w.round) for w in of(ev.Want, actions)] == [("a", round_), ("b", round_)]
    p = of(ev.Want, actions)[0].fragment
    assert of(ev.Merge, syncer.step(answer("a", p, round_, 0, 1), 1.5)) == []
    # slack = 1*1 - 0.5 = 0.5, grace = 0.4
    assert syncer.next_deadline() == pytest.approx(1.9)
    (merge,) = of(ev.Merge, syncer.step(answer("b", p, round_, 0, 3, tokens=90, update_id=2), 1.8))
    # weights tokens^2/steps: a 10*10/1 = 100, b 90*90/3 = 2700
    assert {part.island: part.weight for part in merge.parts} == {
        "a": pytest.approx(100 / 2800),
        "b": pytest.approx(2700 / 2800),
    }
    assert (merge.fragment, merge.round, merge.version) == (p, round_, 1)
    assert "everybody asked" in merge.reason


def test_of_two_rounds_in_flight_each_merge_tells_its_own_grace_window():
    """K = 1, tau = 2, gamma = 0.8, steps of 1 s. The second round's quorum is there before the first one's window closes."""
    syncer = syncer_of(fragments=4, quorum=1, overlap=2, grace=Grace(safety=0.8))
    bases = (0, 0, 0, 0)
    syncer.step(report("b", 0, base=bases), 0.0)
    first = of(ev.Want, syncer.step(report("a", 1, base=bases), 1.0))[0]
    second = of(ev.Want, syncer.step(report("a", 2, base=bases), 2.0))[0]
    assert (first.round, second.round) == (1, 2)
    # slack = 2*1 - 1.5 = 0.5, grace = 0.4: until 2.9
    assert of(ev.Merge, syncer.step(answer("a", first.fragment, 1, 0, 1), 2.5)) == []
    # slack = 2*1 - 0.7 = 1.3, grace = min(1.04, one step) = 1: until 3.7
    assert of(ev.Merge, syncer.step(answer("a", second.fragment, 2, 0, 1, update_id=2), 2.7)) == []
    (merge,) = of(ev.Merge, syncer.step(ev.Tick(), 3.0))
    assert (merge.round, merge.grace) == (1, pytest.approx(0.4))
    (merge,) = of(ev.Merge, syncer.step(ev.Tick(), 3.8))
    assert (merge.round, merge.grace) == (2, 1.0)


def test_the_grace_window_closes_without_the_slow_one_whose_late_answer_is_merged_next_time():
    syncer = syncer_of(quorum=1, overlap=1, fragments=2)
    syncer.step(report("b", 1), 0.0)
    first = of(ev.Want, syncer.step(report("a", 1), 0.0))
    p, round_ = first[0].fragment, first[0].round
    syncer.step(answer("a", p, round_, 0, 1), 0.1)
    actions = syncer.step(ev.Tick(), 2.0)
    (merge,) = of(ev.Merge, actions)
    assert [part.island for part in merge.parts] == ["a"]
    (keep,) = of(ev.Keep, syncer.step(answer("b", p, round_, 0, 2, update_id=7), 2.5))
    assert (keep.base, keep.update_id) == (0, 7)
    # the other fragment's round, then p again: b's kept answer is in it, as late, beside a's new one
    other = 1 - p
    bases = [0, 0]
    bases[p] = 1
    now, merged = 3.0, []
    for step in range(2, 8):
        for want in of(ev.Want, syncer.step(report("a", step, base=bases, steps=[1, 1]), now)):
            if want.island == "a":
                now += 0.1
                base = bases[want.fragment]
                merged += of(
                    ev.Merge,
                    syncer.step(answer("a", want.fragment, want.round, base, 1, update_id=20 + step), now),
                )
        now += 2.0
        merged += of(ev.Merge, syncer.step(ev.Tick(), now))
        for merge in merged:
            bases[merge.fragment] = merge.version
    second = next(m for m in merged if m.fragment == p and m.version == 2)
    assert {(part.island, part.late) for part in second.parts} == {("a", False), ("b", True)}
    assert any(m.fragment == other for m in merged)


def test_of_the_late_answers_of_an_island_the_newest_is_kept_and_the_other_is_told():
    syncer = syncer_of(quorum=1, overlap=1)
    syncer.step(report("b", 1), 0.0)
    want = of(ev.Want, syncer.step(report("a", 1), 0.0))[0]
    p, round_ = want.fragment, want.round
    syncer.step(answer("a", p, round_, 0, 1), 0.1)
    assert of(ev.Merge, syncer.step(ev.Tick(), 2.0))
    syncer.step(answer("b", p, round_, 0, 2, update_id=7), 2.5)
    actions = syncer.step(answer("b", p, round_, 1, 1, update_id=8), 2.6)
    assert [(drop.update_id, "takes its place" in drop.reason) for drop in of(ev.Drop, actions)] == [
        (7, True)
    ]
    assert [keep.update_id for keep in of(ev.Keep, actions)] == [8]


def test_late_answers_are_dropped_when_so_set():
    syncer = syncer_of(quorum=1, overlap=1, merge=Merge(late="drop"))
    syncer.step(report("b", 1), 0.0)
    want = of(ev.Want, syncer.step(report("a", 1), 0.0))[0]
    syncer.step(answer("a", want.fragment, want.round, 0, 1), 0.1)
    syncer.step(ev.Tick(), 2.0)
    (drop,) = of(ev.Drop, syncer.step(answer("b", want.fragment, want.round, 0, 2, update_id=7), 2.5))
    assert "late" in drop.reason


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (answer("stranger", 0, 1, 0, 1), "does not belong"),
        (answer("a", 0, 1, 0, 1, incarnation=0), "incarnation"),
        (answer("a", 0, 1, -1, 1), "weight 0"),
        (answer("a", 0, 1, 0, 0, tokens=0), "weight 0"),
        (answer("a", 0, 1, 5, 1), "newer than the global"),
    ],
)
def test_what_may_never_be_merged_is_dropped_with_the_reason(bad, words):
    syncer = syncer_of()
    syncer.step(report("a", 1), 0.0)
    (drop,) = of(ev.Drop, syncer.step(bad, 0.1))
    assert words in drop.reason


def test_a_learner_without_a_global_version_is_never_asked_nor_merged():
    syncer = syncer_of(quorum=1)
    actions = syncer.step(report("a", 50, base=(-1, -1)), 0.0)
    assert of(ev.Want, actions) == []
    assert of(ev.Merge, syncer.step(answer("a", 0, 1, -1, 50), 0.1)) == []


def test_starting_islands_are_nobody_and_silent_ones_are_away_until_they_report_again():
    syncer = syncer_of(quorum=1)
    assert syncer.step(report("a", 9, phase="starting"), 0.0) == []
    (alive,) = of(ev.Membership, syncer.step(report("a", 9), 1.0))
    assert alive.alive
    (away,) = of(ev.Membership, syncer.step(ev.Tick(), 11.5))
    assert not away.alive
    assert "silent" in away.reason
    (back,) = of(ev.Membership, syncer.step(report("a", 10), 12.0))
    assert back.alive


def test_a_slow_island_gets_a_lease_of_ten_of_its_own_steps():
    syncer = syncer_of(quorum=1)
    syncer.step(report("a", 1, step_time=5.0), 0.0)
    assert of(ev.Membership, syncer.step(ev.Tick(), 49.0)) == []
    assert len(of(ev.Membership, syncer.step(ev.Tick(), 50.0))) == 1


def test_an_old_incarnation_is_not_heard():
    syncer = syncer_of()
    syncer.step(report("a", 5, incarnation=3), 0.0)
    syncer.step(report("a", 99, incarnation=2), 0.1)
    assert syncer.view().islands["a"].step == 5


def test_the_run_drains_only_when_the_last_merge_is_there_to_be_adopted():
    """Else the last answers would still start from the version that it has merged, and count for nothing."""
    syncer = syncer_of(quorum=1, overlap=1, islands=("a",), budget=20, grace=Grace(safety=0.0))
    (want,) = of(ev.Want, syncer.step(report("a", 1), 0.0))
    syncer.step(report("a", 2), 0.1)  # 20 tokens in hand
    actions = syncer.step(answer("a", want.fragment, want.round, 0, 2), 0.2)
    (merge,) = of(ev.Merge, actions)
    assert (of(ev.Phase, actions), syncer.orders("a").phase) == ([], "run")
    syncer.step(ev.Tick(), 0.3)
    assert syncer.orders("a").phase == "run"
    (phase,) = of(ev.Phase, syncer.step(ev.Merged(want.fragment, merge.round, merge.version, 0.1), 0.4))
    assert phase.phase == syncer.orders("a").phase == "drain"


def test_after_a_restart_a_merged_answer_is_not_merged_again():
    syncer = syncer_of(quorum=1)
    for p in range(2):
        counts = {"a": Counts(merged=4, missed=1, tokens=90), "b": Counts(missed=2)}
        syncer.restore(p, version=4, round=9, merged_tokens=100, merged_base={"a": 3}, counts=counts)
    syncer.step(report("a", 12, base=(3, 3)), 0.0)
    (drop,) = of(ev.Drop, syncer.step(answer("a", 0, 9, 3, 2), 0.1))
    assert "merged already" in drop.reason
    assert syncer.global_step >= 9
    assert syncer.merged_tokens == 100
    islands = syncer.view().islands
    assert (islands["a"].merged, islands["a"].missed, islands["a"].token_share) == (8, 2, 0.9)
    assert (islands["b"].merged, islands["b"].missed) == (0, 4)
    assert (islands["a"].tokens, syncer.view().trained_tokens) == (90, 90), (
        "it has trained on what is merged of it"
    )


def test_a_long_outage_of_the_syncer_is_not_paid_back_in_a_burst():
    """The learners are 500 steps ahead: rounds still open one per inner step, with tau of lead at most."""
    syncer = syncer_of(fragments=8, quorum=1, overlap=2)
    bases = [0] * 8
    opened = []
    now, step = 0.0, 500
    for _ in range(40):
        now, step = now + 1.0, step + 1
        actions = syncer.step(report("a", step, base=bases, steps=[1] * 8), now)
        while actions:
            wants, follow = of(ev.Want, actions), []
            for want in wants:
                opened.append(want.round)
                follow += syncer.step(
                    answer("a", want.fragment, want.round, bases[want.fragment], 1, update_id=step), now
                )
            for merge in of(ev.Merge, follow):
                bases[merge.fragment] = merge.version
            actions = follow + syncer.step(report("a", step, base=bases, steps=[1] * 8), now) if wants else []
    assert len(opened) <= 40 + 2


def test_a_quorum_that_cannot_come_skips_the_round_and_says_so():
    syncer = syncer_of(quorum=2)
    syncer.step(report("a", 1), 0.0)
    want = of(ev.Want, syncer.step(report("b", 1), 0.0))[0]
    syncer.step(answer("a", want.fragment, want.round, 0, 1), 0.5)
    skips = []
    for now in (5.0, 9.0):
        syncer.step(report("a", 2), now)
    for now in (11.0, 12.0):
        skips += of(ev.Skip, syncer.step(ev.Tick(), now))
    assert skips
    assert "quorum" in skips[0].reason
    assert "of a quorum of 2" in syncer.view().waiting


def test_a_leaving_island_drains_its_last_update_is_merged_and_it_is_gone():
    world = world_of(4, [1.0, 1.0])
    world.learners["l1"].leaves = 20.5
    world.run(60.0)
    assert list(world.syncer.view().islands) == ["l0"]
    last = max(i for i, m in enumerate(world.tally.merges) if any(p.island == "l1" for p in m.parts))
    assert world.tally.merge_times[last] > 20.5
    assert world.tally.steps["l0"] >= 59


def test_a_joining_island_is_merged_and_the_other_does_not_notice():
    world = world_of(4, [1.0, 1.0])
    world.learners["l1"].joins = 20.5
    world.run(60.0)
    assert world.tally.steps["l0"] == 60
    assert {
        p for m in world.tally.merges for p in [m.fragment] if any(x.island == "l1" for x in m.parts)
    } == {0, 1, 2, 3}


# ---- properties in virtual time ----


@settings(max_examples=60)
@given(
    slowness=st.fractions(min_value=1, max_value=8, max_denominator=6),
    fragments=st.integers(2, 9),
    overlap=st.integers(1, 3),
    safety=st.sampled_from([0.0, 0.8]),
)
def test_a_slower_learner_gets_every_fragment_merged(slowness, fragments, overlap, safety):
    """No aliasing with the rotation, for even and odd P, at K = 1."""
    period = max(10, fragments)  # a step of the slow one must be shorter than a rotation
    world = world_of(
        fragments, [Fraction(1), slowness], period=period, overlap=overlap, grace=Grace(safety=safety)
    )
    world.run(20.0 * period * float(slowness))
    served = {m.fragment for m in world.tally.merges for part in m.parts if part.island == "l1"}
    assert served == set(range(fragments))
    assert world.tally.steps["l0"] == pytest.approx(20 * period * float(slowness), abs=1), (
        "the fast one never waits"
    )


@settings(max_examples=40)
@given(
    speeds=st.lists(st.floats(0.5, 4.0), min_size=1, max_size=5),
    data=st.data(),
    fragments=st.integers(2, 6),
    late=st.sampled_from(["merge_next", "drop"]),
    latency=st.floats(0.0, 1.0),
)
def test_at_least_k_are_merged_weights_sum_to_one_and_no_base_is_merged_twice(
    speeds, data, fragments, late, latency
):
    quorum = data.draw(st.integers(1, len(speeds)))
    world = world_of(fragments, speeds, quorum=quorum, merge=Merge(late=late), wire=Wire(latency_s=latency))
    world.run(150.0)
    assert world.tally.merges
    seen = set()
    for merge in world.tally.merges:
        assert len({part.island for part in merge.parts}) >= quorum
        assert sum(part.weight for part in merge.parts) == pytest.approx(1.0)
        for part in merge.parts:
            assert part.base in (merge.version - 1, merge.version - 2)
            assert part.late or part.base == merge.version - 1
            key = (part.island, merge.fragment, part.base)
            assert key not in seen
            seen.add(key)
    versions = {}
    for merge in world.tally.merges:
        assert merge.version == versions.get(merge.fragment, 0) + 1
        versions[merge.fragment] = merge.version


@pytest.mark.parametrize("how", ["overwrite", "rebase", "mix"])
def test_the_run_drains_at_the_budget_with_everything_in_hand_merged(how):
    world = world_of(4, [1.0, 1.5], budget=1000, adoption=Adoption(how=how), wire=Wire(latency_s=0.1))
    tally = world.run(10_000.0)
    assert tally.finished is not None
    assert world.syncer.phase == "finished"
    assert world.syncer.merged_tokens >= 1000 - 10 * 4
    last = {m.fragment for m in tally.merges if m.reason.startswith("last round")}
    assert last == {0, 1, 2, 3}


def test_data_parallel_as_a_setting_merges_every_token_once():
    """One island, adoption none: the syncer mirrors it, and all its tokens are merged exactly once."""
    world = world_of(4, [1.0], budget=1000, adoption=Adoption(how="none"), wire=Wire(latency_s=0.1))
    world.run(10_000.0)
    assert world.syncer.merged_tokens == 10 * world.tally.steps["l0"]


def test_rebase_counts_every_step_once():
    world = world_of(4, [1.0, 1.0], budget=2000, adoption=Adoption(how="rebase"), wire=Wire(latency_s=0.1))
    world.run(10_000.0)
    trained = 10 * sum(world.tally.steps.values())
    assert world.syncer.merged_tokens == trained


def test_diloco_as_a_setting_merges_all_every_period():
    """P = 1, H = 10, tau = 0, K = M: one merge of both in ten steps of the slower."""
    world = world_of(1, [1.0, 1.0], period=10, overlap=0, quorum=2)
    world.run(101.0)
    assert len(world.tally.merges) == pytest.approx(10, abs=1)
    assert all(len(m.parts) == 2 for m in world.tally.merges)


def test_a_simulation_repeats_itself():
    def merges():
        world = world_of(5, [1.0, 1.7, 2.3], wire=Wire(latency_s=0.05))
        world.run(200.0)
        return world.tally.merges

    assert merges() == merges()
