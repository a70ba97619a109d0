"""The supervisor with a stand-in for the learner, which reports as it is told to. The real one: test_learner.py."""

import functools
import json
import os
import signal
import sys
import threading
import time

import pytest
from tiny_run import tiny_config

from diloco_ds.conductor.shared_memory import remove_shared_memory
from diloco_ds.config_file import save_config
from diloco_ds.core.events import Orders
from diloco_ds.core.fragments import TensorSpec, balance
from diloco_ds.errors import UserError
from diloco_ds.exchange.wire import OrdersRecord
from diloco_ds.island import supervisor, watch
from diloco_ds.island.learner_processes import LearnerProcesses, running_incarnations
from diloco_ds.island.watch import Restarts
from diloco_ds.observe.metrics import read_metrics
from diloco_ds.rundir import RunDir, SharedMemory, write_json

# What a stand-in learner can do: it gets its incarnation from the mark and reports into the mailbox.
PRELUDE = """
import os, sys, time
from pathlib import Path
from diloco_ds.core.events import Report
from diloco_ds.exchange.record import Record
from diloco_ds.exchange.wire import ReportRecord
run_id, _, incarnation = os.environ["DILOCO_DS_LEARNER"].split("/")
incarnation = int(incarnation)
record = Record.open(Path(sys.argv[1]) / "report")
def report(phase, step):
    told = Report("a", incarnation, phase, step, 0, 0.1, [0, 0], [0, 0], [0, 0])
    record.write(ReportRecord(run_id, "", told, 0.0, 0.0, 0).pack())
def steps(number):
    for step in range(1, number + 1):
        report("running", step)
        time.sleep(0.3)
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A run directory with what a supervisor reads of it, and quick decisions."""
    run = RunDir(tmp_path / "run")
    run.root.mkdir()
    save_config(tiny_config(tmp_path, islands=1), run.config)
    write_json(run.manifest, {"run_id": f"test-{os.getpid()}-{tmp_path.name}"})
    run.layout.write_text(
        balance([TensorSpec("x", (3,), False), TensorSpec("y", (2,), False)], 2, 4).to_json()
    )
    quick = functools.partial(Restarts, shortest_s=0.01, longest_s=0.05, give_up_after=3)
    monkeypatch.setattr(supervisor, "Restarts", quick)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield run
    for number, handler in handlers.items():
        signal.signal(number, handler)
    assert running_incarnations(run.run_id(), "a") == []
    remove_shared_memory(run.run_id())


def supervise(run, monkeypatch, script, rank=0):
    """Supervise stand-ins that do `script`, as this rank or (None) as the launcher; exit code and status at the end."""
    folder = SharedMemory(run.run_id()).island_end("a")
    command = [
        "/usr/bin/env",
        *([f"RANK={rank}"] if rank is not None else []),
        sys.executable,
        "-c",
        PRELUDE + script,
        str(folder),
    ]
    monkeypatch.setattr(supervisor, "launch_command", lambda *_arguments: command)
    code = supervisor.Supervisor(run, "a").run()
    return code, json.loads(run.status("supervisor.a").read_text())


def reasons(run, event):
    return [record["reason"] for record in read_metrics(run.metrics) if record.get("event") == event]


def test_a_learner_that_ends_as_asked_is_done(run, monkeypatch):
    code, status = supervise(run, monkeypatch, 'steps(3); report("drained", 3)')
    assert (code, status["state"], status["last_exit"], status["restarts"]) == (0, "done", 0, 0)
    assert status["pids"] == {"launcher": None, "ranks": []}


def test_leaving_without_a_last_report_is_no_end(run, monkeypatch):
    script = """
if incarnation == 1:
    steps(2)
    sys.exit(0)
report("drained", 3)
"""
    code, status = supervise(run, monkeypatch, script)
    assert (code, status["state"], status["incarnation"], status["restarts"]) == (0, "done", 2, 1)
    assert "exit code 0" in reasons(run, "learner_restarting")[0]


def test_what_cannot_run_as_configured_is_not_tried_again(run, monkeypatch):
    code, status = supervise(run, monkeypatch, 'print("error: the moon is not in memory"); sys.exit(2)')
    assert (code, status["state"], status["incarnation"]) == (2, "failed", 1)
    assert status["reason"] == "error: the moon is not in memory"


def test_the_reason_of_a_restart_is_the_error_of_that_start(run, monkeypatch):
    script = """
if incarnation == 1:
    raise ValueError("the first one")
if incarnation == 2:
    sys.exit(4)
report("drained", 3)
"""
    supervise(run, monkeypatch, script)
    first, second = reasons(run, "learner_restarting")
    assert "exit code 1: ValueError: the first one; see" in first
    assert "exit code 4; see" in second


@pytest.mark.parametrize(
    ("fails", "expected"),
    [('raise ValueError("too large")', "ValueError: too large; see "), ("os.abort()", "(SIGABRT); see ")],
)
def test_the_same_failure_at_the_same_step_is_given_up_in_the_end(run, monkeypatch, fails, expected):
    """Three starts here; it makes steps each time, and gets no further."""
    code, status = supervise(run, monkeypatch, f"steps(3); time.sleep(2); {fails}")
    assert (code, status["state"], status["incarnation"]) == (supervisor.GIVEN_UP, "failed", 3)
    assert status["reason"].startswith("3 times in a row the same failure, and no step beyond 3; the last: ")
    assert expected in status["reason"]


