"""Islands that come and go while a run is live: asked for by commands, carried out by the conductor."""

from __future__ import annotations

import difflib
import os
import shutil
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from pydantic import ValidationError

from diloco_ds import membership
from diloco_ds.conductor import preflight
from diloco_ds.conductor.part import Part
from diloco_ds.conductor.parts import Parts
from diloco_ds.config import Island, RunConfig
from diloco_ds.config_errors import COMMAND_LINE, in_words
from diloco_ds.config_file import settings_tree
from diloco_ds.errors import UserError
from diloco_ds.exchange.failpoint import failpoint
from diloco_ds.observe.manifest import manifest_to_go_on
from diloco_ds.observe.status import Status, read_status
from diloco_ds.rundir import RunDir, SharedMemory

KILLED_AFTER_S = 10.0
"""How long the parts of an island that has left may take to end."""


def join(run: RunDir, settings: Sequence[str]) -> None:
    """Let an island with these settings (key=value, `name` among them) join: a live run at once, a stopped one when
    it goes on. UserError, with nothing touched.
    """
    status = read_status(run.root)
    stopped = status.state in ("stopped", "failed", "dead")
    if not stopped:
        status = _live(run)
    if not stopped and status.conductor_pid is None:
        raise UserError(
            f"{run.root}: the run has no conductor to start an island; diloco-ds train --resume first"
        )
    config = membership.run_config(run)
    island = _island(settings)
    _check_name(run, config, island.name)
    if config.exchange.adoption.how == "none":
        raise UserError("exchange.adoption.how of this run is none: that is for one island only")
    config = config.model_copy(update={"islands": [*config.islands, island]})
    preflight.check_joining(run, config, island.name)
    number = len(membership.joinings(run))
    membership.add(run, membership.Joining(island=island, number=number))


def leave(run: RunDir, island: str) -> None:
    """Let the island drain and leave. UserError, with nothing touched."""
    _live(run)
    config = membership.run_config(run)
    gone = membership.leaving(run)
    present = [each.name for each in config.islands if each.name not in gone]
    if island in gone:
        raise UserError(f"{run.root}: island {island} leaves already, or has left")
    if island not in present:
        near = difflib.get_close_matches(island, present, n=1)
        hint = f"did you mean '{near[0]}'?" if near else f"there are {', '.join(present)}"
        raise UserError(f"{run.root}: no island '{island}'; {hint}")
    quorum = config.exchange.quorum
    if len(present) - 1 < quorum:
        raise UserError(
            f"{run.root}: without {island} {len(present) - 1} islands are left, and exchange.quorum asks for {quorum}; "
            "diloco-ds stop ends the run"
        )
    membership.ask_to_leave(run, island)


class Turnover:
    """The conductor's part: starts the parts of islands that have joined, ends those of islands that have left."""

    def __init__(self, run: RunDir, parts: Parts, *, islands: bool) -> None:
        self._run, self._parts, self._islands = run, parts, islands
        self._left = membership.left(run)
        self._ending: list[tuple[str, float, list[Part]]] = []

    def poll(self) -> Iterator[tuple[str, str]]:
        """Do what is due; yields island and what happened to it."""
        for joining in membership.joinings(self._run):
            name = joining.island.name
            if name not in self._parts.links and name not in self._left:
                for part in self._parts.add(self._run, membership.run_config(self._run), name, self._islands):
                    failpoint("conductor.joining")
                    if self._islands:  # elsewhere the link waits until the island says where it is
                        part.start()
                yield name, "joined"
        for name in membership.left(self._run) - self._left:
            self._left.add(name)
            self._ending.append((name, time.monotonic() + KILLED_AFTER_S, self._parts.remove(name)))
            yield name, "left"
        self._end_parts()

    def _end_parts(self) -> None:
        for entry in list(self._ending):
            name, deadline, parts = entry
            for part in parts:
                part.signal(signal.SIGKILL if time.monotonic() > deadline else signal.SIGTERM)
            if not any(part.alive() for part in parts):
                self._ending.remove(entry)
                _remove_mailboxes(self._run, name)


def _live(run: RunDir) -> Status:
    manifest_to_go_on(run.root)
    status = read_status(run.root)
    if status.state not in ("preparing", "running"):
        raise UserError(f"{run.root}: the run is {status.state}; islands join and leave a live run")
    return status


def _island(settings: Sequence[str]) -> Island:
    tree = settings_tree(settings)
    for key in tree:
        if key not in Island.model_fields:
            raise UserError(
                f"{COMMAND_LINE}: {key}: an island that joins has the run's model, data and exchange; "
                f"of its own are {', '.join(Island.model_fields)}"
            )
    try:
        return Island.model_validate(tree)
    except ValidationError as error:
        raise UserError(f"{COMMAND_LINE}: {in_words(error, Island)}") from None


def _check_name(run: RunDir, config: RunConfig, name: str) -> None:
    if name in [island.name for island in config.islands]:
        was = "has left" if name in membership.left(run) else "is there"
        raise UserError(f"{run.root}: an island {name} {was} already; choose another name")


def _remove_mailboxes(run: RunDir, island: str) -> None:
    shared = SharedMemory(run.run_id())
    folders: list[Path] = [shared.island_end(island), shared.syncer_end(island), shared.link_scratch(island)]
    for folder in folders:
        if folder.exists():
            leaving = folder.with_name(f".{folder.name}.leaving")
            os.rename(folder, leaving)
            shutil.rmtree(leaving)
