"""How fast an island trains, by turns: plain torch, DeepSpeed without the exchange, and DeepSpeed with it.

The second and third are the very learner of a run (island/learner.py) under DeepSpeed's launcher; the third is merged
by a real syncer over a real link, on this host. What is measured is the user's own run: its model, data and settings.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from diloco_ds.bench.contestant import Contestant, Turn
from diloco_ds.bench.plain_settings import PlainSettings
from diloco_ds.conductor import ending, marks
from diloco_ds.conductor.parts import Parts
from diloco_ds.conductor.prepare import new_run
from diloco_ds.conductor.stops import Stops
from diloco_ds.config import Budget, Evaluation, Island, Observe, RunConfig, Wandb
from diloco_ds.core.fragments import FragmentLayout
from diloco_ds.errors import UserError
from diloco_ds.exchange.link_launch import clean_environment
from diloco_ds.exchange.mailbox import Mailbox
from diloco_ds.island.launch import LEARNER_MODULE, devices_of, launch_command, rank_environment
from diloco_ds.island.learner_processes import LearnerProcesses
from diloco_ds.observe.metrics import Record
from diloco_ds.rundir import RunDir, SharedMemory

PLAIN, ALONE, EXCHANGE = "plain", "alone", "exchange"
LOOPS = {
    PLAIN: "plain torch",
    ALONE: "DeepSpeed, no exchange",
    EXCHANGE: "DeepSpeed, exchange",
}
WARM_UP = 3
"""Steps before a loop's first turn; the loop with the exchange also adopts something first."""
NEVER = 1e9
_PLAIN_MODULE = "diloco_ds.bench.plain_loop"


@dataclass(frozen=True)
class Measured:
    """The turns of every loop; the n-th turns of all were made one after the other."""

    config: RunConfig
    device: str
    layout: FragmentLayout
    turns: dict[str, list[Turn]]


def bench_island(
    given: RunConfig, island: str | None, turns: int, steps: int, console: Console, stops: Stops
) -> Measured:
    """Let the loops train by turns: `turns` of `steps` whole steps each, as island `island` (default: the first)
    of the run `given` would.

    Leaves nothing behind but the log of a loop that failed. UserError for what cannot be measured, and where a loop fails.
    """
    like = _island(given, island)
    PlainSettings.of(given.deepspeed_of(like.name), like.ranks)
    devices = devices_of(given, like.name, clean_environment(os.environ))
    config = bench_config(given, like)
    with _run(config, console, stops) as run:
        layout = FragmentLayout.from_json(run.layout.read_text())
        contestants = []
        for name in LOOPS:
            console.print(f"starting: {LOOPS[name]}", highlight=False, style="dim")
            contestants.append(_start(run, config, name, devices, layout))
        measured: dict[str, list[Turn]] = {name: [] for name in LOOPS}
        for number in range(turns):
            console.print(f"turn {number + 1} of {turns}", highlight=False, style="dim")
            first = number % len(contestants)  # nobody is always the first
            for contestant in contestants[first:] + contestants[:first]:
                measured[contestant.name].append(contestant.turn(steps))
    _check_exchange(measured[EXCHANGE])
    return Measured(config, "CPU" if devices is None else "GPU", layout, measured)


def bench_config(given: RunConfig, like: Island) -> RunConfig:
    """The run in which the loops are three islands like `like`; nothing but steps and the exchange happens in it."""
    if given.exchange.adoption.how == "none":
        raise UserError(
            "bench island: with exchange.adoption.how: none nothing is adopted; choose overwrite, mix or rebase"
        )
    threads = like.threads_per_rank or max(1, len(os.sched_getaffinity(0)) // like.ranks)
    islands = [
        like.model_copy(update={"name": name, "threads_per_rank": threads, "master_port": None})
        for name in LOOPS
    ]
    return given.model_copy(
        update={
            "name": "bench",
            "budget": Budget(tokens=10**15),
            "islands": islands,
            "exchange": given.exchange.model_copy(update={"quorum": 1}),
            "trainer": given.trainer.model_copy(
                update={"checkpoint_every_s": NEVER, "least_step_s": 0.0, "moments_within_s": 0.0}
            ),
            # A syncer that rests with its island must not take it for absent.
            "syncer": given.syncer.model_copy(update={"checkpoint_every_s": NEVER, "lease_s": NEVER}),
            "evaluation": Evaluation(),
            "observe": Observe(wandb=Wandb(mode="disabled")),
        }
    )


def _island(config: RunConfig, name: str | None) -> Island:
    names = [island.name for island in config.islands]
    if name is not None and name not in names:
        raise UserError(f"bench island: the run has no island '{name}'; it has {', '.join(names)}")
    return config.island(name or names[0])


@contextmanager
def _run(config: RunConfig, console: Console, stops: Stops) -> Iterator[RunDir]:
    """A run directory of its own; all of it, its processes and its shared memory are gone afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="diloco-ds-bench-"))
    run: RunDir | None = None
    try:
        run = new_run(config, folder / "run", sys.argv, console, islands=False)
        yield run
    finally:
        stops.interrupting = False
        if run is not None:
            ending.sweep(run.run_id())
        shutil.rmtree(folder)


def _start(
    run: RunDir, config: RunConfig, name: str, devices: list[int] | None, layout: FragmentLayout
) -> Contestant:
    """Start a loop, wait until it is warm, and let it rest."""
    run_id, roles = run.run_id(), []
    if name != PLAIN:
        folder = SharedMemory(run_id).island_end(name)
        Mailbox.create(folder, layout.numels, inbox=True, experts=layout.experts)
    if name == EXCHANGE:
        parts = Parts.of(run, config, islands=True)
        for part in (parts.syncer, parts.links[name]):
            part.start()
            roles.append(part.role)
    module = _PLAIN_MODULE if name == PLAIN else LEARNER_MODULE
    environment = rank_environment(config, name, clean_environment(os.environ))
    learner = LearnerProcesses.start(
        launch_command(run.root, config, name, devices, module),
        marks.marked(environment, run_id, name),
        run.log(name),
        run_id,
        name,
        incarnation=1,
    )
    contestant = Contestant(
        run, name, learner, lambda: [each for role in roles for each in marks.processes_of(run_id, role)]
    )
    contestant.warm_up(_is_exchanging if name == EXCHANGE else _is_warm)
    return contestant


def _is_warm(steps: list[Record]) -> bool:
    return len(steps) >= WARM_UP


def _is_exchanging(steps: list[Record]) -> bool:
    return len(steps) >= WARM_UP and any(step["adopted"] for step in steps)


def _check_exchange(turns: list[Turn]) -> None:
    """UserError where the loop with the exchange had none: its figures would be another loop's."""
    steps = [step for turn in turns for step in turn.steps]
    for what in ("answered", "adopted"):
        if not any(step[what] for step in steps):
            raise UserError(
                f"bench island: in {len(steps)} steps no fragment was {what}; give more --steps or --turns"
            )
