"""Where a syncer starts from: the store in shared memory, else the newest sound checkpoint, else the initial
weights.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from diloco_ds.config import RunConfig
from diloco_ds.core.fragments import FragmentLayout
from diloco_ds.core.ledger import Ledger
from diloco_ds.core.returning import Origin
from diloco_ds.core.syncer import Syncer
from diloco_ds.errors import UserError
from diloco_ds.exchange.recovery import Recovery
from diloco_ds.exchange.store import Mark, Store, flatten
from diloco_ds.exchange.syncer_checkpoint import BadCheckpoint, checkpoints, restore_checkpoint
from diloco_ds.exchange.tape_file import tells_of_a_merge
from diloco_ds.membership import run_config
from diloco_ds.rundir import RunDir, SharedMemory
from diloco_ds.tensor_file import file_sha256

log = logging.getLogger(__name__)


def read_config(run: RunDir) -> RunConfig:
    """The resolved configuration of `run`. UserError if it is no run directory."""
    if not run.config.is_file():
        raise UserError(f"{run.root} is no run directory: it holds no config.yaml")
    return run_config(run)


def read_layout(run: RunDir, manifest: dict[str, Any]) -> FragmentLayout:
    """The fragment layout of `run`. UserError if it is not the one its manifest names."""
    layout = FragmentLayout.from_json(run.layout.read_text())
    if layout.digest != manifest["model"]["layout_digest"]:
        raise UserError(f"{run.layout} is not the layout that the manifest names: it was changed")
    return layout


def open_store(
    run: RunDir,
    manifest: dict[str, Any],
    layout: FragmentLayout,
    buffers: Sequence[str],
    recovery: Recovery,
) -> tuple[Store, str]:
    """The run's store, and in words where it comes from. `recovery` is used where it must be made anew.

    UserError if there is nothing sound to start from.
    """
    run_id = manifest["run_id"]
    folder = SharedMemory(run_id).store
    if folder.exists():
        return Store.open(folder, layout, buffers, run_id), "the store in shared memory"
    found = checkpoints(run.syncer_checkpoints)
    for path in reversed(found):
        try:
            store = Store.create(
                folder, layout, buffers, run_id, partial(restore_checkpoint, path, recovery=recovery)
            )
        except BadCheckpoint as error:
            log.warning("checkpoint not used: %s", error)
            continue
        return store, str(path.relative_to(run.root))
    if found:
        raise UserError(
            f"{run.syncer_checkpoints}: none of the {len(found)} checkpoints is sound; the log says why"
        )
    weights = run.initial_weights
    if not weights.is_file() or file_sha256(weights) != manifest["model"]["initial_weights_sha256"]:
        raise UserError(
            f"{weights} is not the file whose hash is in the manifest: the initial weights were changed"
        )
    begins = not tells_of_a_merge(run.tape)
    fill = partial(
        fill_with_initial, weights, recovery=None if begins else recovery, before=recovery.generation - 1
    )
    store = Store.create(folder, layout, buffers, run_id, fill)
    return store, "the initial weights"


def fill_with_initial(weights: Path, store: Store, recovery: Recovery | None, before: int = 0) -> None:
    """Version 0 of every fragment from a safetensors file; the outer optimizer's buffers are zero. Not version 0, and
    perhaps not these weights, if something was merged before: then with `recovery`. No lease gets a number that one of
    the `before` syncers before this one can have used.
    """
    ledger = Ledger(store.layout.fragments, store.layout.period)
    ledger.reopen(before)
    store.remember_ledger(ledger.state())
    if recovery is not None:
        recovery.begin([0] * store.layout.fragments, saved_by=0, complete=False)
    try:
        with safe_open(weights, framework="pt") as file:
            for fragment in range(store.layout.fragments):
                theta, buffers = store.begin(fragment)
                flatten(store.layout, fragment, file.get_tensor, theta)
                for buffer in buffers.values():
                    buffer.zero_()
                mark = Mark(version=0, round=0, merges=0, tokens=0)
                store.commit(fragment, recovery.go_on(mark, theta) if recovery else mark, generation=0)
    except (SafetensorError, ValueError) as error:
        raise UserError(f"{weights}: {error}") from error


def restored_core(
    config: RunConfig, layout: FragmentLayout, manifest: Mapping[str, Any], state: Mapping[str, Any]
) -> Syncer:
    """The state machine of a run, going on from `state` (`tape_state`): how a generation starts, live and in a replay."""
    marks = marks_of(state)
    core = Syncer(
        layout,
        config.exchange,
        budget=config.budget.tokens,
        lease=config.syncer.lease_s,
        epoch_blocks=manifest["data"]["train_blocks"],
    )
    for fragment, mark in enumerate(marks):
        core.restore(
            fragment,
            version=mark.version,
            round=mark.round,
            merged_tokens=mark.tokens,
            merged_base=mark.merged,
            counts=mark.counts,
        )
    core.ledger.restore(state["ledger"], [mark.cursors for mark in marks])
    return core


def tape_state(
    marks: Sequence[Mark], ledger: Mapping[str, Any], origins: Sequence[Origin] = ()
) -> dict[str, Any]:
    """What the tape's header says of the state a generation starts from; `marks_of` and `origins_of` read it."""
    return {
        "marks": [mark.to_json() for mark in marks],
        "ledger": ledger,
        "origins": [asdict(origin) for origin in origins],
    }


def marks_of(state: Mapping[str, Any]) -> list[Mark]:
    """The marks in a tape header's state."""
    return [Mark.from_json(dict(mark)) for mark in state["marks"]]


def origins_of(state: Any) -> list[Origin]:
    """The origins in a tape header's state; none where the generation goes on from the store of the one before."""
    return [Origin(**origin) for origin in state.get("origins", [])]
