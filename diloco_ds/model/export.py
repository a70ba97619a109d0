"""Global weights as a Hugging Face directory that `AutoModelForCausalLM.from_pretrained` loads."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from diloco_ds.errors import UserError
from diloco_ds.model.build import travelling_parameters
from diloco_ds.model.initial import FIXED
from diloco_ds.rundir import write_json
from diloco_ds.tensor_file import Stored, TensorFile

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
    """The files of the model but for the tokenizer. In memory is one layer at a time."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(init), dtype=dtype)
    with TensorFile(init / FIXED) as fixed, TensorFile(weights) as travelling:
        sources = {name: file for file in (fixed, travelling) for name in file.tensors}
        missing = sorted(set(travelling_parameters(model)) - set(sources))
        unknown = sorted(set(sources) - set(model.state_dict()))
        if missing or unknown:
            raise UserError(
                f"export: {weights} holds other tensors than the model: {(missing or unknown)[0]}"
            )
        parameters = {name for name, _ in model.named_parameters()}
        dtypes = {
            name: dtype if name in parameters else file.tensors[name].dtype for name, file in sources.items()
        }
        model.save_pretrained(directory, state_dict={})  # config.json and its like
        files, place = _create_shards(model, sources, dtypes, directory, shard_size)
        with contextlib.ExitStack() as open_files:
            for file in files.values():
                open_files.callback(file.close)
            for group in _layers(sources):
                tensors = {name: sources[name].tensor(name).to(dtypes[name]) for name in group}
                for name, tensor in revert_weight_conversion(model, tensors).items():
                    files[place[name]].write(name, 0, tensor.reshape(-1))


def _create_shards(
    model: PreTrainedModel,
    sources: Mapping[str, TensorFile],
    dtypes: Mapping[str, torch.dtype],
    directory: Path,
    shard_size: str,
) -> tuple[dict[str, TensorFile], dict[str, str]]:
    """The safetensors files with room for every tensor, under the names of published checkpoints, and the index;
    the files by name, and the name of the file each tensor goes to.
    """
    shapes = {name: file.tensors[name].shape for name, file in sources.items()}
    empty = {name: torch.empty(shapes[name], dtype=dtypes[name], device="meta") for name in sources}
    planned = revert_weight_conversion(model, empty)
    split = split_torch_state_dict_into_shards(
        planned, filename_pattern="model{suffix}.safetensors", max_shard_size=shard_size
    )
    (directory / SAFE_WEIGHTS_NAME).unlink(missing_ok=True)  # save_pretrained's, without tensors
    files = {
        file: TensorFile.create(
            directory / file,
            {name: Stored(planned[name].dtype, tuple(planned[name].shape)) for name in names},
        )
        for file, names in split.filename_to_tensors.items()
    }
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        write_json(directory / SAFE_WEIGHTS_INDEX_NAME, index)
    return files, split.tensor_to_filename


def _layers(names: Iterable[str]) -> list[list[str]]:
    """Names by layer (model.layers.3), a name outside any layer alone: what transformers converts together never
    lies in two layers.
    """
    groups: dict[str, list[str]] = {}
    for name in names:
        layer = re.match(r".*?\.\d+(?=\.)", name)
        groups.setdefault(layer[0] if layer else name, []).append(name)
    return list(groups.values())
