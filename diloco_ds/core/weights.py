"""How much each learner counts in a merge."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

WeightRule = Literal["tokens", "uniform", "expert_tokens"]
"""expert_tokens is `tokens` but for the tensors of experts, which count by `expert_weights`."""


def learner_weight(steps: int, tokens: int, rule: WeightRule) -> float:
    """Weight of a learner that made `steps` inner steps over `tokens` tokens on its fragment; no steps: 0.

    tokens: tokens * (tokens / steps), quantity times quality (Decoupled DiLoCo, Sec. 3.2); uniform: 1.
    """
    if steps <= 0 or tokens <= 0:
        return 0.0
    return 1.0 if rule == "uniform" else tokens * tokens / steps


def expert_weights(steps: int, expert_tokens: Sequence[int]) -> tuple[float, ...]:
    """Weight of a learner for each of a fragment's experts, of the tokens that it routed to each in `steps` steps."""
    return tuple(learner_weight(steps, tokens, "tokens") for tokens in expert_tokens)


def normalised(weights: Sequence[float]) -> list[float]:
    """The weights divided by their sum. ValueError if one is negative or not finite, or all are zero."""
    if any(weight < 0 or not math.isfinite(weight) for weight in weights):
        raise ValueError(f"weights must be finite and not negative: {list(weights)}")
    total = math.fsum(weights)
    if total == 0:
        raise ValueError("all weights are zero: there is nothing to merge")
    return [weight / total for weight in weights]
