"""What a run will take, computed from its run file before anything of it exists: memory, bandwidth, tokens, goodput.

Sizes of shared memory are those of the files the run will make. Memory of a rank follows the ZeRO paper (Rajbhandari et
al., 2020): low-precision weights and gradients, fp32 master weights and optimizer moments, divided by the ranks as far as
the stage says; activations and temporary buffers are not in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from diloco_ds.conductor.preflight import planned_layout
from diloco_ds.config import Island, RunConfig
from diloco_ds.core.fragments import FragmentLayout
from diloco_ds.core.outer import OuterOptimizer
from diloco_ds.data.tokenizer import load_tokenizer, vocabulary_size
from diloco_ds.errors import UserError
from diloco_ds.exchange.mailbox import Mailbox
from diloco_ds.exchange.store import Store
from diloco_ds.island.deepspeed_settings import batch_of, check_deepspeed, expert_parallel_size
from diloco_ds.model.build import ParameterCount, build_config, count_parameters
from diloco_ds.sim.goodput import System, simulate

WIRE_BYTES = 4
"""A value on the wire, fp32."""
_FP32 = 4
_LOW = 2
_LEARNER_HOURS = 96.0
_STEP_S = 30.0


@dataclass(frozen=True)
class RankMemory:
    """Bytes on one rank's device; what is offloaded lies in its host's memory instead."""

    weights: int
    gradients: int
    master: int
    moments: int
    offloaded: int

    @property
    def total(self) -> int:
        """On the device."""
        return self.weights + self.gradients + self.master + self.moments - self.offloaded


@dataclass(frozen=True)
class IslandPlan:
    """One island. mailbox_bytes: shared memory at its own end of the exchange. checkpoint_bytes: host memory of each rank
    for the copy of a checkpoint that is written in the background.
    """

    ranks: int
    tokens_per_step: int
    rank_memory: RankMemory
    mailbox_bytes: int
    checkpoint_bytes: int

    def to_json(self) -> dict[str, Any]:
        """With the rank's total."""
        return asdict(self) | {"rank_memory": asdict(self.rank_memory) | {"total": self.rank_memory.total}}


@dataclass(frozen=True)
class WirePlan:
    """Between one island and the syncer, in each direction.

    bytes_per_step: mean over global steps. needed_gbit: the largest fragment within tau steps of `step_s` seconds (the
    paper's b N / (P tau t) where fragments are equal). mean_gbit: what flows on average at that pace.
    """

    bytes_per_step: float
    largest_fragment_bytes: int
    step_s: float
    mean_gbit: float
    needed_gbit: float


@dataclass(frozen=True)
class SyncerPlan:
    """Shared memory on the syncer's host, and the memory of its own process for a merge."""

    store_bytes: int
    mailbox_bytes: int  # of each island's mailbox at the syncer's end
    scratch_bytes: int


@dataclass(frozen=True)
class Plan:
    """A whole run."""

    parameters: ParameterCount
    layout: FragmentLayout
    islands: dict[str, IslandPlan]
    wire: WirePlan
    syncer: SyncerPlan
    steps: int
    goodput: dict[str, float] | None

    @property
    def shared_memory(self) -> int:
        """Bytes, if all islands run on the syncer's host."""
        own = sum(island.mailbox_bytes + self.syncer.mailbox_bytes for island in self.islands.values())
        return self.syncer.store_bytes + own

    def to_json(self) -> dict[str, Any]:
        """All numbers; bytes, Gbit/s, percent."""
        numels = self.layout.numels
        travelling = sum(numels)
        return {
            "parameters": {**self.parameters._asdict(), "travelling": travelling},
            "fragments": {
                "count": self.layout.fragments,
                "period": self.layout.period,
                "numels": list(numels),
                "embeddings": [p for p in range(len(numels)) if self.layout.embedding(p)],
                "balance": _balance(self.layout),
            },
            "islands": {name: island.to_json() for name, island in self.islands.items()},
            "wire": asdict(self.wire),
            "syncer": asdict(self.syncer),
            "shared_memory_bytes": self.shared_memory,
            "global_steps": self.steps,
            "goodput": self.goodput,
        }


