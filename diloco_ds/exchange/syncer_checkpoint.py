"""The global state on disk: checkpoints to go on from, and snapshots of the global weights to evaluate.

A checkpoint is a directory ``checkpoints/syncer/NNNNNN``; a snapshot, ``snapshots/TOKENS``, is the same
without ``outer.safetensors``.

    theta.safetensors   every travelling tensor under its own name, fp32
    outer.safetensors   the outer optimizer's buffers, ``FRAGMENT.BUFFER``, flat fp32 as long as the fragment
    state.json          marks of all fragments (version, round, tokens, what was merged), global step and
                        tokens, the ledger, hashes of the files

A directory is written under a hidden name and renamed when it is whole and on disk. Fragments are copied
one after the other while merging goes on, each of them whole; their versions may therefore differ by the
merges made meanwhile, and each is recorded.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from diloco_ds.core.fragments import FragmentLayout
from diloco_ds.core.ledger import Ledger
from diloco_ds.exchange.failpoint import failpoint
from diloco_ds.exchange.recovery import Recovery
from diloco_ds.exchange.store import Mark, Store, flatten
from diloco_ds.tensor_file import TensorFileWriter, file_sha256

FORMAT = 3


class BadCheckpoint(Exception):
    """A checkpoint that cannot be used: what is wrong with it."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What a checkpoint or snapshot says about the run, beside the fragments."""

    run_id: str
    generation: int
    global_step: int  # newest opened round
    tokens: int  # merged tokens
    merges: int  # since the run began
    time: float  # epoch seconds
    complete: bool = False  # nothing is merged after it: the syncer ends


