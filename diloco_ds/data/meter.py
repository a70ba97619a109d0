"""Progress of a long piece of work: a bar in a terminal, now and then a line elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

_SECONDS_BETWEEN_LINES = 10.0


@contextmanager
def meter(console: Console, what: str, total: int) -> Iterator[Callable[[int], None]]:
    """Show how far `what` has come: the function it gives takes how much of `total` is newly done."""
    shown = _bar if console.is_terminal else _lines
    with shown(console, what, total) as advance:
        yield advance


@contextmanager
def _bar(console: Console, what: str, total: int) -> Iterator[Callable[[int], None]]:
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TaskProgressColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(what, total=total)
        yield lambda done: progress.advance(task, done)


@contextmanager
def _lines(console: Console, what: str, total: int) -> Iterator[Callable[[int], None]]:
    start = last = time.monotonic()
    done = 0

    def advance(amount: int) -> None:
        nonlocal done, last
        done += amount
        if time.monotonic() - last >= _SECONDS_BETWEEN_LINES:
            last = time.monotonic()
            console.out(f"{what}: {done / max(1, total):.0%}", highlight=False)

    yield advance
    console.out(f"{what}: done in {time.monotonic() - start:.1f} s", highlight=False)
