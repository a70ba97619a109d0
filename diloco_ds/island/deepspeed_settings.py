"""What of a DeepSpeed config this project refuses or sets. DeepSpeed is not imported: a run file is checked
before anything starts.
"""

from __future__ import annotations

import copy
import json
import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from diloco_ds import program
from diloco_ds.errors import UserError
from diloco_ds.exchange.link_launch import clean_environment


class _Refusal(NamedTuple):
    key: str  # dotted
    harmless: Callable[[Any], bool]  # values that change nothing
    reason: str


def _off(value: Any) -> bool:
    return not value


def _off_or_one(value: Any) -> bool:
    return value in (None, 0, 1)


def _not_nvme(value: Any) -> bool:
    return value != "nvme"


def _disabled(value: Any) -> bool:
    return not (isinstance(value, dict) and value.get("enabled", True))


_REFUSALS = (
    _Refusal("scheduler", _off, "the learning rate follows global tokens; use trainer.scheduler"),
    _Refusal(
        "zero_optimization.offload_optimizer.device",
        _not_nvme,
        "master weights on NVMe cannot be exchanged; use cpu",
    ),
    _Refusal(
        "zero_optimization.offload_param.device", _not_nvme, "weights on NVMe cannot be exchanged; use cpu"
    ),
    _Refusal(
        "zero_optimization.offload_optimizer.ratio",
        lambda value: value == 1,
        "partial offload hides master weights; use 1.0",
    ),
    _Refusal(
        "zero_optimization.offload_optimizer.super_offload", _off, "it hides master weights; leave it out"
    ),
    _Refusal(
        "zero_optimization.round_robin_gradients",
        _off,
        "DeepSpeed loses track of master weights with it; leave it out",
    ),
    _Refusal("zero_optimization.zenflow", _off, "it keeps a second set of master weights; leave it out"),
    _Refusal(
        "zero_optimization.zero_hpz_partition_size", _off_or_one, "it keeps secondary weights; leave it out"
    ),
    _Refusal("zero_optimization.mics_shard_size", _off_or_one, "MiCS is not supported; leave it out"),
    _Refusal("bf16.bf16_master_weights_and_grads", _off, "master weights must be fp32; leave it out"),
    _Refusal("fp16.fp16_master_weights_and_grads", _off, "master weights must be fp32; leave it out"),
    _Refusal("hybrid_engine", _disabled, "the hybrid engine is for inference; leave it out"),
    _Refusal(
        "tensor_parallel.autotp_size",
        _off_or_one,
        "a tensor-parallel part of a matrix is no range of a fragment and cannot be exchanged; "
        "take zero_optimization.stage 3 to divide the model",
    ),
    _Refusal("sequence_parallel_size", _off_or_one, "a rank trains on whole sequences; leave it out"),
)


def check_deepspeed(settings: Mapping[str, Any]) -> None:
    """UserError if `settings`, a DeepSpeed config, would break the exchange of weights or lacks what a step
    needs.
    """
    for key, harmless, reason in _REFUSALS:
        value = _lookup(settings, key)
        if value is not _MISSING and not harmless(value):
            raise UserError(f"deepspeed.{key}: {reason}")
    _check_expert_parallel(settings)
    if _lookup(settings, "optimizer.type") is _MISSING:
        raise UserError(
            "deepspeed.optimizer: give the inner optimizer, for example {type: AdamW, params: {lr: 1e-3}}"
        )
    if _lookup(settings, "optimizer.params.lr") is _MISSING:
        raise UserError(
            "deepspeed.optimizer.params.lr: give the peak learning rate; trainer.scheduler scales it"
        )
    if not {"train_micro_batch_size_per_gpu", "train_batch_size"} & set(settings):
        raise UserError(
            "deepspeed.train_micro_batch_size_per_gpu: give the sequences a rank trains on at a time"
        )


def batch_of(settings: Mapping[str, Any], ranks: int) -> tuple[int, int]:
    """Sequences of a rank's micro batch, and micro batches of a step, on an island of `ranks` ranks.

    DeepSpeed's rule: any two of its three batch settings give the third. For settings that `check_deepspeed` found good.
    """
    micro = int(settings.get("train_micro_batch_size_per_gpu", 0))
    accumulation = int(settings.get("gradient_accumulation_steps", 0))
    a_rank = int(settings.get("train_batch_size", 0)) // ranks
    if not micro:
        accumulation = accumulation or 1
        return a_rank // accumulation, accumulation
    return micro, accumulation or max(1, a_rank // micro)


def expert_parallel_size(settings: Mapping[str, Any]) -> int:
    """Among how many ranks the experts of a layer are divided, as the block `expert_parallel` of a DeepSpeed config says."""
    block = settings.get("expert_parallel") or {}
    return int(block.get("autoep_size", 1)) if block.get("enabled", False) else 1


def _check_expert_parallel(settings: Mapping[str, Any]) -> None:
    block = settings.get("expert_parallel") or {}
    if not isinstance(block, Mapping):
        raise UserError(
            "deepspeed.expert_parallel: give a block, for example {enabled: true, autoep_size: 2}"
        )
    for key in block:
        if key not in ("enabled", "autoep_size"):
            raise UserError(
                f"deepspeed.expert_parallel.{key}: routing is the model's own here; give enabled and autoep_size only"
            )
    size = block.get("autoep_size", 1)
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise UserError(
            f"deepspeed.expert_parallel.autoep_size: {size!r} is no number of ranks to divide the experts among"
        )
    if expert_parallel_size(settings) > 1 and _lookup(settings, "zero_optimization.stage") in (_MISSING, 0):
        raise UserError(
            "deepspeed.zero_optimization.stage: at stage 0 every rank would have to hold all masters, "
            "and of divided experts none does; take stage 1 or more with expert_parallel"
        )


def ask_deepspeed(islands: Sequence[tuple[str, Mapping[str, Any], int]]) -> None:
    """UserError for what DeepSpeed itself refuses; `islands`: name, DeepSpeed config and ranks of each. Takes 2 s."""
    done = subprocess.run(
        program.command("diloco_ds.island.engine_check"),
        input=json.dumps(list(islands)),
        env=clean_environment(os.environ),
        capture_output=True,
        text=True,
    )
    if done.returncode == 0:
        return
    lines = done.stderr.strip().splitlines() or ["it ended without a word"]
    said = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    raise UserError(said[-1] if said else f"deepspeed: its settings cannot be checked: {lines[-1]}")


def prepared(settings: Mapping[str, Any], cpu: bool) -> dict[str, Any]:
    """`settings` as DeepSpeed gets them: on a CPU Adam is torch's own, which needs no compilation, unless
    they say otherwise, and experts are divided by this project.
    """
    check_deepspeed(settings)
    result: dict[str, Any] = copy.deepcopy(dict(settings))
    result.pop("expert_parallel", None)  # done by island/experts.py
    offload = _lookup(result, "zero_optimization.offload_optimizer.device")
    if cpu and result["optimizer"]["type"].lower() in ("adam", "adamw") and offload in (_MISSING, "none"):
        result["optimizer"].setdefault("params", {}).setdefault("torch_adam", True)
    return result


_MISSING = object()


def _lookup(settings: Mapping[str, Any], key: str) -> Any:
    """The value under a dotted key, `_MISSING` if there is none."""
    value: Any = settings
    for part in key.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return _MISSING
        value = value[part]
    return value
