"""The inner state of an island on disk: by tensors, not by shards, so that an island of any shape goes on from it.

In the directory of a checkpoint:

    master.safetensors     fp32 master weights, every travelling tensor under its own name
    exp_avg.safetensors    and the like: one such file for each value per weight that the optimizer keeps
    buffers.safetensors    persistent buffers, where the model has any
    island.json            layout, shape of the island, what the optimizer counts, DeepSpeed's counters

The ranks write into the same files, each its own ranges (inner_snapshot.py), and read what belongs to them: no rank
ever holds more than its part.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from diloco_ds.core.fragments import FragmentLayout
from diloco_ds.errors import UserError
from diloco_ds.island.inner_snapshot import BUFFERS, FACTS, FORMAT, MASTER, Piece, Snapshot
from diloco_ds.island.moments import Moments
from diloco_ds.island.slices import FragmentSlices, Slice
from diloco_ds.island.transfer import DeviceCopy, HostMemory
from diloco_ds.tensor_file import TensorFile

_COUNTERS = ("global_steps", "global_samples", "skipped_steps")
_LOSS_SCALE = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


class InnerState:
    """What one rank holds of the inner state. `engine` is DeepSpeed's, `slices` are this rank's."""

    def __init__(self, engine: Any, layout: FragmentLayout, slices: Sequence[FragmentSlices]) -> None:
        self._engine, self._layout, self._slices = engine, layout, slices
        self._moments = Moments(engine.optimizer)

    def snapshot(self, host: HostMemory | None) -> Snapshot:
        """What this rank writes, as it is now; waits for nobody. With `host` it is copied to host memory, and on its way
        there when this returns: who changes masters goes by `HostMemory.hold_writers`. Without, it must not change before it
        is written.
        """
        values = self._moments.values()
        pieces: dict[str, list[Piece]] = {}
        copies: list[DeviceCopy] = []
        for name in (MASTER, *values):
            pieces[name] = list(self._owned(name))
            if host is not None:
                copies.append(staged(pieces[name], host))
        buffers = {
            name: buffer.detach() for name, buffer in persistent_buffers(self._engine.module.model).items()
        }
        if host is not None:
            for name, buffer in buffers.items():
                room = host.room(buffer.numel(), buffer.dtype).view(buffer.shape)
                buffers[name] = room.copy_(buffer, non_blocking=True)
            copies.append(host.mark())
        return Snapshot(
            layout=self._layout,
            pieces=pieces,
            buffers=buffers,
            copies=copies,
            values=values,
            numbers={name: self._moments.numbers(part, values) for name, _, part in self._parts("owned")},
            optimizer=self._moments.kind(),
            counters={name: getattr(self._engine, name) for name in _COUNTERS},
            loss_scale=_loss_scale(self._engine.optimizer),
        )

    def read(self, directory: Path) -> tuple[dict[str, Any], list[str]]:
        """Go on from what `Snapshot.write` wrote, before the first step; waits for nobody. Returns the shape of the island
        that wrote it, and in words what was not taken. UserError, with nothing touched, as `read_facts`.
        """
        facts = read_facts(directory, self._layout)
        with TensorFile(directory / f"{MASTER}.safetensors") as file:
            read_weights(file, self._layout, self._slices)
        self._read_buffers(directory / BUFFERS)
        for name, value in facts["counters"].items():
            setattr(self._engine, name, value)
        _set_loss_scale(self._engine.optimizer, facts["loss_scale"])
        return facts["shape"], self._read_moments(directory, facts["optimizer"])

    def _read_moments(self, directory: Path, saved: dict[str, Any]) -> list[str]:
        if not self._moments.can_go_on_from(saved["kind"]):
            kinds = saved["kind"], self._moments.kind()
            was, is_ = (kind["class"] if kinds[0]["class"] != kinds[1]["class"] else kind for kind in kinds)
            return [f"the optimizer moments saved are of {was}, the optimizer is {is_}"]
        if not saved["values"] and not saved["numbers"]:
            return ["no optimizer moments were saved"]
        numbers = ((part, saved["numbers"].get(tensor, {})) for tensor, _, part in self._parts("masters"))
        self._moments.begin(saved["values"], numbers)
        for name in saved["values"]:
            with TensorFile(directory / f"{name}.safetensors") as file:
                for tensor, start, part in self._parts("masters"):
                    file.read(tensor, start, self._moments.beside(part, name).values())
        return []

    def _read_buffers(self, path: Path) -> None:
        buffers = persistent_buffers(self._engine.module.model)
        if buffers:
            with TensorFile(path) as file:
                for name, buffer in buffers.items():
                    file.read(name, 0, buffer.detach().view(-1))

    def _owned(self, name: str) -> Iterator[Piece]:
        """This rank's share of the file `name`."""
        for tensor, start, part in self._parts("owned"):
            yield Piece(tensor, start, part if name == MASTER else self._moments.beside(part, name))

    def _parts(self, which: str) -> Iterator[tuple[str, int, Slice]]:
        """This rank's `owned` slices, `masters` or `copies`, cut by tensors: name, where in it, and slice."""
        for fragment, slices in enumerate(self._slices):
            yield from cut_by_tensors(self._layout, fragment, getattr(slices, which))


