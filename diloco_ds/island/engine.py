"""The one seam to DeepSpeed: a step, the slices of fragments in and out, save and load. Only the
preflight's engine_check.py imports DeepSpeed beside it.
"""

from __future__ import annotations

import copy
import json
import logging
import os
import shutil
from collections.abc import Mapping, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.module_inject.auto_ep_layer import AutoEPMoELayer
from deepspeed.utils import groups
from torch import Tensor, distributed, nn

from diloco_ds import config
from diloco_ds.core.fragments import FragmentLayout
from diloco_ds.errors import UserError
from diloco_ds.exchange.failpoint import failpoint
from diloco_ds.island.deepspeed_settings import expert_parallel_size, prepared
from diloco_ds.island.experts import WHOLE, Division, check_division, divide_experts
from diloco_ds.island.first_weights import fill, make_low_precision
from diloco_ds.island.inner_snapshot import Snapshot, together
from diloco_ds.island.inner_state import InnerState, read_weights
from diloco_ds.island.portioned_moments import OwnMoments, PortionedMoments
from diloco_ds.island.slices import How, Ranks, adopt, find_slices, undo_first_step
from diloco_ds.island.timing import StepResult, StepTimer
from diloco_ds.island.transfer import DeviceCopy, HostMemory
from diloco_ds.island.writing import Writing
from diloco_ds.model.build import travelling_parameters
from diloco_ds.model.experts import ExpertLayer, RoutedTokens, expert_modules
from diloco_ds.model.initial import WEIGHTS, empty_model
from diloco_ds.model.loss import LossModel
from diloco_ds.rundir import write_json
from diloco_ds.tensor_file import TensorFile

log = logging.getLogger(__name__)

CLIENT_FILE = "learner.json"
"""In a checkpoint: what the learner keeps beside the inner state."""


class Loaded(NamedTuple):
    """What `Engine.load` found."""

    client_state: dict[str, Any]
    # The shape of the island that wrote it, where it is another than this one's.
    written_by: dict[str, Any] | None
    # What was not taken, in words.
    missing: tuple[str, ...]


