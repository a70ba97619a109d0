"""The syncer's store: the global state of a run in shared memory, durable against kill -9 at any instant.

One FragmentBox, ``store/theta``. The payload of fragment p is ``[Theta_p | buffer 1 | buffer 2 | ...]``,
each numel(p) fp32 values: the weights and the outer optimizer's buffers, so that both are committed by one
store of one word. The header is a ThetaHeader; its `extra` is the fragment's Mark. The folder appears
whole, filled with version 0 or a checkpoint, or not at all. Beside it lies ``ledger.json``, who reads which blocks.

There is one writer, the syncer that holds the run's Tenure. Readers (links, checkpoints) copy and check;
none can hold up a merge.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from diloco_ds.core.fragments import FragmentLayout
from diloco_ds.core.lease import Position
from diloco_ds.core.member import Counts
from diloco_ds.errors import UserError
from diloco_ds.exchange.failpoint import failpoint
from diloco_ds.exchange.fragment_box import FragmentBox
from diloco_ds.exchange.space import private_folder, require_space
from diloco_ds.exchange.wire import ThetaHeader
from diloco_ds.rundir import write_atomically

_MARK_CAPACITY = 32 * 1024
"""Bytes for the header of a fragment: room for the marks of some hundred islands."""


@dataclass(frozen=True, slots=True)
class Mark:
    """What is committed with a fragment: all that the core, the outer optimizer and the screen for outliers need to go on
    from there.
    """

    version: int
    round: int  # the global step of its last merge; 0 = the initial weights
    merges: int  # how often this fragment was merged
    tokens: int  # merged into this fragment so far
    merged: dict[str, int] = field(default_factory=dict)  # per island: the base of its last merged update
    scalars: dict[str, float] = field(default_factory=dict)  # of the outer optimizer, such as Adam's step
    cursors: dict[str, Position] = field(default_factory=dict)  # per island: data its merged updates had read
    counts: dict[str, Counts] = field(
        default_factory=dict
    )  # per island: its part in the merges of this fragment
    # norms of its newest updates that passed the screen (core/screen.py); a replay does not screen and cannot tell them
    norms: tuple[float, ...] = field(default=(), compare=False)

    def to_json(self) -> dict[str, Any]:
        """As JSON takes it; `from_json` gives it back."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Mark:
        """The mark that `to_json` wrote; TypeError for anything else."""
        cursors = {island: (lease, cursor) for island, (lease, cursor) in value["cursors"].items()}
        counts = {island: Counts(*of_it) for island, of_it in value["counts"].items()}
        return cls(**{**value, "cursors": cursors, "counts": counts, "norms": tuple(value["norms"])})


