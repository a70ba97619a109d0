"""The experts of a model, and how many tokens its routers send to each.

Layers of experts are counted from 0 in the order of the model; `expert_layer` of a TensorSpec is that number.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from diloco_ds.core.fragments import FragmentLayout


def expert_modules(model: nn.Module) -> dict[str, Any]:
    """The modules of `model` that hold the experts of one layer as tensors [experts, ...], by name."""
    return {name: module for name, module in model.named_modules() if _holds_experts(module)}


def _holds_experts(module: nn.Module) -> bool:
    count, parameters = getattr(module, "num_experts", None), list(module.parameters(recurse=False))
    return (
        isinstance(count, int)
        and all(parameter.shape[0] == count for parameter in parameters)
        and any(parameter.ndim == 3 for parameter in parameters)  # a router has a matrix [experts, width]
    )


class ExpertLayer:
    """One layer of experts as the model has them before they are divided or partitioned."""

    def __init__(self, module: Any) -> None:
        self.module: nn.Module = module
        self.experts: int = module.num_experts


class RoutedTokens:
    """Tokens that went through this process's routers, for each expert; and per fragment those since its base.

    Counted on the device, whose results nobody waits for. `layers`: all of the model, in its order; their forward pass
    takes (hidden, chosen int64 [tokens, k], weights), with the whole layer's numbers of experts in `chosen`. A fragment's
    counts are int64 [experts], in the order of `FragmentLayout.expert_layers`. When they start anew is `LearnerClock`'s
    rule for tokens.
    """

    def __init__(self, layers: Sequence[ExpertLayer], layout: FragmentLayout, device: torch.device) -> None:
        sizes = [layer.experts for layer in layers]
        self._counts = torch.zeros(sum(sizes), dtype=torch.int64, device=device).split(sizes)
        self._per_token = [0] * len(sizes)  # experts that a token is sent to; known after the first step
        self._layers = [list(layout.expert_layers(p)) for p in range(layout.fragments)]
        self._origin = [self._now(p) for p in range(layout.fragments)]
        self._snapshot: list[Tensor | None] = [None] * layout.fragments
        for number, layer in enumerate(layers):
            layer.module.register_forward_pre_hook(partial(self._count, number))

    def answered(self, fragment: int) -> Tensor | None:
        """The fragment is being answered: its counts since its base, in memory of their own; None if it has no experts."""
        if not self._layers[fragment]:
            return None
        self._snapshot[fragment] = now = self._now(fragment)
        return now - self._origin[fragment]

    def adopted(self, fragment: int, keeps: bool) -> None:
        """A new version of it was adopted; `keeps`: the steps made since the last answer are kept (`rebase`)."""
        snapshot = self._snapshot[fragment]
        self._origin[fragment] = snapshot if keeps and snapshot is not None else self._now(fragment)
        self._snapshot[fragment] = None

    def tokens(self, fragment: int, counts: Sequence[int], tokens: int) -> tuple[int, ...]:
        """Of `tokens` trained ones those that each expert got, by the shares in `counts`; none where one of the layers was
        not counted yet. Shares, since recomputed activations pass a router twice, and a checkpoint keeps no counts.
        """
        told: list[int] = []
        for layer in self._layers[fragment]:
            own = counts[len(told) : len(told) + len(self._counts[layer])]
            routed, total = self._per_token[layer] * tokens, sum(own)
            if not routed or not total:
                return ()
            told += [(2 * routed * count + total) // (2 * total) for count in own]
        return tuple(told)

    def counted(self) -> list[list[int]]:
        """For each layer the tokens of each expert since the beginning; waits for the device."""
        return [[int(count) for count in counts] for counts in self._counts]

    def _now(self, fragment: int) -> Tensor:
        own = [self._counts[layer] for layer in self._layers[fragment]]
        return torch.cat(own) if own else torch.empty(0, dtype=torch.int64)

    def _count(self, layer: int, _module: nn.Module, inputs: tuple[Tensor, Tensor, Tensor]) -> None:
        chosen = inputs[1].detach()
        self._per_token[layer] = chosen.shape[-1]
        rows = chosen.reshape(-1)
        self._counts[layer].scatter_add_(0, rows, torch.ones_like(rows))
