"""Status: what the files say, believed as far as the processes live."""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from recorded_run import GONE, new_run, record_training, write_status

from diloco_ds.errors import UserError
from diloco_ds.observe.status import IslandPids, IslandStatus, Status, SyncerStatus, read_status
from diloco_ds.observe.status_files import LedgerFile, is_alive
from diloco_ds.rundir import RunDir

LEARNING = {
    "alive": True,
    "phase": "running",
    "incarnation": 1,
    "step": 40,
    "tokens": 40_000,
    "tokens_per_s": 500.0,
    "loss": 4.2,
    "merged": 30,
    "missed": 10,
}


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    """Another living process."""
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield child
    child.kill()
    child.wait()


def training_run(tmp_path: Path, rank: int) -> RunDir:
    """Conductor, syncer and two islands at work; only island a has ranks."""
    run = new_run(tmp_path)
    write_status(run, "conductor", state="running")
    islands = {"a": LEARNING, "b": {**LEARNING, "alive": False, "step": 12}}
    write_status(
        run,
        "syncer",
        state="running",
        generation=3,
        global_step=41,
        tokens=60_000,
        merges=38,
        drops=2,
        islands=islands,
    )
    write_status(
        run, "supervisor.a", state="running", incarnation=1, pids={"launcher": os.getppid(), "ranks": [rank]}
    )
    write_status(
        run, "supervisor.b", state="restarting", incarnation=2, restarts=1, reason="rank 0 was killed"
    )
    write_status(run, "agent.a")
    write_status(run, "proxy.a", pid=GONE)
    return run


def test_a_training_run_has_what_the_command_promises(
    tmp_path: Path, process: subprocess.Popen[bytes]
) -> None:
    run = training_run(tmp_path, process.pid)
    status = read_status(run.root)
    shown = json.loads(status.model_dump_json())
    assert shown["run_id"] == run.run_id()
    assert (shown["state"], shown["global_step"], shown["tokens"]) == ("running", 41, 60_000)
    assert shown["target_tokens"] == 1_000_000
    assert shown["syncer"] == {
        "generation": 3,
        "state": "running",
        "pids": [os.getpid()],
        "merges": 38,
        "drops": 2,
        "lost": None,
    }
    a, b = shown["islands"]
    assert a["pids"] == {
        "ranks": [process.pid],
        "launcher": os.getppid(),
        "supervisor": os.getpid(),
        "agent": os.getpid(),
        "proxy": None,
    }
    assert {key: a[key] for key in LEARNING if key in a} == {
        key: LEARNING[key] for key in LEARNING if key in a
    }
    assert (a["name"], a["state"], a["alive"]) == ("a", "running", True)
    assert (b["state"], b["incarnation"], b["restarts"], b["reason"]) == (
        "restarting",
        2,
        1,
        "rank 0 was killed",
    )
    assert shown["tokens_per_s"] == 500.0
    assert shown["eta_s"] == pytest.approx((1_000_000 - 60_000) / 500.0)
    assert status.islands[0].merge_share == 0.75


def test_a_rank_that_died_is_no_longer_listed(tmp_path: Path, process: subprocess.Popen[bytes]) -> None:
    run = training_run(tmp_path, process.pid)
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # a zombie: dead, though its id is still taken
    island = read_status(run.root).islands[0]
    assert island.pids.ranks == []
    assert not island.alive


def test_a_process_id_given_to_somebody_else_is_not_believed(process: subprocess.Popen[bytes]) -> None:
    now = time.time()
    assert is_alive(process.pid, now)
    assert not is_alive(process.pid, now - 3600)
    assert not is_alive(GONE, now)


