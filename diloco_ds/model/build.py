"""Models as the run file names them: transformers' own classes, from a YAML of config fields or from a
checkpoint.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
import yaml
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from diloco_ds import config
from diloco_ds.core.fragments import TensorSpec
from diloco_ds.errors import UserError
from diloco_ds.model.experts import expert_modules

VOCABULARY_PADDING = 1024
"""A model's vocabulary may be larger than its tokenizer's by less than this: published models pad it to a
round number.
"""


UNDECLARED = frozenset({"head_dim"})
"""Fields that models read though not every config class declares them (Qwen3-MoE and Mixtral read
`head_dim`).
"""


def build_config(
    model: config.Model, vocab_size: int, special_tokens: Mapping[str, int | None] | None = None
) -> PreTrainedConfig:
    """The transformers config of `model` for a tokenizer with `vocab_size` entries.

    `special_tokens` gives `bos_token_id`, `eos_token_id` and `pad_token_id` of the tokenizer; a model from a
    config file gets them, and none where they are not given: transformers' defaults are another tokenizer's.
    Such a model also gets `vocab_size` where its file says nothing. UserError for an unknown class or field
    and for vocabularies that differ.
    """
    if model.config_file is not None:
        hf_config = config_from_file(model.config_file, model.overrides, vocab_size, special_tokens or {})
    else:
        hf_config = _from_checkpoint(str(model.checkpoint), model.overrides)
    _check_vocabulary(hf_config, vocab_size)
    return hf_config


def build_model(hf_config: PreTrainedConfig, seed: int) -> PreTrainedModel:
    """A model with random fp32 weights on the CPU, the same for the same `seed`."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(hf_config, dtype=torch.float32)


def meta_model(hf_config: PreTrainedConfig) -> PreTrainedModel:
    """The model on the meta device: names and shapes without weights."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(hf_config, dtype=torch.float32)


def travelling_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Every trainable parameter once (a tied one under its first name), in the model's own order."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def tensor_specs(model: PreTrainedModel) -> list[TensorSpec]:
    """What is exchanged of `model`: a spec for each of its `travelling_parameters`, in that order.

    Flagged as embeddings are the token embedding and any other table with a row per token (Gemma's per-layer
    one); tensors of experts tell of which layer they are.
    """
    vocabulary = model.get_input_embeddings().num_embeddings
    tables = {
        id(module.weight)
        for module in model.modules()
        if isinstance(module, nn.Embedding) and module.num_embeddings == vocabulary
    }
    layers = {
        id(parameter): number
        for number, module in enumerate(expert_modules(model).values())
        for parameter in module.parameters(recurse=False)
    }
    return [
        TensorSpec(name, tuple(parameter.shape), id(parameter) in tables, layers.get(id(parameter)))
        for name, parameter in travelling_parameters(model).items()
    ]


class ParameterCount(NamedTuple):
    """Parameters of a model, tied ones once."""

    total: int
    active: int  # what one token passes through: all but the experts it is not routed to
    embedding: int  # the token embedding's share of both


def count_parameters(hf_config: PreTrainedConfig) -> ParameterCount:
    """Counts on the meta device."""
    model = meta_model(hf_config)
    total = sum(parameter.numel() for parameter in model.parameters())
    experts = sum(parameter.numel() for name, parameter in model.named_parameters() if ".experts." in name)
    idle = 0
    if experts:
        count, chosen = routing(hf_config)
        idle = experts * (count - chosen) // count
    embedding = sum(parameter.numel() for parameter in model.get_input_embeddings().parameters())
    return ParameterCount(total, total - idle, embedding)


def routing(hf_config: PreTrainedConfig) -> tuple[int, int]:
    """Routed experts of a layer, and how many of them a token passes through. UserError for a model without any."""
    text = hf_config.get_text_config()
    count = _first_of(text, ("num_experts", "num_local_experts", "n_routed_experts"))
    return count, _first_of(text, ("top_k_experts", "num_experts_per_tok", "num_experts_per_token"))


def _first_of(hf_config: PreTrainedConfig, names: Iterable[str]) -> int:
    values = [getattr(hf_config, name) for name in names if getattr(hf_config, name, None) is not None]
    if not values:
        raise UserError(f"{type(hf_config).__name__} has experts but none of the fields {', '.join(names)}")
    return int(values[0])


def config_from_file(
    path: str, overrides: Mapping[str, Any], vocab_size: int, special_tokens: Mapping[str, int | None]
) -> PreTrainedConfig:
    """The config a model file describes, as `build_config` says, whatever the size of its own vocabulary."""
    config_class, fields = _read_file(path)
    known = set(config_class().__dict__)
    fields = {**fields, **overrides}
    for name in ("vocab_size", "vocab_size_per_layer_input"):
        if name in known:
            fields.setdefault(name, vocab_size)
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        fields.setdefault(name, special_tokens.get(name))
    try:
        hf_config = config_class(**fields)
    except Exception as error:  # whatever a config class finds wrong with its fields
        reason = " ".join(str(error).split())
        raise UserError(f"{path}: {config_class.__name__} refuses these fields: {reason}") from error
    _refuse_unknown(set(hf_config.__dict__) - known - UNDECLARED, known, f"{path}: {config_class.__name__}")
    return hf_config


def _read_file(path: str) -> tuple[type[PreTrainedConfig], dict[str, Any]]:
    """The config class and its fields, as the file says."""
    file = Path(path)
    if not file.is_file():
        raise UserError(f"model.config_file: there is no file {path}")
    try:
        content = yaml.safe_load(file.read_text())
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from error
    if (
        not isinstance(content, dict)
        or set(content) != {"class", "fields"}
        or not isinstance(content["fields"], dict)
    ):
        raise UserError(
            f"{path}: a model file has two keys: class (a transformers config class) and fields (its fields)"
        )
    name = str(content["class"])
    trainable = {known.__name__: known for known in MODEL_FOR_CAUSAL_LM_MAPPING}
    if name not in trainable:
        what = (
            "makes no causal language model"
            if hasattr(transformers, name)
            else "is not a config class of transformers"
        )
        raise UserError(f"{path}: {name} {what}{_nearest(name, trainable)}")
    return trainable[name], content["fields"]


def _from_checkpoint(path: str, overrides: Mapping[str, Any]) -> PreTrainedConfig:
    try:
        hf_config, unused = AutoConfig.from_pretrained(path, return_unused_kwargs=True, **overrides)
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise UserError(
            f"model.checkpoint: '{path}' cannot be read as a Hugging Face checkpoint: {reason}"
        ) from error
    _refuse_unknown(set(unused), set(hf_config.__dict__), f"model.overrides: {type(hf_config).__name__}")
    return hf_config


def _refuse_unknown(unknown: set[str], known: set[str], where: str) -> None:
    for name in sorted(unknown):
        raise UserError(f"{where} has no field '{name}'{_nearest(name, known)}")


def _nearest(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean '{near[0]}'?" if near else ""


def _check_vocabulary(hf_config: PreTrainedConfig, vocab_size: int) -> None:
    own = hf_config.get_text_config().vocab_size
    if vocab_size <= own < vocab_size + VOCABULARY_PADDING:
        return
    raise UserError(
        f"the model's vocabulary has {own} entries, the tokenizer's {vocab_size}: they must be the same "
        f"(set model.overrides.vocab_size={vocab_size}, or choose the tokenizer of the model)"
    )
