"""A run's status as a picture for the terminal (rich) or as one line of text."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from diloco_ds.observe.metrics import Record
from diloco_ds.observe.status import IslandStatus, Status
from diloco_ds.observe.status_files import LedgerFile
from diloco_ds.observe.units import count, duration, fixed, percent

TREND_WIDTH = 16
WIDE, NARROW = 90, 72
"""Columns of a terminal from which there is room for more, and below which there is room for less."""

_STATE_STYLES = {
    "running": "bold green",
    **dict.fromkeys(("preparing", "starting", "waiting"), "cyan"),
    **dict.fromkeys(("draining", "drained", "finished", "done"), "bold blue"),
    **dict.fromkeys(("restarting", "absent", "stopping"), "yellow"),
    **dict.fromkeys(("dead", "failed"), "bold red"),
    "stopped": "dim",
}
_RED = {"died", "failed", "fault", "dead", "error", "lost", "given", "hung", "killed"}
_YELLOW = {"restart", "restarting", "warning", "drop", "dropped", "skip", "stop", "absent"}
_SPARKS = "▁▂▃▄▅▆▇█"


class LossTrend:
    """The losses seen so far, thinned out evenly, so that a whole run fits into a few characters."""

    def __init__(self) -> None:
        self._points: list[tuple[int, float]] = []

    def add(self, step: int, loss: float) -> None:
        """Note the loss at `step`, unless one is noted for it or a later step."""
        if self._points and step <= self._points[-1][0]:
            return
        self._points.append((step, loss))
        if len(self._points) > 16 * TREND_WIDTH:
            self._points = self._points[::2]

    def sparkline(self) -> str:
        """A character per equal span of steps, as high as the mean loss there; empty before there are two."""
        if len(self._points) < 2:
            return ""
        first, last = self._points[0][0], self._points[-1][0]
        spans: dict[int, list[float]] = {}
        for step, loss in self._points:
            spans.setdefault((TREND_WIDTH - 1) * (step - first) // (last - first), []).append(loss)
        means = [sum(losses) / len(losses) for _, losses in sorted(spans.items())]
        low, high = min(means), max(means)
        heights = [(mean - low) / (high - low) if high > low else 0.0 for mean in means]
        return "".join(_SPARKS[round((len(_SPARKS) - 1) * height)] for height in heights)


def picture(
    status: Status, events: Sequence[Record], trends: Mapping[str, LossTrend], width: int, height: int
) -> RenderableType:
    """The whole run in a frame, for a terminal of `width` x `height` characters."""
    parts: list[RenderableType] = [_summary(status, width), _below(_island_table(status, trends, width))]
    room = min(max(height - len(status.islands) - 12, 3), 8)
    if events:
        parts.append(_below(Group(*(event_line(event) for event in events[-room:]))))
    return Panel(
        Group(*parts),
        title=_title(status),
        title_align="left",
        subtitle=Text(f" {status.run_dir} ", style="dim"),
        subtitle_align="right",
        border_style="bright_black",
        padding=(1, 2),
    )


def plain_line(status: Status) -> str:
    """The whole status in one line of text."""
    target = f"/{count(status.target_tokens)}" if status.target_tokens else ""
    heldout = _heldout(status)
    parts = [
        f"{status.state}: step {status.global_step}, {count(status.tokens)}{target} tokens",
        *([f"{count(status.tokens_per_s)} tokens/s"] if status.tokens_per_s else []),
        *([f"ETA {duration(status.eta_s)}"] if status.eta_s is not None else []),
        *(_island_words(island) for island in status.islands),
        *([f"held-out {heldout}"] if heldout else []),
    ]
    return " | ".join(parts)


def event_line(event: Record) -> Text:
    """One event as a line: time of day, who, what and why."""
    what = str(event.get("event", "event")).replace("_", " ")
    who = " ".join(str(event[key]) for key in ("role", "island") if event.get(key) is not None)
    words = set(what.split())
    style = "bold red" if words & _RED else "yellow" if words & _YELLOW else "default"
    clock = time.strftime("%H:%M:%S", time.localtime(event["time"]))
    why = f": {event['reason']}" if event.get("reason") else ""
    return Text.assemble((clock, "dim"), "  ", (f"{who} {what}".strip(), style), why)


def _below(part: RenderableType) -> RenderableType:
    return Padding(part, (1, 0, 0, 0))


def _title(status: Status) -> Text:
    title = Text.assemble(" ", (status.name, "bold"), "  ", (f"● {status.state}", _style(status.state)), " ")
    if status.state in ("failed", "dead", "stopped") and status.reason:
        title.append(f"{status.reason} ", style="dim")
    return title


def _summary(status: Status, width: int) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    table.add_row("tokens", _token_line(status, width))
    table.add_row("global step", _step_line(status))
    if status.ledger.epoch_blocks:
        table.add_row("blocks", _block_line(status.ledger))
    table.add_row("held out", _heldout(status) or Text("no evaluation yet", style="dim"))
    return table


def _token_line(status: Status, width: int) -> Table:
    """Bar, share, tokens of the target, rate and ETA, as far as they are known and there is room."""
    target = status.target_tokens
    cells: list[RenderableType] = []
    if target and width >= NARROW:
        cells.append(ProgressBar(total=target, completed=min(status.tokens, target), width=width // 4))
    if target:
        cells.append(percent(status.tokens / target))
    cells.append(Text(f"{count(status.tokens)}/{count(target)}", style="bold"))
    if status.tokens_per_s and width >= NARROW:
        cells.append(f"{count(status.tokens_per_s)} tokens/s")
    if status.eta_s is not None:
        cells.append(Text(f"ETA {duration(status.eta_s)}", style="cyan"))
    line = Table.grid(padding=(0, 2, 0, 0))
    line.add_row(*cells)
    return line


def _step_line(status: Status) -> Text:
    syncer = status.syncer
    line = Text.assemble((str(status.global_step), "bold"), f"   {syncer.merges} merges")
    if syncer.drops:
        line.append(f"   {syncer.drops} dropped", style="yellow")
    if syncer.generation > 1 or syncer.state == "dead":
        line.append(f"   syncer {syncer.state}, generation {syncer.generation}", style=_style(syncer.state))
    return line


def _block_line(ledger: LedgerFile) -> Text:
    """What has become of the data, block by block."""
    line = Text.assemble((count(ledger.merged), "bold"), " merged")
    line.append(f"   {count(ledger.leased)} leased   {count(ledger.free)} free in epoch {ledger.epochs}")
    if ledger.trained_twice:
        line.append(f"   {count(ledger.trained_twice)} trained twice", style="yellow")
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


def _island_table(status: Status, trends: Mapping[str, LossTrend], width: int) -> Table:
    wide, narrow = width >= WIDE, width < NARROW
    table = Table(box=None, padding=(0, 1 if narrow else 2, 0, 0), header_style="dim")
    for name in ("island", "state"):
        table.add_column(name, no_wrap=True)
    for name in ("step", "loss"):
        table.add_column(name, justify="right", no_wrap=True)
    if wide:
        table.add_column("trend", no_wrap=True)
    table.add_column("tok/s" if narrow else "tokens/s", justify="right", no_wrap=True)
    table.add_column("merged" if narrow else "in merges", no_wrap=True)
    for island in status.islands:
        trend = trends.get(island.name, LossTrend()).sparkline()
        table.add_row(
            Text(island.name, style="bold"),
            Text(f"● {island.state}".replace("_", " "), style=_style(island.state)),
            "–" if island.step is None else str(island.step),
            fixed(island.loss, 3),
            *([Text(trend, style="magenta")] if wide else []),
            count(island.tokens_per_s) if island.alive else "–",
            Text(percent(island.merge_share)) if narrow else _participation(island, bar=wide),
        )
    return table


def _participation(island: IslandStatus, *, bar: bool) -> Text:
    """In how many of the rounds in which it was asked an island was merged."""
    share = island.merge_share
    if share is None:
        return Text("–", style="dim")
    full = round(10 * share) if bar else 0
    rest = 10 - full if bar else 0
    numbers = f" {percent(share):>5}  {island.merged}/{island.merged + island.missed}"
    return Text.assemble(("━" * full, "green"), ("━" * rest, "bright_black"), numbers)


def _island_words(island: IslandStatus) -> str:
    if island.step is None:
        return f"{island.name} {island.state}"
    share = f", in {percent(island.merge_share)} of merges" if island.merge_share is not None else ""
    return f"{island.name} {island.state}, step {island.step}, loss {fixed(island.loss, 3)}{share}"


def _style(state: str) -> str:
    return _STATE_STYLES.get(state, "default")
