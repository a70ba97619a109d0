"""The outer optimizer: any element-wise torch.optim class, with its state in tensors that the caller owns."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from diloco_ds import config
from diloco_ds.core.schedule import token_schedule
from diloco_ds.errors import UserError

STEPS = "outer_steps"  # steps taken so far, kept among the scalars; torch.optim has no such name

_REFUSALS = (TypeError, ValueError, RuntimeError, AssertionError, IndexError, KeyError)


class OuterOptimizer:
    """Steps flat fp32 fragments with a torch.optim class, exactly as that class would.

    It holds no state: everything a fragment's next step depends on is in `buffers` flat fp32 tensors of the
    fragment's size and in a few numbers, so that the caller can commit [Theta | state] by one mark.
    The default, SGD with Nesterov momentum mu, is b <- mu*b + Delta; Theta <- Theta - lr*(Delta + mu*b).
    UserError for a class torch.optim does not have, for arguments it refuses, and for a class that cannot
    work so (one that needs a closure, sparse gradients, or the shape of a matrix).
    """

    def __init__(self, settings: config.OuterOptimizer) -> None:
        self._settings = settings
        self._class = _torch_class(settings.name)
        self._scalars: dict[str, Tensor] = {}
        self.buffers: tuple[str, ...] = self._find_state()
        """Names of the S state buffers; empty for an optimizer without memory."""

    def schedule(self, total_tokens: int) -> Callable[[int], float]:
        """The factor on the learning rate after a number of merged tokens: what `step` takes as `lr_scale`."""
        settings = self._settings
        lr = self._build(torch.zeros(1)).param_groups[0]["lr"]
        return token_schedule(
            settings.scheduler,
            settings.scheduler_args,
            settings.warmup_tokens,
            total_tokens,
            lr,
            "exchange.outer.scheduler",
        )

    def step(
        self,
        theta: Tensor,
        delta: Tensor,
        state: Sequence[Tensor],
        scalars: Mapping[str, float],
        lr_scale: float,
        out_theta: Tensor,
        out_state: Sequence[Tensor],
    ) -> dict[str, float]:
        """Write the stepped fragment and state into `out_theta` and `out_state`; return the new scalars.

        All tensors are flat fp32 of the fragment's size, `state` and `out_state` in the order of `buffers`.
        Empty `scalars` mean a first step: `state` is not read. `theta` and `state` stay as they are; `delta`
        may be overwritten. `lr_scale` multiplies the learning rate. ValueError for another number of buffers.
        """
        if len(state) != len(self.buffers) or len(out_state) != len(self.buffers):
            raise ValueError(f"{self._settings.name} has {len(self.buffers)} state buffers")
        out_theta.copy_(theta)
        parameter = out_theta.detach().requires_grad_(True)
        parameter.grad = delta
        optimizer = self._build(parameter)
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] * lr_scale
        if scalars:
            for old, new in zip(state, out_state, strict=True):
                new.copy_(old)
            optimizer.state[parameter] = self._restored(out_state, scalars, optimizer.param_groups[0])
        optimizer.step()
        return self._collect(optimizer.state[parameter], out_state, scalars)

    def _restored(
        self, buffers: Sequence[Tensor], scalars: Mapping[str, float], group: Mapping[str, Any]
    ) -> dict[str, Tensor]:
        state = dict(zip(self.buffers, buffers, strict=True))
        on_device = group.get("capturable") or group.get("fused")
        for name, like in self._scalars.items():
            device = buffers[0].device if on_device and buffers else like.device
            state[name] = torch.tensor(scalars[name], dtype=like.dtype, device=device)
        return state

    def _collect(
        self, state: Mapping[str, Any], out_state: Sequence[Tensor], scalars: Mapping[str, float]
    ) -> dict[str, float]:
        for name, out in zip(self.buffers, out_state, strict=True):
            if state[name].data_ptr() != out.data_ptr():
                out.copy_(state[name])
        return {STEPS: scalars.get(STEPS, 0.0) + 1.0} | {name: float(state[name]) for name in self._scalars}

    def _build(self, parameter: Tensor) -> Optimizer:
        return self._class([parameter], **self._settings.args)

    def _find_state(self) -> tuple[str, ...]:
        """Run the class once on a tiny parameter and sort what it remembers into buffers and scalars."""
        parameter = torch.zeros(3, requires_grad=True)
        parameter.grad = torch.ones(3)
        name = self._settings.name
        try:
            optimizer = self._build(parameter)
            optimizer.step()
        except _REFUSALS as error:
            raise UserError(
                f"exchange.outer: torch.optim.{name} with {self._settings.args} cannot be the outer optimizer: "
                f"{_line(error)}"
            ) from error
        buffers = []
        for key, value in optimizer.state[parameter].items():
            if value is None:
                continue
            if isinstance(value, Tensor) and value.dim() == 0:
                self._scalars[key] = value
            elif (
                isinstance(value, Tensor) and value.shape == parameter.shape and value.dtype == torch.float32
            ):
                buffers.append(key)
            else:
                raise UserError(
                    f"exchange.outer.name: {name} cannot be the outer optimizer: its state '{key}' is neither "
                    "a number nor fp32 of the parameter's shape"
                )
        return tuple(buffers)


def _torch_class(name: str) -> type[Optimizer]:
    known = {
        key: value
        for key, value in vars(torch.optim).items()
        if isinstance(value, type) and issubclass(value, Optimizer) and value is not Optimizer
    }
    if name in known:
        return known[name]
    lower = {key.lower(): key for key in known}
    near = difflib.get_close_matches(name.lower(), lower, n=1, cutoff=0)
    raise UserError(f"exchange.outer.name: torch.optim has no '{name}'; did you mean {lower[near[0]]}?")


def _line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