def save(target: Path, store: Store, facts: Facts, *, with_outer: bool) -> None:
    """Write `target`, a directory that must not exist, from `store`.

    OSError if the disk does not take it; nothing is left behind then.
    """
    partial = target.with_name(f".{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        state = _write_tensors(partial, store, with_outer)
        failpoint("checkpoint.tensors")
        state |= {"format": FORMAT, "layout": store.layout.digest, **asdict(facts)}
        _write_durably(partial / "state.json", json.dumps(state, indent=1) + "\n")
        failpoint("checkpoint.before_rename")
        os.rename(partial, target)
        _sync_directory(target.parent)
        failpoint("checkpoint.after_rename")
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def save_checkpoint(directory: Path, store: Store, facts: Facts, keep: int) -> Path:
    """Write the next checkpoint into `directory`, then delete all but the newest `keep`. OSError as `save`."""
    existing = checkpoints(directory)
    number = int(existing[-1].name) + 1 if existing else 1
    target = directory / f"{number:06d}"
    save(target, store, facts, with_outer=True)
    for old in [*existing, target][:-keep]:
        shutil.rmtree(old, ignore_errors=True)
    return target


def mark_complete(path: Path) -> None:
    """Note that nothing is merged after the checkpoint `path`: the syncer ends. OSError if the disk does not take it."""
    state = json.loads((path / "state.json").read_text())
    partial = path / ".state.json.partial"
    partial.unlink(missing_ok=True)  # of a syncer that was killed here
    try:
        _write_durably(partial, json.dumps({**state, "complete": True}, indent=1) + "\n")
        os.replace(partial, path / "state.json")
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def checkpoints(directory: Path) -> list[Path]:
    """The checkpoints in `directory`, oldest first."""
    if not directory.is_dir():
        return []
    return sorted(
        (path for path in directory.iterdir() if path.name.isdigit()), key=lambda path: int(path.name)
    )


def remove_unfinished(directory: Path) -> None:
    """Delete what a killed writer left in `directory`."""
    for partial in directory.glob(".*.partial"):
        shutil.rmtree(partial, ignore_errors=True)


def restore_checkpoint(path: Path, store: Store, recovery: Recovery) -> None:
    """Fill the empty `store` from the checkpoint at `path`, and with what islands give back.

    Versions and numbers of leases go on above every one that may have been used since: what islands hold from then
    is older. All blocks that were leased are free again.
    BadCheckpoint if it is damaged or of another run, layout or outer optimizer.
    """
    state = _verified_state(path, store)
    marks = [Mark.from_json(mark) for mark in state["fragments"]]
    versions = [mark.version for mark in marks]
    recovery.begin(versions, state["generation"], complete=state.get("complete", False))
    with _tensors(path / "theta.safetensors") as theta, _tensors(path / "outer.safetensors") as outer:
        for fragment, mark in enumerate(marks):
            weights, buffers = store.begin(fragment)
            flatten(store.layout, fragment, theta.get_tensor, weights)
            for name, buffer in buffers.items():
                buffer.copy_(outer.get_tensor(f"{fragment}.{name}"))
            store.commit(fragment, recovery.go_on(mark, weights), state["generation"])
    ledger = Ledger(store.layout.fragments, store.layout.period)
    ledger.restore(state["ledger"], [mark.cursors for mark in marks])
    ledger.reopen(recovery.generations)
    store.remember_ledger(ledger.state())


def _write_tensors(partial: Path, store: Store, with_outer: bool) -> dict[str, Any]:
    """Copy all fragments into the files; returns what state.json says of them."""
    layout = store.layout
    ledger = store.ledger()  # before the marks: what it counts as merged is merged in them
    marks = []
    scratch = torch.empty(max(store.payload_numel(fragment) for fragment in range(layout.fragments)))
    with contextlib.ExitStack() as files:
        theta = _open_writer(files, partial / "theta.safetensors", _theta_shapes(layout))
        outer = (
            _open_writer(files, partial / "outer.safetensors", _outer_shapes(store)) if with_outer else None
        )
        for fragment, numel in enumerate(layout.numels):
            payload = scratch[: store.payload_numel(fragment)]
            marks.append(store.copy(fragment, payload).to_json())
            theta.write(payload[:numel])
            if outer is not None:
                outer.write(payload[numel:])
        files_written = {file.path.name: file.close() for file in (theta, outer) if file is not None}
    return {"fragments": marks, "ledger": ledger, "files": files_written}


def _open_writer(
    files: contextlib.ExitStack, path: Path, tensors: list[tuple[str, tuple[int, ...]]]
) -> TensorFileWriter:
    writer = TensorFileWriter(path, tensors)
    files.callback(writer.abandon)
    return writer


def _theta_shapes(layout: FragmentLayout) -> list[tuple[str, tuple[int, ...]]]:
    return [(placed.spec.name, placed.spec.shape) for placed in layout.tensors]


def _outer_shapes(store: Store) -> list[tuple[str, tuple[int, ...]]]:
    numels = store.layout.numels
    return [
        (f"{fragment}.{name}", (numel,)) for fragment, numel in enumerate(numels) for name in store.buffers
    ]


def _verified_state(path: Path, store: Store) -> dict[str, Any]:
    try:
        state: dict[str, Any] = json.loads((path / "state.json").read_text())
        wrong = [
            f"{key} is {state[key]}, not {right}"
            for key, right in {
                "format": FORMAT,
                "run_id": store.run_id,
                "layout": store.layout.digest,
            }.items()
            if state[key] != right
        ]
        wrong += [
            f"{name} is damaged"
            for name, sha256 in state["files"].items()
            if file_sha256(path / name) != sha256
        ]
    except (OSError, ValueError, KeyError) as error:
        raise BadCheckpoint(f"{path}: {error}") from error
    if wrong:
        raise BadCheckpoint(f"{path}: {'; '.join(wrong)}")
    return state


@contextlib.contextmanager
def _tensors(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (OSError, SafetensorError) as error:
        raise BadCheckpoint(f"{path}: {error}") from error


def _write_durably(path: Path, text: str) -> None:
    with open(path, "x") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
