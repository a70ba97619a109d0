"""The simulator's results as plots. They take what the JSON holds."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

from diloco_ds.observe.plots import COLORS

Draw = Callable[[Figure], None]


def save(draw: Draw, path: Path) -> None:
    """Draw into `path`, whole or not at all; its suffix is the format (.png, .svg)."""
    figure = Figure(figsize=(7.2, 4.2), dpi=150, layout="constrained")
    draw(figure)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    figure.savefig(partial, format=path.suffix[1:])
    os.replace(partial, path)


def goodput(value: dict[str, Any]) -> Draw:
    """Where the time went, a bar a system."""
    bars = {
        "Decoupled DiLoCo": (value["goodput"], value["lost"]),
        **{name: (each["goodput"], each["lost"]) for name, each in value["baselines"].items()},
    }

    def draw(figure: Figure) -> None:
        axes = _axes(figure, "", "% of the allocated time")
        causes = ["goodput", *value["lost"]]
        bottom = [0.0] * len(bars)
        for color, cause in zip(COLORS, causes, strict=False):
            parts = [good if cause == "goodput" else lost.get(cause, 0.0) for good, lost in bars.values()]
            axes.bar(list(bars), parts, bottom=bottom, color=color, label=cause.replace("_", " "))
            bottom = [below + part for below, part in zip(bottom, parts, strict=True)]
        figure.legend(loc="outside right upper")

    return draw


def table1(value: dict[str, Any]) -> Draw:
    """Goodput over chips; the paper's as circles."""

    def draw(figure: Figure) -> None:
        axes = _axes(figure, "chips", "goodput, %")
        axes.set_xscale("log")
        for color, row in zip(COLORS, value["rows"], strict=False):
            label = f"M = {row['learners']}" if row["kind"] == "diloco" else row["kind"]
            axes.plot(value["chips"], row["goodput"], color=color, label=label)
            axes.plot(value["chips"], row["paper"], "o", color=color, mfc="none")
        axes.plot([], [], "o", color="gray", mfc="none", label="paper")
        axes.legend()

    return draw


def scavenge(value: dict[str, Any]) -> Draw:
    """Relative time over extra compute."""

    def draw(figure: Figure) -> None:
        axes = _axes(figure, "extra compute for half of the FLOPs, %", "relative time")
        extra = [100 * point["extra"] for point in value["points"]]
        axes.plot(extra, [point["time"] for point in value["points"]], "o-", color=COLORS[0], label="ours")
        axes.plot(extra, [point["ideal"] for point in value["points"]], ":", color="gray", label="ideal")
        axes.plot(extra, [point["paper"] for point in value["points"]], "x", color=COLORS[4], label="paper")
        axes.legend()

    return draw


def hetero(value: dict[str, Any]) -> Draw:
    """Goodput by quorum and grace."""

    def draw(figure: Figure) -> None:
        axes = _axes(figure, "quorum", "goodput, %")
        names = [case["name"] for case in value["cases"]]
        axes.bar(names, [case["result"]["goodput"] for case in value["cases"]], color=COLORS[0], width=0.5)
        axes.plot(names, [case["paper"] for case in value["cases"]], "x", color=COLORS[4], label="paper")
        axes.legend(loc="lower right")

    return draw


def bandwidth(value: dict[str, Any]) -> Draw:
    """A panel a sweep."""

    def draw(figure: Figure) -> None:
        panels: Sequence[Axes] = figure.subplots(1, 3, sharey=True)
        sweeps = {"Gbit/s": "over_gbit", "step, s": "over_step_s", "fragments": "over_fragments"}
        for axes, (name, key) in zip(panels, sweeps.items(), strict=True):
            points = value[key]
            for color, method in zip(COLORS, points[0]["utilisation"], strict=False):
                shares = [100 * point["utilisation"][method] for point in points]
                label = method.replace("_", " ")
                axes.plot([point["at"] for point in points], shares, color=color, label=label)
            axes.set_xscale("log")
            axes.xaxis.set_minor_formatter(NullFormatter())
            axes.xaxis.set_major_formatter(FuncFormatter(lambda number, _: f"{number:g}"))
            axes.set_xlabel(name)
            axes.grid(alpha=0.2)
        panels[0].set_ylabel("compute utilisation, %")
        panels[0].legend(fontsize=7)

    return draw


def train(value: dict[str, Any]) -> Draw:
    """Held-out loss over tokens."""

    def draw(figure: Figure) -> None:
        axes = _axes(figure, "tokens", "held-out loss, nats per token")
        points = value["curve"]
        axes.plot([point["tokens"] for point in points], [point["loss"] for point in points], color=COLORS[0])

    return draw


def study(value: dict[str, Any]) -> Draw:
    """A point a case, with the spread over the seeds."""

    def draw(figure: Figure) -> None:
        axes = _axes(figure, "held-out loss, nats per byte", "")
        names = [f"{case['group']}: {case['name']}" for case in value["cases"]]
        means, spreads = ([case[key] for case in value["cases"]] for key in ("mean", "spread"))
        axes.errorbar(means, names, xerr=spreads, fmt="o", ms=3, color=COLORS[0])
        axes.invert_yaxis()
        axes.tick_params(axis="y", labelsize=6)

    return draw


def _axes(figure: Figure, x: str, y: str) -> Axes:
    axes: Axes = figure.subplots()
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(alpha=0.2)
    return axes
