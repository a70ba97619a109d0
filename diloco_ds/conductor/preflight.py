"""What can be known to be wrong before anything is started or written: one UserError, or warnings."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from diloco_ds.config import RunConfig
from diloco_ds.errors import UserError
from diloco_ds.exchange.link_launch import clean_environment, find_mpirun
from diloco_ds.island.deepspeed_settings import ask_deepspeed, check_deepspeed, expert_parallel_size
from diloco_ds.island.launch import devices_of
from diloco_ds.rundir import RunDir, obstacle

if TYPE_CHECKING:  # torch comes with them
    from transformers import PreTrainedModel

    from diloco_ds.core.fragments import FragmentLayout

SHARED = Path("/dev/shm")


def check_host(config: RunConfig, *, islands: bool) -> list[str]:
    """What this host must offer, looked at in milliseconds; returns warnings. `islands`: whether they run here.

    UserError for: no mpirun, no shared memory, too few GPUs, a port that is taken.
    """
    find_mpirun()
    if not SHARED.is_dir() or not os.access(SHARED, os.W_OK):
        raise UserError(f"{SHARED}: shared memory is needed; mount a tmpfs there that you can write to")
    if not islands:
        return []
    check_ports(config)
    environment = clean_environment(os.environ)
    on_cpu = [
        island.name for island in config.islands if devices_of(config, island.name, environment) is None
    ]
    ranks = sum(config.island(name).ranks for name in on_cpu)
    cores = len(os.sched_getaffinity(0))
    if ranks > cores:
        return [f"{ranks} ranks on the CPU share {cores} cores: they train, but slow each other down"]
    return []


def check_ports(config: RunConfig) -> None:
    """UserError for a master_port that two islands claim or that is in use."""
    owner: dict[int, str] = {}
    for island in config.islands:
        port = island.master_port
        if port is None:
            continue
        if port in owner:
            raise UserError(
                f"islands.{island.name}.master_port: {port} is the port of island '{owner[port]}' already"
            )
        owner[port] = island.name
        if not _free(port):
            raise UserError(
                f"islands.{island.name}.master_port: {port} is in use; choose another, or leave it out for a free one"
            )


def check_joining(run: RunDir, config: RunConfig, island: str) -> None:
    """UserError if `island`, the newest of `config`, cannot run on this host beside those that run already."""
    from diloco_ds.core.fragments import FragmentLayout
    from diloco_ds.exchange.mailbox import Mailbox
    from diloco_ds.exchange.space import require_space

    settings = config.deepspeed_of(island)
    check_deepspeed(settings)
    ask_deepspeed([(island, settings, config.island(island).ranks)])
    if expert_parallel_size(settings) > 1:
        from transformers import AutoConfig

        from diloco_ds.model.build import meta_model

        check_experts(config, island, meta_model(AutoConfig.from_pretrained(run.model_config)))
    devices_of(config, island, clean_environment(os.environ))
    port = config.island(island).master_port
    if port is not None and not _free(port):
        raise UserError(f"master_port: {port} is in use; choose another, or leave it out for a free one")
    layout = FragmentLayout.from_json(run.layout.read_text())
    sizes = (Mailbox.file_size(layout.numels, inbox=inbox, experts=layout.experts) for inbox in (False, True))
    require_space(SHARED, sum(sizes))


def check_changed(run: RunDir, config: RunConfig) -> None:
    """UserError if the run cannot go on with `config`: it still runs, or the islands or devices refuse."""
    from diloco_ds.observe.status import ENDED, read_status

    status = read_status(run.root)
    if status.state not in ENDED:
        raise UserError(
            f"{run.root}: the run is {status.state}; settings change while it is stopped: diloco-ds stop {run.root}"
        )
    check_training(config)


def check_checkpoints(run: RunDir, config: RunConfig) -> None:
    """UserError for an island's newest checkpoint that is of another model or other fragments than the run's."""
    from diloco_ds.core.fragments import FragmentLayout
    from diloco_ds.island.checkpoints import IslandCheckpoints
    from diloco_ds.island.inner_state import read_facts

    layout = FragmentLayout.from_json(run.layout.read_text())
    for island in config.islands:
        checkpoints = IslandCheckpoints(run.island_checkpoints(island.name), config.syncer.keep_checkpoints)
        newest = checkpoints.newest()
        if newest is not None:
            read_facts(checkpoints.root / newest.tag, layout)


def check_run_dir(run_dir: Path) -> None:
    """UserError if the directory that the user named cannot become a new run's."""
    if run_dir.exists() and not run_dir.is_dir():
        raise UserError(f"--run-dir: {run_dir} is a file; name a directory that does not exist yet")
    if run_dir.is_dir() and any(run_dir.iterdir()):
        resume = f", or go on with it: diloco-ds train --resume {run_dir}"
        holds_run = (run_dir / "manifest.json").exists()
        raise UserError(
            f"--run-dir: {run_dir} is not empty; name another directory" + (resume if holds_run else "")
        )
    if why := obstacle(run_dir):
        raise UserError(f"--run-dir: {run_dir} cannot be made: {why}; name another directory")


