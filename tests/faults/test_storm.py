"""`diloco-ds drill storm` as a user calls it: a whole run under faults, and what it says of it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from tiny_run import tiny_run_file

from diloco_ds.conductor import ending, marks
from diloco_ds.rundir import RunDir, SharedMemory

pytestmark = pytest.mark.slow

SETTINGS = {
    "deepspeed": {"gradient_accumulation_steps": 2},
    "trainer": {"least_step_s": 0.5, "warmup_tokens": 1024, "checkpoint_every_s": 10.0},
}


@pytest.fixture(scope="module")
def storm(tmp_path_factory):
    """What the drill printed as JSON, and its directory; half a minute of a fault every five seconds on four islands."""
    directory = tmp_path_factory.mktemp("storm")
    run_file = tiny_run_file(directory / "given", islands=4, **SETTINGS)
    out = directory / "storm"
    drill = ["drill", "storm", str(run_file), "--minutes", "0.5", "--rate", "720", "--seed", "5"]
    run = RunDir(out / "storm")
    try:
        done = subprocess.run(
            [sys.executable, "-m", "diloco_ds.cli", *drill, "--without-calm", "--json", "--out", str(out)],
            cwd=directory,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode in (0, 1), done.stderr + (out / "storm.txt").read_text()
        yield json.loads(done.stdout), out
    finally:
        if run.manifest.exists():
            ending.sweep(run.run_id())


def test_the_run_finishes_and_leaves_nothing(storm):
    _, out = storm
    run = RunDir(out / "storm")
    assert run.export.exists()
    assert marks.processes_of(run.run_id()) == []
    assert not SharedMemory(run.run_id()).root.exists()


def test_the_faults_are_those_of_the_seed(storm):
    result, out = storm
    schedule = yaml.safe_load((out / "storm.yaml").read_text())
    assert (result["seed"], result["per_hour"], schedule["seed"]) == (5, 720, 5)
    assert result["faults"] + result["faults_missed"] == len(schedule["faults"]) > 3
    assert sum(result["faults_by_kind"].values()) == result["faults"]


def test_nobody_waited_and_all_came_back(storm):
    result, _ = storm
    busy = max(result["usual_step_s"].values()) / result["set_step_s"]
    assert result["recovery_s"]["n"] > 0
    assert result["recovery_s"]["not_back"] == 0
    assert 0.8 / busy < result["goodput"] < 1.1, result
    assert result["longest_gap_steps"] < 5 * busy, result
    assert 0 < result["participation"]["merged"] <= result["participation"]["eligible"]
    assert result["loss"] < 5.7, "better than a guess among 320"


def test_the_result_lies_beside_the_runs(storm):
    result, out = storm
    assert json.loads(Path(out / "result.json").read_text()) == result
