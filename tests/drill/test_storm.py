"""What a storm cost, from records made by hand: two islands, a step and a merge a second, and what is done to a."""

import pytest
from drill_told_run import evaluation, fault, merge, phase, restart, steps, told

from diloco_ds.drill.comeback import comebacks
from diloco_ds.drill.outages import Outage, down, outages, overlap
from diloco_ds.drill.storm import measure
from diloco_ds.errors import UserError
from diloco_ds.observe.status_files import LedgerFile


def a_storm(*more):
    """a's rank is killed at 30.5, steps again from 41 on and is merged again at 43; b steps all the time."""
    return told(
        steps("a", range(1, 31)),
        steps("a", range(41, 101), incarnation=2),
        steps("b", range(1, 101)),
        [merge(second + 0.1, "ab") for second in range(2, 31)],
        [merge(second + 0.1, "b", alive=1) for second in range(31, 43)],
        [merge(second + 0.1, "ab") for second in range(43, 101)],
        fault(30.5, 0, "kill", "a.rank0"),
        phase(99.5, "drain"),
        evaluation(110, 2.5),
        list(more),
    )


def test_a_killed_learner_costs_neither_the_others_nor_its_own_live_time():
    result = measure(a_storm(), None)
    assert result["seconds"] == 20.0  # of which a is down for 10.5
    assert result["faults_by_kind"] == {"kill": 1}
    # b: the steps 31..50 in 20 s; a: 42..50, in the 9.5 s after the end of its first step
    assert result["goodput"] == pytest.approx((20 + 9) / (20 + 9.5))
    assert result["goodput_of_all_time"] == pytest.approx((20 + 10) / 40)
    assert result["longest_gap_steps"] == pytest.approx(1.0)
    assert result["recovery_s"]["by_victim"].keys() == {"learner"}
    assert result["recovery_s"]["max"] == pytest.approx(43.1 - 30.5)
    assert result["participation"]["share"] == pytest.approx((12 * 1 + 8 * 2) / (12 * 1 + 8 * 2))
    assert (result["loss"], result["loss_without_faults"], result["blocks_lost"]) == (2.5, None, None)
    assert result["goals_met"]["recovery_s"] is True
    assert result["goals_met"]["blocks_lost"] is None


def test_a_survivor_that_waits_is_seen():
    waited = [each for each in range(1, 101) if not 60 < each < 66]
    storm = told(
        steps("a", range(1, 101)),
        steps("b", waited),
        [merge(second + 0.1, "ab") for second in range(2, 101)],
        fault(50.5, 0, "kill", "a.supervisor"),
        restart(51.0, "supervisor", "a"),
    )
    result = measure(storm, None)
    assert result["longest_gap_steps"] == 6.0
    assert result["goodput"] == pytest.approx((20 + 15) / 40)
    assert result["goals_met"]["longest_gap_steps"] is False
    assert result["goals_met"]["goodput"] is False


def test_the_pace_of_a_calm_run_is_what_counts():
    twice = told(
        *(steps(name, [second / 2 for second in range(1, 200)]) for name in "ab"),
        [merge(second + 0.1, "ab") for second in range(1, 100)],
        phase(99.0, "drain"),
        evaluation(110, 2.25),
    )
    result = measure(a_storm(), twice)
    assert result["goodput"] == pytest.approx((20 + 9) / (20 + 9.5) / 2)
    assert result["usual_step_s"] == {"a": 0.5, "b": 0.5}
    assert result["loss_without_faults"] == 2.25


@pytest.mark.parametrize("lost", [0, 3, -1])
def test_a_block_in_no_account_is_lost_and_one_in_two_as_bad(lost):
    ledger = LedgerFile(
        epochs=2, epoch_blocks=50, merged=70 - lost, leased=20, free=10, trained_twice=4, lost=lost
    )
    result = measure(a_storm(), None, ledger)
    assert (result["blocks_lost"], result["blocks_trained_twice"]) == (lost, 4)
    assert result["goals_met"]["blocks_lost"] is (lost == 0)


def test_without_faults_or_without_calm_there_is_nothing_to_measure():
    with pytest.raises(UserError, match="no fault"):
        measure(told(steps("a", range(10))), None)
    early = told(steps("a", range(10)), [merge(1.0, "a")], fault(1.5, 0, "kill", "a"))
    with pytest.raises(UserError, match="before its first fault has too few steps of a"):
        measure(early, None)


def test_outages_end_with_the_first_step_of_a_later_incarnation_or_when_the_fault_is_over():
    story = told(
        steps("a", [1, 2, 3]),
        steps("a", [9, 10], incarnation=3),  # the second one was killed before it stepped
        fault(3.5, 0, "kill", "a.launcher"),
        fault(6.0, 1, "lose", "a"),
        fault(10.5, 2, "hang", "a.rank0"),
        fault(14.0, 2, "hang", "a.rank0", event="chaos_over"),
        fault(15.0, 3, "hang", "a.proxy"),
        fault(16.0, 4, "kill", "a.agent"),
        fault(17.0, 5, "slow", "a"),
        {
            "kind": "event",
            "time": 18.0,
            "event": "ended",
            "role": "chaos",
        },  # the process that injects: no fault
    )
    assert outages(story) == [
        Outage("a", 3.5, 9),
        Outage("a", 6.0, 9),
        Outage("a", 10.5, 14.0),
        Outage("a", 17.0, float("inf")),
    ]
    spans = down(outages(story), "a")
    assert spans == [(3.5, 9), (10.5, 14.0), (17.0, float("inf"))]
    assert overlap(spans, 8, 20) == 1 + 3.5 + 3
    assert down(outages(story), "b") == []


def test_recovery_counts_from_the_last_of_several_hits_to_an_answer_in_time():
    story = told(
        steps("a", [1, 2, 3]),
        steps("a", [9, 10, 11], incarnation=3),
        fault(3.5, 0, "kill", "a"),
        fault(6.0, 1, "lose", "a"),
        merge(8.5, "b", late="a"),  # what the dead one had handed in
        merge(9.5, "b", late="a"),
        merge(10.5, "ab"),
        fault(20.0, 2, "kill", "a.agent"),
        merge(20.5, "ab"),  # it had arrived before
        restart(21.0, "link", "a"),
        merge(23.0, "ab"),
        fault(30.0, 3, "cut", "a"),
        merge(31.0, "b"),
        fault(40.0, 3, "cut", "a", event="chaos_over"),
        merge(42.0, "ab"),
        fault(50.0, 4, "syncer", "syncer"),
        merge(50.1, "ab"),
        merge(55.0, "ab", generation=2),
        fault(60.0, 5, "kill", "a.supervisor"),
    )
    found = {
        (each.hit, each.island): each.seconds
        for each in comebacks(story, outages(story))
        if each.hit != "link"
    }
    assert found == {("learner", "a"): 4.5, ("syncer", None): 5.0, ("supervisor", "a"): float("inf")}
    assert [each.seconds for each in comebacks(story, outages(story)) if each.hit == "link"] == [3.0, 2.0]