def check_wandb(config: RunConfig) -> None:
    """UserError if wandb is to log online and nobody is logged in."""
    if config.observe.wandb.mode != "online":
        return
    from diloco_ds.observe.observer import resolve_mode

    if resolve_mode("auto") != "online":
        raise UserError(
            "observe.wandb.mode: online, but nobody is logged in to wandb; run `wandb login`, or set it to auto or offline"
        )


def check_tasks(config: RunConfig) -> None:
    """UserError for an lm-eval task that does not exist."""
    if config.evaluation.tasks:
        from diloco_ds.evaluate.tasks import find_tasks

        find_tasks(config.evaluation.tasks, [Path(directory) for directory in config.evaluation.task_dirs])


def check_training(config: RunConfig) -> None:
    """UserError for DeepSpeed settings, optimizers and schedules that the islands or the syncer would refuse."""
    from diloco_ds.core.outer import OuterOptimizer
    from diloco_ds.core.schedule import token_schedule

    settings = {island.name: config.deepspeed_of(island.name) for island in config.islands}
    for each in settings.values():
        check_deepspeed(each)
    ask_deepspeed([(island.name, settings[island.name], island.ranks) for island in config.islands])
    OuterOptimizer(config.exchange.outer).schedule(config.budget.tokens)
    trainer = config.trainer
    for each in settings.values():
        token_schedule(
            trainer.scheduler,
            trainer.scheduler_args,
            trainer.warmup_tokens,
            config.budget.tokens,
            each["optimizer"]["params"]["lr"],
            "trainer.scheduler",
        )


def check_sources(config: RunConfig, base_dir: Path) -> None:
    """UserError for text that is not there, before any of it is read."""
    from diloco_ds.data.source_files import find_files

    for source in config.data.sources:
        if source.files is not None:
            find_files(source, base_dir)


def planned_layout(config: RunConfig, base_dir: Path) -> FragmentLayout:
    """The fragments of the model, found without making its weights or reading the text.

    UserError for a model that cannot be built, whose vocabulary is not the tokenizer's, whose experts cannot be divided
    as an island says, or that has none where the merge weighs them. A tokenizer that is still to be
    trained counts with the size it is asked for.
    """
    from diloco_ds.core.fragments import balance
    from diloco_ds.data.tokenizer import load_tokenizer, vocabulary_size
    from diloco_ds.model.build import build_config, meta_model, tensor_specs

    path = config.tokenizer.path
    entries = (
        config.tokenizer.train_vocab if path is None else vocabulary_size(load_tokenizer(path, base_dir))
    )
    model = meta_model(build_config(config.model, int(entries or 0)))
    for island in config.islands:
        check_experts(config, island.name, model)
    layout = balance(tensor_specs(model), config.exchange.fragments, config.exchange.period)
    if config.exchange.merge.weights == "expert_tokens" and not any(layout.experts):
        raise UserError(
            f"exchange.merge.weights: expert_tokens, but {type(model).__name__} trains no experts in tensors "
            "[experts, ...]; take tokens"
        )
    return layout


def check_experts(config: RunConfig, island: str, model: PreTrainedModel) -> None:
    """UserError if the experts of `model` (it may be a meta one) cannot be divided among the island's ranks as it says."""
    size = expert_parallel_size(config.deepspeed_of(island))
    if size > 1:
        from diloco_ds.island.experts import check_division

        try:
            check_division(model, size, config.island(island).ranks)
        except UserError as error:
            raise UserError(f"islands.{island}.deepspeed.expert_parallel.autoep_size: {error}") from error


def check_shared_memory(config: RunConfig, layout: FragmentLayout, *, islands: bool) -> None:
    """UserError if the store and the mailboxes of a run do not fit into this host's shared memory."""
    from diloco_ds.exchange.space import require_space

    require_space(SHARED, sum(_shared_sizes(config, layout, islands)))


def _shared_sizes(config: RunConfig, layout: FragmentLayout, islands: bool) -> Iterator[int]:
    from diloco_ds.core.outer import OuterOptimizer
    from diloco_ds.exchange.mailbox import Mailbox
    from diloco_ds.exchange.store import Store

    yield Store.file_size(layout, OuterOptimizer(config.exchange.outer).buffers)
    for _ in config.islands:
        yield Mailbox.file_size(layout.numels, inbox=False, experts=layout.experts)
        if islands:
            yield Mailbox.file_size(layout.numels, inbox=True, experts=layout.experts)


def _free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
