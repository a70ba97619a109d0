"""Goodput of whole systems in virtual time: against arithmetic, Table 1, and itself."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from diloco_ds.cli import main
from diloco_ds.config import Exchange
from diloco_ds.errors import UserError
from diloco_ds.sim.fleet import RigidChips, TimeAccount, Weather, account, common_pause
from diloco_ds.sim.goodput import System, baselines, simulate
from diloco_ds.sim.hetero import NO_FAILURES
from diloco_ds.sim.table1 import PAPER, compute

SMALL = {"chips": 300_000, "learners": 4, "hours": 2.0, "step_s": 30.0}


def test_without_failures_all_time_is_good():
    result = simulate(System(**SMALL, weather=NO_FAILURES))
    assert result.goodput == result.uptime == 1.0
    assert result.failures == 0
    assert result.steps == 4 * 240


def test_the_same_seed_gives_the_same_numbers_and_another_others():
    assert simulate(System(**SMALL, seed=3)) == simulate(System(**SMALL, seed=3))
    assert simulate(System(**SMALL, seed=3)) != simulate(System(**SMALL, seed=4))


def test_goodput_and_what_was_lost_are_the_whole():
    result = simulate(System(**SMALL))
    assert result.goodput + sum(result.lost.values()) == pytest.approx(1.0)
    assert 0 < result.merged < 1
    expected = 300_000 * 2.0 * 3600 / (365 * 86_400)
    assert abs(result.failures - expected) < 5 * math.sqrt(expected)


def test_steps_are_made_in_the_time_that_trains():
    result = simulate(System(**SMALL))
    assert result.steps * 30.0 / (4 * 7200) == pytest.approx(result.training, abs=0.01)


def test_a_rigid_learner_has_the_goodput_of_renewal_theory():
    weather = Weather(mtbi_days=365, restart_s=100.0)
    chips = 200_000
    alone = account(RigidChips(chips, weather, np.random.default_rng(0)), hours=2000)
    rate = chips / (365 * 86_400)
    assert alone.goodput == pytest.approx(1 / (1 + rate * 100.0), rel=0.01)


def test_learners_are_worth_more_than_one_elastic_learner():
    system = System(**SMALL)
    alone = baselines(system, hours=24)
    assert alone["dp"].goodput < alone["elastic"].goodput < simulate(system).goodput


def test_a_quorum_of_all_holds_the_clock_back_but_no_chip():
    system = System(**SMALL, slowest=0.3, weather=NO_FAILURES, exchange=Exchange(quorum=4))
    result = simulate(system)
    assert result.training == 1.0
    assert result.goodput == pytest.approx(4 * 0.7 / 3.7, abs=0.01)
    assert result.lost["ahead_of_quorum"] == pytest.approx(1 - result.goodput)


def test_nobody_steps_only_where_all_pauses_meet():
    accounts = [
        TimeAccount(pauses=[(0, 4), (10, 20)]),
        TimeAccount(pauses=[(2, 5), (5, 12), (19, 40)]),
    ]
    assert common_pause(accounts, 30.0) == 2 + 2 + 1
    assert common_pause(accounts[:1], 15.0) == 4 + 5
    assert common_pause([TimeAccount(), accounts[0]], 30.0) == 0


@pytest.mark.slow
def test_table_1_of_the_paper():
    table = compute(System())
    value = table.to_json()
    assert value["mean_error"] <= 2
    assert value["worst_error"] <= 5
    assert [(row["kind"], row["learners"]) for row in value["rows"]] == list(PAPER)
    assert all(len(row["goodput"]) == len(row["paper"]) == 5 for row in value["rows"])
    for row in value["rows"]:
        if row["learners"] >= 8:
            assert min(row["uptime"]) >= 99.9
        assert row["goodput"] == sorted(row["goodput"], reverse=True)


@pytest.mark.slow
def test_a_day_of_the_largest_system():
    result = simulate(System(chips=2_400_000, learners=16, hours=24))
    assert 0.81 <= result.goodput <= 0.91
    assert result.uptime >= 0.999


def test_the_command_line(capsys, tmp_path):
    arguments = [
        "simulate",
        "goodput",
        "--chips",
        "300000",
        "--learners",
        "4",
        "--hours",
        "1",
        "--step-s",
        "30",
    ]
    assert main([*arguments, "--json", "--out", str(tmp_path)]) == 0
    value = json.loads(capsys.readouterr().out)
    assert {"goodput", "uptime", "failures", "lost", "baselines", "system"} <= set(value)
    assert 90 < value["goodput"] < 100
    assert json.loads((tmp_path / "goodput.json").read_text()) == value
    assert (tmp_path / "goodput.png").read_bytes().startswith(b"\x89PNG")
    assert main(arguments) == 0
    assert "lost: shrink" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--learners", "0"], "--learners: must be a whole number of 1 or more, not '0'"),
        (
            ["--learners", "2", "--quorum", "3"],
            "quorum (K = 3) must not exceed the number of learners (M = 2)",
        ),
        (["--mtbi-days", "-1"], "--mtbi-days: must be a number above 0 (or inf), not '-1'"),
        (["--shrink-s", "-1"], "--shrink-s: must be a number of 0 or more, not '-1'"),
        (["--hours", "0"], "--hours: must be a number above 0, not '0'"),
        (["--chips", "3"], "3 chips cannot make 16 learners"),
        (["--step-s", "-2"], "--step-s: must be a number above 0, not '-2'"),
        (["--gbit", "-1"], "--gbit: must be a number above 0 (or inf), not '-1'"),
        (["--slowest", "1"], "--slowest: must be a number of 0 or more and below 1, not '1'"),
        (["--hours", "nan"], "--hours: must be a number above 0, not 'nan'"),
        (["--hours", "inf"], "--hours: must be a number above 0, not 'inf'"),
        (["--seed", "-1"], "--seed: must be a whole number of 0 or more, not '-1'"),
        (["--quorum", "0"], "--quorum: must be a whole number of 1 or more, not '0'"),
        (["--overlap", "24"], "simulate goodput: overlap (24) must be less than period (24)"),
        (["--fragments", "30"], "simulate goodput: fragments (30) must not exceed period (24)"),
        (["--chips", "many"], "--chips: must be a whole number of 1 or more, not 'many'"),
        (["--out", "file/out"], "--out: file/out cannot be written: "),
    ],
)
def test_bad_input_is_one_line(tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    assert main(["simulate", "goodput", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_an_unknown_part_is_one_line(capsys):
    assert main(["simulate", "weather"]) == 2
    error = capsys.readouterr().err
    assert "goodput" in error
    assert error.count("\n") == 1


def test_a_system_is_checked_where_it_is_made():
    for wrong in ({"slowest": 1.0}, {"hours": 0}, {"learners": 0}, {"step_s": -2.0}):
        with pytest.raises(UserError, match=r"at least|above|more than"):
            simulate(System(**wrong))
