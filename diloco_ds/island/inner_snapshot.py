"""What one rank writes of a checkpoint, as it was between two steps, and how the ranks write it together.

The files: inner_state.py. A snapshot in host memory is written while the next steps are made, from a thread of every
rank; these threads agree over a process group of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from diloco_ds.core.fragments import FragmentLayout
from diloco_ds.island.slices import Slice
from diloco_ds.island.transfer import DeviceCopy
from diloco_ds.rundir import write_json
from diloco_ds.tensor_file import Stored, TensorFile

FORMAT = 2
FACTS = "island.json"
MASTER = "master"
BUFFERS = "buffers.safetensors"

Gather = Callable[[Any], list[Any]]
"""Gives every rank the values of all ranks, in the order of the ranks; a collective."""


@dataclass(frozen=True)
class Piece:
    """Values of one tensor, from element `start` of it on."""

    tensor: str
    start: int
    part: Slice


@dataclass(frozen=True)
class Snapshot:
    """What this rank writes. `pieces`: by file. `values` and `numbers`: what the optimizer keeps (moments.py), as far as
    this rank knows.
    """

    layout: FragmentLayout
    pieces: Mapping[str, Sequence[Piece]]
    buffers: Mapping[str, Tensor]
    copies: Sequence[DeviceCopy]
    values: Mapping[str, str]
    numbers: Mapping[str, Mapping[str, float]]
    optimizer: Mapping[str, Any]
    counters: Mapping[str, int]
    loss_scale: Mapping[str, float]

    def write(self, directory: Path, rank: int, gather: Gather, shape: Mapping[str, Any]) -> None:
        """Write the files into `directory`, which rank 0 makes. A collective; blocks until all is written. OSError on all
        ranks if the disk does not take it on one of them.
        """
        for copy in self.copies:
            copy.wait()
        told = gather((self.values, self.numbers))
        values = {name: dtype for names, _ in told for name, dtype in names.items()}
        numbers = {tensor: counted for _, theirs in told for tensor, counted in theirs.items()}
        files = [MASTER, *values]
        together(gather, lambda: self._create(directory, files) if rank == 0 else None)
        together(gather, lambda: self._write_own(directory))
        facts = {
            "format": FORMAT,
            "layout": self.layout.digest,
            "shape": shape,
            "optimizer": {"kind": self.optimizer, "values": values, "numbers": numbers},
            "counters": self.counters,
            "loss_scale": self.loss_scale,
        }
        together(gather, lambda: write_json(directory / FACTS, facts) if rank == 0 else None)

    def _create(self, directory: Path, files: Sequence[str]) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        tensors = {p.spec.name: Stored(torch.float32, p.spec.shape) for p in self.layout.tensors}
        for name in files:
            TensorFile.create(directory / f"{name}.safetensors", tensors).close()
        if self.buffers:
            stored = {
                name: Stored(buffer.dtype, tuple(buffer.shape)) for name, buffer in self.buffers.items()
            }
            with TensorFile.create(directory / BUFFERS, stored) as file:
                for name, buffer in self.buffers.items():
                    file.write(name, 0, buffer.flatten())

    def _write_own(self, directory: Path) -> None:
        """A file that only other ranks know of holds zeros in this rank's ranges: no gradient has come there yet."""
        for name, pieces in self.pieces.items():
            with TensorFile(directory / f"{name}.safetensors", writable=True) as file:
                for piece in pieces:
                    file.write(piece.tensor, piece.start, piece.part.values().detach())


def together(gather: Gather, work: Callable[[], None]) -> None:
    """Do the work; OSError on all ranks if there is one on any."""
    error: OSError | None = None
    try:
        work()
    except OSError as caught:
        error = caught
    said = [each for each in gather(str(error) if error else None) if each]
    if said:
        raise OSError(said[0]) from error
