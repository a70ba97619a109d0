"""The report's plots: matplotlib figures as SVG text that takes its ink from the page, so that it fits light and dark."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, MultipleLocator

from diloco_ds.observe.history import BUCKETS, History, IslandHistory, binned, rate
from diloco_ds.observe.metrics import Record
from diloco_ds.observe.units import count, duration

COLORS = ("#3b82f6", "#f59e0b", "#10b981", "#a855f7", "#ef4444", "#14b8a6", "#ec4899", "#84cc16")
_INK = "#010203"  # stands for the page's text colour while matplotlib draws
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "diloco_ds",
    "font.family": "sans-serif",
    "font.size": 9.5,
    "text.color": _INK,
    "axes.edgecolor": _INK,
    "axes.labelcolor": _INK,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.6,
    "axes.grid": True,
    "grid.color": _INK,
    "grid.alpha": 0.12,
    "grid.linewidth": 0.6,
    "lines.linewidth": 1.6,
    "legend.frameon": False,
    "legend.fontsize": 9,
}
_TIME_STEPS = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 28800, 43200, 86400)
FAULT_WORDS = ("fault", "died", "restarting", "failed", "dead", "killed", "hung", "given_up")


def heldout(history: History) -> str | None:
    """Held-out loss of the global weights over merged tokens, with its standard error; bits per byte on the right."""
    rows = [
        row for row in history.evaluations if row.get("loss") is not None and row.get("tokens") is not None
    ]
    if not rows:
        return None

    def draw(axes: Axes) -> None:
        tokens, loss = _column(rows, "tokens"), _column(rows, "loss")
        axes.errorbar(
            tokens, loss, yerr=np.nan_to_num(_column(rows, "stderr")), color=COLORS[0], marker="o", ms=3.5
        )
        axes.set_ylabel("loss, nats per token")
        _tokens_axis(axes, "tokens merged")
        bits = _column(rows, "bits_per_byte")
        if np.isfinite(bits).all():
            right = axes.twinx()
            right.plot(tokens, bits, alpha=0)
            ratio = float(np.median(bits / loss))
            low, high = axes.get_ylim()
            right.set_ylim(low * ratio, high * ratio)
            right.set_ylabel("bits per byte")
            right.grid(False)

    return _svg(draw)


def training_loss(history: History) -> str | None:
    """Training loss of each island over the tokens it trained on."""

    def draw(axes: Axes) -> None:
        for color, island in _colored(history):
            axes.plot(*binned(island.tokens, island.loss), color=color, label=island.name, lw=1.2)
        axes.set_ylabel("loss, nats per token")
        _tokens_axis(axes, "tokens of the island")
        _legend(axes)

    return _svg(draw) if history.islands else None


def throughput(history: History) -> str | None:
    """Tokens per second of each island over time, with the moments of faults."""

    def draw(axes: Axes) -> None:
        for color, island in _colored(history):
            times, rates = rate(island.time, island.step_tokens)
            axes.plot(_since_start(history, times), rates, color=color, label=island.name, lw=1.2)
        axes.set_ylim(bottom=0)
        axes.set_ylabel("tokens/s")
        axes.yaxis.set_major_formatter(FuncFormatter(_short))
        _mark_faults(axes, history)
        _time_axis(axes)
        _legend(axes)

    return _svg(draw) if any(len(island.time) > 1 for island in history.islands.values()) else None


def participation(history: History) -> str | None:
    """Islands alive, eligible and merged in each merge, and the share of all tokens that was merged."""
    times = history.merges["time"]
    if not times:
        return None

    def draw(axes: Axes) -> None:
        for color, name in zip(COLORS, ("alive", "eligible", "merged"), strict=False):
            moments, values = binned(times, history.merges[name], bins=120)
            axes.plot(_since_start(history, moments), values, color=color, label=name)
        axes.set_ylim(bottom=0, top=len(history.islands) + 0.5 if history.islands else None)
        axes.set_ylabel("islands")
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))
        moments, shares = binned(times, history.merges["token_share"], bins=120)
        if len(shares):
            right = axes.twinx()
            right.plot(_since_start(history, moments), 100 * shares, color=COLORS[3], ls=":", lw=1.3)
            axes.plot([], [], color=COLORS[3], ls=":", lw=1.3, label="token share, %")
            right.set_ylim(0, 105)
            right.set_ylabel("token share, %")
            right.grid(False)
        _time_axis(axes)
        _legend(axes, columns=4)

    return _svg(draw)


def time_buckets(history: History) -> str | None:
    """Where the wall clock of each island's steps went."""
    islands = [island for island in history.islands.values() if sum(island.bucket_s.values()) > 0]
    if not islands:
        return None

    def draw(axes: Axes) -> None:
        names = [island.name for island in islands]
        left = np.zeros(len(islands))
        for color, bucket in zip((*COLORS[:5], "#94a3b8"), BUCKETS, strict=True):
            shares = np.array(
                [100 * island.bucket_s[bucket] / sum(island.bucket_s.values()) for island in islands]
            )
            axes.barh(names, shares, left=left, color=color, label=bucket, height=0.55)
            left += shares
        axes.set_xlim(0, 100)
        axes.set_xlabel("share of the step, %")
        axes.invert_yaxis()
        axes.grid(False)
        _legend(axes, columns=3)

    return _svg(draw, height=1.5 + 0.32 * len(islands))


