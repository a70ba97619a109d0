"""The quality study: which of the algorithm's choices matter, with several seeds and their spread.

Every case is one change to a base case, against data parallel training at equal tokens (docs/numbers.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

from diloco_ds.config import Exchange
from diloco_ds.errors import UserError
from diloco_ds.sim.tiny_model import Text
from diloco_ds.sim.training import Training, train

LEARNERS = 4
"""Learners of a case that says nothing else."""
EXPERTS = 8
"""Experts of a layer, in the cases about them."""
MIXED = {"slowest": 0.4, "step_variance": 0.1}
"""Mixed speeds: one of the learners 40 % behind, steps that vary by 10 %."""


@dataclass(frozen=True)
class Case:
    """A run of the study: its group, its name in it, and what it changes."""

    group: str
    name: str
    settings: dict[str, Any]
    exchange: dict[str, Any]


@dataclass(frozen=True)
class Result:
    """Held-out loss of a case, nats per byte, a value a seed: `losses` when as many tokens were trained as the
    budget has, `end_losses` at the end, after `tokens`.

    A run ends by its merged tokens: a case that throws work away trains more. `losses` compares at equal tokens.
    """

    case: Case
    losses: list[float]
    end_losses: list[float]
    tokens: list[int]
    expert_loads: list[list[float]]
    """Of each seed, of each learner (Curve.expert_load)."""
    apart: list[float]

    def to_json(self) -> dict[str, Any]:
        """Mean and spread (sample standard deviation; 0 for one seed)."""
        spread = stdev(self.losses) if len(self.losses) > 1 else 0.0
        return {
            "group": self.case.group,
            "name": self.case.name,
            "mean": fmean(self.losses),
            "spread": spread,
            "losses": self.losses,
            "end_mean": fmean(self.end_losses),
            "trained_tokens": fmean(self.tokens),
            "expert_load": [fmean(loads) for loads in zip(*self.expert_loads, strict=True)],
            "apart": fmean(self.apart) if self.apart else None,
        }


def cases() -> list[Case]:
    """All cases, in the order of the table."""
    return list(_cases())


def groups() -> list[str]:
    """Names of the groups."""
    return list(dict.fromkeys(case.group for case in _cases()))


def run_study(
    text: Text, seeds: Sequence[int], steps: int, chosen: Sequence[str], tell: Callable[[Result], None]
) -> list[Result]:
    """Run the cases of the `chosen` groups with every seed; `tell` hears of each as it is done."""
    if not seeds:
        raise UserError("a study needs at least one seed")
    results = []
    for case in cases():
        if case.group in chosen:
            runs = [_run(text, case, steps, seed) for seed in seeds]
            curves = [train(run) for run in runs]
            losses = [curve.at(run.tokens) for run, curve in zip(runs, curves, strict=True)]
            ends = [curve.loss for curve in curves]
            apart = [curve.apart for curve in curves if curve.apart is not None]
            tokens, loads = [curve.tokens for curve in curves], [curve.expert_load for curve in curves]
            results.append(Result(case, losses, ends, tokens, loads, apart))
            tell(results[-1])
    return results


def to_json(results: Sequence[Result], steps: int, seeds: Sequence[int]) -> dict[str, Any]:
    """All results and what they were run with."""
    return {"steps": steps, "seeds": list(seeds), "cases": [result.to_json() for result in results]}


def _run(text: Text, case: Case, steps: int, seed: int) -> Training:
    settings = {"learners": LEARNERS, **case.settings}
    return Training(text, steps=steps, seed=seed, exchange=Exchange.model_validate(case.exchange), **settings)


def _cases() -> Iterator[Case]:
    yield Case("baseline", "data parallel", {"data_parallel": True}, {})
    for learners in (2, 4, 8, 16):
        for rule in ("rda", "mean"):
            settings = {"learners": learners}
            yield Case("merge", f"M = {learners}, {rule}", settings, {"merge": {"matrices": rule}})
    for how in ("overwrite", "mix", "rebase"):
        yield Case("adoption", how, {}, {"adoption": {"how": how}})
    for safety in (0.8, 0.0):
        for anchor in ("global", "base"):
            name = f"{anchor}, {'grace' if safety else 'no grace'}"
            yield Case(
                "anchor", name, dict(MIXED), {"merge": {"anchor": anchor}, "grace": {"safety": safety}}
            )
    for late in ("merge_next", "drop"):
        yield Case("late", late, dict(MIXED), {"merge": {"late": late}, "grace": {"safety": 0.0}})
    for quorum, safety in ((1, 0.8), (1, 0.0), (LEARNERS, 0.8)):
        name = f"K = {quorum}, {'grace' if safety else 'no grace'}"
        yield Case("quorum", name, dict(MIXED), {"quorum": quorum, "grace": {"safety": safety}})
    for learners, lr, momentum in ((1, 0.7, 0.9), (1, 1.0, 0.0), (4, 0.4, 0.9), (4, 0.7, 0.5), (4, 1.0, 0.0)):
        args = {"lr": lr, "momentum": momentum, "nesterov": momentum > 0}
        name = f"M = {learners}, outer lr {lr:g}, momentum {momentum:g}"
        yield Case("outer", name, {"learners": learners}, {"outer": {"args": args}})
    for period in (2, 6, 24, 48, 96):
        exchange = {"period": period, "fragments": min(24, period), "overlap": min(2, period - 1)}
        yield Case("period", f"H = {period}", {}, exchange)
    yield Case("experts", "data parallel", {"data_parallel": True, "experts": EXPERTS}, {})
    for learners in (2, 4):
        for own_text, rule in ((False, "rda"), (True, "rda"), (True, "mean")):
            for weights in ("tokens", "expert_tokens"):
                settings = {"learners": learners, "experts": EXPERTS, "own_text": own_text}
                name = f"M = {learners}, {'own' if own_text else 'same'} text, {rule}, {weights}"
                yield Case("experts", name, settings, {"merge": {"matrices": rule, "weights": weights}})