@pytest.mark.parametrize(
    ("last_words", "expected"),
    [
        ("ValueError: no more", "a rank has ended, and the others wait for it; see "),
        ("", "a rank is gone without a word, as if killed; see "),
    ],
)
def test_a_dead_rank_that_the_others_wait_for_is_not_waited_for(run, monkeypatch, last_words, expected):
    """The launcher waits for rank 0, which does not hear it; rank 1 has ended."""
    script = f"""
if incarnation > 1:
    report("drained", 3)
    sys.exit(0)
import subprocess
stuck = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
ranks = [
    subprocess.Popen([sys.executable, "-c", code], env={{**os.environ, "RANK": str(rank)}})
    for rank, code in enumerate((stuck, "import time; time.sleep(5); print({last_words!r})"))
]
steps(20)
[each.wait() for each in ranks]
"""
    monkeypatch.setattr(supervisor, "LAUNCHER_WITHIN_S", 0.5 if last_words else 600.0)
    two = tiny_config(run.root.parent, islands=1, ranks=2)
    save_config(two, run.config)
    monkeypatch.delenv("RANK", raising=False)
    code, status = supervise(run, monkeypatch, script, rank=None)
    assert (code, status["state"], status["restarts"]) == (0, "done", 1)
    assert reasons(run, "learner_restarting")[0].startswith(expected)


def test_a_mailbox_that_was_removed_is_made_again(run, monkeypatch):
    script = """
import shutil
if incarnation == 1:
    steps(2)
    shutil.rmtree(sys.argv[1])
    time.sleep(600)
report("drained", 3)
"""
    code, status = supervise(run, monkeypatch, script)
    assert (code, status["state"], status["incarnation"]) == (0, "done", 2)
    assert "was removed" in reasons(run, "learner_restarting")[0]


def test_it_gives_up_after_starts_in_a_row_without_a_step(run, monkeypatch):
    code, status = supervise(run, monkeypatch, "os.kill(os.getpid(), 9)")
    assert (code, status["state"], status["incarnation"], status["last_exit"]) == (1, "failed", 3, -9)
    assert "3 starts in a row without a step" in status["reason"]
    assert "SIGKILL" in status["reason"]


@pytest.mark.slow
def test_a_hung_learner_is_killed_with_all_its_processes_and_started_again(run, monkeypatch):
    monkeypatch.setattr(watch, "LEAST_SILENCE_S", 1.0)
    monkeypatch.setattr(watch, "SILENCE_FACTOR", 2.0)
    script = """
import signal, subprocess
if incarnation == 1:
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    steps(10)
    os.kill(os.getpid(), signal.SIGSTOP)
report("drained", 9)
"""
    code, status = supervise(run, monkeypatch, script)
    assert (code, status["state"], status["incarnation"]) == (0, "done", 2)
    assert reasons(run, "learner_restarting")[0].startswith("hung: no step for ")


def test_a_stop_while_nothing_runs_ends_at_once(run, monkeypatch):
    monkeypatch.setattr(supervisor, "Restarts", functools.partial(Restarts, shortest_s=600, longest_s=600))
    ended = threading.Event()

    def stop_when_it_waits():
        while not ended.wait(0.05):
            status = run.status("supervisor.a")
            if status.exists() and json.loads(status.read_text())["state"] == "restarting":
                os.kill(os.getpid(), signal.SIGTERM)
                return

    asker = threading.Thread(target=stop_when_it_waits)
    asker.start()
    code, status = supervise(run, monkeypatch, "steps(3); sys.exit(3)")
    ended.set()
    asker.join()
    assert (code, status["state"], status["last_exit"]) == (0, "stopped", 3)


def test_a_learner_that_fails_while_the_run_ends_is_not_started_again(run, monkeypatch):
    unmade = supervisor.Supervisor._take_over

    def order_a_stop(self):
        orders = Orders("stop", 1, 1, (0, 0))
        self._mailbox.orders.write(OrdersRecord(run.run_id(), 1, orders).pack())
        return unmade(self)

    monkeypatch.setattr(supervisor.Supervisor, "_take_over", order_a_stop)
    code, status = supervise(run, monkeypatch, "steps(3); sys.exit(3)")
    assert (code, status["state"], status["incarnation"]) == (0, "stopped", 1)


@pytest.mark.parametrize(
    ("launcher_ends", "expected"),
    [
        ("when it was taken over", ["its launcher or a rank has ended"]),
        ("before", []),
    ],
)
def test_a_learner_of_another_supervisor_without_its_launcher_is_started_anew(
    run, monkeypatch, launcher_ends, expected
):
    """Its rank would go on. What stood in the log before is no reason."""
    status = run.status("supervisor.a")
    run.log("a").parent.mkdir()
    run.log("a").write_text("ValueError: of long ago\n")
    launcher = f"""
import os, subprocess, sys, time
from pathlib import Path
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], env={{**os.environ, "RANK": "0"}})
while {launcher_ends != "before"} and not Path({str(status)!r}).exists():
    time.sleep(0.01)
"""
    first = LearnerProcesses.start(
        [sys.executable, "-c", launcher], dict(os.environ), run.log("a"), run.run_id(), "a", 0
    )
    while not first.find_processes(1) or (launcher_ends == "before" and first.exit_code() is None):
        time.sleep(0.01)
    code, status = supervise(run, monkeypatch, 'report("drained", 3)')
    assert (code, status["state"], status["incarnation"]) == (0, "done", 1)
    told = [reason.partition("; see")[0] for reason in reasons(run, "learner_restarting")]
    assert told == expected


def test_one_island_has_one_supervisor(run):
    first = supervisor.Supervisor(run, "a")
    with pytest.raises(UserError, match="has a supervisor already"):
        supervisor.Supervisor(run, "a")
    del first


def test_an_unknown_island_is_named(run):
    with pytest.raises(UserError, match="no island 'b'; there are a"):
        supervisor.Supervisor(run, "b")
    supervisor.Supervisor(run, "a")
