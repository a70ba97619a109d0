"""What the optimizer keeps for each weight (Adam's moments), found beside the masters it updates, under each
ZeRO stage. DeepSpeed's objects are read through their attributes; DeepSpeed is not imported.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from diloco_ds.errors import UserError
from diloco_ds.island.slices import Slice

_ADAM = frozenset({"Adam", "AdamW", "FusedAdam", "DeepSpeedCPUAdam"})
"""Optimizers that keep the same moments: each goes on from another's."""
_DECISIVE = ("amsgrad", "centered")
"""Settings of torch's optimizers that decide what they keep."""


class Moments:
    """The state of the optimizer that DeepSpeed drives: *values*, tensors with an element for each weight
    (exp_avg), and *numbers*, one for a whole tensor (step).
    """

    def __init__(self, optimizer: Any) -> None:
        self._base = optimizer
        while hasattr(self._base, "optimizer"):
            self._base = self._base.optimizer
        # At stage 3 the parameter groups are filled only while a step is made.
        updated = getattr(optimizer, "fp32_partitioned_groups_flat", None) or [
            tensor for group in self._base.param_groups for tensor in group["params"]
        ]
        self._updated: list[Tensor] = sorted(
            (tensor for tensor in updated if tensor.numel()), key=lambda tensor: tensor.data_ptr()
        )
        self._addresses = [tensor.data_ptr() for tensor in self._updated]
        self._before: dict[Tensor, Any] | None = None  # the state that `begin` replaced

    def kind(self) -> dict[str, Any]:
        """What decides which moments there are: the optimizer's class and settings. JSON-able."""
        group = self._base.param_groups[0]
        return {"class": type(self._base).__name__, **{name: bool(group.get(name)) for name in _DECISIVE}}

    def is_adam(self) -> bool:
        """Whether the moments are Adam's two."""
        kind = self.kind()
        return kind["class"] in _ADAM and not any(kind[name] for name in _DECISIVE)

    def can_go_on_from(self, kind: Mapping[str, Any]) -> bool:
        """Whether the moments that an optimizer of this `kind` kept mean the same to this one."""
        own = self.kind()
        same = own["class"] == kind["class"] or {own["class"], kind["class"]} <= _ADAM
        return same and all(own[name] == kind[name] for name in _DECISIVE)

    def values(self) -> dict[str, str]:
        """Names of the values per weight, with their dtype; none before the first step.

        UserError where the optimizer keeps something that is neither a value per weight nor a number.
        """
        names: dict[str, str] = {}
        for updated in sorted(self._updated, key=lambda tensor: -tensor.numel()):
            for name, kept in self._base.state.get(updated, {}).items():
                if not isinstance(kept, Tensor):
                    continue
                if kept.shape == updated.shape and updated.numel() > 1:
                    names[name] = str(kept.dtype).removeprefix("torch.")
                elif kept.numel() > 1:
                    raise UserError(
                        f"deepspeed.optimizer: {type(self._base).__name__} keeps '{name}' of shape "
                        f"{list(kept.shape)} for {list(updated.shape)} weights: that cannot be saved"
                    )
        return names

    def numbers(self, master: Slice, values: Mapping[str, str]) -> dict[str, float]:
        """The numbers kept for the tensor that `master` is of: what is not one of the `values`."""
        kept = self._base.state.get(self._holder(master)[0], {})
        return {
            name: float(number)
            for name, number in kept.items()
            if name not in values and isinstance(number, (Tensor, int, float))
        }

    def most(self, name: str) -> float:
        """The largest of the numbers called `name` that are kept; 0 before the first step."""
        return max((float(kept[name]) for kept in self._base.state.values() if name in kept), default=0.0)

    def begin(self, values: Mapping[str, str], numbers: Iterable[tuple[Slice, Mapping[str, float]]]) -> None:
        """Make room before the first step: zeros for `values` (with their dtypes), and each master's numbers.
        Tensors that ZeRO keeps together get the largest of their numbers.
        """
        self._before = dict(self._base.state)
        of_each: dict[int, dict[str, float]] = {}
        largest: dict[str, float] = {}  # for what belongs to no tensor: padding
        for master, own in numbers:
            for known in (of_each.setdefault(id(self._holder(master)[0]), {}), largest):
                known.update({name: max(number, known.get(name, number)) for name, number in own.items()})
        # torch's optimizers count in tensors, DeepSpeed's own in integers.
        number = torch.tensor if type(self._base).__module__.startswith("torch.") else int
        for updated in self._updated:
            self._base.state[updated] = {
                **{name: number(of_it) for name, of_it in of_each.get(id(updated), largest).items()},
                **{
                    name: torch.zeros_like(updated, dtype=getattr(torch, dtype), requires_grad=False)
                    for name, dtype in values.items()
                },
            }

    def forget(self) -> None:
        """Undo `begin`: the optimizer is fresh again."""
        if self._before is not None:
            self._base.state.clear()
            self._base.state.update(self._before)
            self._before = None

    def beside(self, master: Slice, name: str) -> Slice:
        """The values called `name` of the weights in `master`: zeros where no gradient has come yet."""
        updated, offset = self._holder(master)
        if name not in self._base.state.get(updated, {}):
            return Slice(master.start, master.length, torch.zeros(master.length))
        return Slice(master.start, master.length, self._base.state[updated][name], offset)

    def _holder(self, master: Slice) -> tuple[Tensor, int]:
        """The tensor that the optimizer updates and `master` is a part of, and where in it."""
        address = master.values().data_ptr()
        updated = self._updated[bisect.bisect_right(self._addresses, address) - 1]
        offset = (address - updated.data_ptr()) // updated.element_size()
        if not 0 <= offset <= updated.numel() - master.length:
            raise RuntimeError("a master that no optimizer updates")
        return updated, offset
