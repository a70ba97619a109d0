"""Global weights as a Hugging Face directory that `AutoModelForCausalLM.from_pretrained` loads."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from diloco_ds.errors import UserError
from diloco_ds.model.build import travelling_parameters
from diloco_ds.model.initial import FIXED

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def export(
    weights: Path, init: Path, tokenizer: Path, out: Path, dtype: str = "float32", shard_size: str = "5GB"
) -> None:
    """Write the model with the travelling tensors of the safetensors file `weights` to the new directory
    `out`.

    `init` is the run's directory of initial weights (config and fixed tensors), `tokenizer` its tokenizer.
    Weights are stored as `dtype`, buffers as they are, in shards of at most `shard_size`. `out` appears whole
    or not at all. UserError if `out` exists or the tensors are not those of the model.
    """
    if dtype not in DTYPES:
        raise UserError(f"export: '{dtype}' is no dtype for weights; choose one of {', '.join(DTYPES)}")
    if out.exists():
        raise UserError(f"export: {out} exists already; choose another directory")
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.with_name(f".{out.name}.{os.getpid()}.partial")
    try:
        _write(weights, init, partial, DTYPES[dtype], shard_size)
        for file in sorted(tokenizer.iterdir()):
            if file.is_file() and not (partial / file.name).exists():
                shutil.copy2(file, partial)
        os.rename(partial, out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _write(weights: Path, init: Path, directory: Path, dtype: torch.dtype, shard_size: str) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(init), dtype=dtype)
    parameters = {name for name, _ in model.named_parameters()}
    state = _read(init / FIXED, dtype, parameters) | _read(weights, dtype, parameters)
    missing = sorted(set(travelling_parameters(model)) - set(state))
    unknown = sorted(set(state) - set(model.state_dict()))
    if missing or unknown:
        raise UserError(f"export: {weights} holds other tensors than the model: {(missing or unknown)[0]}")
    model.save_pretrained(directory, state_dict=state, max_shard_size=shard_size)


def _read(path: Path, dtype: torch.dtype, parameters: set[str]) -> dict[str, Tensor]:
    """The tensors of a file, parameters cast to `dtype` one at a time."""
    with safe_open(path, framework="pt") as file:
        return {
            name: file.get_tensor(name).to(dtype) if name in parameters else file.get_tensor(name)
            for name in file.keys()  # noqa: SIM118 (not a dict)
        }
