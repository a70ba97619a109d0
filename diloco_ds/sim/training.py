"""Studies of quality in one process: M tiny models with true gradients, driven by the product's core in virtual time.

All learners together train on `batch` examples a step whatever their number, so that runs of different M, and data
parallel training, see as many tokens in as many steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

import numpy as np
import torch

from diloco_ds.config import Exchange
from diloco_ds.core.expert_load import expert_load
from diloco_ds.core.fragments import FragmentLayout, balance
from diloco_ds.errors import UserError
from diloco_ds.sim.goodput import new_learner
from diloco_ds.sim.learner import Speed, check_learners
from diloco_ds.sim.real_weights import Learner, RealWeights
from diloco_ds.sim.tiny_model import LENGTH, Text, TinyModel
from diloco_ds.sim.world import World

_POINTS = 10
"""Held-out evaluations along a run."""
_WARMUP_SHARE = 0.05
_LAST_LR_SHARE = 0.1
_CLIP = 1.0


@dataclass(frozen=True)
class Training:
    """One run. steps: inner steps of a learner at full speed. batch: examples of all learners in one step. experts: of each
    layer, 0 for a dense model. own_text: each learner has its part of the text, in order; else all read all of it.
    """

    text: Text
    learners: int = 4
    steps: int = 200
    batch: int = 16
    lr: float = 3e-3
    slowest: float = 0.0
    step_variance: float = 0.0
    data_parallel: bool = False
    experts: int = 0
    own_text: bool = True
    exchange: Exchange = field(default_factory=Exchange)
    seed: int = 0

    def __post_init__(self) -> None:
        check_learners(self.learners, self.exchange)
        if self.batch % self.learners:
            raise UserError(f"a batch of {self.batch} examples cannot be shared by {self.learners} learners")
        if self.steps < 1:
            raise UserError(f"steps must be at least 1, not {self.steps}")
        if not 0 <= self.slowest < 1:
            raise UserError(f"slowest is a share, at least 0 and below 1, not {self.slowest:g}")
        if self.experts not in (0, *range(2, 65)):
            raise UserError(f"experts must be 0 (a dense model), or 2 to 64, not {self.experts}")
        if self.exchange.merge.weights == "expert_tokens" and not self.experts:
            raise UserError("weights: expert_tokens, but a dense model has no experts: give --experts")

    def model(self) -> TinyModel:
        """The model it begins from."""
        return TinyModel(self.seed, self.experts)

    @property
    def tokens(self) -> int:
        """Tokens of the whole run."""
        return self.steps * self.batch * LENGTH

    def name(self) -> str:
        """The run in words."""
        if self.data_parallel:
            return f"data parallel, {self.steps} steps of {self.batch * LENGTH} tokens"
        exchange = self.exchange
        return (
            f"M = {self.learners}, H = {exchange.period}, P = {exchange.fragments}, K = {exchange.quorum}, "
            f"{exchange.merge.matrices}, {exchange.adoption.how}, {self.tokens} tokens"
        )


@dataclass(frozen=True)
class Curve:
    """Held-out loss of the global weights, nats per byte, over trained tokens of all learners.

    expert_load: of each learner over the whole run (core/expert_load.py), none for a dense model. apart: how much the
    learners' routing differs, 0 to 1: the share of tokens that go to other experts, mean over layers and pairs.
    """

    what: str
    points: list[tuple[int, float]]
    merges: int
    dropped: int
    expert_load: list[float] = field(default_factory=list)
    apart: float | None = None

    @property
    def loss(self) -> float:
        """At the end."""
        return self.points[-1][1]

    @property
    def tokens(self) -> int:
        """Trained until the end."""
        return self.points[-1][0]

    def at(self, tokens: int) -> float:
        """Held-out loss after that many trained tokens, on the straight line between two evaluations."""
        trained, losses = zip(*self.points, strict=True)
        return float(np.interp(tokens, trained, losses))

    def to_json(self) -> dict[str, Any]:
        """With bits per byte."""
        curve = [
            {"tokens": tokens, "loss": loss, "bits_per_byte": loss / math.log(2)}
            for tokens, loss in self.points
        ]
        return {
            "what": self.what,
            "loss": self.loss,
            "merges": self.merges,
            "dropped": self.dropped,
            "expert_load": self.expert_load,
            "apart": self.apart,
            "curve": curve,
        }


def train(run: Training) -> Curve:
    """Train, and tell the held-out loss. Deterministic by the run's seed on one machine."""
    return _data_parallel(run) if run.data_parallel else _decoupled(run)


