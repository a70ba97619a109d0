"""Commands that change a run, and say what they did, say it as one JSON object too."""

import json
import subprocess
import sys

import pytest
from recorded_run import GONE, new_run, record_training, write_status

from diloco_ds import membership
from diloco_ds.cli import main
from diloco_ds.conductor import preflight
from diloco_ds.rundir import SharedMemory


@pytest.fixture
def run(tmp_path):
    """A run at work, as far as its files say."""
    run = new_run(tmp_path)
    record_training(run)
    write_status(run, "conductor", state="running")
    return run


@pytest.fixture
def told(capsys):
    """Runs a command with --json: what it prints."""

    def tell(*arguments: object) -> dict:
        assert main([*map(str, arguments), "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    return tell


def test_a_report(run, told):
    assert told("report", run.root) == {"run_dir": str(run.root), "report": str(run.report)}
    assert run.report.is_file()


def test_leaving(run, told):
    assert told("leave", run.root, "b") == {"run_dir": str(run.root), "island": "b", "leaves": True}
    assert membership.leaving(run) == {"b"}


def test_joining_now_and_at_the_resume(run, told, monkeypatch):
    monkeypatch.setattr(preflight, "check_joining", lambda *_: None)
    where = {"run_dir": str(run.root)}
    assert told("join", run.root, "--island", "c") == {**where, "island": "c", "joins": "now"}
    write_status(run, "conductor", state="stopped", pid=GONE)
    assert told("join", run.root, "--island", "d") == {**where, "island": "d", "joins": "at_resume"}
    assert [joining.island.name for joining in membership.joinings(run)] == ["c", "d"]


def test_a_stop_where_nothing_runs(run, told):
    write_status(run, "conductor", state="stopped", pid=GONE)
    nothing = {"was_running": False, "ended": True, "state": None, "conductor_pid": None, "remark": None}
    assert told("stop", run.root) == {"run_dir": str(run.root), **nothing, "kept": None}
    memory = SharedMemory(run.run_id()).root
    memory.mkdir(parents=True, mode=0o700)
    assert told("stop", run.root)["kept"] == str(memory)
    removed = told("stop", run.root, "--now")
    assert (removed["was_running"], removed["state"], removed["kept"]) == (False, "stopped", None)
    assert not memory.exists()


def test_a_stop_through_the_conductor(run, told):
    conductor = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    write_status(run, "conductor", state="stopped", pid=conductor.pid)
    stopped = told("stop", run.root)
    assert (stopped["was_running"], stopped["ended"], stopped["state"]) == (True, True, "stopped")
    assert conductor.wait() < 0, "it was asked to"
    conductor.stdin.close()
