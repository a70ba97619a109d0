"""Whether DeepSpeed takes the settings of every island, asked of DeepSpeed's own reader before anything starts.

    python -m diloco_ds.island.engine_check < ISLANDS.json

ISLANDS.json: a list of [island, DeepSpeed settings, ranks]. A process of its own, since importing DeepSpeed is slow and
loud. Exit code 0, or 2 with one line on standard error: the first thing that is wrong.
"""

from __future__ import annotations

import difflib
import json
import sys
from collections.abc import Mapping
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.config import DEEPSPEED_OPTIMIZERS, DeepSpeedConfig
from deepspeed.runtime.config_utils import DeepSpeedConfigModel
from deepspeed.runtime.zero.utils import ZERO_SUPPORTED_OPTIMIZERS
from pydantic import ValidationError

from diloco_ds.errors import UserError
from diloco_ds.island.deepspeed_settings import prepared


def check_island(settings: Mapping[str, Any], ranks: int) -> None:
    """UserError for what DeepSpeed refuses on `ranks` ranks: a key, a value, a batch size, an optimizer or its arguments."""
    settings = prepared(settings, get_accelerator().device_name() == "cpu")
    for_one_rank = dict(settings)
    total = settings.get("train_batch_size")
    if isinstance(total, int):
        if total % ranks:
            raise UserError(f"deepspeed.train_batch_size: {total} cannot be divided among {ranks} ranks")
        for_one_rank["train_batch_size"] = total // ranks
    try:
        DeepSpeedConfig(for_one_rank)
    except ValidationError as error:
        raise UserError(_in_words(error)) from error
    except (AssertionError, ValueError) as error:
        raise UserError(f"deepspeed: {' '.join(str(error).split())}") from error
    optimizer = _check_optimizer(settings["optimizer"])
    sharded = settings.get("zero_optimization", {}).get("stage", 0) > 0
    untested = optimizer is not None and type(optimizer) not in ZERO_SUPPORTED_OPTIMIZERS
    if sharded and untested and not settings.get("zero_allow_untested_optimizer", False):
        raise UserError(
            f"deepspeed.optimizer.type: DeepSpeed has not tested {type(optimizer).__name__} with ZeRO; "
            "to use it all the same set zero_allow_untested_optimizer: true"
        )


def _check_optimizer(optimizer: Mapping[str, Any]) -> torch.optim.Optimizer | None:
    """Names as DeepSpeed takes them: its own in any case, else a class of torch.optim. torch's are tried on a number, and
    returned.
    """
    name, arguments = str(optimizer["type"]), dict(optimizer["params"])
    own_names = {known.lower(): known for known in DEEPSPEED_OPTIMIZERS}
    if name.lower() in own_names and not arguments.pop("torch_adam", False):
        return None
    if name.lower() in own_names:
        decoupled = name.lower() == "adamw" or arguments.get("adam_w_mode", True)
        arguments.pop("adam_w_mode", None)
        name = "AdamW" if decoupled else "Adam"
    kinds = {key: value for key, value in vars(torch.optim).items() if isinstance(value, type)}
    if name not in kinds:
        near = difflib.get_close_matches(name, [*kinds, "Adam", "AdamW", "Lamb", "Lion", "Muon"], 1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise UserError(f"deepspeed.optimizer.type: there is no optimizer '{name}'{hint}")
    try:
        tried: torch.optim.Optimizer = kinds[name]([torch.zeros(1, requires_grad=True)], **arguments)
    except (TypeError, ValueError) as error:
        raise UserError(f"deepspeed.optimizer.params: {' '.join(str(error).split())}") from error
    return tried


def _in_words(error: ValidationError) -> str:
    """The first complaint of a DeepSpeed block, with the nearest key for one that does not exist."""
    first = error.errors()[0]
    key = ".".join(str(part) for part in first["loc"])
    if first["type"] != "extra_forbidden":
        return f"deepspeed: {error.title}: {key}: {first['msg']}, not {first['input']!r}"
    fields = [
        name
        for kind in _kinds(DeepSpeedConfigModel)
        if kind.__name__ == error.title
        for name in kind.model_fields
    ]
    near = difflib.get_close_matches(key, fields, 1)
    return f"deepspeed: {error.title}: there is no key '{key}'" + (
        f"; did you mean {near[0]}?" if near else ""
    )


def _kinds(kind: type[Any]) -> list[type[Any]]:
    return [kind, *(deeper for child in kind.__subclasses__() for deeper in _kinds(child))]


def main(_arguments: list[str]) -> int:
    """Check the islands on standard input; the exit code."""
    for island, settings, ranks in json.load(sys.stdin):
        try:
            check_island(settings, ranks)
        except UserError as error:
            print(f"error: islands.{island}: {error}", file=sys.stderr)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
