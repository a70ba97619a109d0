"""Scavenging, mixed hardware and bandwidth: the paper's numbers, and formulas worked out by hand."""

from __future__ import annotations

import json

import pytest

from diloco_ds.cli import main
from diloco_ds.config import Exchange
from diloco_ds.errors import UserError
from diloco_ds.sim import bandwidth, hetero, scavenge
from diloco_ds.sim.bandwidth import Setup


@pytest.mark.slow
def test_the_scavenging_curve():
    points = scavenge.compute(scavenge.Scavenging())
    assert [point.paper for point in points] == [0.90, 0.83, 0.75, 0.62]
    for point in points:
        assert point.time == pytest.approx(point.paper, abs=0.01)
        assert point.time == pytest.approx(0.5 + 0.5 / (1 + point.extra), abs=0.005)
    assert [point.learners for point in points] == [5, 6, 8, 16]


def test_extra_compute_must_make_whole_learners():
    with pytest.raises(UserError, match=r"0\.3 is no whole number of 4 learners"):
        scavenge.Scavenging(extra=(0.3,))


@pytest.mark.slow
def test_mixed_hardware():
    cases = {case.name: case for case in hetero.compute(hetero.mixed_hardware(hours=3.0))}
    assert cases["all"].result.goodput == pytest.approx(0.84, abs=0.01)
    assert cases["one"].result.goodput == pytest.approx(1.0, abs=0.005)
    assert cases["one, no grace"].result.goodput == pytest.approx(1.0, abs=0.005)
    assert cases["all"].in_time > cases["one"].in_time >= cases["one, no grace"].in_time - 0.02


def test_formulas_by_hand():
    setup = Setup(parameters=4_000_000_000, bits=16, step_s=2.0, gbit=8.0, learners=2, diloco_period=100)
    assert setup.model_gbits == 64
    assert setup.all_reduce == 1.0  # of two learners: everything goes once each way
    assert bandwidth.utilisation(setup, "data_parallel") == pytest.approx(2 / (2 + 8))
    assert bandwidth.utilisation(setup, "diloco") == pytest.approx(200 / (200 + 8))
    assert bandwidth.utilisation(setup, "streaming") == 1.0  # a fragment takes a third of a second
    assert bandwidth.utilisation(setup, "decoupled") == 1.0


def test_streaming_waits_when_a_fragment_takes_longer_than_its_overlap():
    exchange = Exchange(fragments=2, period=24, overlap=2)
    setup = Setup(
        parameters=4_000_000_000, step_s=1.0, gbit=4.0, learners=2, exchange=exchange
    )  # a fragment: 32 Gbit, 8 s, every 12 s, of which 2 s overlap
    assert bandwidth.utilisation(setup, "streaming") == pytest.approx(12 / (12 + 8 - 2))


def test_the_papers_bandwidth():
    setup = Setup()  # 5B, bf16, steps of 1 s, P = 24, tau = 2
    assert bandwidth.needed(setup, "decoupled", 0.95) == pytest.approx(1.7, abs=0.05)
    assert bandwidth.needed(setup, "data_parallel", 0.95) > 50 * bandwidth.needed(setup, "decoupled", 0.95)


@pytest.mark.parametrize("method", ["data_parallel", "diloco", "streaming"])
def test_the_needed_bandwidth_gives_the_utilisation(method):
    for target in (0.5, 0.9, 0.99):
        needed = bandwidth.needed(Setup(), method, target)
        assert bandwidth.utilisation(Setup(gbit=needed), method) == pytest.approx(target)


def test_a_slow_link_makes_merges_rarer_and_not_impossible():
    periods = [bandwidth.merge_period(Setup(gbit=gbit)) for gbit in (10.0, 1.7, 0.3, 0.1)]
    assert periods[0] == pytest.approx(24, rel=0.02)
    assert periods[1] == pytest.approx(48, rel=0.05)  # a fragment takes two steps
    assert periods == sorted(periods)
    on_the_wire = 16 * 5.0 / 0.1  # seconds, and steps, that all fragments take one after the other
    assert periods[3] == pytest.approx(on_the_wire, rel=0.25)


@pytest.mark.slow
@pytest.mark.parametrize("part", ["scavenge", "hetero", "bandwidth"])
def test_each_prints_a_table_and_writes_json_and_a_plot(part, tmp_path, capsys):
    quick = {"scavenge": ["--steps", "200"], "hetero": ["--hours", "0.5"], "bandwidth": []}[part]
    assert main(["simulate", part, "--out", str(tmp_path / "out"), *quick]) == 0
    assert "┃" in capsys.readouterr().out
    value = json.loads((tmp_path / "out" / f"{part}.json").read_text())
    assert value
    assert (tmp_path / "out" / f"{part}.png").read_bytes().startswith(b"\x89PNG")
    assert main(["simulate", part, "--json", "--out", str(tmp_path / "out"), *quick]) == 0
    assert json.loads(capsys.readouterr().out) == value


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["scavenge", "--learners", "0"], "--learners: must be a whole number of 1 or more"),
        (["scavenge", "--quorum", "9"], "quorum (K = 9) must not exceed the number of learners (M = 4)"),
        (["hetero", "--learners", "0"], "--learners: must be a whole number of 1 or more"),
        (["hetero", "--step-variance", "-0.1"], "--step-variance: must be a number of 0 or more and below 1"),
        (["bandwidth", "--gbit", "-1"], "--gbit: must be a number above 0"),
        (["bandwidth", "--target", "1"], "--target: must be a number above 0 and below 1, not '1'"),
        (["bandwidth", "--parameters", "0.5"], "--parameters: must be a number of 1 or more, not '0.5'"),
        (["scavenge", "--extra", "-1"], "--extra: must be a number of 0 or more, not '-1'"),
    ],
)
def test_bad_input_is_one_line(capsys, arguments, message):
    assert main(["simulate", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
