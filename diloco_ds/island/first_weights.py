"""The initial weights of a rank, read from the run directory: at ZeRO-3 no more than its part of each tensor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn

from diloco_ds.model.initial import FIXED, WEIGHTS
from diloco_ds.tensor_file import TensorFile


def make_low_precision(model: nn.Module, dtype: torch.dtype) -> None:
    """Make all parameters and buffers `dtype`, as DeepSpeed would; the parameters lose their values."""
    for parameter in model.parameters():
        if parameter.dtype != dtype:
            parameter.data = torch.empty_like(parameter, dtype=dtype)
    for buffer in model.buffers():
        if buffer.is_floating_point():
            buffer.data = buffer.to(dtype)


@torch.no_grad()
def fill(model: nn.Module, directory: Path) -> None:
    """Give parameters and saved buffers the values that `write_initial_weights` wrote to `directory`."""
    with TensorFile(directory / WEIGHTS) as travelling, TensorFile(directory / FIXED) as fixed:
        for name, parameter in model.named_parameters():
            file = travelling if name in travelling.tensors else fixed
            start, held = _held(parameter)
            if held.numel():
                file.read(name, start, held)
        for name, buffer in model.named_buffers():
            if name in fixed.tensors:
                fixed.read(name, 0, buffer.view(-1))


def _held(parameter: Any) -> tuple[int, Tensor]:
    """First element and values of this rank's part of a parameter; ZeRO-3 pads the last rank's."""
    if not hasattr(parameter, "ds_tensor"):
        return 0, parameter.data.view(-1)
    part = parameter.ds_tensor.data.view(-1).zero_()
    start = distributed.get_rank(parameter.ds_process_group) * part.numel()
    return start, part[: max(0, min(part.numel(), parameter.ds_numel - start))]