class Engine:
    """One rank of an island. All ranks call the same methods in the same order; which of them wait for the
    others is said there.
    """

    def __init__(self, engine: Any, layout: FragmentLayout, division: Division) -> None:
        self._engine = engine
        self._layout = layout
        self._division = division
        self.rank: int = distributed.get_rank()
        self.world_size: int = distributed.get_world_size()
        self.device: torch.device = torch.device(engine.device)
        self.micro_batch: int = engine.train_micro_batch_size_per_gpu()
        self.grad_accumulation: int = engine.gradient_accumulation_steps()
        self._base_lr = [group["lr"] for group in engine.optimizer.param_groups]
        self._timer = StepTimer(self.device)
        self.host = HostMemory(self.device)
        self.routed: RoutedTokens | None = None
        """Tokens of each expert, where they are counted."""
        self._group = distributed.new_group(backend="gloo")
        # For the threads that write checkpoints. A disk that stalls is no reason to end training.
        self._saving_group = distributed.new_group(backend="gloo", timeout=timedelta(days=30))
        self._decision: tuple[Any, Tensor] | None = None
        self._taking: PortionedMoments | None = None
        self._ranks = Ranks(
            self.rank, self.world_size, self.device, lambda tensor: distributed.all_reduce(tensor)
        )
        self._find_slices()

    @classmethod
    def start(
        cls,
        initial: Path,
        deepspeed_config: dict[str, Any],
        trainer: config.Trainer,
        layout: FragmentLayout,
        seed: int,
        count_routed: bool = False,
    ) -> Engine:
        """Join the island's ranks (the launcher's environment names them) and hand the model in `initial`
        (model/initial.py) to DeepSpeed. No rank ever holds more of it than it trains with: at ZeRO-3 its part.

        `seed` is for dropout and the like. `count_routed`: count the tokens of each expert (`routed`). Blocks until all
        ranks are there. UserError for settings that cannot work.
        """
        connect()
        cpu = get_accelerator().device_name() == "cpu"
        settings = prepared(deepspeed_config, cpu)
        torch.manual_seed(seed + distributed.get_rank())
        model = empty_model(initial)
        make_low_precision(model, _precision(settings))
        if trainer.activation_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        loss_model = LossModel(model, trainer.loss_chunk)
        layers = [ExpertLayer(module) for module in expert_modules(model).values()] if count_routed else []
        experts = expert_parallel_size(deepspeed_config)
        if settings.get("zero_optimization", {}).get("stage") == 3 and experts == 1:
            _partition(loss_model, settings)
        fill(model, initial)
        division = _divide(loss_model, experts)
        trained = [parameter for parameter in loss_model.parameters() if parameter.requires_grad]
        try:
            engine, *_ = deepspeed.initialize(model=loss_model, model_parameters=trained, config=settings)
        except (AssertionError, ValueError) as error:  # a setting DeepSpeed finds wrong, or impossible here
            raise UserError(f"deepspeed: {' '.join(str(error).split())}") from error
        undo_first_step(engine.optimizer)
        if trainer.compile:
            engine.compile()
        started = cls(engine, layout, division)
        if layers:
            started.routed = RoutedTokens(layers, layout, started.device)
        with TensorFile(initial / WEIGHTS) as file:  # DeepSpeed has made the masters of the rounded weights
            read_weights(file, layout, started._slices)
        return started

    # --- the step ---

    def set_lr(self, scale: float) -> None:
        """The learning rate of each parameter group from the next step on: `scale` times the one in the
        DeepSpeed config.
        """
        for group, base in zip(self._engine.optimizer.param_groups, self._base_lr, strict=True):
            group["lr"] = base * scale

    def step(self, batch: Tensor) -> None:
        """One optimizer step on `batch`, int64 [grad_accumulation * micro_batch, length]: this rank's share.
        Waits for the other ranks as DeepSpeed does. On a GPU it adds no wait for the device; give `batch` in
        pinned memory.
        """
        self._timer.begin()
        batch = batch.to(self.device, non_blocking=True)
        total = torch.zeros((), dtype=torch.float32, device=self.device)
        for micro_batch in batch.split(self.micro_batch):
            loss = self._engine(micro_batch)
            total += loss.detach()
            self._timer.lap("forward")
            self._engine.backward(loss)
            self._timer.lap("backward")
            self.host.hold_writers()
            self._engine.step()
            self._timer.lap("optimizer")
        distributed.all_reduce(total)
        self._timer.lap("optimizer")
        self._timer.end(total / (self.grad_accumulation * self.world_size))

    def finished_steps(self, wait: bool = False) -> list[StepResult]:
        """Results of steps that have ended and were not given out before, oldest first: on a CPU of the step
        just made, on a GPU usually of the one before. With `wait` of all steps made.
        """
        return self._timer.finished(wait)

    # --- agreement between the ranks, over a CPU group of its own ---

    def broadcast_start(self, values: Sequence[int]) -> None:
        """Begin to send rank 0's `values` to all ranks and return at once; the others give as many values,
        which are ignored.
        """
        if self._decision is not None:
            raise RuntimeError("a broadcast is under way already")
        tensor = torch.tensor(values, dtype=torch.int64)
        self._decision = distributed.broadcast(tensor, src=0, group=self._group, async_op=True), tensor

    def broadcast_wait(self) -> list[int]:
        """The values of the broadcast that was started; blocks until they are there."""
        if self._decision is None:
            raise RuntimeError("no broadcast was started")
        (work, tensor), self._decision = self._decision, None
        work.wait()
        return [int(value) for value in tensor]

    def least(self, values: Sequence[int]) -> list[int]:
        """The least of each value over all ranks; blocks until all ranks have called it."""
        tensor = torch.tensor(values, dtype=torch.int64)
        distributed.all_reduce(tensor, op=distributed.ReduceOp.MIN, group=self._group)
        return [int(value) for value in tensor]

    # --- fragments ---

    def write_fragment(self, fragment: int, out: Tensor) -> DeviceCopy:
        """Copy this rank's part of the fp32 masters into `out`, the flat fp32 fragment in host memory. The
        fragment is whole when the transfers of all ranks are done; each element is written by exactly one.
        Waits for nobody.
        """
        return self.host.take(self._slices[fragment].owned, out)

    def adopt_fragment(
        self,
        fragment: int,
        source: Tensor,
        how: How = "overwrite",
        alpha: float = 0.0,
        snapshot: Tensor | None = None,
    ) -> DeviceCopy:
        """Write the flat fp32 fragment `source` (host memory) into this rank's masters and into all
        parameters its next forward pass uses.

        `how`, `alpha` and `snapshot` as in `slices.adopt`. The optimizer's moments stay. `source` and
        `snapshot` must be left alone until the transfer is done. `overwrite` waits for nobody, `mix` and
        `rebase` for the other ranks.
        """
        self.host.hold_writers()
        adopt(self._slices[fragment], source, how, alpha, snapshot, self._ranks)
        return self.host.mark()

    def pin(self, address: int, nbytes: int) -> None:
        """Page-lock mapped memory that fragments are written to and adopted from, until `close`. On a CPU
        nothing is to be done.
        """
        self.host.pin(address, nbytes)

    # --- the optimizer's moments, for and from other islands ---

    def own_moments(self) -> OwnMoments | None:
        """What this island could give; None before the first step, and where the optimizer is not Adam or its kin."""
        return self._moments().own()

    def write_moments(self, portion: int, out: Tensor) -> DeviceCopy:
        """Copy this rank's part of a portion of the moments into `out`, its flat fp32 values in host memory. As
        `write_fragment`.
        """
        return self.host.take(self._moments().owned(portion), out)

    def can_take_moments(self, optimizer: str | None = None) -> bool:
        """Whether moments could be taken of a peer with this `optimizer` (OwnMoments), or of any."""
        return self._moments().can_take(optimizer)

    def take_moments(self, portion: int, source: Tensor, steps: int) -> None:
        """Take this rank's part of a portion of a peer's moments, before the first step; `source` as `out` of
        `write_moments`, free again on return. What they count is `steps`, of the first portion taken. Waits for nobody.
        """
        if self._taking is None:
            self._taking = self._moments()
            self._taking.begin(steps)
        self._taking.take(portion, source)

    def forget_moments(self) -> None:
        """The portions taken are not all there are: the optimizer is fresh again."""
        if self._taking is not None:
            self._taking.forget()
            self._taking = None

    def _moments(self) -> PortionedMoments:
        return PortionedMoments(self._engine.optimizer, self._layout, self._slices)

    # --- checkpoints ---

    def save(self, directory: Path, tag: str, client_state: dict[str, Any], background: bool) -> Writing:
        """Begin to write a checkpoint `directory`/`tag` with masters and moments as they are now, and `client_state`
        (JSON-able); it appears whole or not at all. With `background` all of it is copied to host memory and written while
        training goes on; else it is written when this returns. The one before must have been waited for.
        """
        inner = InnerState(self._engine, self._layout, self._slices)
        try:
            snapshot = inner.snapshot(self.host if background else None)
        except RuntimeError as error:  # torch's, of memory of any kind
            log.warning(
                "no host memory for a copy of the checkpoint, steps wait until it is written: %s", error
            )
            snapshot, background = inner.snapshot(None), False
        state = copy.deepcopy(client_state)
        work = partial(self._write, snapshot, directory / f".{tag}.partial", directory / tag, state)
        return Writing(work, background)

    def _write(
        self, snapshot: Snapshot, unfinished: Path, target: Path, client_state: dict[str, Any]
    ) -> None:
        try:
            snapshot.write(unfinished, self.rank, self._gather, self._shape())
            failpoint("learner.saving")
            together(self._gather, lambda: self._publish(unfinished, target, client_state))
        except OSError:
            if self.rank == 0:
                shutil.rmtree(unfinished, ignore_errors=True)
            raise

    def _publish(self, unfinished: Path, target: Path, client_state: dict[str, Any]) -> None:
        if self.rank == 0:
            write_json(unfinished / CLIENT_FILE, client_state)
            os.replace(unfinished, target)

    def load(self, directory: Path, tag: str) -> Loaded:
        """Go on from the checkpoint `directory`/`tag`, whatever shape of island wrote it; one of the same shape
        exactly. Only before the first step. UserError, with nothing touched, if it is no checkpoint or one of
        another model.
        """
        written, missing = InnerState(self._engine, self._layout, self._slices).read(directory / tag)
        self._find_slices()
        client_state = json.loads((directory / tag / CLIENT_FILE).read_text())
        return Loaded(client_state, written if written != self._shape() else None, tuple(missing))

    def close(self, disconnect: bool = True) -> None:
        """Wait for the other ranks and end; without `disconnect` another engine can be started among them
        afterwards.
        """
        self.host.close()
        distributed.barrier(group=self._group)
        self._engine.destroy()
        if disconnect:  # or half of the clean ends abort at exit
            distributed.destroy_process_group()

    def _shape(self) -> dict[str, Any]:
        return {
            "ranks": self.world_size,
            "expert_parallel": self._division.size,
            "zero_stage": self._engine.zero_optimization_stage(),
            "precision": str(self._engine.get_data_types()[0]).removeprefix("torch."),
        }

    def _gather(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * self.world_size
        distributed.all_gather_object(values, value, group=self._saving_group)
        return values

    def _find_slices(self) -> None:
        parameters = travelling_parameters(self._engine.module.model)
        self._slices = find_slices(
            self._engine.optimizer, parameters, self._layout, self._ranks, self._division.starts
        )


class _DividedExperts(AutoEPMoELayer):  # type: ignore[misc]
    """Stands in the model so that DeepSpeed expects parameters which differ between ranks; the layers themselves are
    transformers'.
    """

    def __init__(self, num_experts: int) -> None:
        nn.Module.__init__(self)
        self.num_experts = num_experts

    def set_deepspeed_parallelism(self, *_: Any, **__: Any) -> None:
        """Its groups are made already."""


def _divide(loss_model: LossModel, size: int) -> Division:
    """Divide the experts of every layer among groups of `size` ranks. UserError if they do not divide."""
    if size == 1:
        return WHOLE
    try:
        check_division(loss_model.model, size, distributed.get_world_size())
    except UserError as error:
        raise UserError(f"deepspeed.expert_parallel.autoep_size: {error}") from error
    name = f"ep_size_{size}"
    groups._create_expert_and_data_parallel(size)
    loss_model.divided_experts = _DividedExperts(size)
    return divide_experts(loss_model.model, groups._get_expert_parallel_group(name), name)


def _precision(settings: Mapping[str, Any]) -> torch.dtype:
    """Of the weights that the forward pass uses."""
    low = {"bf16": torch.bfloat16, "fp16": torch.float16}
    chosen = [dtype for key, dtype in low.items() if settings.get(key, {}).get("enabled")]
    return chosen[0] if chosen else torch.float32


def _partition(model: LossModel, settings: dict[str, Any]) -> None:
    """Leave each rank its part of every parameter; DeepSpeed does so itself, but first takes the whole model to the
    device.
    """
    deepspeed.zero.Init(module=model, config_dict_or_path=settings)


def connect() -> None:
    """Join the ranks the launcher's environment names; does nothing when that is done."""
    # Its shared-memory collective would be compiled now and leave 66 MiB a rank in /dev/shm.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    # An MPI environment around the launcher must not change the world size.
    deepspeed.init_distributed(auto_mpi_discovery=False, verbose=False)
