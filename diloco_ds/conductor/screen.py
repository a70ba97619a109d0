"""What the user sees of a run while it is conducted. A terminal that goes away takes nothing with it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from types import TracebackType

from rich.console import Console

from diloco_ds.observe.metrics import MetricsFollower
from diloco_ds.observe.progress import ProgressView
from diloco_ds.observe.status import read_status
from diloco_ds.rundir import RunDir

EVERY_S = 1.0


class Screen:
    """The live view of the run, kept fresh by `update`."""

    def __init__(self, run: RunDir, console: Console) -> None:
        size = run.metrics.stat().st_size if run.metrics.exists() else 0
        self._run, self._console = run, console
        self._view: ProgressView | None = ProgressView(console)
        self._events = MetricsFollower(run.metrics, size)
        self._due = 0.0

    def __enter__(self) -> Screen:
        self._show(lambda view: view.__enter__())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._show(lambda view: view.__exit__(kind, error, trace))

    def update(self, *, at_once: bool = False) -> None:
        """Show the newest state; without `at_once` no more often than every `EVERY_S` seconds."""
        now = time.monotonic()
        if self._view is None or (now < self._due and not at_once):
            return
        self._due = now + EVERY_S
        status, events = read_status(self._run.root), self._events.read()
        self._show(lambda view: view.update(status, events))

    def say(self, text: str) -> None:
        """A line below everything."""
        with contextlib.suppress(OSError):
            self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def _show(self, act: Callable[[ProgressView], object]) -> None:
        """Without a terminal (closed, or the reader of a pipe is gone) the run goes on unseen."""
        if self._view is None:
            return
        try:
            act(self._view)
        except OSError:
            self._view = None
