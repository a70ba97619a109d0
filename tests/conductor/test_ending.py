"""The end of a run on real processes: wandb gets its time to upload the rest, and nobody waits for ever."""

import os
import sys
import time
from types import SimpleNamespace

import pytest

from diloco_ds.conductor import ending, marks
from diloco_ds.conductor.part import Part
from diloco_ds.conductor.parts import Parts
from diloco_ds.rundir import RunDir

RUN_ID = "test-ending"
ENDS_AFTER = """
import pathlib, signal, sys, time
def end(*_):
    time.sleep({seconds})
    sys.exit(0)
signal.signal(signal.SIGTERM, end)
pathlib.Path({ready!r}).touch()
time.sleep(600)
"""
"""A process that takes so long to end when it is asked to."""


@pytest.fixture
def started(tmp_path):
    """Makes the parts of a run: one link and an observer, that take so many seconds to end."""

    def start(link_s: float, observer_s: float) -> Parts:
        parts = [part("link.a", link_s), part("observer", observer_s)]
        link, observer = parts
        for each in parts:
            each.start()
        while not all((tmp_path / each.role).exists() for each in parts):
            time.sleep(0.01)
        return Parts(
            syncer=part("syncer", 0.0), links={"a": link}, supervisors={}, observer=observer, chaos=None
        )

    def part(role: str, seconds: float) -> Part:
        program = ENDS_AFTER.format(seconds=seconds, ready=str(tmp_path / role))
        return Part(
            RunDir(tmp_path), RUN_ID, role, lambda: ([sys.executable, "-c", program], dict(os.environ))
        )

    yield start
    marks.kill(lambda: marks.processes_of(RUN_ID))


def seconds_of(call) -> float:
    began = time.monotonic()
    call()
    return time.monotonic() - began


def test_an_observer_that_still_uploads_is_waited_for(started, monkeypatch):
    monkeypatch.setattr(ending, "REST_WITHIN_S", 0.2)
    parts = started(link_s=0.0, observer_s=1.5)
    assert seconds_of(lambda: ending.end_rest(parts, lambda: False)) >= 1.4
    assert ending.cut_off(parts) is None


def test_one_that_does_not_end_is_given_up_and_that_is_said(started, monkeypatch):
    monkeypatch.setattr(ending, "REST_WITHIN_S", 0.1)
    monkeypatch.setattr(ending, "OBSERVER_WITHIN_S", 1.0)
    parts = started(link_s=0.0, observer_s=600)
    assert 0.9 < seconds_of(lambda: ending.end_rest(parts, lambda: False)) < 10
    assert "wandb sync" in ending.cut_off(parts)
    ending.sweep(RUN_ID, keep_shared_memory=True)
    assert ending.cut_off(parts) is None


@pytest.mark.parametrize("hurried", [True, False])
def test_neither_a_hurry_nor_a_deadline_is_exceeded(started, monkeypatch, hurried):
    monkeypatch.setattr(ending, "REST_WITHIN_S", 0.1)
    parts = started(link_s=0.0, observer_s=600)
    deadline = float("inf") if hurried else time.monotonic() + 0.5
    assert seconds_of(lambda: ending.end_rest(parts, lambda: hurried, deadline)) < 10  # not the usual 15
    assert parts.observer.alive()


def test_the_conductor_waits_longer_than_the_observer_for_wandb():
    from diloco_ds.observe import observer

    assert observer.FINISH_TIMEOUT_S < ending.OBSERVER_WITHIN_S < ending.CLEANLY_WITHIN_S < 30


class Clock:
    """Time that passes by sleeping alone."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.mark.parametrize("chaos", [True, False])
def test_a_clean_end_keeps_its_promise_though_nobody_ends(monkeypatch, chaos):
    clock = Clock()
    monkeypatch.setattr(ending, "time", clock)
    asked = []

    def stubborn(role: str) -> SimpleNamespace:
        return SimpleNamespace(alive=lambda: True, signal=lambda _: asked.append((role, clock.now)))

    parts = Parts(
        syncer=stubborn("syncer"),
        links={"a": stubborn("link.a")},
        supervisors={"a": stubborn("supervisor.a")},
        observer=stubborn("observer"),
        chaos=stubborn("chaos") if chaos else None,
    )
    ending.end_cleanly(parts, lambda: False)
    assert clock.now == pytest.approx(ending.CLEANLY_WITHIN_S, abs=1)
    assert clock.now < 30
    times = dict(asked)
    assert times["link.a"] - times["syncer"] > 20  # most of it is for the checkpoints
