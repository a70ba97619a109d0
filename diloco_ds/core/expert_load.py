"""How evenly the tokens of an island are spread over the experts of its layers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import fmean


def expert_load(layers: Iterable[int], tokens: Sequence[int]) -> float | None:
    """Tokens of a layer's busiest expert over the mean of its experts, averaged over the layers: 1 is even.

    `layers`: experts of each; `tokens`: of all their experts, layer after layer. None where nothing was counted.
    """
    loads, before = [], 0
    for experts in layers:
        own = tokens[before : before + experts]
        before += experts
        if not sum(own):
            return None
        loads.append(max(own) * experts / sum(own))
    return fmean(loads) if loads else None
