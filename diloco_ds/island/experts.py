"""Experts divided among the ranks of an island: each rank holds whole experts of every layer, tokens travel to them.

transformers' own router chooses; only its experts module is divided, in place. Rank r of a group of `size` ranks keeps
experts r * E / size up to (r + 1) * E / size, so its part of every expert tensor is one range of the model's tensor. All
layouts whose experts lie in tensors [experts, ...] of one module work alike: Gemma 4, Mixtral, Qwen3-MoE, DeepSeek-V3.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed, nn

from diloco_ds.errors import UserError
from diloco_ds.model.experts import expert_modules


class Division(NamedTuple):
    """How the experts of a model are divided: `size` ranks hold those of a layer together. `starts`: of each parameter that
    was divided, where this rank's part begins in the whole flat tensor.
    """

    size: int
    starts: Mapping[str, int]


WHOLE = Division(1, {})
"""Every rank holds all experts."""


def check_division(model: nn.Module, size: int, ranks: int) -> None:
    """UserError unless the experts of `model` (it may be a meta one) can be divided among `size` of `ranks` ranks."""
    modules = expert_modules(model)
    if not modules:
        raise UserError(
            f"{type(model).__name__} has no experts in tensors [experts, ...]: leave expert_parallel out"
        )
    if ranks % size:
        raise UserError(f"{size} does not divide the island's {ranks} ranks")
    for name, module in modules.items():
        if module.num_experts % size:
            raise UserError(f"{size} does not divide the {module.num_experts} experts of {name}")
        if not all(parameter.requires_grad for parameter in module.parameters()):
            raise UserError(f"{name} is frozen: frozen experts cannot be divided")


@torch.no_grad()
def divide_experts(model: nn.Module, group: Any, group_name: str) -> Division:
    """Keep this rank's experts of every layer of `model` and let tokens travel in `group`, a process group that DeepSpeed
    knows as `group_name`. For a model that `check_division` has found good.
    """
    rank, size = distributed.get_rank(group), distributed.get_world_size(group)
    starts = {}
    for name, module in expert_modules(model).items():
        own = module.num_experts // size
        for parameter_name, parameter in module.named_parameters(recurse=False):
            part = parameter.data.narrow(0, rank * own, own)
            starts[f"{name}.{parameter_name}"] = rank * part.numel()
            parameter.data = part.clone()
            _mark(parameter, group_name)
        module.num_experts = own
        module.forward = functools.partial(_on_all_ranks, module.forward, own, group)
    return Division(size, starts)


def _mark(parameter: Any, group_name: str) -> None:
    """Tell DeepSpeed that the ranks hold different values: it then sums gradients and shards the optimizer only over the
    ranks that hold the same experts.
    """
    parameter.allreduce = False
    parameter.group_name = group_name
    parameter.ds_zero_placement_family = "autoep_expert"  # the last two are read at stage 3
    parameter.ds_zero_partition_group_name = group_name


def _on_all_ranks(
    compute: Callable[[Tensor, Tensor, Tensor], Tensor],
    own: int,
    group: Any,
    hidden: Tensor,
    chosen: Tensor,
    weights: Tensor,
) -> Tensor:
    """The experts' forward pass with every row computed where its expert lives. A collective of `group`.

    `hidden` is [tokens, width], `chosen` (int64) and `weights` are [tokens, k]; the result is like `hidden`. `compute` is
    transformers' own forward pass over this rank's `own` experts, numbered from 0.
    """
    order = chosen.flatten().argsort(stable=True)  # by expert, and so by rank
    counts, sent, received = _agree_on_counts(chosen, own, group)
    rows = _Travel.apply(hidden[order // chosen.shape[1]], sent, received, group)
    numbers = torch.arange(own, device=hidden.device).repeat(len(sent))
    index = numbers.repeat_interleave(counts.flatten(), output_size=sum(received))
    if not sum(received):  # one row of zeros, so that every rank runs through the same graph
        rows, index = torch.cat([rows, rows.new_zeros(1, rows.shape[1])]), index.new_zeros(1)
    results = compute(rows, index[:, None], rows.new_ones(len(index), 1))[: sum(received)]
    results = _Travel.apply(results, received, sent, group)[order.argsort()]
    return (results.view(*chosen.shape, -1) * weights[..., None]).sum(dim=1).to(hidden.dtype)


def _agree_on_counts(chosen: Tensor, own: int, group: Any) -> tuple[Tensor, list[int], list[int]]:
    """Rows from each rank for each own expert [ranks, own], rows sent to each rank, rows received from each. The sizes are
    needed on the host: on a GPU the one wait of the layer.
    """
    ranks = distributed.get_world_size(group)
    ours = torch.zeros(ranks * own, dtype=torch.int64, device=chosen.device)
    ours.scatter_add_(0, chosen.flatten(), torch.ones_like(chosen.flatten()))
    theirs = torch.empty_like(ours)
    distributed.all_to_all_single(theirs, ours, group=group)
    sent, received = torch.stack([ours.view(ranks, own).sum(1), theirs.view(ranks, own).sum(1)]).tolist()
    return theirs.view(ranks, own), sent, received


class _Travel(torch.autograd.Function):
    """Rows [n, width] to the ranks of a group: `sent` and `received` are the rows to and from each. Gradients go back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], received: list[int], group: Any) -> Tensor:
        ctx.way_back = received, sent, group
        return _travel(rows, sent, received, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return _travel(gradients[0], *ctx.way_back), None, None, None


def _travel(rows: Tensor, sent: list[int], received: list[int], group: Any) -> Tensor:
    arrived = rows.new_empty(sum(received), rows.shape[1])
    distributed.all_to_all_single(arrived, rows.contiguous(), received, sent, group=group)
    return arrived
