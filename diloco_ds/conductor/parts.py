"""The processes a run consists of, as the conductor starts them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from diloco_ds import program
from diloco_ds.conductor.elsewhere import host_of, link_arguments
from diloco_ds.conductor.part import Command, Endings, Part
from diloco_ds.config import RunConfig
from diloco_ds.exchange.link_launch import clean_environment, link_command
from diloco_ds.membership import left
from diloco_ds.rundir import RunDir

HOST_AWAY = 1_000_000
"""Starts, half a minute apart, for a link to another host: that may be away for hours and come back."""


@dataclass(frozen=True)
class Parts:
    """All parts of a run; `supervisors` and `links` by island, no supervisors where the islands are started elsewhere."""

    syncer: Part
    links: dict[str, Part]
    supervisors: dict[str, Part]
    observer: Part | None
    chaos: Part | None
    """Injects faults, where the run was started with a schedule of them."""

    @classmethod
    def of(cls, run: RunDir, config: RunConfig, *, islands: bool) -> Parts:
        """The parts of the run, none of them started."""
        run_id = run.run_id()
        gone = left(run)
        names = [island.name for island in config.islands if island.name not in gone]
        observed = config.observe.wandb.mode != "disabled"
        return cls(
            syncer=Part(
                run,
                run_id,
                "syncer",
                _module("diloco_ds.exchange.syncer_process", run),
                Endings(well=frozenset({"finished", "stopped"}), badly=frozenset({"failed"})),
            ),
            links={name: _link(run, run_id, config, name, elsewhere=not islands) for name in names},
            supervisors={name: _supervisor(run, run_id, name) for name in names} if islands else {},
            observer=Part(run, run_id, "observer", _module("diloco_ds.observe.observer", run))
            if observed
            else None,
            chaos=Part(run, run_id, "chaos", _module("diloco_ds.chaos.process", run))
            if run.chaos.exists()
            else None,
        )

    def add(self, run: RunDir, config: RunConfig, island: str, supervised: bool) -> list[Part]:
        """The parts of an island that has joined, not started yet; `supervised`: also one that runs its learner."""
        run_id = run.run_id()
        self.links[island] = _link(run, run_id, config, island, elsewhere=not supervised)
        if supervised:
            self.supervisors[island] = _supervisor(run, run_id, island)
        return self.of_island(island)

    def remove(self, island: str) -> list[Part]:
        """The parts of an island that has left; what still runs of them is for the caller to end."""
        parts = self.of_island(island)
        self.links.pop(island, None)
        self.supervisors.pop(island, None)
        return parts

    def of_island(self, island: str) -> list[Part]:
        """Link and supervisor of the island, as far as there are any."""
        return [parts[island] for parts in (self.links, self.supervisors) if island in parts]

    def all(self) -> list[Part]:
        """Every part, the syncer first."""
        return [
            self.syncer,
            *self.links.values(),
            *self.supervisors.values(),
            *(part for part in (self.observer, self.chaos) if part),
        ]

    def take_over(self, run: RunDir) -> list[Part]:
        """Those parts that an earlier conductor started and that still run, taken over."""
        path = run.status("conductor")
        recorded: dict[str, Any] = json.loads(path.read_text()).get("parts", {}) if path.is_file() else {}
        return [part for part in self.all() if part.role in recorded and part.take_over(recorded[part.role])]


def _supervisor(run: RunDir, run_id: str, island: str) -> Part:
    return Part(
        run,
        run_id,
        f"supervisor.{island}",
        _module("diloco_ds.island.supervisor", run, island),
        Endings(well=frozenset({"done", "stopped"}), badly=frozenset({"failed"})),
    )


def _link(run: RunDir, run_id: str, config: RunConfig, island: str, *, elsewhere: bool) -> Part:
    """A link never ends by itself; what mpirun says at its end proves nothing."""

    def command() -> Command:
        link_args = config.island(island).link_args
        host = host_of(run, island) if elsewhere else None
        return link_command(run.root, island, link_arguments(link_args, host) if host else link_args)

    endings = Endings(by_exit_code=False, give_up_after=HOST_AWAY if elsewhere else 10)
    return Part(run, run_id, f"link.{island}", command, endings)


def _module(name: str, run: RunDir, *arguments: str) -> Callable[[], Command]:
    return lambda: module_command(name, run, *arguments)


def module_command(name: str, run: RunDir, *arguments: str) -> Command:
    """argv and environment of the program NAME RUN_DIR ARGUMENTS..."""
    environment = {**clean_environment(os.environ), "PYTHONUNBUFFERED": "1"}
    return program.command(name, str(run.root), *arguments), environment