def make_plan(config: RunConfig, base_dir: Path, *, step_s: float = 1.0, chips: int | None = None) -> Plan:
    """The plan of `config`. step_s: seconds an inner step is expected to take, above 0. chips: for the expected goodput.

    UserError for a configuration that could not run.
    """
    layout = planned_layout(config, base_dir)
    parameters = _parameters(config, base_dir)
    islands = {island.name: _island(config, island, parameters.total, layout) for island in config.islands}
    step_tokens = max(island.tokens_per_step for island in islands.values())
    all_tokens = sum(island.tokens_per_step for island in islands.values())
    if step_tokens > config.budget.tokens:
        raise UserError(f"budget.tokens: {config.budget.tokens} is less than one step ({step_tokens})")
    return Plan(
        parameters=parameters,
        layout=layout,
        islands=islands,
        wire=_wire(config, layout, step_s),
        syncer=_syncer(config, layout),
        steps=-(-config.budget.tokens // all_tokens),
        goodput=None if chips is None else _goodput(config, chips),
    )


def _parameters(config: RunConfig, base_dir: Path) -> ParameterCount:
    path = config.tokenizer.path
    size = config.tokenizer.train_vocab if path is None else vocabulary_size(load_tokenizer(path, base_dir))
    return count_parameters(build_config(config.model, int(size or 0)))


def _island(config: RunConfig, island: Island, parameters: int, layout: FragmentLayout) -> IslandPlan:
    settings = config.deepspeed_of(island.name)
    check_deepspeed(settings)
    micro_batch, accumulation = batch_of(settings, island.ranks)
    kept = _FP32 * (1 + moments_of(settings["optimizer"]))  # bytes per weight
    return IslandPlan(
        ranks=island.ranks,
        tokens_per_step=island.ranks * micro_batch * accumulation * config.data.sequence_length,
        rank_memory=rank_memory(settings, parameters, island.ranks, _experts(layout)),
        mailbox_bytes=Mailbox.file_size(layout.numels, inbox=True, experts=layout.experts),
        checkpoint_bytes=kept * -(-parameters // island.ranks)
        if config.trainer.checkpoint_in_background
        else 0,
    )


def _experts(layout: FragmentLayout) -> int:
    return sum(placed.spec.numel for placed in layout.tensors if ".experts." in placed.spec.name)


def rank_memory(settings: Mapping[str, Any], parameters: int, ranks: int, experts: int = 0) -> RankMemory:
    """Bytes a rank holds of a model of `parameters`, `experts` of them in experts, under DeepSpeed `settings`."""
    zero = settings.get("zero_optimization", {})
    stage = zero.get("stage", 0)
    is_low = any(settings.get(name, {}).get("enabled", False) for name in ("bf16", "fp16"))
    width = _LOW if is_low else _FP32
    share = -(-parameters // ranks)
    whole = parameters - experts + experts // expert_parallel_size(settings)
    of_optimizer = share if stage >= 1 else whole
    master = _FP32 * of_optimizer if is_low or stage >= 1 else 0
    moments = _FP32 * moments_of(settings["optimizer"]) * of_optimizer
    weights = width * (share if stage >= 3 else whole)
    offloads_optimizer = zero.get("offload_optimizer", {}).get("device", "none") == "cpu"
    offloads_weights = zero.get("offload_param", {}).get("device", "none") == "cpu"
    return RankMemory(
        weights=weights,
        gradients=width * (share if stage >= 2 else whole),
        master=master,
        moments=moments,
        offloaded=(master + moments) * offloads_optimizer + weights * offloads_weights,
    )


def moments_of(optimizer: Mapping[str, Any]) -> int:
    """Values of optimizer state per parameter; Adam's two for a class not known here."""
    name = str(optimizer["type"]).lower()
    if name == "sgd":
        return 1 if optimizer.get("params", {}).get("momentum", 0) else 0
    return 1 if "lion" in name or "adagrad" in name else 2


def _wire(config: RunConfig, layout: FragmentLayout, step_s: float) -> WirePlan:
    mean = WIRE_BYTES * sum(layout.numels) / layout.period
    largest = WIRE_BYTES * max(layout.numels)
    window = max(1, config.exchange.overlap) * step_s
    return WirePlan(mean, largest, step_s, 8e-9 * mean / step_s, 8e-9 * largest / window)


def _syncer(config: RunConfig, layout: FragmentLayout) -> SyncerPlan:
    return SyncerPlan(
        store_bytes=Store.file_size(layout, OuterOptimizer(config.exchange.outer).buffers),
        mailbox_bytes=Mailbox.file_size(layout.numels, inbox=False, experts=layout.experts),
        scratch_bytes=_FP32 * max(layout.numels),
    )


def _goodput(config: RunConfig, chips: int) -> dict[str, float]:
    """Under the simulator's weather (docs/simulator.md)."""
    learners = len(config.islands)
    exchange = config.exchange
    if exchange.adoption.how == "none":
        raise UserError("--chips: goodput is of islands that exchange; this run has adoption: none")
    system = System(
        chips=chips,
        learners=learners,
        hours=_LEARNER_HOURS / learners,
        step_s=_STEP_S,
        exchange=exchange,
        parameters=exchange.fragments,
    )
    result = simulate(system).to_json()
    return {"chips": chips, "goodput": result["goodput"], "uptime": result["uptime"]}


def _balance(layout: FragmentLayout) -> float:
    """Largest over mean of the fragments that are no embedding: 1 is perfect."""
    sizes = [n for p, n in enumerate(layout.numels) if not layout.embedding(p)] or list(layout.numels)
    return max(sizes) * len(sizes) / sum(sizes)
