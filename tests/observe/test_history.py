"""Numbers of the report, against a training whose course is known."""

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from recorded_run import BEGIN, new_run, record_training

from diloco_ds.observe.history import History, IslandHistory, binned, gather, rate
from diloco_ds.observe.metrics import iterate_metrics


@pytest.fixture
def history(tmp_path: Path) -> History:
    """100 seconds, a step a second; b is away in the seconds 51 to 70."""
    run = new_run(tmp_path)
    record_training(run)
    return gather(iterate_metrics(run.metrics))


def test_an_outage_is_the_only_lost_time(history: History) -> None:
    a, b = history.islands["a"], history.islands["b"]
    assert (a.usual_step_s, a.longest_gap_s) == (1.0, 1.0)
    assert (b.usual_step_s, b.longest_gap_s) == (1.0, 21.0)
    assert a.stretches() == [(BEGIN, BEGIN + 100)]
    assert b.stretches() == [(BEGIN, BEGIN + 50), (BEGIN + 70, BEGIN + 100)]
    assert history.goodput_of(a) == 1.0
    assert history.goodput_of(b) == pytest.approx(0.8)  # 20 of 100 seconds
    assert history.goodput == pytest.approx(0.9)
    assert history.longest_gap_steps() == 21.0
    assert b.incarnations == {1, 2}


def test_an_island_that_never_comes_back_loses_the_rest() -> None:
    lost = IslandHistory("lost")
    for second in range(1, 26):
        lost.add({"time": float(second)})
    assert lost.goodput(until=100.0) == pytest.approx(0.25)


@pytest.mark.parametrize(("was_stopped", "goodput", "gap"), [(True, 1.0, 1.0), (False, 20 / 1000, 981.0)])
def test_the_time_between_a_stop_and_its_resumption_does_not_count(
    was_stopped: bool, goodput: float, gap: float
) -> None:
    steps = [{"kind": "step", "island": "a", "time": float(t)} for t in [*range(1, 11), *range(991, 1001)]]
    events = [
        {"kind": "event", "event": name, "role": "conductor", "time": t}
        for name, t in [("started", 0.0), ("started", 980.0)]
    ]
    stop = [{"kind": "event", "event": "stop", "role": "conductor", "time": 9.5}] if was_stopped else []
    history = gather([*steps, *events, *stop])
    assert history.goodput == pytest.approx(goodput)
    assert history.longest_gap_steps() == gap


def test_participation_and_evaluations(history: History) -> None:
    assert history.mean_of_merges("merged") == pytest.approx((80 * 2 + 20) / 100)
    assert history.mean_of_merges("token_share") == pytest.approx(0.95)
    assert history.mean_of_merges("grace_s") is None
    assert history.merged_updates == {"a": 100, "b": 80}
    assert (history.final("loss"), history.final("bits_per_byte")) == (2.5, 1.25)
    assert [event["event"] for event in history.events] == ["started", "learner_restarting"]


def test_time_buckets_add_up_to_the_steps(history: History) -> None:
    a = history.islands["a"]
    assert sum(a.bucket_s.values()) == pytest.approx(sum(a.step_s))
    assert a.bucket_s["backward"] == pytest.approx(40.0)


def test_nothing_is_known_of_an_empty_run() -> None:
    history = gather([])
    assert history.goodput is None
    assert history.first_step is None
    assert history.longest_gap_steps() is None
    assert history.final("loss") is None


def test_records_without_their_numbers_are_gaps_in_the_columns() -> None:
    history = gather(
        [{"kind": "step", "time": 1.0, "island": "a", "loss": None}, {"kind": "merge", "time": 2.0}]
    )
    assert math.isnan(history.islands["a"].loss[0])
    assert math.isnan(history.merges["alive"][0])


@given(
    st.lists(st.tuples(st.floats(0, 1e6), st.floats(-100, 100)), min_size=1, max_size=400), st.integers(1, 50)
)
def test_binned_means_keep_the_range_and_fit(points: list[tuple[float, float]], bins: int) -> None:
    x, y = zip(*points, strict=True)
    mean_x, mean_y = binned(x, y, bins)
    assert 1 <= len(mean_x) == len(mean_y) <= max(bins, 1)
    assert min(y) - 1e-9 <= mean_y.min() <= mean_y.max() <= max(y) + 1e-9
    assert (np.diff(mean_x) >= 0).all()


def test_rate_is_tokens_per_second_with_zero_where_nothing_came() -> None:
    seconds = [*range(400), *range(600, 1000)]
    times, rates = rate(seconds, [7.0] * len(seconds), bins=10)
    assert times == pytest.approx([99.9 * (number + 0.5) for number in range(10)])
    assert rates[:4] == pytest.approx([7.0] * 4, rel=0.02)
    assert rates[4:6] == [0.0, 0.0]
    assert sum(rates) * 99.9 == pytest.approx(7.0 * 799)  # all but the first step's, whose time is not known


def test_no_rate_from_a_single_step() -> None:
    assert rate([5.0], [7.0]) == ([], [])