def timeline(history: History) -> str | None:
    """When each island stepped, and the moments of faults and restarts."""
    if not history.islands:
        return None

    def draw(axes: Axes) -> None:
        rows = {name: row for row, name in enumerate(history.islands)}
        for color, island in _colored(history):
            spans = [(begin - _start(history), end - begin) for begin, end in island.stretches()]
            axes.broken_barh(spans, (rows[island.name] - 0.3, 0.6), color=color, alpha=0.85, lw=0)
        for event in faults(history):
            row = rows.get(str(event.get("island")))
            moment = event["time"] - _start(history)
            if row is None:
                axes.axvline(moment, color=COLORS[4], lw=1, ls=":")
            else:
                axes.plot([moment], [row - 0.4], marker="v", ms=7, color=COLORS[4], mew=0)
        axes.set_yticks(list(rows.values()), list(rows))
        axes.set_ylim(len(rows) - 0.5, -0.7)
        axes.grid(axis="y", visible=False)
        _time_axis(axes)

    return _svg(draw, height=1.0 + 0.38 * len(history.islands))


def faults(history: History) -> list[Record]:
    """The events that tell of a fault, a death or a restart while the islands trained."""
    told = [event for event in history.events if any(word in str(event.get("event")) for word in FAULT_WORDS)]
    first, last = history.first_step or 0.0, history.last_step or 0.0
    return [event for event in told if first <= event["time"] <= last]


def _svg(draw: Callable[[Axes], None], height: float = 2.9, width: float = 5.8) -> str:
    """The figure as an <svg> element that scales with its container."""
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(width, height), layout="constrained")
        axes = figure.subplots()
        draw(axes)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :].replace(_INK, "currentColor")
    text = re.sub(r'font: ([\d.]+px) [^;"]*', r"font-size: \1", text)
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    return re.sub(
        r'(<svg[^>]*?) width="[^"]*"',
        r"\1",
        re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", text, count=1),
        count=1,
    )


def _colored(history: History) -> list[tuple[str, IslandHistory]]:
    return [(COLORS[number % len(COLORS)], island) for number, island in enumerate(history.islands.values())]


def _column(rows: Sequence[Record], name: str) -> np.ndarray:
    return np.array([row[name] if row.get(name) is not None else np.nan for row in rows], dtype=float)


def _start(history: History) -> float:
    moments = [history.first_step, history.merges["time"][0] if history.merges["time"] else None]
    return min(moment for moment in moments if moment is not None)


def _since_start(history: History, times: Any) -> np.ndarray:
    return np.asarray(times, dtype=float) - _start(history)


def _mark_faults(axes: Axes, history: History) -> None:
    for event in faults(history):
        axes.axvline(event["time"] - _start(history), color=COLORS[4], lw=0.8, ls=":", alpha=0.7)


def _tokens_axis(axes: Axes, label: str) -> None:
    axes.set_xlabel(label)
    axes.xaxis.set_major_formatter(FuncFormatter(_short))


def _time_axis(axes: Axes) -> None:
    axes.set_xlabel("time since the first step")
    low, high = axes.get_xlim()
    spacing = next((step for step in _TIME_STEPS if (high - low) / step <= 7), _TIME_STEPS[-1])
    axes.xaxis.set_major_locator(MultipleLocator(max(spacing, (high - low) // 7 // 86400 * 86400)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: duration(value) if value >= 0 else ""))


def _short(value: float, _position: int | None = None) -> str:
    """A tick's number without digits that say nothing: 1M, not 1.00M."""
    text = count(value)
    return f"{float(text[:-1]):g}{text[-1]}" if text[-1].isalpha() else f"{value:g}"


def _legend(axes: Axes, columns: int = 4) -> None:
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=columns, borderaxespad=0.2, handlelength=1.2)