class Store:
    """The fragments of `layout` with the outer optimizer's `buffers` (their names), in a FragmentBox."""

    def __init__(
        self, folder: Path, box: FragmentBox, layout: FragmentLayout, buffers: Sequence[str], run_id: str
    ) -> None:
        self.folder, self.layout, self.buffers, self.run_id = folder, layout, tuple(buffers), run_id
        self._box = box
        if box.numels != payload_numels(layout, buffers):
            raise UserError(
                f"{box.path}: its fragments are not those of the run's layout and outer optimizer; remove it"
            )

    @classmethod
    def open(cls, folder: Path, layout: FragmentLayout, buffers: Sequence[str], run_id: str) -> Store:
        """The store in `folder`, as its last writer left it; FileNotFoundError if there is none."""
        store = cls(folder, FragmentBox.open(folder / "theta"), layout, buffers, run_id)
        for fragment in range(layout.fragments):
            store.mark(fragment)
        return store

    @classmethod
    def create(
        cls,
        folder: Path,
        layout: FragmentLayout,
        buffers: Sequence[str],
        run_id: str,
        fill: Callable[[Store], None],
    ) -> Store:
        """A new store in `folder`, which appears when `fill` has put every fragment."""
        numels = payload_numels(layout, buffers)
        partial = folder.with_name(f".{folder.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)  # of a syncer that was killed here
        private_folder(partial)
        try:
            require_space(partial, cls.file_size(layout, buffers))
            box = FragmentBox.create(partial / "theta", numels, _MARK_CAPACITY)
            store = cls(partial, box, layout, buffers, run_id)
            fill(store)
            failpoint("store.filled")
            os.rename(partial, folder)
            store.folder = folder
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        failpoint("store.created")
        return store

    @staticmethod
    def file_size(layout: FragmentLayout, buffers: Sequence[str]) -> int:
        """Bytes of shared memory a store takes once every slot was written."""
        return FragmentBox.file_size(payload_numels(layout, buffers), _MARK_CAPACITY)

    def payload_numel(self, fragment: int) -> int:
        """fp32 values of a fragment with its buffers."""
        return self._box.numels[fragment]

    def mark(self, fragment: int) -> Mark:
        """The mark of the newest version; UserError if the store holds none or one of another run."""
        header = self._box.read_header(fragment)
        if header is None:
            raise UserError(f"{self._box.path}: fragment {fragment} is empty; remove the store")
        theta = ThetaHeader.unpack(header[1])
        if theta.run_id != self.run_id:
            raise UserError(f"{self._box.path}: belongs to run {theta.run_id}, not {self.run_id}; remove it")
        return Mark.from_json(json.loads(theta.extra))

    def theta(self, fragment: int) -> torch.Tensor:
        """Newest Theta_p, a view, fp32[numel]."""
        return self._newest(fragment)[: self.layout.numel(fragment)]

    def outer(self, fragment: int) -> dict[str, torch.Tensor]:
        """Newest outer buffers by name, views, fp32[numel] each."""
        return self._buffers(fragment, self._newest(fragment))

    def theta_of(self, fragment: int, version: int) -> torch.Tensor | None:
        """Theta_p of `version`, a view, or None if it lies in neither slot."""
        payload = self._box.payload(fragment, version)
        return None if payload is None else payload[: self.layout.numel(fragment)]

    def begin(self, fragment: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The slot for the next version, to be filled whole: (Theta, buffers by name).

        The older of the two versions is gone from then on.
        """
        slot = self._box.begin(fragment)
        while (
            slot is None
        ):  # no reader of the store is promised a pin: one that died with it must not stop merges
            self._box.unpin(fragment)
            slot = self._box.begin(fragment)
        return slot[: self.layout.numel(fragment)], self._buffers(fragment, slot)

    def commit(self, fragment: int, mark: Mark, generation: int) -> None:
        """Make the begun slot the newest version."""
        failpoint("store.before_commit")
        extra = json.dumps(mark.to_json(), separators=(",", ":")).encode()
        header = ThetaHeader(run_id=self.run_id, generation=generation, round=mark.round, extra=extra)
        self._box.commit(fragment, mark.version, header.pack())
        failpoint("store.after_commit")

    def copy(self, fragment: int, out: torch.Tensor) -> Mark:
        """Copy weights and buffers of one version into `out`, whole, while merging may go on; returns its mark."""
        while True:
            version = self._box.version(fragment)
            payload, meta = self._box.payload(fragment, version), self._box.meta(fragment, version)
            if payload is None or meta is None:
                continue
            out.copy_(payload)
            if self._box.holds(fragment, version):
                return Mark.from_json(json.loads(ThetaHeader.unpack(meta).extra))

    def remember_drain(self, reason: str) -> None:
        """The run drains from now on: a syncer that follows this one must know."""
        write_atomically(self.folder / "drain", reason)

    def drain_reason(self) -> str | None:
        """Why a syncer before this one had begun to drain the run; None if none had."""
        path = self.folder / "drain"
        return path.read_text() if path.exists() else None

    def remember_ledger(self, state: Mapping[str, Any]) -> None:
        """The ledger as of now (core/ledger.py), beside the cursors in the marks."""
        write_atomically(self.folder / "ledger.json", json.dumps(state))
        failpoint("store.ledger")

    def ledger(self) -> dict[str, Any]:
        """What was remembered last; empty if nothing was leased yet."""
        path = self.folder / "ledger.json"
        return json.loads(path.read_text()) if path.exists() else {}

    def _newest(self, fragment: int) -> torch.Tensor:
        payload = self._box.payload(fragment, self._box.version(fragment))
        if payload is None:
            raise RuntimeError(f"{self._box.path}: fragment {fragment} is empty")
        return payload

    def _buffers(self, fragment: int, payload: torch.Tensor) -> dict[str, torch.Tensor]:
        numel = self.layout.numel(fragment)
        return {name: payload[n * numel : (n + 1) * numel] for n, name in enumerate(self.buffers, start=1)}


def payload_numels(layout: FragmentLayout, buffers: Sequence[str]) -> tuple[int, ...]:
    """fp32 values of each fragment with its outer buffers."""
    return tuple((1 + len(buffers)) * numel for numel in layout.numels)


def flatten(
    layout: FragmentLayout, fragment: int, tensor: Callable[[str], torch.Tensor], out: torch.Tensor
) -> None:
    """Fill `out`, fp32[numel(fragment)], with the fragment's tensors, asked for by name; ValueError for a wrong shape."""
    for placed in layout.tensors_of(fragment):
        value = tensor(placed.spec.name)
        if tuple(value.shape) != placed.spec.shape:
            raise ValueError(
                f"tensor '{placed.spec.name}' has shape {tuple(value.shape)}, the layout says {placed.spec.shape}"
            )
        out[placed.offset : placed.offset + placed.spec.numel] = value.reshape(-1)
