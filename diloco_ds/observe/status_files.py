"""The files under status/ as their writers leave them, and whether the processes they name still live.

Each long-lived process writes one file of itself, atomically. A file outlives its process, so what it says is
believed only as far as its process id still belongs to that process.
"""

from __future__ import annotations

import json
import logging
import socket
from pathlib import Path
from typing import Any, TypeVar

import psutil
from pydantic import BaseModel, ConfigDict, ValidationError

from diloco_ds.rundir import RunDir

_ENDED_STATES = ("done", "stopped", "finished", "failed")

CLOCK_SLACK_S = 2.0
"""How far the kernel's creation time of a process and the wall clock may disagree."""

log = logging.getLogger(__name__)


class StatusFile(BaseModel):
    """What every status file holds; each field may be missing, unknown ones are ignored."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    pid: int | None = None
    host: str | None = None  # that `pid` belongs to; None: this one
    started: float = 0.0  # epoch seconds
    state: str | None = None
    reason: str | None = None

    @property
    def alive(self) -> bool:
        """The process that wrote this file still runs; of one on another host only its own word is known."""
        if self.elsewhere:
            return self.state not in _ENDED_STATES
        return self.pid is not None and is_alive(self.pid, self.started)

    @property
    def elsewhere(self) -> bool:
        """Written on another host."""
        return self.host is not None and self.host != socket.gethostname()


class IslandInSyncer(BaseModel):
    """One island as the syncer sees it."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    alive: bool = False
    phase: str | None = None
    incarnation: int | None = None
    step: int | None = None
    tokens: int | None = None
    tokens_per_s: float | None = None
    loss: float | None = None
    merged: int = 0
    missed: int = 0
    eligible: int | bool | None = None
    token_share: float | None = None
    reason: str | None = None


class LedgerFile(BaseModel):
    """What has become of the data, in blocks (core/ledger.py): merged + leased + free = epochs * epoch_blocks."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    epoch_blocks: int = 0
    epochs: int = 0
    merged: int = 0
    leased: int = 0
    free: int = 0
    trained_twice: int = 0
    reserve: int = 0
    lost: int = 0


class SyncerFile(StatusFile):
    """status/syncer.json."""

    generation: int = 0
    global_step: int = 0
    tokens: int = 0
    target_tokens: int | None = None
    merges: int = 0
    drops: int = 0
    lost: str | None = None
    ledger: LedgerFile = LedgerFile()
    islands: dict[str, IslandInSyncer] = {}


class SupervisedPids(BaseModel):
    """The processes of an island's DeepSpeed job."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    launcher: int | None = None
    ranks: list[int] = []


class SupervisorFile(StatusFile):
    """status/supervisor.NAME.json."""

    incarnation: int | None = None
    pids: SupervisedPids = SupervisedPids()
    restarts: int = 0
    written: float = 0.0  # epoch seconds; filled in from the file

    def living(self, pid: int | None) -> int | None:
        """`pid`, if it is still the process that was meant when the file was written; as `alive`."""
        if pid is None or (self.elsewhere and self.alive):
            return pid
        return pid if not self.elsewhere and is_alive(pid, self.written) else None


File = TypeVar("File", bound=StatusFile)


def is_alive(pid: int, known_at: float) -> bool:
    """True if the process `pid` runs and is the one that had this id at `known_at` (epoch seconds).

    A process that got the id later was created later. A zombie counts as dead.
    """
    try:
        process = psutil.Process(pid)
        return process.create_time() <= known_at + CLOCK_SLACK_S and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def read_status_file(run: RunDir, role: str, kind: type[File]) -> File | None:
    """The status file of `role`; None if there is none, or none that can be understood (which is logged)."""
    path = run.status(role)
    try:
        content: dict[str, Any] = json.loads(path.read_text())
        if kind is SupervisorFile:
            content["written"] = path.stat().st_mtime
        return kind.model_validate(content)
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, ValidationError) as error:
        log.warning("%s is not understood: %s", path, str(error).splitlines()[0])
        return None


def supervised_islands(run: RunDir) -> list[str]:
    """Names of the islands that have, or had, a supervisor."""
    files = Path(run.root / "status").glob("supervisor.*.json")
    return sorted(path.name.removeprefix("supervisor.").removesuffix(".json") for path in files)
