"""Who belongs to a run: the islands of its configuration, those that have joined since, and not those that have left.

`config.yaml` stays as it was. What changes lies beside it, one file for each fact, made whole or not at all:

    islands/NAME.yaml    NAME joins: its settings
    islands/NAME.leave   NAME shall drain and leave (`diloco-ds leave`)
    islands/NAME.left    NAME has left: its last update is merged (written by the syncer)

Syncer and conductor look for new files; whoever starts anew reads them all. A name is used once in a run.
"""

from __future__ import annotations

from collections.abc import Sequence

import yaml
from pydantic import Field

from diloco_ds.changes import changed_settings
from diloco_ds.config import Block, Island, RunConfig
from diloco_ds.config_file import load_config
from diloco_ds.errors import UserError
from diloco_ds.rundir import RunDir, write_atomically, write_once


class Joining(Block):
    """An island that joined a live run."""

    island: Island = Field(description="Its settings, as an entry of `islands` in a run file.")
    number: int = Field(ge=0, description="How many joined before it.")


def run_config(run: RunDir, more_changes: Sequence[str] = ()) -> RunConfig:
    """The configuration of `run` with all islands that have joined, in that order, behind its own, and with what
    was changed at a resume.

    Those that have left are in it: an island keeps its place, and with it its ids, for the life of the run.
    """
    joined = [joining.island for joining in joinings(run)]
    return load_config(run.config, [*changed_settings(run), *more_changes], joined)


def joinings(run: RunDir) -> list[Joining]:
    """The islands that have joined, first come first."""
    found = [Joining.model_validate(yaml.safe_load(path.read_text())) for path in run.islands.glob("*.yaml")]
    return sorted(found, key=lambda joining: joining.number)


def leaving(run: RunDir) -> set[str]:
    """Islands that were told to leave, also those that have left."""
    return {path.stem for path in run.islands.glob("*.leave")}


def left(run: RunDir) -> set[str]:
    """Islands that belong to the run no longer."""
    return {path.stem for path in run.islands.glob("*.left")}


def add(run: RunDir, joining: Joining) -> None:
    """Let the island join. UserError if another one took its name or number at the same moment."""
    text = yaml.safe_dump(joining.model_dump(mode="json"), sort_keys=False)
    taken = {each.number for each in joinings(run)}
    if joining.number in taken or not write_once(run.islands / f"{joining.island.name}.yaml", text):
        raise UserError(f"{run.root}: another island is joining just now; try again")


def ask_to_leave(run: RunDir, island: str) -> None:
    """Let the island drain and leave."""
    write_atomically(run.islands / f"{island}.leave", "")


def note_left(run: RunDir, island: str) -> None:
    """The island belongs to the run no longer. OSError if that cannot be written."""
    write_atomically(run.islands / f"{island}.left", "")
