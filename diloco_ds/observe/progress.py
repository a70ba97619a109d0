"""The live view of a run: one picture in a terminal, plain lines elsewhere."""

from __future__ import annotations

import io
import time
from collections import deque
from collections.abc import Iterable
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from diloco_ds.observe.metrics import MetricsFollower, Record
from diloco_ds.observe.status import ENDED, IslandStatus, Status, read_status
from diloco_ds.observe.units import count, duration, fixed, percent
from diloco_ds.rundir import RunDir

EVENTS_KEPT = 50
TREND_LENGTH = 16
_SPARKS = "▁▂▃▄▅▆▇█"
_STATE_STYLES = {
    **dict.fromkeys(("running",), "bold green"),
    **dict.fromkeys(("preparing", "starting", "waiting", "joining"), "cyan"),
    **dict.fromkeys(("draining", "drained", "finished"), "bold blue"),
    **dict.fromkeys(("restarting", "backoff", "absent", "hung", "stopping"), "yellow"),
    **dict.fromkeys(("dead", "failed", "given_up"), "bold red"),
    **dict.fromkeys(("stopped", "left"), "dim"),
}
_BAD_EVENTS = frozenset({"died", "failed", "fault", "given_up", "dead", "error"})
_ODD_EVENTS = frozenset({"restart", "warning", "drop", "metrics_lost", "skip", "stop"})


class ProgressView:
    """What a run is doing, kept up to date by `update`; a context manager, so that the terminal is always given back.

    In a terminal one live picture; elsewhere a line every `plain_every_s` seconds and one per event.
    """

    def __init__(self, console: Console | None = None, plain_every_s: float = 10.0) -> None:
        self.console = console or Console()
        self._plain_every_s = plain_every_s
        self._next_plain = 0.0
        self._last_plain = ""
        self._events: deque[Record] = deque(maxlen=EVENTS_KEPT)
        self._trends: dict[str, deque[float]] = {}
        self._status: Status | None = None
        self._live = Live(console=self.console, auto_refresh=False, transient=False)

    def __enter__(self) -> ProgressView:
        if self.console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._live.stop()

    def update(self, status: Status, events: Iterable[Record] = ()) -> None:
        """Show `status`; `events` are the event records that are new since the last call."""
        new = [event for event in events if event.get("kind") == "event"]
        self._events.extend(new)
        self._note_losses(status)
        ended = status.state in ENDED and (self._status is None or self._status.state not in ENDED)
        self._status = status
        if self.console.is_terminal:
            self._live.update(self.render(self.console.width, self.console.height), refresh=True)
            return
        for event in new:
            self.console.print(event_text(event), soft_wrap=True, highlight=False)
        self._print_plain(status, at_once=ended)

    def render(self, width: int, height: int) -> RenderableType:
        """The picture as it stands, for a terminal of `width` columns and `height` lines."""
        if self._status is None:
            return Text("waiting for the run to begin", style="dim")
        room = max(height - len(self._status.islands) - 12, 3)
        parts = [
            _summary(self._status),
            Padding(self._island_table(self._status, wide=width >= 90), (1, 0, 0, 0)),
        ]
        if self._events:
            parts.append(Padding(_event_list(list(self._events)[-min(room, 8) :]), (1, 0, 0, 0)))
        return Panel(
            Group(*parts),
            title=_title(self._status),
            title_align="left",
            subtitle=Text(self._status.run_dir, style="dim"),
            subtitle_align="right",
            border_style="bright_black",
            padding=(1, 2),
        )

    def export_svg(self, path: Path, width: int = 100) -> None:
        """Write the picture as it stands to `path` as an SVG."""
        console = Console(record=True, width=width, height=40, force_terminal=True, file=io.StringIO())
        console.print(self.render(width, console.height))
        console.save_svg(
            str(path), title=f"diloco-ds status --watch {self._status.run_dir if self._status else ''}"
        )

    def _note_losses(self, status: Status) -> None:
        for island in status.islands:
            trend = self._trends.setdefault(island.name, deque(maxlen=TREND_LENGTH))
            if island.loss is not None and (not trend or trend[-1] != island.loss):
                trend.append(island.loss)

    def _print_plain(self, status: Status, *, at_once: bool) -> None:
        now = time.monotonic()
        line = plain_line(status)
        if (now < self._next_plain and not at_once) or line == self._last_plain:
            return
        self._next_plain = now + self._plain_every_s
        self._last_plain = line
        self.console.print(line, soft_wrap=True, highlight=False, markup=False)

    def _island_table(self, status: Status, *, wide: bool) -> Table:
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", expand=False)
        for name in ("island", "state"):
            table.add_column(name, no_wrap=True)
        for name in ("step", "loss"):
            table.add_column(name, justify="right", no_wrap=True)
        if wide:
            table.add_column("trend", no_wrap=True)
        table.add_column("tokens/s", justify="right", no_wrap=True)
        table.add_column("in merges", no_wrap=True)
        for island in status.islands:
            trend = [Text(_sparkline(self._trends.get(island.name, ())), style="magenta")] if wide else []
            table.add_row(
                Text(island.name, style="bold"),
                Text(f"● {island.state}", style=_style(island.state)),
                str(island.step) if island.step is not None else "–",
                fixed(island.loss, 3),
                *trend,
                count(island.tokens_per_s) if island.alive else "–",
                _participation(island, wide),
            )
        return table


