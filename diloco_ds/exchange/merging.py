"""Carrying out a Merge: merged outer gradient, outer step, next mark. Live syncer and replay both use this
very code.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from diloco_ds.config import RunConfig
from diloco_ds.core.events import Merge
from diloco_ds.core.fragments import FragmentLayout
from diloco_ds.core.member import Counts
from diloco_ds.core.merge import MergePart, merge_fragment
from diloco_ds.core.outer import OuterOptimizer
from diloco_ds.core.roster import counts_of
from diloco_ds.exchange.store import Mark


@dataclass(frozen=True, slots=True)
class Payload:
    """What one part of a merge brings: flat fp32, its weights, or its outer gradient if it was kept as a late one."""

    values: torch.Tensor
    is_gradient: bool


@dataclass(frozen=True, slots=True)
class OuterStep:
    """What an outer step was, for the logs."""

    norm: float  # of the merged outer gradient
    lr_scale: float  # factor of the schedule on the outer learning rate


class Merger:
    """Merge and outer step of one run's fragments. Holds scratch memory of the largest fragment, no state."""

    def __init__(self, config: RunConfig, layout: FragmentLayout) -> None:
        self._layout = layout
        self._rule = config.exchange.merge
        self._optimizer = OuterOptimizer(config.exchange.outer)
        self._lr_scale = self._optimizer.schedule(config.budget.tokens)
        self._scratch = torch.empty(max(layout.numels))
        self.buffers = self._optimizer.buffers
        """Names of the outer optimizer's state buffers, in the order `step` takes them."""

    def outer_gradient(self, action: Merge, payloads: Sequence[Payload], theta: torch.Tensor) -> torch.Tensor:
        """The merged outer gradient of `action`, fp32[numel], valid until the next call.

        `payloads` are those of `action.parts`, in their order; `theta` is the fragment before the merge. Sums
        are taken in the order of the islands' names: who answered first makes no difference, not in one bit.
        """
        delta = self._scratch[: theta.numel()]
        pairs = zip(action.parts, payloads, strict=True)
        parts = [
            MergePart.of(part, payload.values, payload.is_gradient)
            for part, payload in sorted(pairs, key=lambda pair: (pair[0].island, pair[0].update_id))
        ]
        merge_fragment(self._layout, action.fragment, theta, parts, self._rule, delta)
        return delta

    def outer_step(
        self,
        action: Merge,
        delta: torch.Tensor,
        old: tuple[torch.Tensor, Mapping[str, torch.Tensor]],
        mark: Mark,
        new: tuple[torch.Tensor, Mapping[str, torch.Tensor]],
    ) -> tuple[Mark, OuterStep]:
        """Step `old` (weights, buffers by name; `mark` belongs to it) along `delta` into `new`.

        Returns the mark of the new version. `delta` may be overwritten.
        """
        norm = float(torch.linalg.vector_norm(delta))
        scale = self._lr_scale(action.lr_tokens)
        scalars = self._optimizer.step(
            old[0],
            delta,
            [old[1][name] for name in self.buffers],
            mark.scalars,
            scale,
            new[0],
            [new[1][name] for name in self.buffers],
        )
        return next_mark(mark, action, scalars), OuterStep(norm, scale)


def next_mark(mark: Mark, action: Merge, scalars: dict[str, float]) -> Mark:
    """The mark of a fragment after `action`, given the one before, whose norms it keeps, and the outer optimizer's new
    scalars.
    """
    merged, cursors, counts = dict(mark.merged), dict(mark.cursors), dict(mark.counts)
    for island, of_it in counts_of(action.parts, action.missed).items():
        counts[island] = counts.get(island, Counts()).plus(of_it)
    for part in action.parts:
        merged[part.island] = max(part.base, merged.get(part.island, -1))
        if part.lease:
            cursors[part.island] = max((part.lease, part.cursor), cursors.get(part.island, (0, 0)))
    return Mark(
        version=action.version,
        round=action.round,
        merges=mark.merges + 1,
        tokens=mark.tokens + sum(part.tokens for part in action.parts),
        merged=merged,
        cursors=cursors,
        counts=counts,
        scalars=scalars,
        norms=mark.norms,
    )