@pytest.mark.parametrize(
    ("conductor", "syncer", "expected"),
    [
        (None, None, "dead"),
        ({"state": "preparing"}, None, "preparing"),
        ({}, None, "preparing"),
        ({"state": "running"}, {"state": "running"}, "running"),
        ({"state": "running"}, {"state": "draining"}, "draining"),
        ({"state": "running"}, {"state": "running", "pid": GONE}, "running"),
        ({"state": "running"}, {"state": "finished"}, "draining"),
        ({"state": "running"}, {"state": "finished", "pid": GONE, "started": 2e10}, "draining"),
        ({"state": "finished"}, {"state": "finished", "pid": GONE}, "finished"),
        ({"state": "stopping"}, {"state": "running"}, "stopping"),
        ({"pid": GONE, "state": "running"}, {"state": "running"}, "running"),
        ({"pid": GONE, "state": "running"}, {"state": "running", "pid": GONE}, "dead"),
        ({"pid": GONE, "state": "stopped"}, {"state": "stopping", "pid": GONE}, "stopped"),
        ({"pid": GONE, "state": "finished"}, {"state": "finished", "pid": GONE}, "finished"),
        ({"pid": GONE, "state": "failed"}, None, "failed"),
        ({"state": "preparing"}, {"state": "finished", "pid": GONE, "started": 5.0}, "preparing"),
        ({}, {"state": "stopped", "pid": GONE, "started": 5.0}, "preparing"),
    ],
)
def test_state_of_the_run(tmp_path: Path, conductor: dict | None, syncer: dict | None, expected: str) -> None:
    run = new_run(tmp_path)
    for role, content in (("conductor", conductor), ("syncer", syncer)):
        if content is not None:
            write_status(run, role, **content)
    assert read_status(run.root).state == expected


def test_islands_that_train_on_without_conductor_and_syncer(
    tmp_path: Path, process: subprocess.Popen[bytes]
) -> None:
    run = training_run(tmp_path, process.pid)
    write_status(run, "conductor", pid=GONE)
    write_status(run, "syncer", pid=GONE, state="running")
    status = read_status(run.root)
    assert status.state == "running"
    assert status.reason is not None
    assert "syncer is gone" in status.reason
    assert status.syncer.state == "dead"
    assert status.syncer.pids == []


def test_missing_and_damaged_files_are_no_obstacle(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    write_status(run, "syncer")
    run.status("syncer").write_text("{ torn")
    run.status("supervisor.a").write_text('{"pid": "no number"}')
    run.config.unlink()
    status = read_status(run.root)
    assert status.state == "dead"
    assert [island.name for island in status.islands] == ["a"]
    assert status.target_tokens is None


def test_an_island_that_joined_comes_after_the_configured_ones(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    write_status(run, "syncer", islands={"newcomer": LEARNING})
    assert [island.name for island in read_status(run.root).islands] == ["a", "b", "newcomer"]


def test_the_newest_evaluation_is_shown(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    record_training(run)
    evaluation = read_status(run.root).last_eval
    assert evaluation is not None
    assert (evaluation["loss"], evaluation["bits_per_byte"]) == (2.5, 1.25)


def test_what_is_no_run_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no run directory"):
        read_status(tmp_path)


def test_the_documentation_names_every_field_and_no_other() -> None:
    page = (Path(__file__).parents[2] / "docs" / "observing.md").read_text()
    table = page.partition("All numbers of `--json`:")[2].partition("\n\nOnly living")[0]
    rows = [line.split("|")[1:3] for line in table.splitlines() if line.startswith("| `")]
    documented = {name: meaning for names, meaning in rows for name in _quoted(names)}
    assert set(documented) == set(Status.model_fields)
    assert _quoted(documented["syncer"]) == set(SyncerStatus.model_fields)
    assert _quoted(documented["ledger"]) == set(LedgerFile.model_fields)
    assert _quoted(documented["islands"]) == {*IslandStatus.model_fields, *IslandPids.model_fields}


def _quoted(text: str) -> set[str]:
    """Words between backticks."""
    return {word for quoted in re.findall(r"`([^`]*)`", text) for word in re.findall(r"\w+", quoted)}
