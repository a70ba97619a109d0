"""Simulate the algorithm in virtual time, with the very core that trains: goodput, Table 1, mixed hardware, bandwidth.

Every part is deterministic by --seed. docs/simulator.md says what is modelled, with which parameters, and how they were
found.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diloco_ds.arguments import add_part, folder, number, share, whole

if TYPE_CHECKING:
    from rich.table import Table

    from diloco_ds.config import Exchange
    from diloco_ds.sim.figures import Draw
    from diloco_ds.sim.fleet import Weather

SUBCOMMANDS = True

EXAMPLES = """\
  diloco-ds simulate goodput --chips 2400000 --learners 16 --mtbi-days 365
  diloco-ds simulate table1
  diloco-ds simulate scavenge --learners 8 --extra 0.5 1
  diloco-ds simulate hetero --slowest 0.3 --out studies
  diloco-ds simulate bandwidth --parameters 7e9 --step-s 2
  diloco-ds simulate train --learners 4 --text README.md --json
  diloco-ds simulate study --text README.md --groups merge quorum --seeds 1"""

_WEATHER = {
    "mtbi_days": "mean days between two interruptions of one chip (default 365; inf: never)",
    "slice_chips": "chips that go and come together (256)",
    "shrink_s": "pause to go on without a slice (15)",
    "grow_s": "pause to take slices back (15)",
    "grow_window_s": "seconds returned slices are gathered before a learner grows (20)",
    "restart_s": "pause of the baseline that is not elastic (76)",
    "return_scale_s": "scale of the exponentiated Weibull time until a slice returns (600)",
    "return_shape": "its shape (1)",
    "return_power": "its power (1; with shape 1 that is the exponential distribution)",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    parts = parser.add_subparsers(dest="part", required=True, metavar="PART")
    _add_goodput(parts)
    _add_table1(parts)
    _add_scavenge(parts)
    _add_hetero(parts)
    _add_bandwidth(parts)
    _add_train(parts)
    _add_study(parts)


def run(arguments: argparse.Namespace) -> int:
    """Simulate one part and show it."""
    arguments.simulate(arguments)
    return 0


# ---- arguments ----


def _part(parts: Any, name: str, simulate: Any, text: str, out: str | None) -> argparse.ArgumentParser:
    part = add_part(parts, "simulate", name, text, EXAMPLES)
    part.set_defaults(simulate=simulate)
    part.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    where = "by default only shown" if out is None else f"default {out}"
    part.add_argument(
        "--out", type=folder, default=out, metavar="DIR", help=f"write {name}.json and a plot here ({where})"
    )
    part.add_argument("--seed", type=whole(0), default=0, metavar="N", help="seed of every random number (0)")
    return part


def _add_exchange(part: argparse.ArgumentParser) -> None:
    part.add_argument("--fragments", type=whole(1), default=24, metavar="P", help="fragments (24)")
    part.add_argument("--period", type=whole(1), default=24, metavar="H", help="steps between two syncs (24)")
    part.add_argument("--overlap", type=whole(0), default=2, metavar="TAU", help="rounds in flight (2)")
    part.add_argument("--quorum", type=whole(1), default=1, metavar="K", help="learners a round needs (1)")
    part.add_argument(
        "--grace", type=share, default=0.8, metavar="GAMMA", help="grace safety, 0 = none (0.8)"
    )
    part.add_argument("--late", choices=("merge_next", "drop"), default="merge_next", help="late answers")


def _add_weather(part: argparse.ArgumentParser) -> None:
    group = part.add_argument_group("chips")
    for name, text in _WEATHER.items():
        group.add_argument(f"--{name.replace('_', '-')}", type=_weather_kind(name), metavar="N", help=text)


def _weather_kind(name: str) -> Callable[[str], float]:
    if name == "slice_chips":
        return whole(1)
    is_pause = name in ("shrink_s", "grow_s", "grow_window_s", "restart_s")
    return number(least=0) if is_pause else number(above=0, infinite=name == "mtbi_days")


def _add_goodput(parts: Any) -> None:
    text = "Goodput, uptime and lost time of one system, and its data-parallel baselines."
    part = _part(parts, "goodput", _goodput, text, None)
    part.add_argument(
        "--chips", type=whole(1), default=2_400_000, help="chips of all learners together (2400000)"
    )
    part.add_argument("--learners", type=whole(1), default=16, metavar="M", help="learners (16)")
    part.add_argument("--hours", type=number(above=0), default=24.0, help="simulated hours (24)")
    part.add_argument("--step-s", type=number(above=0), default=5.0, help="seconds of an inner step (5)")
    part.add_argument("--step-variance", type=share, default=0.0, help="relative deviation of a step (0)")
    part.add_argument("--slowest", type=share, default=0.0, help="how far the slowest is behind, 0..1 (0)")
    part.add_argument(
        "--latency-s", type=number(least=0), default=0.05, help="of a message between learner and syncer"
    )
    part.add_argument(
        "--gbit",
        type=number(above=0, infinite=True),
        default=float("inf"),
        help="Gbit/s of a learner each way (inf)",
    )
    part.add_argument("--parameters", type=whole(1), default=24_000, help="of the model, matters with --gbit")
    _add_exchange(part)
    _add_weather(part)


def _add_table1(parts: Any) -> None:
    text = "The 30 cells of the paper's Table 1, ours, the paper's, and the difference."
    part = _part(parts, "table1", _table1, text, None)
    _add_weather(part)


def _add_scavenge(parts: Any) -> None:
    text = "Extra learners for half of the FLOPs: how much sooner the run ends."
    part = _part(parts, "scavenge", _scavenge, text, "simulations")
    part.add_argument("--learners", type=whole(1), default=4, metavar="M", help="learners from the start (4)")
    part.add_argument("--steps", type=whole(1), default=2_000, help="inner steps of each without help (2000)")
    part.add_argument(
        "--extra",
        type=number(least=0),
        nargs="+",
        metavar="X",
        help="shares of extra learners (0.25 0.5 1 3)",
    )
    part.add_argument("--step-variance", type=share, default=0.0, help="relative deviation of a step (0)")
    _add_exchange(part)


def _add_hetero(parts: Any) -> None:
    text = "Mixed hardware: goodput with a quorum of all, and of one with and without grace."
    part = _part(parts, "hetero", _hetero, text, "simulations")
    part.add_argument("--learners", type=whole(1), default=8, metavar="M", help="learners (8)")
    part.add_argument("--slowest", type=share, default=0.18, help="how far the slowest is behind (0.18)")
    part.add_argument("--step-variance", type=share, default=0.1, help="relative deviation of a step (0.1)")
    part.add_argument("--hours", type=number(above=0), default=6.0, help="simulated hours (6)")
    part.add_argument("--step-s", type=number(above=0), default=5.0, help="seconds of an inner step (5)")
    _add_exchange(part)


def _add_bandwidth(parts: Any) -> None:
    text = "Compute utilisation over Gbit/s, step time and fragments, for the family of methods."
    part = _part(parts, "bandwidth", _bandwidth, text, "simulations")
    part.add_argument(
        "--parameters", type=number(least=1), default=5e9, metavar="N", help="of the model (5e9)"
    )
    part.add_argument("--bits", type=number(above=0), default=16.0, help="of a value on the wire (16)")
    part.add_argument("--step-s", type=number(above=0), default=1.0, help="seconds of an inner step (1)")
    part.add_argument(
        "--gbit", type=number(above=0), default=1.7, help="Gbit/s for the other two sweeps (1.7)"
    )
    part.add_argument("--learners", type=whole(1), default=8, metavar="M", help="learners (8)")
    part.add_argument(
        "--diloco-period", type=whole(1), default=500, metavar="H", help="period of DiLoCo (500)"
    )
    part.add_argument(
        "--target",
        type=number(above=0, below=1),
        default=0.95,
        help="utilisation for the needed Gbit/s (0.95)",
    )
    _add_exchange(part)


def _add_text(part: argparse.ArgumentParser) -> None:
    part.add_argument(
        "--text",
        type=Path,
        required=True,
        nargs="+",
        metavar="FILE",
        help="text to train on (UTF-8); several files are kinds of text, and learners have them in this order",
    )


def _add_train(parts: Any) -> None:
    text = "Real tiny models with true gradients, all learners in this process: held-out loss."
    part = _part(parts, "train", _train, text, None)
    _add_text(part)
    part.add_argument(
        "--experts", type=whole(0), default=0, metavar="E", help="experts a layer, 0 = dense (0)"
    )
    part.add_argument(
        "--weights", choices=("tokens", "uniform", "expert_tokens"), default="tokens", help="of the learners"
    )
    part.add_argument("--learners", type=whole(1), default=4, metavar="M", help="learners (4)")
    part.add_argument("--steps", type=whole(1), default=100, help="inner steps of each learner's share (100)")
    part.add_argument("--slowest", type=share, default=0.0, help="how far the slowest is behind, 0..1 (0)")
    part.add_argument("--step-variance", type=share, default=0.0, help="relative deviation of a step (0)")
    part.add_argument("--matrices", choices=("rda", "mean"), default="rda", help="merge of the matrices")
    part.add_argument("--anchor", choices=("base", "global"), default="global", help="of late answers")
    part.add_argument("--adoption", choices=("overwrite", "mix", "rebase"), default="overwrite")
    part.add_argument("--data-parallel", action="store_true", help="the same tokens, synchronously")
    _add_exchange(part)


def _add_study(parts: Any) -> None:
    text = (
        "The quality study: merge, adoption, anchor, late answers, quorum, outer optimizer, period and experts, "
        "against data parallel."
    )
    part = _part(parts, "study", _study, text, "simulations")
    _add_text(part)
    part.add_argument("--steps", type=whole(1), default=240, help="inner steps of each learner's share (240)")
    part.add_argument("--seeds", type=whole(1), default=3, metavar="N", help="seeds from --seed on (3)")
    part.add_argument("--groups", nargs="+", metavar="GROUP", help="only these groups of cases (all)")


# ---- what was asked for ----


def _exchange_of(arguments: argparse.Namespace, **merge: str) -> Exchange:
    from pydantic import ValidationError

    from diloco_ds.config import Exchange
    from diloco_ds.config_errors import in_words
    from diloco_ds.errors import UserError

    names = ("fragments", "period", "overlap", "quorum")
    value = {name: getattr(arguments, name) for name in names}
    value |= {"grace": {"safety": arguments.grace}, "merge": {"late": arguments.late, **merge}}
    if "adoption" in arguments:
        value["adoption"] = {"how": arguments.adoption}
    try:
        return Exchange.model_validate(value)
    except ValidationError as error:
        raise UserError(f"simulate {arguments.part}: {in_words(error, Exchange)}") from None


def _weather_of(arguments: argparse.Namespace) -> Weather:
    from diloco_ds.sim.fleet import Weather

    given = {each.name: getattr(arguments, each.name) for each in fields(Weather)}
    return Weather(**{name: value for name, value in given.items() if value is not None})


def _goodput(arguments: argparse.Namespace) -> None:
    from diloco_ds.sim import figures, goodput, tables
    from diloco_ds.sim.learner import Wire

    system = goodput.System(
        **{
            name: getattr(arguments, name)
            for name in ("chips", "learners", "hours", "step_s", "step_variance")
        },
        **{name: getattr(arguments, name) for name in ("slowest", "parameters", "seed")},
        exchange=_exchange_of(arguments),
        weather=_weather_of(arguments),
        wire=Wire(arguments.latency_s, arguments.gbit * 1e9 / 8),
    )
    result, alone = goodput.simulate(system), goodput.baselines(system)
    value = goodput.to_json(system, result, alone)
    _show(arguments, value, tables.goodput(value), figures.goodput(value))


def _table1(arguments: argparse.Namespace) -> None:
    from diloco_ds.sim import figures, tables
    from diloco_ds.sim.goodput import System
    from diloco_ds.sim.table1 import compute

    value = compute(System(weather=_weather_of(arguments), seed=arguments.seed)).to_json()
    _show(arguments, value, tables.table1(value), figures.table1(value))


def _scavenge(arguments: argparse.Namespace) -> None:
    from diloco_ds.sim import figures, scavenge, tables

    study = scavenge.Scavenging(
        learners=arguments.learners,
        steps=arguments.steps,
        extra=tuple(arguments.extra or scavenge.PAPER),
        step_variance=arguments.step_variance,
        exchange=_exchange_of(arguments),
        seed=arguments.seed,
    )
    value = scavenge.to_json(scavenge.compute(study))
    _show(arguments, value, tables.scavenge(value), figures.scavenge(value))


def _hetero(arguments: argparse.Namespace) -> None:
    from diloco_ds.sim import figures, hetero, tables

    names = ("learners", "slowest", "step_variance", "hours", "step_s", "seed")
    system = hetero.mixed_hardware(
        **{name: getattr(arguments, name) for name in names}, exchange=_exchange_of(arguments)
    )
    value = hetero.to_json(hetero.compute(system))
    _show(arguments, value, tables.hetero(value), figures.hetero(value))


def _bandwidth(arguments: argparse.Namespace) -> None:
    from diloco_ds.sim import bandwidth, figures, tables

    setup = bandwidth.Setup(
        parameters=int(arguments.parameters),
        **{
            name: getattr(arguments, name) for name in ("bits", "step_s", "gbit", "learners", "diloco_period")
        },
        exchange=_exchange_of(arguments),
    )
    value = bandwidth.compute(setup, target=arguments.target).to_json()
    _show(arguments, value, tables.bandwidth(value), figures.bandwidth(value))


def _train(arguments: argparse.Namespace) -> None:
    from diloco_ds.sim import figures, tables, tiny_model, training

    names = ("learners", "steps", "slowest", "step_variance", "seed", "data_parallel", "experts")
    merge = {name: getattr(arguments, name) for name in ("matrices", "anchor", "weights")}
    exchange = _exchange_of(arguments, **merge)
    study = training.Training(
        text=tiny_model.read_text(arguments.text),
        exchange=exchange,
        **{name: getattr(arguments, name) for name in names},
    )
    value = training.train(study).to_json()
    _show(arguments, value, tables.train(value), figures.train(value))


def _study(arguments: argparse.Namespace) -> None:
    from diloco_ds.errors import UserError
    from diloco_ds.sim import figures, study, tables, tiny_model

    chosen = arguments.groups or study.groups()
    for name in chosen:
        if name not in study.groups():
            raise UserError(f"--groups: no group '{name}'; there are {', '.join(study.groups())}")
    seeds = range(arguments.seed, arguments.seed + arguments.seeds)

    def tell(result: study.Result) -> None:
        value = result.to_json()
        text = f"{value['group']}: {value['name']}: {value['mean']:.4f} +- {value['spread']:.4f}"
        text += f", {value['trained_tokens']:.0f} tokens trained"
        print(text, file=sys.stderr, flush=True)

    text = tiny_model.read_text(arguments.text)
    results = study.run_study(text, seeds, arguments.steps, chosen, tell)
    value = study.to_json(results, arguments.steps, seeds)
    _show(arguments, value, tables.study(value), figures.study(value))


def _show(arguments: argparse.Namespace, value: dict[str, Any], shown: list[Table], draw: Draw) -> None:
    """Print, and write where it is asked for."""
    from rich.console import Console

    if arguments.json:
        print(json.dumps(value))
    else:
        Console().print(*shown, sep="\n")
    if arguments.out is None:
        return
    from diloco_ds.rundir import write_json
    from diloco_ds.sim.figures import save

    out = Path(arguments.out)
    write_json(out / f"{arguments.part}.json", value)
    save(draw, out / f"{arguments.part}.png")
    if not arguments.json:
        print(f"written: {out / arguments.part}.json, .png")
