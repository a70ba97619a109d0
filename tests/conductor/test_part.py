"""A part on real processes: started, restarted with back-off, given up, taken over by another conductor."""

import json
import os
import signal
import sys
import time

import psutil
import pytest

from diloco_ds.conductor import marks, part
from diloco_ds.conductor.part import Endings, Part
from diloco_ds.rundir import RunDir, write_json

RUN_ID = "test-part"
SLEEPER = "import time; time.sleep(60)"


@pytest.fixture
def run(tmp_path):
    yield RunDir(tmp_path)
    marks.kill(lambda: marks.processes_of(RUN_ID))


def make(run: RunDir, program: str, endings: Endings | None = None) -> Part:
    return Part(run, RUN_ID, "worker", lambda: ([sys.executable, "-c", program], dict(os.environ)), endings)


def until(condition, within_s: float = 120.0):
    deadline = time.monotonic() + within_s
    while not (value := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return value


def test_what_is_killed_is_started_again_as_another_process(run):
    worker = make(run, SLEEPER)
    worker.start()
    first = worker.pid
    os.kill(first, signal.SIGKILL)
    told = until(worker.poll)
    assert told.startswith("it ended with exit code -9; next start in 0.5 s")
    assert worker.record() is None
    assert until(worker.poll) == "started again"
    assert worker.pid != first
    assert worker.alive()


def test_it_has_a_session_of_its_own_and_logs_to_its_file(run):
    worker = make(run, f"print('hello', flush=True); {SLEEPER}")
    worker.start()
    assert os.getsid(worker.pid) == worker.pid
    until(lambda: run.log("worker").read_text() == "hello\n")


@pytest.mark.parametrize(
    ("program", "state", "reason"),
    [
        ("pass", "ended", "it is done"),
        ("import sys; print('error: no such thing'); sys.exit(2)", "failed", "no such thing; see "),
    ],
)
def test_exit_codes_that_are_an_end(run, program, state, reason):
    worker = make(run, program)
    worker.start()
    until(worker.poll)
    assert worker.state == state
    assert worker.reason.startswith(reason)


def test_its_own_word_counts_more_than_its_exit_code(run):
    endings = Endings(well=frozenset({"done"}), badly=frozenset({"lost"}))
    for said, state in (("done", "ended"), ("lost", "failed"), ("running", "waiting")):
        program = (
            f"import json, os, sys; path = {str(run.status('worker'))!r}; "
            "os.makedirs(os.path.dirname(path), exist_ok=True); "
            f"json.dump({{'pid': os.getpid(), 'state': {said!r}, 'reason': 'its word'}}, open(path, 'w')); "
            "sys.exit(5)"
        )
        worker = make(run, program, endings)
        worker.start()
        until(worker.poll)
        assert worker.state == state


def test_the_word_of_an_earlier_process_does_not_count(run):
    write_json(run.status("worker"), {"pid": 1, "state": "done"})
    worker = make(run, "import sys; sys.exit(5)", Endings(well=frozenset({"done"})))
    worker.start()
    until(worker.poll)
    assert worker.state == "waiting"


def test_one_that_never_lasts_is_given_up(run, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(part.time, "monotonic", lambda: now[0])
    worker = make(run, "import sys; sys.exit(1)")
    worker.start()
    starts = 1
    while not worker.over:
        worker._popen.wait()
        worker.poll()
        now[0] += 31.0
        starts += worker.poll() == "started again"
    assert worker.state == "failed"
    assert starts == 10
    assert "10 starts in a row did not last" in worker.reason


def test_another_conductor_takes_it_over_and_sees_it_end(run):
    worker = make(run, SLEEPER)
    worker.start()
    record = json.loads(json.dumps(worker.record()))
    heir = make(run, SLEEPER)
    assert heir.take_over(record)
    assert heir.pid == worker.pid
    os.kill(heir.pid, signal.SIGKILL)
    worker._popen.wait()
    assert until(heir.poll).startswith("it ended; next start")


def test_a_process_id_that_is_somebody_elses_now_is_not_taken_over(run):
    record = {"pid": os.getpid(), "create_time": psutil.Process().create_time() - 100}
    assert not make(run, SLEEPER).take_over(record)
    assert not make(run, SLEEPER).take_over({"pid": 2**22 + 1, "create_time": 0.0})


def test_leftovers_of_a_role_are_killed_before_it_starts(run):
    worker = make(
        run, f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {SLEEPER!r}]); {SLEEPER}"
    )
    worker.start()
    until(lambda: len(marks.processes_of(RUN_ID)) == 2)
    os.kill(worker.pid, signal.SIGKILL)
    until(worker.poll)
    orphan = until(lambda: marks.processes_of(RUN_ID, "worker"))
    until(worker.poll)
    assert worker.state == "running"
    assert orphan[0] not in marks.processes_of(RUN_ID)


def test_strays_are_those_below_no_known_process(run):
    worker = make(
        run, f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {SLEEPER!r}]); {SLEEPER}"
    )
    worker.start()
    both = until(lambda: len(found := marks.processes_of(RUN_ID)) == 2 and found)
    assert marks.strays(RUN_ID, {worker.pid}) == []
    assert {process.pid for process in marks.strays(RUN_ID, set())} == {process.pid for process in both}
    os.kill(worker.pid, signal.SIGKILL)
    worker._popen.wait()
    orphan = next(process.pid for process in both if process.pid != worker.pid)
    assert [process.pid for process in marks.strays(RUN_ID, {worker.pid})] == [orphan]