def watch(run_dir: Path, console: Console | None = None, every_s: float = 1.0) -> Status:
    """Show the run in `run_dir` until it has ended; returns its last status. UserError if that is no run directory."""
    status = read_status(run_dir)
    follower = MetricsFollower(RunDir(run_dir).metrics)
    with ProgressView(console) as view:
        while True:
            view.update(status, follower.read())
            if status.state in ENDED:
                return status
            time.sleep(every_s)
            status = read_status(run_dir)


def plain_line(status: Status) -> str:
    """The whole status in one line of text."""
    target = f"/{count(status.target_tokens)}" if status.target_tokens else ""
    parts = [
        f"{status.state}: step {status.global_step}, {count(status.tokens)}{target} tokens",
        *([f"{count(status.tokens_per_s)} tokens/s"] if status.tokens_per_s else []),
        *([f"ETA {duration(status.eta_s)}"] if status.eta_s is not None else []),
        *(_island_words(island) for island in status.islands),
        *([f"held-out {_heldout(status)}"] if _heldout(status) else []),
    ]
    return " | ".join(parts)


def event_text(event: Record) -> Text:
    """One event as a line: time of day, who, what and why."""
    what = str(event.get("event", "event"))
    who = " ".join(str(event[key]) for key in ("role", "island") if event.get(key) is not None)
    style = "red" if what in _BAD_EVENTS else "yellow" if what in _ODD_EVENTS else ""
    line = Text(time.strftime("%H:%M:%S", time.localtime(event["time"])), style="dim")
    line.append("  ")
    line.append(f"{who} {what}".strip().replace("_", " "), style=style)
    if event.get("reason"):
        line.append(f": {event['reason']}", style="default")
    return line


def _title(status: Status) -> Text:
    title = Text.assemble(" ", (status.name, "bold"), "  ", (f"● {status.state}", _style(status.state)), " ")
    if status.state in ("failed", "dead", "stopped") and status.reason:
        title.append(f"{status.reason} ", style="dim")
    return title


def _summary(status: Status) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    table.add_row("tokens", _token_bar(status))
    syncer = status.syncer
    steps = Text.assemble((str(status.global_step), "bold"), f"   {syncer.merges} merges")
    if syncer.drops:
        steps.append(f"   {syncer.drops} dropped", style="yellow")
    if syncer.generation > 1 or syncer.state == "dead":
        steps.append(f"   syncer generation {syncer.generation}, {syncer.state}", style=_style(syncer.state))
    table.add_row("global step", steps)
    table.add_row("held out", _heldout(status) or Text("no evaluation yet", style="dim"))
    return table


def _token_bar(status: Status) -> Table:
    line = Table.grid(padding=(0, 2, 0, 0))
    target = status.target_tokens
    done = f"{count(status.tokens)} / {count(target)}"
    rate = f"{count(status.tokens_per_s)} tokens/s" if status.tokens_per_s else ""
    eta = f"ETA {duration(status.eta_s)}" if status.eta_s is not None else ""
    if not target:
        line.add_row(Text(done, style="bold"), rate)
        return line
    bar = ProgressBar(
        total=target,
        completed=min(status.tokens, target),
        width=28,
        complete_style="green",
        finished_style="green",
    )
    line.add_row(
        bar, percent(status.tokens / target), Text(done, style="bold"), rate, Text(eta, style="cyan")
    )
    return line


def _heldout(status: Status) -> str:
    evaluation = status.last_eval or {}
    if evaluation.get("loss") is None:
        return ""
    parts = [f"loss {evaluation['loss']:.3f}"]
    if evaluation.get("bits_per_byte") is not None:
        parts.append(f"{evaluation['bits_per_byte']:.3f} bits/byte")
    if evaluation.get("tokens") is not None:
        parts.append(f"at {count(evaluation['tokens'])} tokens")
    return ", ".join(parts)


def _participation(island: IslandStatus, wide: bool) -> Text:
    share = island.merge_share
    if share is None:
        return Text("–", style="dim")
    full = round(10 * share)
    bar = Text("━" * full, style="green") + Text("━" * (10 - full), style="bright_black")
    numbers = f" {percent(share):>5}  {island.merged}/{island.merged + island.missed}"
    return (bar if wide else Text("")) + Text(numbers)


def _event_list(events: list[Record]) -> Group:
    return Group(*(event_text(event) for event in events))


def _island_words(island: IslandStatus) -> str:
    if island.step is None:
        return f"{island.name} {island.state}"
    share = f", in {percent(island.merge_share)} of merges" if island.merge_share is not None else ""
    return f"{island.name} {island.state}, step {island.step}, loss {fixed(island.loss, 3)}{share}"


def _sparkline(values: Iterable[float]) -> str:
    points = list(values)
    if len(points) < 2:
        return ""
    low, high = min(points), max(points)
    scale = (len(_SPARKS) - 1) / (high - low) if high > low else 0.0
    return "".join(_SPARKS[round((point - low) * scale)] for point in points)


def _style(state: str) -> str:
    return _STATE_STYLES.get(state, "default")
