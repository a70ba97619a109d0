"""The live view of a run while it goes on: one picture in a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from pathlib import Path

from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

from diloco_ds.observe.metrics import MetricsFollower, Record
from diloco_ds.observe.picture import LossTrend, event_line, picture, plain_line
from diloco_ds.observe.status import ENDED, Status, read_status
from diloco_ds.rundir import RunDir

EVENTS_KEPT = 50
ROUTINE = {"checkpoint", "snapshot"}
"""Events that come all the time and would push out the others; metrics.jsonl and the report have them."""


class ProgressView:
    """What a run is doing, kept up to date by `update`. A context manager: the terminal is always given back.

    In a terminal one live picture; elsewhere a line every `plain_every_s` seconds, and one per event.
    """

    def __init__(self, console: Console | None = None, plain_every_s: float = 10.0) -> None:
        self.console = console or Console()
        self._plain_every_s = plain_every_s
        self._next_plain = 0.0
        self._last_plain = ""
        self._events: deque[Record] = deque(maxlen=EVENTS_KEPT)
        self._trends: dict[str, LossTrend] = {}
        self._status: Status | None = None
        self._live = Live(console=self.console, auto_refresh=False)

    def __enter__(self) -> ProgressView:
        if self.console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._live.stop()

    def update(self, status: Status, events: Iterable[Record] = ()) -> None:
        """Show `status` and, among the records new since the last call, the events."""
        new = [event for event in events if event["kind"] == "event" and event.get("event") not in ROUTINE]
        self._events.extend(new)
        self._note_losses(status)
        just_ended = status.state in ENDED and (self._status is None or self._status.state not in ENDED)
        self._status = status
        if self.console.is_terminal:
            self._live.update(self.render(self.console.width, self.console.height), refresh=True)
            return
        for event in new:
            self.console.print(event_line(event), soft_wrap=True, highlight=False)
        self._print_plain(plain_line(status), at_once=just_ended)

    def render(self, width: int, height: int) -> RenderableType:
        """The picture as it stands, for a terminal of `width` columns and `height` lines."""
        if self._status is None:
            return Text("waiting for the run to begin", style="dim")
        return picture(self._status, list(self._events), self._trends, width, height)

    def _note_losses(self, status: Status) -> None:
        for island in status.islands:
            if island.loss is not None and island.step is not None:
                self._trends.setdefault(island.name, LossTrend()).add(island.step, island.loss)

    def _print_plain(self, line: str, *, at_once: bool) -> None:
        now = time.monotonic()
        if line == self._last_plain or (now < self._next_plain and not at_once):
            return
        self._next_plain = now + self._plain_every_s
        self._last_plain = line
        self.console.print(line, soft_wrap=True, highlight=False, markup=False)


def watch(run_dir: Path, console: Console | None = None, every_s: float = 1.0) -> Status:
    """Show the run in `run_dir` until it has ended; returns its last status. UserError if there is no run."""
    status = read_status(run_dir)
    follower = MetricsFollower(RunDir(run_dir).metrics)
    with ProgressView(console) as view:
        while True:
            view.update(status, follower.read())
            if status.state in ENDED:
                return status
            time.sleep(every_s)
            status = read_status(run_dir)
