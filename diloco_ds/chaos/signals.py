"""Signals and limits for processes that may be gone by the time they are reached."""

from __future__ import annotations

import contextlib
import resource
import signal
import time
from collections.abc import Generator, Iterable

import psutil

STOPPED_WITHIN_S = 5.0
PERIOD_S = 0.1
"""Of the duty cycle of a throttled process."""


def send(processes: Iterable[psutil.Process], number: signal.Signals) -> None:
    """A signal to each of them that still lives."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def stop_and_wait(processes: list[psutil.Process]) -> None:
    """SIGSTOP, and return when all of them stand still. TimeoutError if one does not."""
    send(processes, signal.SIGSTOP)
    deadline = time.monotonic() + STOPPED_WITHIN_S
    while not all(_stands_still(process) for process in processes):
        if time.monotonic() > deadline:
            raise TimeoutError(f"processes {[process.pid for process in processes]} do not stop")
        time.sleep(0.002)


def resumed_after(processes: list[psutil.Process], seconds: float) -> Generator[float]:
    """The rest of a hang: wait, then SIGCONT; also when it is broken off."""
    try:
        yield seconds
    finally:
        send(processes, signal.SIGCONT)


def throttled(processes: list[psutil.Process], seconds: float, factor: float) -> Generator[float]:
    """Let them run 1/`factor` of the time; at the end, also a sudden one, all of it."""
    until = time.monotonic() + seconds
    try:
        while time.monotonic() < until:
            send(processes, signal.SIGSTOP)
            yield PERIOD_S * (1 - 1 / factor)
            send(processes, signal.SIGCONT)
            yield PERIOD_S / factor
    finally:
        send(processes, signal.SIGCONT)


def limit_files(processes: Iterable[psutil.Process], most_bytes: int | None) -> None:
    """Let no file of theirs grow beyond `most_bytes`; None: as large as they may be."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            _, hard = process.rlimit(resource.RLIMIT_FSIZE)
            process.rlimit(resource.RLIMIT_FSIZE, (hard if most_bytes is None else most_bytes, hard))


def _stands_still(process: psutil.Process) -> bool:
    try:
        return process.status() in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True