class _Meter:
    """Tokens trained by all, the learning rate they lead to, and the held-out loss along the way."""

    def __init__(self, run: Training) -> None:
        self._run, self._probe, self._heldout = run, run.model(), run.text.heldout()
        self.tokens = 0
        self.points: list[tuple[int, float]] = []
        self._next = 0

    def lr(self) -> float:
        """Linear warmup, then a cosine to a tenth, over the tokens of the run."""
        share = min(self.tokens / self._run.tokens, 1.0)
        if share < _WARMUP_SHARE:
            return self._run.lr * share / _WARMUP_SHARE
        turn = (share - _WARMUP_SHARE) / (1.0 - _WARMUP_SHARE)
        cosine = 0.5 * (1.0 + math.cos(math.pi * turn))
        return self._run.lr * (_LAST_LR_SHARE + (1.0 - _LAST_LR_SHARE) * cosine)

    def is_due(self) -> bool:
        """Whether the next evaluation is."""
        return self.tokens >= self._next

    def measure(self, write: Callable[[TinyModel], None]) -> None:
        """Evaluate the weights that `write` puts into a model."""
        self._next = self.tokens + self._run.tokens // _POINTS
        write(self._probe)
        with torch.no_grad():
            self.points.append((self.tokens, float(self._probe.loss(self._heldout))))


def _decoupled(run: Training) -> Curve:
    meter = _Meter(run)
    exchange = run.exchange
    layout = balance(run.model().specs(), exchange.fragments, exchange.period)
    if layout.fragments != exchange.fragments:
        raise UserError(f"the model has {layout.fragments} tensors: fragments cannot be {exchange.fragments}")
    names = [f"learner{m:02d}" for m in range(run.learners)]
    models = {
        name: _learner(run, meter, m, run.batch // run.learners, layout) for m, name in enumerate(names)
    }

    def on_merge() -> None:
        if meter.is_due():
            meter.measure(weights.write_global)

    weights = RealWeights(layout, exchange, models, on_merge)
    rows = run.batch // run.learners
    learners = [
        new_learner(
            name,
            exchange,
            Speed(1.0 / (1.0 - run.slowest) if m == run.learners - 1 else 1.0, run.step_variance),
            np.random.default_rng([run.seed, m]),
            tokens=rows * LENGTH,
        )
        for m, name in enumerate(names)
    ]
    world = World(layout, exchange, learners, budget=run.tokens, weights=weights)
    tally = world.run(100.0 * (run.steps + exchange.period))
    if tally.finished is None:
        raise RuntimeError(f"{run.name()} does not finish")
    meter.measure(weights.write_global)
    return Curve(
        run.name(), meter.points, len(tally.merges), len(tally.drops), *_routing(list(models.values()))
    )


def _data_parallel(run: Training) -> Curve:
    meter = _Meter(run)
    layout = balance(run.model().specs(), 1, 1)
    learner = _learner(run, meter, 0, run.batch, layout)
    for _ in range(run.steps):
        if meter.is_due():
            meter.measure(lambda model: model.load_state_dict(learner.model.state_dict()))
        learner.step()
    meter.measure(lambda model: model.load_state_dict(learner.model.state_dict()))
    return Curve(run.name(), meter.points, 0, 0, *_routing([learner]))


def _routing(learners: Sequence[Learner]) -> tuple[list[float], float | None]:
    """`expert_load` and `apart` of a Curve."""
    counted = [learner.routed.counted() for learner in learners if learner.routed is not None]
    loads = [expert_load(map(len, layers), [n for layer in layers for n in layer]) for layers in counted]
    shares = [np.array([[n / sum(layer) for n in layer] for layer in layers]) for layers in counted]
    apart = [0.5 * float(np.abs(one - other).sum(1).mean()) for one, other in combinations(shares, 2)]
    return [load for load in loads if load is not None], float(np.mean(apart)) if apart else None


def _learner(run: Training, meter: _Meter, number: int, rows: int, layout: FragmentLayout) -> Learner:
    """A model with its own optimizer and data; all begin with the same weights."""
    model = run.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=run.lr, betas=(0.9, 0.95), weight_decay=0.1)
    generator = torch.Generator().manual_seed(1_000_003 * (run.seed + 1) + number)
    shards = run.learners if run.own_text and not run.data_parallel else 1
    shard = number if shards > 1 else 0

    def step() -> None:
        for group in optimizer.param_groups:
            group["lr"] = meter.lr()
        model.training_loss(run.text.batch(shard, shards, rows, generator)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), _CLIP)
        optimizer.step()
        optimizer.zero_grad()
        meter.tokens += rows * LENGTH

    return Learner(model, step, model.count_routed(layout))
