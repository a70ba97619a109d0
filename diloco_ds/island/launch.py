"""How an island's learner is launched: the `deepspeed` command line and the environment of its ranks."""

from __future__ import annotations

import os
import shutil
import socket
import sys
from collections.abc import Mapping
from pathlib import Path

from diloco_ds import program
from diloco_ds.config import RunConfig
from diloco_ds.errors import UserError

LEARNER_MODULE = "diloco_ds.island.learner"


def launch_command(
    run_dir: Path, config: RunConfig, island: str, devices: list[int] | None, module: str = LEARNER_MODULE
) -> list[str]:
    """The `deepspeed` command that starts the island's ranks on this host. Each runs `module RUN_DIR ISLAND`.

    `devices`: GPU indices, one per rank; None = no GPU here, DeepSpeed takes the CPU. A port is chosen where
    none is set.
    """
    settings = config.island(island)
    where = ["--num_gpus", str(settings.ranks)]
    if devices is not None:
        where = ["--include", "localhost:" + ",".join(str(device) for device in devices)]
    return [
        _deepspeed(),
        *where,
        *("--hostfile", os.devnull),  # this host only, whatever lies at DeepSpeed's default place
        *("--master_addr", "127.0.0.1", "--master_port", str(settings.master_port or free_port())),
        *("--no_local_rank", "--module", program.__name__, module, str(run_dir), island),
    ]


def rank_environment(config: RunConfig, island: str, inherited: Mapping[str, str]) -> dict[str, str]:
    """The environment of the launcher and its ranks; `inherited` is free of MPI's variables already.

    CPU threads per rank are the cores of this process divided by all ranks of the run, unless the island says
    otherwise.
    """
    settings = config.island(island)
    ranks = sum(each.ranks for each in config.islands)
    threads = settings.threads_per_rank or max(1, len(os.sched_getaffinity(0)) // ranks)
    fixed = {"OMP_NUM_THREADS": str(threads), "PYTHONUNBUFFERED": "1"}
    world = {"MASTER_ADDR", "MASTER_PORT", "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_SIZE"}
    kept = {name: value for name, value in inherited.items() if name not in world}
    return {**kept, **fixed, **settings.env}


def devices_of(config: RunConfig, island: str, inherited: Mapping[str, str]) -> list[int] | None:
    """GPU indices for the island's ranks, None where this host has no NVIDIA GPU or the island is to run on
    the CPU.

    Islands take the visible GPUs in the order of the configuration; an island's own CUDA_VISIBLE_DEVICES goes
    before. UserError where there are too few or they are not given as indices.
    """
    settings = config.island(island)
    if {**inherited, **settings.env}.get("DS_ACCELERATOR") == "cpu":
        return None
    own = settings.env.get("CUDA_VISIBLE_DEVICES")
    visible = _visible(own if own is not None else inherited.get("CUDA_VISIBLE_DEVICES"), island)
    if not visible:
        return None
    start = 0 if own is not None else _ranks_before(config, island)
    devices = visible[start : start + settings.ranks]
    if len(devices) < settings.ranks:
        raise UserError(
            f"islands.{island}: {settings.ranks} ranks from GPU {start} on, but only {len(visible)} GPUs are "
            "visible; use fewer ranks, or set env: {CUDA_VISIBLE_DEVICES: ...} for the island"
        )
    return devices


def free_port() -> int:
    """A TCP port of this host that nobody uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _deepspeed() -> str:
    beside = Path(sys.executable).with_name("deepspeed")
    found = str(beside) if beside.exists() else shutil.which("deepspeed")
    if found is None:
        raise UserError(
            f"no `deepspeed` launcher beside {sys.executable} or on PATH; bash launch/setup.sh installs it"
        )
    return found


def _visible(listed: str | None, island: str) -> list[int]:
    present = sorted(int(path.name[6:]) for path in Path("/dev").glob("nvidia[0-9]*"))
    if listed is None or not present:
        return present
    try:
        return [int(device) for device in listed.split(",") if device.strip()]
    except ValueError:
        raise UserError(
            f"islands.{island}: CUDA_VISIBLE_DEVICES={listed} must list indices (0,1,...): "
            "DeepSpeed's launcher takes no others"
        ) from None


def _ranks_before(config: RunConfig, island: str) -> int:
    names = [each.name for each in config.islands]
    return sum(each.ranks for each in config.islands[: names.index(island)])
