"""`launch/storm.sh --short` as a user calls it: a whole run under faults, and what it says of it."""

import json
import math
import subprocess
from pathlib import Path

import pytest
import yaml

from diloco_ds.conductor import ending, marks
from diloco_ds.rundir import RunDir, SharedMemory

pytestmark = pytest.mark.slow

REPOSITORY = Path(__file__).parents[2]
SEED = 5
VOCABULARY = 2048


@pytest.fixture(scope="module")
def storm(tmp_path_factory):
    """What it printed, its exit code and its directory; half a minute of a fault every five seconds on four islands."""
    out = tmp_path_factory.mktemp("storm") / "storm"
    run = RunDir(out / "storm")
    command = ["bash", "launch/storm.sh", "--short", "--seed", str(SEED), "--json", "--out", str(out)]
    try:
        done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
        assert done.returncode in (0, 1), done.stderr + (out / "storm.txt").read_text()
        yield json.loads(done.stdout), done.returncode, out
    finally:
        if run.manifest.exists():
            ending.sweep(run.run_id())


def test_the_run_finishes_and_leaves_nothing(storm):
    _, _, out = storm
    run = RunDir(out / "storm")
    assert run.export.exists()
    assert marks.processes_of(run.run_id()) == []
    assert not SharedMemory(run.run_id()).root.exists()


def test_the_faults_are_those_of_the_seed(storm):
    result, _, out = storm
    schedule = yaml.safe_load((out / "storm.yaml").read_text())
    assert (result["seed"], result["per_hour"], schedule["seed"]) == (SEED, 720, SEED)
    assert result["faults"] + result["faults_missed"] == len(schedule["faults"]) > 3
    assert sum(result["faults_by_kind"].values()) == result["faults"]


def test_nobody_waited_and_all_came_back(storm):
    result, _, _ = storm
    busy = max(result["usual_step_s"].values()) / result["set_step_s"]
    assert result["recovery_s"]["n"] > 0
    assert result["recovery_s"]["not_back"] == 0
    assert 0.8 / busy < result["goodput"] < 1.3 * busy, result
    assert result["longest_gap_steps"] < 5 * busy, result
    assert 0.5 < result["participation"]["share"] <= 1, result
    assert result["participation"]["merged"] <= result["participation"]["eligible"]
    assert result["blocks_lost"] == 0
    assert result["loss"] < math.log(VOCABULARY) - 0.5, "better than a guess"


def test_a_goal_that_is_missed_is_told_by_the_exit_code(storm):
    """Which are met depends on what else the machine has to do."""
    result, code, _ = storm
    assert code == int(False in result["goals_met"].values())
    assert result["goals_met"]["blocks_lost"] is True


def test_the_result_lies_beside_the_runs(storm):
    result, _, out = storm
    assert json.loads((out / "result.json").read_text()) == result
