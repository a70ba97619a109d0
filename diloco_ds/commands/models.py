"""Show how large models are: total and active parameters, counted without their weights.

What a token passes through is active: everything but the experts it is not routed to. Tied parameters count once.
"""

from __future__ import annotations

import argparse
import json

from diloco_ds.arguments import whole

EXAMPLES = """\
  diloco-ds models
  diloco-ds models gemma4-moe-a2.8b mine.yaml
  diloco-ds models runs/quickstart/hf --json | jq .models[0].active"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    parser.add_argument(
        "names",
        nargs="*",
        metavar="NAME|FILE|DIR",
        help="a model of model_configs/, a file like those, or a checkpoint directory (default: all of model_configs/)",
    )
    parser.add_argument(
        "--vocab",
        type=whole(1),
        default=4096,
        metavar="N",
        help="vocabulary of models that leave it to the tokenizer (4096)",
    )
    parser.add_argument("--json", action="store_true", help="as one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Print a line for each model."""
    from dataclasses import asdict

    from rich.console import Console
    from rich.table import Table

    from diloco_ds.model.sizes import model_sizes
    from diloco_ds.observe.units import count

    sizes = model_sizes(arguments.names, arguments.vocab)
    if arguments.json:
        print(json.dumps({"models": [asdict(size) for size in sizes]}))
        return 0
    table = Table(box=None)
    table.add_column("model", no_wrap=True)
    for column in ("layers", "width", "vocab", "experts", "total", "active", "embedding"):
        table.add_column(column, justify="right", no_wrap=True)
    for size in sizes:
        table.add_row(
            size.name,
            str(size.layers),
            str(size.width),
            str(size.vocabulary),
            f"{size.chosen} of {size.experts}" if size.experts else "–",
            count(size.total),
            count(size.active),
            count(size.embedding),
        )
    Console().print(table, highlight=False)
    return 0
