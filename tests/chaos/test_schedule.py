"""Schedules of faults: drawn from a seed, written and read back, refused in one line."""

import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco_ds.chaos.schedule import KINDS, Fault, Schedule, generate, load_schedule, mix
from diloco_ds.errors import UserError

ISLANDS = {"a": 1, "b": 2}

rates = st.dictionaries(st.sampled_from(sorted(KINDS)), st.floats(0, 500), max_size=5)
seeds = st.integers(0, 2**31 - 1)


@given(seed=seeds, per_hour=rates, minutes=st.floats(0.1, 60))
@settings(max_examples=60)
def test_the_same_seed_gives_the_same_schedule_in_order_and_in_time(seed, per_hour, minutes):
    schedule = generate(seed, per_hour, 60 * minutes, ISLANDS)
    assert schedule == generate(seed, per_hour, 60 * minutes, ISLANDS)
    times = [fault.at_s for fault in schedule.faults]
    assert times == sorted(times)
    assert all(0 <= at <= 60 * minutes for at in times)
    assert {fault.fault for fault in schedule.faults} <= set(per_hour)


@given(seed=seeds, per_hour=rates)
@settings(max_examples=40)
def test_what_is_drawn_can_be_aimed_and_is_read_back_equal(seed, per_hour, tmp_path_factory):
    schedule = generate(seed, per_hour, 600, ISLANDS)
    path = tmp_path_factory.mktemp("schedule") / "s.yaml"
    path.write_text(schedule.to_yaml())
    assert load_schedule(path, ISLANDS) == schedule


def test_one_kind_does_not_depend_on_the_others():
    alone = generate(5, {"kill": 200}, 3600, ISLANDS)
    among = generate(5, {"hang": 100, "kill": 200, "cut": 3}, 3600, ISLANDS)
    assert [fault for fault in among.faults if fault.fault == "kill"] == alone.faults


def test_it_is_poisson_with_the_rate_that_was_asked_for():
    counts = [len(generate(seed, {"kill": 60}, 1200, ISLANDS).faults) for seed in range(400)]
    assert statistics.mean(counts) == pytest.approx(20, rel=0.05)
    assert statistics.variance(counts) == pytest.approx(20, rel=0.25)


def test_a_mix_adds_up():
    assert sum(mix(125).values()) == pytest.approx(125)
    assert "disk" not in mix(125)


def test_a_schedule_is_put_in_order():
    later, sooner = Fault(at_s=9, fault="kill", target="a"), Fault(at_s=1, fault="kill", target="b")
    assert Schedule(faults=[later, sooner]).faults == [sooner, later]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("faults: [{fault: kil, target: a}]", "faults.0.fault: no fault 'kil'; did you mean 'kill'?"),
        (
            "faults: [{at_s: 3, fault: kill, target: c}]",
            "kill at 3 s: no island 'c'; there are a, b, syncer, conductor, random",
        ),
        (
            "faults: [{fault: kill, target: a.rank1}]",
            "kill at 0 s: no 'rank1' of island a; did you mean 'rank0'?",
        ),
        (
            "faults: [{fault: hang, target: b.proxi}]",
            "hang at 0 s: no 'proxi' of island b; did you mean 'proxy'?",
        ),
        (
            "faults: [{fault: lose, target: a.agent}]",
            "lose at 0 s: lose hits a whole island: write a, not a.agent",
        ),
        ("faults: [{fault: lose, target: syncer}]", "lose at 0 s: lose hits an island, not the syncer"),
        ("faults: [{fault: disk, target: a}]", "disk at 0 s: disk hits the whole run: it takes no target"),
        ("faults: [{fault: kill, seconds: 3}]", "faults.0: kill is over at once: it takes no seconds"),
        ("faults: [{fault: kill, at_s: -1}]", "faults.0.at_s: must be greater than or equal to 0, not -1"),
        ("faults: [{fault: garbage, what: rot}]", "faults.0.what: must be 'malformed', 'not_finite',"),
        (
            "faults: [{fault: kill, who: a}]",
            "faults.0.who: unknown key; the keys here are at_s, fault, target, seconds, factor, what",
        ),
        ("fault: []", "fault: unknown key; did you mean 'faults'?"),
        ("faults: [{target: a}]", "faults.0.fault: is missing: Its kind, a key of KINDS."),
        ("faults: 3", "faults: must be a list, not 3"),
        ("[1, 2]", "a schedule is a YAML mapping with the key faults, and perhaps seed"),
        ("faults: [", "not valid YAML:"),
    ],
)
def test_what_is_wrong_is_one_line(tmp_path, text, expected):
    path = tmp_path / "s.yaml"
    path.write_text(text)
    with pytest.raises(UserError) as error:
        load_schedule(path, ISLANDS)
    assert str(error.value).startswith(f"{path}: {expected}")
    assert "\n" not in str(error.value)
