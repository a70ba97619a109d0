"""The loop one would write without DeepSpeed: what an island's speed is compared with.

    DeepSpeed's launcher (island/launch.py) --module diloco_ds.bench.plain_loop RUN_DIR NAME

Torch alone: the same model with the same loss, weights, batches, precision and clipping as an island of the run, the
optimizer torch.optim.AdamW, and DistributedDataParallel where there are several ranks. In low precision it keeps fp32
masters beside the weights, as DeepSpeed does. It runs until it is killed, and writes the same records of its steps.
"""

from __future__ import annotations

import itertools
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

from diloco_ds import config
from diloco_ds.bench.plain_settings import PlainSettings
from diloco_ds.data.prepared import Prepared
from diloco_ds.data.shard import BlockOrder
from diloco_ds.errors import UserError
from diloco_ds.island.batches import AHEAD, Batches
from diloco_ds.island.step_log import StepLog
from diloco_ds.island.timing import StepTimer
from diloco_ds.membership import run_config
from diloco_ds.model.initial import load_initial
from diloco_ds.model.loss import LossModel
from diloco_ds.observe.manifest import read_manifest
from diloco_ds.rundir import RunDir


class PlainTrainer:
    """One rank; its step makes the same numbers as DeepSpeed's up to rounding."""

    def __init__(
        self, model: nn.Module, settings: PlainSettings, device: torch.device, compiled: bool
    ) -> None:
        self._settings, self._device = settings, device
        self._ranks = distributed.get_world_size() if distributed.is_initialized() else 1
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        initial = [parameter.detach().to(device, torch.float32).clone() for parameter in trained]
        model.to(device, settings.dtype)
        self._weights = [parameter for parameter in model.parameters() if parameter.requires_grad]
        low = settings.dtype != torch.float32
        self._masters = [nn.Parameter(value) for value in initial] if low else self._weights
        self._module: Any = DistributedDataParallel(model) if self._ranks > 1 else model
        if compiled:
            self._module = torch.compile(self._module)
        self._optimizer = torch.optim.AdamW(
            self._masters, fused=device.type == "cuda" or None, **settings.optimizer
        )
        self.timer = StepTimer(device)

    def step(self, batch: Tensor) -> None:
        """One optimizer step on this rank's share, int64 [grad_accumulation * micro_batch, length]."""
        timer, settings = self.timer, self._settings
        timer.begin()
        batch = batch.to(self._device, non_blocking=True)
        total = torch.zeros((), dtype=torch.float32, device=self._device)
        for micro_batch in batch.split(settings.micro_batch):
            loss = self._module(micro_batch)
            total += loss.detach()
            timer.lap("forward")
            (loss / settings.grad_accumulation).backward()
            timer.lap("backward")
        self._update()
        if self._ranks > 1:
            distributed.all_reduce(total)
        timer.lap("optimizer")
        timer.end(total / (settings.grad_accumulation * self._ranks))

    @torch.no_grad()
    def _update(self) -> None:
        low = self._masters is not self._weights
        if low:
            for master, weight in zip(self._masters, self._weights, strict=True):
                master.grad = None if weight.grad is None else weight.grad.float()
        if self._settings.clipping:
            nn.utils.clip_grad_norm_(self._masters, self._settings.clipping)
        self._optimizer.step()
        if low:
            torch._foreach_copy_(list(self._weights), list(self._masters))
        for weight in self._weights:
            weight.grad = None


def train(run: RunDir, name: str) -> None:
    """Train, and record every step, without end."""
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    whole, manifest = run_config(run), read_manifest(run.root)
    settings = PlainSettings.of(whole.deepspeed_of(name), ranks)
    device = _device()
    if ranks > 1:
        distributed.init_process_group("nccl" if device.type == "cuda" else "gloo")
    trainer = PlainTrainer(_model(run, whole.trainer), settings, device, compiled=whole.trainer.compile)
    data = Prepared.from_dict(manifest["data"])
    blocks = data.open_train()
    sequences = settings.micro_batch * settings.grad_accumulation
    order = BlockOrder(len(blocks), whole.seed)
    batches = Batches(blocks, order, rank, ranks, sequences, device.type == "cuda")
    islands = [island.name for island in whole.islands]
    turns = itertools.count(
        islands.index(name), len(islands)
    )  # side by side, each its own batches of the order
    for _ in range(AHEAD):
        batches.read([(next(turns) * ranks * sequences, ranks * sequences)])
    log = StepLog(run.metrics, name, 1) if rank == 0 else None
    step_tokens, number, ended = ranks * sequences * data.sequence_length, 0, time.perf_counter()
    while True:
        began = time.perf_counter()
        batches.read([(next(turns) * ranks * sequences, ranks * sequences)])
        batch = batches.next()
        waited = time.perf_counter() - began
        trainer.step(batch)
        number += 1
        before, ended = ended, time.perf_counter()
        results = trainer.timer.finished()
        if log is not None:
            log.add(number, ended - before, waited, {}, {"step": number, "step_tokens": step_tokens})
            log.results(results)


def _model(run: RunDir, trainer: config.Trainer) -> LossModel:
    model = load_initial(run.model_config)
    if trainer.activation_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return LossModel(model, trainer.loss_chunk)


def _device() -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    return device


def main(arguments: list[str]) -> int:
    """One rank; returns only if it cannot run."""
    try:
        train(RunDir(Path(arguments[0])), arguments[1])
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
