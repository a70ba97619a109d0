"""The learning rate as a function of tokens: transformers' schedules with the token as their unit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR

from diloco_ds.errors import UserError


def token_schedule(
    name: str, args: dict[str, Any], warmup_tokens: int, total_tokens: int, base_lr: float, where: str
) -> Callable[[int], float]:
    """The factor on the learning rate after a number of tokens; it depends on nothing else, so it never
    restarts.

    `name` and `args` (scheduler_specific_kwargs) are those of `transformers.get_scheduler`; beyond
    `total_tokens` the factor stays at its last value. UserError, with `where` in front, for a schedule that
    is unknown, lacks arguments, has no warm-up though one is asked for, or depends on more than the step.
    """
    if (
        name == "constant" and not args and not warmup_tokens
    ):  # the syncer's usual one: it starts again faster
        return lambda _tokens: 1.0
    from transformers import get_scheduler

    optimizer = torch.optim.SGD([torch.zeros(1)], lr=base_lr)
    try:
        scheduler = get_scheduler(
            name,
            optimizer,
            num_warmup_steps=warmup_tokens,
            num_training_steps=total_tokens,
            scheduler_specific_kwargs=args,
        )
    except (ValueError, TypeError) as error:
        raise UserError(f"{where} '{name}': {str(error).splitlines()[0]}") from error
    if not isinstance(scheduler, LambdaLR):
        raise UserError(
            f"{where} '{name}' depends on more than the tokens; take one of transformers' other schedules"
        )
    factor: Callable[[int], float] = scheduler.lr_lambdas[0]
    if warmup_tokens and factor(0) > 0:
        raise UserError(f"{where} '{name}' has no warm-up; take one that has, or leave warmup_tokens at 0")
    return lambda tokens: float(factor(min(tokens, total_tokens)))
