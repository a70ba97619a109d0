"""Real weights in virtual time: every learner a model with true gradients, merged by the product's own code."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from diloco_ds.config import Exchange
from diloco_ds.core.events import Answer, Drop, Keep, Merge, Part
from diloco_ds.core.fragments import FragmentLayout
from diloco_ds.core.merge import MergePart, late_payload, merge_fragment
from diloco_ds.core.outer import OuterOptimizer
from diloco_ds.model.experts import RoutedTokens
from diloco_ds.sim.world import Weights

_VERSIONS_KEPT = 8
"""Versions of a fragment that learners may still adopt or have as base."""


@dataclass
class Learner:
    """A learner's model. step: one inner step on its own data. routed: of a model with experts."""

    model: nn.Module
    step: Callable[[], None]
    routed: RoutedTokens | None = None

    def __post_init__(self) -> None:
        self.parameters = dict(self.model.named_parameters())


@dataclass(frozen=True)
class _Payload:
    values: Tensor
    base: int
    is_gradient: bool


class RealWeights(Weights):
    """What the simulated learners and the syncer do to weights."""

    def __init__(
        self,
        layout: FragmentLayout,
        exchange: Exchange,
        learners: Mapping[str, Learner],
        on_merge: Callable[[], None],
    ) -> None:
        self.layout, self._exchange, self._learners, self._on_merge = layout, exchange, learners, on_merge
        self._optimizer = OuterOptimizer(exchange.outer)
        first = next(iter(learners.values()))
        self._versions = [{0: self._read(first, p)} for p in range(layout.fragments)]
        self._newest = [0] * layout.fragments
        buffers = len(self._optimizer.buffers)
        self._state = [[torch.zeros(numel) for _ in range(buffers)] for numel in layout.numels]
        self._scalars: list[dict[str, float]] = [{} for _ in layout.numels]
        self._snapshots: dict[tuple[str, int], Tensor] = {}  # of the newest answer under the base in use
        self._outbox: dict[tuple[str, int], Tensor] = {}  # of an answer that is being written
        self._payloads: dict[tuple[str, int, int], _Payload] = {}

    def write_global(self, model: nn.Module) -> None:
        """Copy the global weights into `model`."""
        target = Learner(model, lambda: None)
        for p, version in enumerate(self._newest):
            self._write(target, p, self._versions[p][version])

    # ---- a learner ----

    def train(self, island: str) -> None:
        """One inner step of `island`."""
        self._learners[island].step()

    def snapshot(self, island: str, fragment: int) -> tuple[int, ...]:
        """Remember the island's fragment as of now; returns the tokens of each of its experts since its base."""
        learner = self._learners[island]
        values = self._read(learner, fragment)
        self._snapshots[island, fragment] = self._outbox[island, fragment] = values
        counts = None if learner.routed is None else learner.routed.answered(fragment)
        return () if counts is None else tuple(int(count) for count in counts)

    def sent(self, answer: Answer) -> None:
        """The newest snapshot is the payload of `answer`."""
        values = self._outbox.pop((answer.island, answer.fragment))
        key = (answer.island, answer.fragment, answer.update_id)
        self._payloads[key] = _Payload(values, answer.base, is_gradient=False)

    def adopt(self, island: str, fragment: int, version: int) -> None:
        """overwrite: the global fragment; mix: alpha own + (1 - alpha) global; rebase: global + steps since the answer."""
        learner, values = self._learners[island], self._versions[fragment][version]
        snapshot = self._snapshots.pop((island, fragment), None)
        how = self._exchange.adoption
        if learner.routed is not None:
            learner.routed.adopted(fragment, keeps=how.how == "rebase")
        if how.how == "mix" and version > 0:
            values = torch.lerp(values, self._read(learner, fragment), how.alpha)
        elif how.how == "rebase" and snapshot is not None:
            values = values + (self._read(learner, fragment) - snapshot)
        self._write(learner, fragment, values)

    # ---- the syncer ----

    def keep(self, action: Keep) -> None:
        """A late payload waits for the next merge."""
        key = (action.island, action.fragment, action.update_id)
        payload = self._payloads[key]
        if payload.is_gradient:
            return
        base = self._versions[action.fragment][payload.base]
        kept = late_payload(self._exchange.merge.anchor, base, payload.values)
        self._payloads[key] = _Payload(kept[0], payload.base, kept[1])

    def drop(self, action: Drop) -> None:
        """Forget a payload."""
        self._payloads.pop((action.island, action.fragment, action.update_id), None)

    def merge(self, action: Merge) -> None:
        """Outer gradient, outer step, next version."""
        p = action.fragment
        theta = self._versions[p][self._newest[p]]
        delta, new = torch.empty_like(theta), torch.empty_like(theta)
        parts = [self._part(action, part) for part in action.parts]
        merge_fragment(self.layout, p, theta, parts, self._exchange.merge, delta)
        state = [torch.empty_like(theta) for _ in self._state[p]]
        self._scalars[p] = self._optimizer.step(
            theta, delta, self._state[p], self._scalars[p], 1.0, new, state
        )
        self._state[p] = state
        self._versions[p][action.version] = new
        self._versions[p].pop(action.version - _VERSIONS_KEPT, None)
        self._newest[p] = action.version
        self._on_merge()

    def _part(self, action: Merge, part: Part) -> MergePart:
        payload = self._payloads.pop((part.island, action.fragment, part.update_id))
        return MergePart.of(part, payload.values, payload.is_gradient)

    # ---- flat fragments ----

    def _read(self, learner: Learner, fragment: int) -> Tensor:
        tensors = [learner.parameters[placed.spec.name] for placed in self.layout.tensors_of(fragment)]
        return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])

    def _write(self, learner: Learner, fragment: int, values: Tensor) -> None:
        for placed in self.layout.tensors_of(fragment):
            piece = values[placed.offset : placed.offset + placed.spec.numel]
            learner.parameters[placed.spec.name].data.copy_(piece.view(placed.spec.shape))
