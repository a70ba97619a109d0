"""The one seam to DeepSpeed: a step, the slices of fragments in and out, save and load. Only the
preflight's engine_check.py imports DeepSpeed beside it.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.module_inject.auto_ep_layer import AutoEPMoELayer
from deepspeed.utils import groups
from torch import Tensor, distributed, nn
from transformers import PreTrainedModel

from diloco_ds import config
from diloco_ds.core.fragments import FragmentLayout
from diloco_ds.errors import UserError
from diloco_ds.exchange.failpoint import failpoint
from diloco_ds.island.deepspeed_settings import expert_parallel_size, prepared
from diloco_ds.island.experts import WHOLE, Division, check_division, divide_experts
from diloco_ds.island.slices import How, Ranks, adopt, find_slices, renew_copies, undo_first_step
from diloco_ds.island.timing import StepResult, StepTimer
from diloco_ds.island.transfer import HostMemory, Transfer
from diloco_ds.model.build import travelling_parameters
from diloco_ds.model.loss import LossModel
from diloco_ds.rundir import write_json

SHAPE_FILE = "island.json"
"""Beside a checkpoint of DeepSpeed: the shape of the island that wrote it."""


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
        self._host = HostMemory(self.device)
        self._group = distributed.new_group(backend="gloo")
        self._decision: tuple[Any, Tensor] | None = None
        self._ranks = Ranks(
            self.rank, self.world_size, self.device, lambda tensor: distributed.all_reduce(tensor)
        )
        self._find_slices()

    @classmethod
    def start(
        cls,
        model: PreTrainedModel,
        deepspeed_config: dict[str, Any],
        trainer: config.Trainer,
        layout: FragmentLayout,
        seed: int,
    ) -> Engine:
        """Join the island's ranks (the launcher's environment names them) and hand `model` (fp32, on the CPU)
        to DeepSpeed.

        `seed` is for dropout and the like. Blocks until all ranks are there. UserError for settings that
        cannot work.
        """
        connect()
        cpu = get_accelerator().device_name() == "cpu"
        settings = prepared(deepspeed_config, cpu)
        torch.manual_seed(seed + distributed.get_rank())
        if trainer.activation_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()
        initial = {name: tensor.detach() for name, tensor in travelling_parameters(model).items()}
        loss_model = LossModel(model, trainer.loss_chunk)
        division = _divide(loss_model, expert_parallel_size(deepspeed_config))
        trained = [parameter for parameter in loss_model.parameters() if parameter.requires_grad]
        try:
            engine, *_ = deepspeed.initialize(model=loss_model, model_parameters=trained, config=settings)
        except ValueError as error:  # a setting DeepSpeed finds wrong, or impossible on this device
            raise UserError(f"deepspeed: {' '.join(str(error).split())}") from error
        undo_first_step(engine.optimizer)
        if trainer.compile:
            engine.compile()
        started = cls(engine, layout, division)
        started._begin_with(initial)
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
            self._host.hold_writers()
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

    def write_fragment(self, fragment: int, out: Tensor) -> Transfer:
        """Copy this rank's part of the fp32 masters into `out`, the flat fp32 fragment in host memory. The
        fragment is whole when the transfers of all ranks are done; each element is written by exactly one.
        Waits for nobody.
        """
        return self._host.take(self._slices[fragment].owned, out)

    def adopt_fragment(
        self,
        fragment: int,
        source: Tensor,
        how: How = "overwrite",
        alpha: float = 0.0,
        snapshot: Tensor | None = None,
    ) -> Transfer:
        """Write the flat fp32 fragment `source` (host memory) into this rank's masters and into all
        parameters its next forward pass uses.

        `how`, `alpha` and `snapshot` as in `slices.adopt`. The optimizer's moments stay. `source` and
        `snapshot` must be left alone until the transfer is done. `overwrite` waits for nobody, `mix` and
        `rebase` for the other ranks.
        """
        self._host.hold_writers()
        adopt(self._slices[fragment], source, how, alpha, snapshot, self._ranks)
        return self._host.mark()

    def pin(self, address: int, nbytes: int) -> None:
        """Page-lock mapped memory that fragments are written to and adopted from, until `close`. On a CPU
        nothing is to be done.
        """
        self._host.pin(address, nbytes)

    # --- checkpoints ---

    def save(self, directory: Path, tag: str, client_state: dict[str, Any]) -> None:
        """Write a checkpoint `directory`/`tag` with moments, masters and `client_state`; it appears whole or
        not at all. Waits for the other ranks.
        """
        partial = f".{tag}.partial"
        with self._plain_files():
            self._engine.save_checkpoint(
                str(directory), tag=partial, client_state=client_state, save_latest=False
            )
        if self.rank == 0:
            write_json(directory / partial / SHAPE_FILE, self._shape())
        failpoint("learner.saving")
        distributed.barrier(group=self._group)
        if self.rank == 0:
            os.replace(directory / partial, directory / tag)
        distributed.barrier(group=self._group)

    def load(self, directory: Path, tag: str) -> dict[str, Any]:
        """Go on from the checkpoint `directory`/`tag` exactly; returns its client_state. Only before the
        first step. Waits for the other ranks. UserError if another shape of island wrote it.
        """
        file = directory / tag / SHAPE_FILE
        if not file.is_file():
            raise UserError(f"{directory / tag} holds no checkpoint of an island")
        written = json.loads(file.read_text())
        if written != self._shape():
            raise UserError(
                f"{directory / tag} was written by another shape of island: {written}; "
                f"this one is {self._shape()}"
            )
        with self._plain_files():
            path, client_state = self._engine.load_checkpoint(str(directory), tag=tag)
        if path is None:
            raise UserError(f"{directory / tag}: DeepSpeed could not read this checkpoint")
        if (
            self._division.starts
        ):  # of the copies the file holds rank 0's only; the masters are each rank's own
            for fragment in self._slices:
                renew_copies(fragment, self._ranks)
        self._find_slices()
        return dict(client_state)

    def close(self, disconnect: bool = True) -> None:
        """Wait for the other ranks and end; without `disconnect` another engine can be started among them
        afterwards.
        """
        self._host.close()
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

    def _begin_with(self, initial: Mapping[str, Tensor]) -> None:
        """Make the masters the fp32 weights: DeepSpeed has made them of the rounded ones."""
        for fragment in range(self._layout.fragments):
            tensors = [initial[placed.spec.name].flatten() for placed in self._layout.tensors_of(fragment)]
            self.adopt_fragment(fragment, torch.cat(tensors)).wait()

    def _find_slices(self) -> None:
        parameters = travelling_parameters(self._engine.module.model)
        self._slices = find_slices(
            self._engine.optimizer, parameters, self._layout, self._ranks, self._division.starts
        )

    @contextlib.contextmanager
    def _plain_files(self) -> Iterator[None]:
        """Checkpoints as of a model without experts: DeepSpeed's own files of experts know only layers it made. What a rank
        alone holds is in its optimizer's file.
        """
        known, self._engine.has_moe_layers = self._engine.has_moe_layers, False
        try:
            yield
        finally:
            self._engine.has_moe_layers = known


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


def connect() -> None:
    """Join the ranks the launcher's environment names; does nothing when that is done."""
    # Its shared-memory collective would be compiled now and leave 66 MiB a rank in /dev/shm.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    # An MPI environment around the launcher must not change the world size.
    deepspeed.init_distributed(auto_mpi_discovery=False, verbose=False)
