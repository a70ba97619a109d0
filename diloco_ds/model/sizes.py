"""How large the models of configuration files and checkpoints are, counted without their weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from transformers import AutoConfig, PreTrainedConfig

import diloco_ds
from diloco_ds.errors import UserError
from diloco_ds.model.build import config_from_file, count_parameters, routing

SHIPPED = Path(diloco_ds.__file__).parents[1] / "model_configs"
"""The model files that come with the project."""


@dataclass(frozen=True)
class ModelSize:
    """A model in numbers; parameters that are tied count once."""

    name: str
    architecture: str  # transformers' config class
    layers: int
    width: int
    vocabulary: int
    experts: int  # routed ones of a layer; 0: dense
    chosen: int  # of them for a token
    total: int
    active: int  # parameters a token passes through
    embedding: int  # the token embedding's share of both


def model_sizes(names: Sequence[str], vocabulary: int) -> list[ModelSize]:
    """Sizes of the named models, by default of all shipped ones.

    A name is a file as in model_configs/, such a file's stem, or a local checkpoint directory. A file that leaves the
    vocabulary to the tokenizer is counted with `vocabulary` entries. UserError for what is none of these.
    """
    if not names:
        names = sorted(path.stem for path in SHIPPED.glob("*.yaml"))
        if not names:
            raise UserError(f"models: {SHIPPED} holds no model files; name one")
    return [_size(name, vocabulary) for name in names]


def _size(name: str, vocabulary: int) -> ModelSize:
    hf_config = _config(name, vocabulary)
    text = hf_config.get_text_config()
    counts = count_parameters(hf_config)
    experts, chosen = routing(hf_config) if counts.active < counts.total else (0, 0)
    return ModelSize(
        name=Path(name).stem if name.endswith(".yaml") else name,
        architecture=type(hf_config).__name__,
        layers=text.num_hidden_layers,
        width=text.hidden_size,
        vocabulary=text.vocab_size,
        experts=experts,
        chosen=chosen,
        total=counts.total,
        active=counts.active,
        embedding=counts.embedding,
    )


def _config(name: str, vocabulary: int) -> PreTrainedConfig:
    path = Path(name)
    if path.is_dir():
        return _of_checkpoint(path)
    file = path if path.is_file() else SHIPPED / f"{name}.yaml"
    if not file.is_file():
        known = ", ".join(sorted(each.stem for each in SHIPPED.glob("*.yaml")))
        raise UserError(f"models: '{name}' is no model file and no checkpoint directory, and none of {known}")
    return config_from_file(str(file), {}, vocabulary, {})


def _of_checkpoint(path: Path) -> PreTrainedConfig:
    try:
        found: PreTrainedConfig = AutoConfig.from_pretrained(path)
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"models: '{path}' cannot be read as a Hugging Face checkpoint: {reason}") from error
    return found
