"""Settings that a run goes on with, other than those it began with: given at a resume, recorded beside config.yaml.

    changes/0001.yaml    settings as key=value, when and with which command they were given; later ones win

`config.yaml` stays as it was. What may change is where and how an island computes; never what is computed.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from diloco_ds.config import RunConfig
from diloco_ds.errors import UserError
from diloco_ds.rundir import RunDir, write_once

_MAY_CHANGE = (
    *("deepspeed", "observe"),
    *(
        "trainer.checkpoint_every_s",
        "trainer.checkpoint_in_background",
        "trainer.loss_chunk",
        "trainer.activation_checkpointing",
        "trainer.compile",
        "trainer.least_step_s",
        "trainer.moments_within_s",
    ),
    *("syncer.checkpoint_every_s", "syncer.keep_checkpoints", "syncer.threads"),
)
_OF_AN_ISLAND = ("ranks", "deepspeed", "master_port", "threads_per_rank", "env", "link_args")
_REASONS = {
    "model": "another model is another run",
    "tokenizer": "another tokenizer is another run",
    "data": "other text is another run",
    "seed": "the order of the text follows from it",
    "name": "it is the run's name",
    "islands": "an island comes with diloco-ds join and goes with diloco-ds leave",
    "evaluation": "what is measured stays comparable from start to end",
    "trainer": "the learning rate's schedule belongs to the run",
}
_SYNCERS = "what the syncer decides by stays as it is from start to end: its tape is replayed with it"


def changed_settings(run: RunDir) -> list[str]:
    """Everything that was changed, as key=value, in the order in which it was."""
    return [setting for path in _files(run) for setting in yaml.safe_load(path.read_text())["settings"]]


def differences(before: RunConfig, after: RunConfig) -> dict[str, tuple[Any, Any]]:
    """Dotted keys whose values differ (islands by their names), with the value before and after."""
    old, new = (dict(_leaves(_by_name(each))) for each in (before, after))
    keys = [key for key in {**old, **new} if old.get(key) != new.get(key)]
    return {key: (old.get(key), new.get(key)) for key in keys}


def check_changes(before: RunConfig, after: RunConfig) -> None:
    """UserError for a difference that would make another run of it."""
    for key in differences(before, after):
        top, _, rest = key.partition(".")
        of_island = rest.partition(".")[2].partition(".")[0]
        if top == "islands" and of_island in _OF_AN_ISLAND:
            continue
        if any(key == allowed or key.startswith(f"{allowed}.") for allowed in _MAY_CHANGE):
            continue
        raise UserError(f"{key}: cannot change at a resume: {_REASONS.get(top, _SYNCERS)}")


def record(run: RunDir, settings: Sequence[str], argv: Sequence[str]) -> None:
    """Let the run go on with these settings. UserError if somebody else changes it at the same moment."""
    number = len(_files(run)) + 1
    text = yaml.safe_dump(
        {"settings": list(settings), "time": time.time(), "argv": list(argv)}, sort_keys=False
    )
    if not write_once(run.changes / f"{number:04d}.yaml", text):
        raise UserError(f"{run.root}: its settings are being changed just now; try again")


def _files(run: RunDir) -> list[Path]:
    return sorted(run.changes.glob("[0-9]*.yaml"))


def _by_name(config: RunConfig) -> dict[str, Any]:
    tree = config.model_dump(mode="json")
    tree["islands"] = {island["name"]: island for island in tree["islands"]}
    return tree


def _leaves(tree: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        name = f"{above}{key}"
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{name}.")
        else:
            yield name, value
