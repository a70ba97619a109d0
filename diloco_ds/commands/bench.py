"""Measure a part of the system on this machine, side by side with what it is compared with.

Figures of a busy machine mean little; ratios of one run mean more. docs/numbers.md holds measured ones.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from diloco_ds.arguments import add_part, whole

SUBCOMMANDS = True

EXAMPLES = """\
  diloco-ds bench island launch/quickstart.yaml
  diloco-ds bench island launch/two_ranks.yaml --turns 10 --json
  diloco-ds bench link --mb 16 256
  diloco-ds bench loss --vocab 262144 --tokens 2048"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    parts = parser.add_subparsers(dest="part", required=True, metavar="PART")
    _add_island(parts)
    _add_link(parts)
    _add_loss(parts)


def run(arguments: argparse.Namespace) -> int:
    """Measure one part and show it."""
    arguments.measure(arguments)
    return 0


def _part(parts: Any, name: str, measure: Any, text: str) -> argparse.ArgumentParser:
    part = add_part(parts, "bench", name, text, EXAMPLES)
    part.set_defaults(measure=measure)
    part.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    return part


def _add_island(parts: Any) -> None:
    text = "An island by turns: plain torch, DeepSpeed without the exchange, and with it; where a step's time goes."
    part = _part(parts, "island", _island, text)
    part.add_argument("run_file", type=Path, metavar="RUN.yaml", help="the run, as a YAML file")
    part.add_argument(
        "overrides", nargs="*", metavar="key=value", help="settings that replace those of the file"
    )
    part.add_argument("--island", metavar="NAME", help="which island of the run (default: the first)")
    part.add_argument("--turns", type=whole(1), default=6, metavar="N", help="turns of each loop (6)")
    part.add_argument("--steps", type=whole(1), default=20, metavar="N", help="whole steps of a turn (20)")


def _add_link(parts: Any) -> None:
    text = "A fragment's way from mailbox to mailbox over a link on this host, beside a copy in memory."
    part = _part(parts, "link", _link, text)
    part.add_argument(
        "--mb", type=whole(1), nargs="+", default=(1, 16, 64, 256), help="fragment sizes in MB (1 16 64 256)"
    )
    part.add_argument("--repeats", type=whole(1), default=7, help="transfers for each size and direction (7)")


def _add_loss(parts: Any) -> None:
    text = "Peak memory and time of the loss over a large vocabulary, with and without chunks."
    part = _part(parts, "loss", _loss, text)
    part.add_argument("--vocab", type=whole(1), default=262_144, metavar="N", help="vocabulary (262144)")
    part.add_argument("--width", type=whole(1), default=512, metavar="N", help="of the hidden states (512)")
    part.add_argument("--tokens", type=whole(1), default=2048, metavar="N", help="in a micro batch (2048)")
    part.add_argument(
        "--chunks",
        type=whole(1),
        nargs="+",
        default=(128, 512, 2048),
        metavar="N",
        help="values of trainer.loss_chunk (128 512 2048)",
    )
    part.add_argument(
        "--precision",
        choices=("bf16", "fp32"),
        default="bf16",
        help="of hidden states and embedding (bf16); without hardware for it, bf16 is slow on a CPU",
    )
    part.add_argument("--repeats", type=whole(1), default=3, metavar="N", help="passes of each (3)")


def _island(arguments: argparse.Namespace) -> None:
    from rich.console import Console

    from diloco_ds.bench.island import bench_island
    from diloco_ds.bench.island_table import numbers, tables
    from diloco_ds.conductor.stops import Stops
    from diloco_ds.config_file import load_config

    config = load_config(arguments.run_file, arguments.overrides)
    measured = bench_island(
        config, arguments.island, arguments.turns, arguments.steps, Console(stderr=True), Stops()
    )
    value = numbers(measured)
    if arguments.json:
        print(json.dumps(value))
    else:
        Console().print(tables(value), highlight=False)


def _link(arguments: argparse.Namespace) -> None:
    from dataclasses import asdict

    from diloco_ds.bench.link import bench_link, print_table

    speeds = bench_link(arguments.mb, arguments.repeats)
    if arguments.json:
        print(json.dumps({"speeds": [asdict(speed) for speed in speeds]}))
    else:
        print_table(speeds)


def _loss(arguments: argparse.Namespace) -> None:
    from dataclasses import asdict

    from rich.console import Console
    from rich.table import Table

    from diloco_ds.bench.loss import LossShape, bench_loss

    shape = LossShape(arguments.vocab, arguments.width, arguments.tokens, arguments.precision)
    costs = bench_loss(shape, arguments.chunks, arguments.repeats)
    if arguments.json:
        print(json.dumps({**asdict(shape), "losses": [asdict(cost) for cost in costs]}))
        return
    title = (
        f"{shape.tokens} tokens, vocabulary {shape.vocabulary}, width {shape.width}, {shape.precision}: "
        f"logits in fp32 {shape.logits_mb:.0f} MiB"
    )
    table = Table(title=title, title_justify="left")
    for column in ("chunk", "peak, MiB", "ms"):
        table.add_column(column, justify="right")
    for cost in costs:
        table.add_row(str(cost.chunk or "none"), f"{cost.peak_mb:.0f}", f"{1000 * cost.seconds:.0f}")
    Console().print(table, highlight=False)
