"""Plan a run: parameters, memory, bandwidth and tokens, before anything of it exists.

The numbers are those of the run file; nothing is trained, downloaded or written. docs/simulator.md says how the expected
goodput is computed.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diloco_ds.arguments import number, whole

if TYPE_CHECKING:
    from rich.table import Table

EXAMPLES = """\
  diloco-ds plan launch/quickstart.yaml
  diloco-ds plan launch/quickstart.yaml exchange.fragments=24 exchange.period=24 --step-s 0.5
  diloco-ds plan launch/quickstart.yaml --chips 150000 --json"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    parser.add_argument("run_file", type=Path, metavar="RUN.yaml", help="the run, as a YAML file")
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="settings that replace those of the file"
    )
    parser.add_argument(
        "--step-s",
        type=number(above=0),
        default=1.0,
        metavar="S",
        help="expected seconds of an inner step, for the bandwidth (1)",
    )
    parser.add_argument("--chips", type=whole(1), metavar="N", help="expected goodput on N chips that fail")
    parser.add_argument("--json", action="store_true", help="as one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Print the plan."""
    from rich.console import Console

    from diloco_ds.config_file import load_config
    from diloco_ds.plan import make_plan

    config = load_config(arguments.run_file, arguments.overrides)
    plan = make_plan(config, Path.cwd(), step_s=arguments.step_s, chips=arguments.chips)
    value = plan.to_json()
    if arguments.json:
        print(json.dumps(value))
    else:
        Console().print(_run_table(value), _island_table(value))
    return 0


def _run_table(value: dict[str, Any]) -> Table:
    from rich.table import Table

    from diloco_ds.observe.units import count

    table = Table(title="The run", title_justify="left", show_header=False)
    for name, size in value["parameters"].items():
        table.add_row(f"parameters, {name}", count(size))
    fragments, wire, syncer = value["fragments"], value["wire"], value["syncer"]
    sizes = fragments["numels"]
    table.add_row("fragments, period", f"{fragments['count']}, {fragments['period']} steps")
    table.add_row("fragment, smallest to largest", f"{count(min(sizes))} to {count(max(sizes))} parameters")
    table.add_row("balance (largest / mean, embeddings apart)", f"{fragments['balance']:.2f}")
    table.add_row("global steps to the budget", count(value["global_steps"]))
    table.add_row("an island, each way: bytes a step", count(wire["bytes_per_step"]))
    pace = f"at {wire['step_s']:g} s a step"
    table.add_row(f"an island, each way: mean {pace}", f"{wire['mean_gbit']:.3g} Gbit/s")
    table.add_row(f"an island, each way: needed {pace}", f"{wire['needed_gbit']:.3g} Gbit/s")
    table.add_row("syncer's store, shared memory", _bytes(syncer["store_bytes"]))
    table.add_row("syncer's end of a link, shared memory", _bytes(syncer["mailbox_bytes"]))
    table.add_row("syncer, scratch of a merge", _bytes(syncer["scratch_bytes"]))
    table.add_row("shared memory with all on one host", _bytes(value["shared_memory_bytes"]))
    if value["goodput"] is not None:
        expected = value["goodput"]
        table.add_row(
            f"expected on {count(expected['chips'])} chips",
            f"goodput {expected['goodput']:.1f} %, uptime {expected['uptime']:.2f} %",
        )
    return table


def _island_table(value: dict[str, Any]) -> Table:
    from rich.table import Table

    from diloco_ds.observe.units import count

    islands = value["islands"]
    table = Table(title="Islands: memory of a rank, without activations", title_justify="left")
    table.add_column("")
    for name in islands:
        table.add_column(name, justify="right")
    table.add_row("ranks", *(str(island["ranks"]) for island in islands.values()))
    table.add_row("tokens a step", *(count(island["tokens_per_step"]) for island in islands.values()))
    for part in ("weights", "gradients", "master", "moments", "offloaded", "total"):
        table.add_row(part, *(_bytes(island["rank_memory"][part]) for island in islands.values()))
    copies = (_bytes(island["checkpoint_bytes"]) for island in islands.values())
    table.add_row("copy for a checkpoint, in the host's memory", *copies)
    table.add_row("mailbox of the host", *(_bytes(island["mailbox_bytes"]) for island in islands.values()))
    return table


def _bytes(number: float) -> str:
    for suffix in ("B", "KiB", "MiB", "GiB"):
        if number < 1024:
            return f"{number:.3g} {suffix}"
        number /= 1024
    return f"{number:.3g} TiB"