def cut_by_tensors(
    layout: FragmentLayout, fragment: int, slices: Sequence[Slice]
) -> Iterator[tuple[str, int, Slice]]:
    """`slices` of a fragment, cut where its tensors end: name of the tensor, first element in it, slice."""
    for placed in layout.tensors_of(fragment):
        low, high = placed.offset, placed.offset + placed.spec.numel
        for each in slices:
            if part := each.cut(low, high):
                yield placed.spec.name, part.start - low, part


@torch.no_grad()
def read_weights(file: TensorFile, layout: FragmentLayout, slices: Sequence[FragmentSlices]) -> None:
    """Write the tensors of `file` into the masters and copies of this rank; waits for nobody."""
    for fragment, own in enumerate(slices):
        for name, start, part in cut_by_tensors(layout, fragment, [*own.masters, *own.copies]):
            if part.held():
                file.read(name, start, part.values())


def read_facts(directory: Path, layout: FragmentLayout) -> dict[str, Any]:
    """What island.json in `directory` says. UserError if that is no checkpoint, or one of another model."""
    file = directory / FACTS
    if not file.is_file():
        raise UserError(f"{directory} holds no checkpoint of an island")
    facts: dict[str, Any] = json.loads(file.read_text())
    if facts.get("format") != FORMAT:
        raise UserError(f"{directory}: its format is {facts.get('format')}, this program writes {FORMAT}")
    if facts["layout"] != layout.digest:
        raise UserError(
            f"{directory} is a checkpoint of another model, or of other fragments, than the run's"
        )
    return facts


def persistent_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Buffers that belong to the model's weights, such as a router's bias."""
    kept = model.state_dict(keep_vars=True)
    return {name: buffer for name, buffer in model.named_buffers() if name in kept}


def staged(pieces: list[Piece], host: HostMemory) -> DeviceCopy:
    """Let the pieces be copies in one range of host memory, which are on their way."""
    room = host.room(sum(piece.part.length for piece in pieces), torch.float32)
    ends = list(accumulate(piece.part.length for piece in pieces))
    parts = [
        replace(piece.part, start=end - piece.part.length) for piece, end in zip(pieces, ends, strict=True)
    ]
    pieces[:] = [
        replace(piece, part=Slice(0, part.length, room, part.start))
        for piece, part in zip(pieces, parts, strict=True)
    ]
    return host.take(parts, room)


def _loss_scaler(optimizer: Any) -> Any:
    """The object that holds the loss scale of fp16; for other precisions it never changes."""
    return getattr(optimizer, "loss_scaler", None) or getattr(optimizer, "loss_scale_config", optimizer)


def _loss_scale(optimizer: Any) -> dict[str, float]:
    scaler = _loss_scaler(optimizer)
    found = {name: getattr(scaler, name, None) for name in _LOSS_SCALE}
    return {name: float(value) for name, value in found.items() if value is not None}


def _set_loss_scale(optimizer: Any, saved: dict[str, float]) -> None:
    scaler = _loss_scaler(optimizer)
    for name, value in saved.items():
        own = getattr(scaler, name, None)
        if own is not None:
            setattr(scaler, name, type(own)(value))
