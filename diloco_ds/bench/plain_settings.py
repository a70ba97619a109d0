"""What a plain torch loop needs to know of a DeepSpeed config, to do the same work."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from diloco_ds.errors import UserError
from diloco_ds.island.deepspeed_settings import batch_of

_NOT_TORCHS = {"torch_adam", "adam_w_mode", "bias_correction", "set_grad_none"}
"""Arguments of DeepSpeed's Adam that say which implementation is taken, or are what torch does anyway."""


@dataclass(frozen=True)
class PlainSettings:
    """Precision, batch and optimizer of one rank."""

    dtype: torch.dtype  # of weights and gradients; masters and moments are fp32
    micro_batch: int  # sequences
    grad_accumulation: int
    clipping: float  # 0: none
    optimizer: dict[str, Any]  # arguments of torch.optim.AdamW

    @classmethod
    def of(cls, deepspeed: Mapping[str, Any], ranks: int) -> PlainSettings:
        """From DeepSpeed's config. UserError for what a plain loop does not do."""
        optimizer = deepspeed["optimizer"]
        if str(optimizer["type"]).lower() != "adamw":
            raise UserError(
                f"bench island: plain torch is compared with AdamW alone, not deepspeed.optimizer.type {optimizer['type']}"
            )
        for block in ("fp16", "torch_autocast", "amp"):
            if (deepspeed.get(block) or {}).get("enabled"):
                raise UserError(
                    f"bench island: plain torch is compared in fp32 or bf16, not with deepspeed.{block}; "
                    "set bf16: {enabled: true}"
                )
        low = (deepspeed.get("bf16") or {}).get("enabled", False)
        micro_batch, accumulation = batch_of(deepspeed, ranks)
        return cls(
            dtype=torch.bfloat16 if low else torch.float32,
            micro_batch=micro_batch,
            grad_accumulation=accumulation,
            clipping=float(deepspeed.get("gradient_clipping", 0.0)),
            optimizer={name: value for name, value in optimizer["params"].items() if name not in _NOT_TORCHS},
        )
