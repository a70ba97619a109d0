"""Global weights and outer optimizer state recomputed from a tape and the kept updates, with the live merging code.

A merge counts when the syncer committed it: when the tape tells that it did, or when the next generation starts from it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from diloco_ds.core.events import Merge, Merged
from diloco_ds.core.fragments import FragmentLayout
from diloco_ds.core.returning import Origin
from diloco_ds.core.tape import Header
from diloco_ds.errors import UserError
from diloco_ds.exchange.kept_updates import load_kept
from diloco_ds.exchange.merging import Merger
from diloco_ds.exchange.store import Mark, Store, flatten
from diloco_ds.exchange.syncer_checkpoint import checkpoints
from diloco_ds.exchange.syncer_opening import origins_of
from diloco_ds.replay.decisions import Generation, Moment, Recording
from diloco_ds.rundir import SharedMemory
from diloco_ds.tensor_file import file_sha256

Version = tuple[int, int]
"""Fragment and version; names a state of a fragment once and for all, since no version is used twice."""


@dataclass(frozen=True)
class State:
    """A fragment at one version: weights and outer buffers, flat fp32, and its mark."""

    theta: torch.Tensor
    buffers: Mapping[str, torch.Tensor]
    mark: Mark


@dataclass(frozen=True)
class Target:
    """What the recomputed state is compared with. load: the fragment's weights and buffers, one flat fp32 tensor."""

    name: str
    marks: tuple[Mark, ...]
    load: Callable[[int], torch.Tensor]


@dataclass(frozen=True)
class Comparison:
    """How the recomputed fragments compare with a target."""

    against: str
    fragments: int
    differing: tuple[int, ...]

    @property
    def identical(self) -> bool:
        """Whether all are the same, bit for bit."""
        return not self.differing


class Weights:
    """The global state along a tape. Only the versions that are asked for later are kept in memory."""

    def __init__(self, recording: Recording) -> None:
        self._recording, self._layout = recording, recording.layout
        self._merger = Merger(recording.config, recording.layout)
        self.target = _find_target(recording, self._merger.buffers)
        self._needed = _returned_to(recording) | {(p, m.version) for p, m in enumerate(self.target.marks)}
        self._states: list[State] = []
        self._saved: dict[Version, State] = {}
        self._pending: dict[int, Merge] = {}
        self.merges = 0

    def take(self, moment: Generation | Moment) -> None:
        """Follow the tape by one moment. UserError for a merge whose updates were not kept."""
        if isinstance(moment, Generation):
            self._begin(moment)
            return
        if isinstance(moment.event, Merged):
            self._commit(moment.event.fragment)
        for action in moment.recorded:
            if isinstance(action, Merge):
                self._pending[action.fragment] = action

    def compare(self) -> Comparison:
        """The recomputed state against the target's, once the tape is through."""
        for p, mark in enumerate(self.target.marks):
            if p in self._pending and self._pending[p].version == mark.version:
                self._commit(p)
        differing = tuple(p for p in range(self._layout.fragments) if not self._is_equal(p))
        return Comparison(self.target.name, self._layout.fragments, differing)

    def _begin(self, generation: Generation) -> None:
        if self._states:
            self._go_on(generation)
        else:
            self._start(generation)
        torch.set_num_threads(generation.threads)  # sums are taken as the syncer takes them from here on

    def _go_on(self, generation: Generation) -> None:
        for p, mark in enumerate(generation.marks):
            origin = generation.origins[p] if generation.origins else Origin(mark.version, mark.version)
            if p in self._pending and self._pending[p].version == origin.weights:
                self._commit(p)
            self._pending.pop(p, None)
            if mark.version != self._states[p].mark.version:
                self._return_to(p, mark, origin)

    def _start(self, generation: Generation) -> None:
        if any(mark.merges for mark in generation.marks):
            raise UserError("the tape does not begin with the run: the weights it began from are not known")
        path = self._recording.run.initial_weights
        if file_sha256(path) != self._recording.manifest["model"]["initial_weights_sha256"]:
            raise UserError(f"{path} is not the file whose hash is in the manifest")
        with safe_open(path, framework="pt") as file:
            for p, mark in enumerate(generation.marks):
                theta = torch.empty(self._layout.numel(p))
                flatten(self._layout, p, file.get_tensor, theta)
                self._put(
                    p, State(theta, {name: torch.zeros_like(theta) for name in self._merger.buffers}, mark)
                )

    def _return_to(self, fragment: int, mark: Mark, origin: Origin) -> None:
        """A generation that began with its memory lost: from a checkpoint, and weights that islands gave back."""
        theta, outer = (self._known(fragment, version) for version in (origin.weights, origin.outer))
        self._put(fragment, State(theta.theta, outer.buffers, mark))

    def _known(self, fragment: int, version: int) -> State:
        try:
            return self._saved[fragment, version]
        except KeyError:
            raise UserError(
                f"a generation starts from version {version} of fragment {fragment}, which the tape does not know"
            ) from None

    def _commit(self, fragment: int) -> None:
        action, old = self._pending.pop(fragment), self._states[fragment]
        try:
            payloads = load_kept(self._recording.run, action)
        except FileNotFoundError as error:
            raise UserError(
                f"version {action.version} of fragment {fragment} cannot be recomputed: its updates were not kept"
            ) from error
        delta = self._merger.outer_gradient(action, payloads, old.theta)
        theta = torch.empty_like(old.theta)
        buffers = {name: torch.empty_like(theta) for name in self._merger.buffers}
        mark, _ = self._merger.outer_step(action, delta, (old.theta, old.buffers), old.mark, (theta, buffers))
        self.merges += 1
        self._put(fragment, State(theta, buffers, mark))

    def _put(self, fragment: int, state: State) -> None:
        if len(self._states) == fragment:
            self._states.append(state)
        self._states[fragment] = state
        if (fragment, state.mark.version) in self._needed:
            self._saved[fragment, state.mark.version] = state

    def _is_equal(self, fragment: int) -> bool:
        mark = self.target.marks[fragment]
        state = self._saved.get((fragment, mark.version))
        if state is None or state.mark != mark:
            return False
        ours = torch.cat([state.theta, *(state.buffers[name] for name in self._merger.buffers)])
        theirs = self.target.load(fragment)
        return torch.equal(ours.view(torch.int32), theirs.view(torch.int32))


