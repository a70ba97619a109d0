import os
import signal
import subprocess
import sys
import time

import psutil

from diloco_ds.island.learner_processes import LearnerProcesses, running_incarnations

# A launcher with two ranks, each with a child of its own, as DeepSpeed's: RANK is set for the ranks and
# inherited below them.
LAUNCHER = """
import os, subprocess, sys
sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
rank = [sys.executable, "-c", f"import subprocess; subprocess.Popen({sleep!r}).wait()"]
ranks = [subprocess.Popen(rank, env={**os.environ, "RANK": str(number)}) for number in range(2)]
print("started", flush=True)
for each in ranks: each.wait()
"""


def wait_for(condition, seconds=90):
    deadline = time.monotonic() + seconds
    while not (result := condition()):
        assert time.monotonic() < deadline, "the condition did not come true in time"
        time.sleep(0.02)
    return result


def start(tmp_path, incarnation=1, run_id=None):
    run_id = run_id or f"test-{os.getpid()}-{tmp_path.name}"
    log = tmp_path / "logs" / "a.log"
    learner = LearnerProcesses.start(
        [sys.executable, "-c", LAUNCHER], dict(os.environ), log, run_id, "a", incarnation
    )
    wait_for(lambda: learner.find_processes(2))
    wait_for(lambda: len(learner.members()) == 5)
    wait_for(lambda: log.read_text() == "started\n")
    return run_id, learner


def test_ranks_are_found_and_all_are_killed(tmp_path):
    run_id, learner = start(tmp_path)
    try:
        assert sorted(learner.ranks) == [0, 1]
        assert {psutil.Process(pid).ppid() for pid in learner.ranks.values()} == {learner.launcher}
        assert os.getsid(learner.launcher) == learner.launcher  # a session of its own
        assert running_incarnations(run_id, "a") == [1]
        assert running_incarnations(run_id, "b") == []
        assert learner.exit_code() is None
    finally:
        learner.kill()
    assert learner.members() == []
    assert learner.exit_code() is not None
    assert running_incarnations(run_id, "a") == []
    assert (tmp_path / "logs" / "a.log").read_text() == "started\n"


def test_another_supervisor_finds_the_learner_by_its_mark(tmp_path):
    run_id, learner = start(tmp_path, incarnation=7)
    try:
        other = LearnerProcesses(run_id, "a", 7)
        assert other.exit_code() is None  # alive, though its ranks are not known yet
        assert other.find_processes(2)
        assert other.ranks == learner.ranks
        assert other.launcher == learner.launcher
        os.kill(learner.ranks[1], signal.SIGKILL)
        wait_for(lambda: other.exit_code() is not None)
    finally:
        learner.kill()


def test_another_supervisor_sees_that_the_launcher_is_gone(tmp_path):
    run_id, learner = start(tmp_path)
    try:
        other = LearnerProcesses(run_id, "a", 1)
        assert other.launcher is None  # nobody has looked yet
        assert other.find_processes(2)
        os.kill(other.launcher, signal.SIGKILL)
        wait_for(lambda: other.exit_code() is not None)
        assert other.launcher is None
        assert len(other.members()) == 4
    finally:
        learner.kill()


def test_ranks_that_their_launcher_left_behind_are_killed_too(tmp_path):
    _, learner = start(tmp_path)
    try:
        os.kill(learner.launcher, signal.SIGKILL)
        wait_for(lambda: learner.exit_code() is not None)
        assert len(learner.members()) == 4
        assert learner.launcher is None
    finally:
        learner.kill()
    assert learner.members() == []


def test_signals_go_to_the_ranks_alone(tmp_path):
    _, learner = start(tmp_path)
    try:
        assert learner.signal_ranks(signal.SIGTERM) == 2
        wait_for(lambda: learner.exit_code() is not None)
        assert learner.exit_code() == 0  # the launcher itself was not hit
    finally:
        learner.kill()


def test_processes_of_another_run_are_let_alone(tmp_path):
    stranger = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(600)"],
        env={**os.environ, "DILOCO_DS_LEARNER": "other/a/1"},
    )
    try:
        _, learner = start(tmp_path)
        learner.kill()
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()
