"""Requests to stop: the first interrupts what is being prepared, later they are counted."""

import os
import signal
import sys
import threading

import pytest

from diloco_ds.conductor import stops as stops_module
from diloco_ds.conductor.stops import Stops

NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@pytest.fixture(autouse=True)
def same_signals():
    handlers = [signal.getsignal(number) for number in NUMBERS]
    hook = sys.unraisablehook
    yield
    sys.unraisablehook = hook
    for number, handler in zip(NUMBERS, handlers, strict=True):
        signal.signal(number, handler)


@pytest.mark.parametrize("number", NUMBERS)
def test_while_a_run_is_prepared_it_interrupts(number):
    stops = Stops()
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), number)
    assert stops.exit_code == 128 + number


def test_afterwards_they_are_counted_and_the_first_is_the_reason():
    stops = Stops()
    stops.interrupting = False
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGINT):
        os.kill(os.getpid(), number)
    assert (stops.count, stops.signal, stops.exit_code) == (3, signal.SIGHUP, 129)


def test_nohup_keeps_its_meaning():
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    stops = Stops()
    os.kill(os.getpid(), signal.SIGHUP)
    assert stops.count == 0


class Interrupted:
    """Raises KeyboardInterrupt where Python drops it: in a destructor."""

    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)


@pytest.fixture
def unhurried(monkeypatch):
    """The interrupt comes again when the test is ready for it, also on a busy machine."""
    monkeypatch.setattr(stops_module, "_AGAIN_AFTER_S", 1.0)


def test_an_interrupt_that_python_drops_is_made_up_for(capsys, unhurried):
    stops = Stops()
    Interrupted()
    with pytest.raises(KeyboardInterrupt):
        threading.Event().wait(60)
    assert stops.count == 1
    assert capsys.readouterr().err == ""


def test_an_interrupt_dropped_just_before_the_run_begins_is_counted_once(unhurried):
    stops = Stops()
    Interrupted()
    stops.interrupting = False
    for thread in threading.enumerate():
        if isinstance(thread, threading.Timer):
            thread.join()
    assert stops.count == 1


def test_other_errors_in_destructors_are_shown_as_ever(capsys):
    class Broken:
        def __del__(self):
            raise ValueError("shown")

    Stops()
    Broken()
    assert "ValueError: shown" in capsys.readouterr().err