def _returned_to(recording: Recording) -> set[Version]:
    """Versions that a later generation goes back to."""
    headers = (record for record in recording.records() if isinstance(record, Header))
    origins = ((p, origin) for header in headers for p, origin in enumerate(origins_of(header.state)))
    return {(p, version) for p, origin in origins for version in (origin.weights, origin.outer)}


def _find_target(recording: Recording, buffers: Iterable[str]) -> Target:
    """The newest checkpoint, else the store in shared memory."""
    names = list(buffers)
    found = checkpoints(recording.run.syncer_checkpoints)
    if found:
        return _checkpoint(found[-1], recording, names)
    folder = SharedMemory(recording.run_id).store
    if folder.exists():
        return _store(Store.open(folder, recording.layout, names, recording.run_id))
    raise UserError(
        f"{recording.run.root}: neither a checkpoint nor a store in shared memory to compare weights with"
    )


def _checkpoint(path: Path, recording: Recording, buffers: list[str]) -> Target:
    layout = recording.layout

    def load(fragment: int) -> torch.Tensor:
        payload = torch.empty((1 + len(buffers)) * layout.numel(fragment))
        parts = payload.split(layout.numel(fragment))
        try:
            with safe_open(path / "theta.safetensors", framework="pt") as theta:
                flatten(layout, fragment, theta.get_tensor, parts[0])
            with safe_open(path / "outer.safetensors", framework="pt") as outer:
                for name, part in zip(buffers, parts[1:], strict=True):
                    part.copy_(outer.get_tensor(f"{fragment}.{name}"))
        except (OSError, SafetensorError) as error:
            raise UserError(f"{path}: {error}") from error
        return payload

    return Target(str(path.relative_to(recording.run.root)), _checkpoint_marks(path, layout), load)


def _checkpoint_marks(path: Path, layout: FragmentLayout) -> tuple[Mark, ...]:
    state = json.loads((path / "state.json").read_text())
    if state["layout"] != layout.digest:
        raise UserError(f"{path} is of another fragment layout")
    return tuple(Mark.from_json(mark) for mark in state["fragments"])


def _store(store: Store) -> Target:
    """A copy of the store as of now: the run may go on."""
    marks, payloads = [], []
    for fragment in range(store.layout.fragments):
        payloads.append(torch.empty(store.payload_numel(fragment)))
        marks.append(store.copy(fragment, payloads[-1]))
    return Target("the store in shared memory", tuple(marks), payloads.__getitem__)
