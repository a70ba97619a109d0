"""Fixtures for the exchange: children that die by SIGKILL, waiting with a deadline."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

import pytest
from syncer_run import PlayedLearner, SyncerRun, play, versions_at_least

from diloco_ds.exchange import failpoint


def _run_child(body: Callable[[], None]) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            body()
        finally:
            os._exit(0)
    return pid


@pytest.fixture
def dies_at() -> Callable[[str, Callable[[], None]], None]:
    """`dies_at(place, body)`: run `body` in a child that is killed by SIGKILL at the failpoint `place`."""

    def run(place: str, body: Callable[[], None]) -> None:
        def armed() -> None:
            failpoint._name, failpoint._left = place, 1
            body()

        _, status = os.waitpid(_run_child(armed), 0)
        assert os.WIFSIGNALED(status), f"the child never came by {place}"
        assert os.WTERMSIG(status) == signal.SIGKILL

    return run


@pytest.fixture
def killed_when() -> Callable[[Callable[[], bool], Callable[[], None]], None]:
    """`killed_when(condition, body)`: run `body` in a child and kill it by SIGKILL once `condition` holds
    here.
    """

    def run(condition: Callable[[], bool], body: Callable[[], None]) -> None:
        pid = _run_child(body)
        try:
            deadline = time.monotonic() + 120
            while not condition():
                assert time.monotonic() < deadline
        finally:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)

    return run


@pytest.fixture
def in_child() -> Callable[[Callable[[], None]], Callable[[], None]]:
    """`in_child(body)` starts `body` in a child; the returned function waits for it and checks that it was
    content.
    """

    def start(body: Callable[[], None]) -> Callable[[], None]:
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                body()
                code = 0
            finally:
                os._exit(code)

        def join() -> None:
            _, status = os.waitpid(pid, 0)
            assert status == 0

        return join

    return start


@pytest.fixture
def wait_until() -> Callable[..., None]:
    """`wait_until(condition, what, seconds)`: poll until it holds; the test fails after `seconds`."""

    def wait(condition: Callable[[], bool], what: str = "condition", seconds: float = 120) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
            time.sleep(0.0005)

    return wait


@pytest.fixture
def new_run(tmp_path):
    runs = []

    def make(**blocks):
        runs.append(SyncerRun(tmp_path / f"run{len(runs)}", **blocks))
        return runs[-1]

    yield make
    for run in runs:
        run.close()
        assert not run.shared.root.exists()


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """The history of a run that nothing happened to: (fragment, version) -> weights and momentum."""
    run = SyncerRun(tmp_path_factory.mktemp("reference") / "run")
    try:
        run.start()
        learners = [PlayedLearner(run, "a"), PlayedLearner(run, "b")]
        play(run, learners, versions_at_least(learners[0], 8))
        return run.history
    finally:
        run.close()
