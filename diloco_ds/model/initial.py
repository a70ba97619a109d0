"""Initial weights: made once, written to the run directory, known to every learner by their hash.

`model.safetensors` holds what travels: every trainable tensor in fp32, under its name in the model.
`fixed.safetensors` beside it holds what every island keeps as it is: frozen parameters and persistent
buffers. `config.json` is the model's transformers config.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights
from transformers.integrations.accelerate import load_offloaded_parameter
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from diloco_ds import config
from diloco_ds.errors import UserError
from diloco_ds.model.build import build_model, travelling_parameters
from diloco_ds.model.loss import check_loss
from diloco_ds.tensor_file import Stored, TensorFile

WEIGHTS = "model.safetensors"
FIXED = "fixed.safetensors"


def initial_model(
    model: config.Model, hf_config: PreTrainedConfig, seed: int, scratch: Path
) -> PreTrainedModel:
    """The model a run starts from, fp32 on the CPU: random by `seed`, or the checkpoint's weights.

    Those of a checkpoint stay on disk: where they are, or in `scratch` (a directory to be removed when the model
    is done with) if transformers stores them otherwise than its model holds them. `whole` reads one.
    UserError if the checkpoint lacks weights of the model, or if its loss is not one this project computes.
    """
    if model.checkpoint is None:
        built = build_model(hf_config, seed)
    else:
        where = f"model.checkpoint: '{model.checkpoint}'"
        built = _load(
            model.checkpoint,
            hf_config,
            None,
            where,
            device_map={"": "disk"},
            offload_folder=str(scratch),
        )
    check_loss(built)
    if model.checkpoint is not None:
        built.tie_weights()  # each weight that was read from disk for the loss is a parameter of its own since
    return built


def whole(model: PreTrainedModel, name: str, tensor: Tensor) -> Tensor:
    """The values of `tensor`, called `name` in `model`: read from disk if they were left there."""
    if not tensor.is_meta:
        return tensor.detach()
    values: Tensor = load_offloaded_parameter(model, name)
    return values


def write_initial_weights(model: PreTrainedModel, directory: Path) -> str:
    """Write config and weights of `model` into `directory`; each weights file appears whole or not at all.

    Returns the SHA-256 of the travelling weights' file (hex).
    """
    directory.mkdir(parents=True, exist_ok=True)
    model.config.save_pretrained(directory)
    _save(model, fixed_tensors(model), directory / FIXED)
    travelling = travelling_parameters(model)
    _save(model, travelling, directory / WEIGHTS, torch.float32)
    return weights_hash(directory)


def weights_hash(directory: Path) -> str:
    """SHA-256 (hex) of the travelling weights that `write_initial_weights` wrote to `directory`."""
    with open(directory / WEIGHTS, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def load_initial(directory: Path, weights: Path | None = None) -> PreTrainedModel:
    """The model that `write_initial_weights` wrote to `directory`, fp32 on the CPU, in training mode.

    `weights`: another file with the same tensors to take instead, for example a snapshot of the global
    weights. UserError if the tensors do not fit the model.
    """
    file = weights or directory / WEIGHTS
    fixed = load_file(directory / FIXED)
    model = _load(None, AutoConfig.from_pretrained(directory), {**fixed, **load_file(file)}, str(file))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in fixed)
    return model.train()


def empty_model(directory: Path) -> PreTrainedModel:
    """The model that `write_initial_weights` wrote to `directory`, in training mode, with weights still to be
    read: their memory is not touched, so it costs nothing yet.
    """
    with no_init_weights():
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            AutoConfig.from_pretrained(directory), dtype=torch.float32
        )
    model.tie_weights()  # which goes with making initial weights, left out here
    with TensorFile(directory / FIXED) as file:
        fixed = set(file.tensors)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in fixed)
    return model.train()


def fixed_tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    """Frozen parameters and persistent buffers of `model`, each once."""
    seen = {id(parameter) for parameter in travelling_parameters(model).values()}
    fixed: dict[str, Tensor] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            fixed[name] = tensor
    return fixed


def _save(
    model: PreTrainedModel, tensors: Mapping[str, Tensor], path: Path, dtype: torch.dtype | None = None
) -> None:
    """Write `tensors` of `model` one at a time, as `dtype` or as they are."""
    stored = {name: Stored(dtype or tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    with TensorFile.create(partial, stored) as file:
        for name, tensor in tensors.items():
            file.write(name, 0, whole(model, name, tensor).reshape(-1))
    os.replace(partial, path)


def _load(
    source: str | None,
    hf_config: PreTrainedConfig,
    state: dict[str, Tensor] | None,
    where: str,
    **placement: Any,
) -> PreTrainedModel:
    """The model of `hf_config` with the weights of a checkpoint (`source`) or of `state`, every one of them."""
    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(hf_config)]
    try:
        model, info = model_class.from_pretrained(
            source,
            config=hf_config,
            state_dict=state,
            dtype=torch.float32,
            output_loading_info=True,
            **placement,
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise UserError(f"{where}: the weights cannot be loaded: {' '.join(str(error).split())}") from error
    for problem, names in (
        ("lacks weights of the model", info["missing_keys"]),
        ("holds weights the model does not have", info["unexpected_keys"] if source is None else ()),
        ("holds weights of other shapes", info["mismatched_keys"]),
    ):
        if names:
            raise UserError(f"{where} {problem}: {sorted(names)[0]} and {len(names) - 1} more")
    return model
