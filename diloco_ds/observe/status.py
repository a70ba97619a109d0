"""The state of a run, put together from what its processes say and from which of them still live."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict

from diloco_ds.errors import UserError
from diloco_ds.observe.manifest import read_manifest
from diloco_ds.observe.metrics import last_record
from diloco_ds.observe.status_files import (
    IslandInSyncer,
    LedgerFile,
    StatusFile,
    SupervisorFile,
    SyncerFile,
    read_status_file,
    supervised_islands,
)
from diloco_ds.rundir import RunDir

RunState = Literal["preparing", "running", "draining", "stopping", "stopped", "finished", "failed", "dead"]
"""preparing: no island steps yet; draining: last updates, last evaluations, export; dead: gone without a stop."""

ENDED: tuple[RunState, ...] = ("stopped", "finished", "failed", "dead")

_STATE_WORDS: dict[str, RunState] = {
    "starting": "preparing",
    **{
        word: word
        for word in ("preparing", "running", "draining", "stopping", "stopped", "finished", "failed")
    },
}
"""What the processes call the state of the run, in the words of `RunState`."""

_STILL_AT_WORK: dict[str, RunState] = {"finished": "draining", "stopped": "stopping", "failed": "running"}
"""The run's state while the conductor closes what its syncer has ended: evaluation, export; checkpoints; a restart."""

_ISLAND_ENDED = ("done", "stopped", "failed")


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True)


class SyncerStatus(_Part):
    """The syncer: `pids` are the living ones."""

    generation: int
    state: str
    pids: list[int]
    merges: int
    drops: int
    lost: str | None
    """What did not come back when it began, after its memory was lost; None where nothing was lost."""


class IslandPids(_Part):
    """Living processes of an island."""

    ranks: list[int]
    launcher: int | None
    supervisor: int | None
    agent: int | None
    proxy: int | None


class IslandStatus(_Part):
    """One island: its step clock, the tokens it trained on, the rounds it was merged in and missed."""

    name: str
    state: str
    incarnation: int | None
    pids: IslandPids
    step: int | None
    tokens: int | None
    tokens_per_s: float | None
    loss: float | None
    merged: int
    missed: int
    alive: bool
    token_share: float | None
    restarts: int
    reason: str | None

    @property
    def merge_share(self) -> float | None:
        """Share of the rounds it was asked in that merged its answer; None before the first."""
        asked = self.merged + self.missed
        return self.merged / asked if asked else None


class Status(_Part):
    """A whole run at one moment; `model_dump(mode="json")` is what `status --json` prints."""

    run_id: str
    name: str
    run_dir: str
    state: RunState
    reason: str | None
    global_step: int
    tokens: int
    target_tokens: int | None
    tokens_per_s: float
    eta_s: float | None
    conductor_pid: int | None
    syncer: SyncerStatus
    ledger: LedgerFile
    islands: list[IslandStatus]
    last_eval: dict[str, Any] | None


def read_status(run_dir: Path) -> Status:
    """The state of the run in `run_dir` now. UserError if that is no run directory."""
    manifest = read_manifest(run_dir)
    run = RunDir(run_dir)
    config = _read_config(run)
    conductor = read_status_file(run, "conductor", StatusFile)
    syncer = read_status_file(run, "syncer", SyncerFile) or SyncerFile()
    islands = [_island(run, name, syncer) for name in _island_names(run, config, syncer)]
    state, reason = _run_state(conductor, syncer, islands)
    target = syncer.target_tokens or config.get("budget", {}).get("tokens")
    rate = sum(island.tokens_per_s or 0.0 for island in islands if island.alive) if syncer.alive else 0.0
    return Status(
        run_id=manifest["run_id"],
        name=manifest.get("name", run_dir.name),
        run_dir=str(run_dir),
        state=state,
        reason=reason,
        global_step=syncer.global_step,
        tokens=syncer.tokens,
        target_tokens=target,
        tokens_per_s=rate,
        eta_s=max(target - syncer.tokens, 0) / rate if target and rate and state not in ENDED else None,
        conductor_pid=conductor.pid if conductor and conductor.alive else None,
        syncer=_syncer(syncer),
        ledger=syncer.ledger,
        islands=islands,
        last_eval=last_record(run.metrics, "eval"),
    )


def _read_config(run: RunDir) -> dict[str, Any]:
    return _parse_config(run.config, run.config.stat().st_mtime_ns) if run.config.is_file() else {}


@lru_cache(maxsize=8)
def _parse_config(path: Path, _changed_ns: int) -> dict[str, Any]:
    """YAML is slow to read, and a view asks every second."""
    config = yaml.safe_load(path.read_text())
    if not isinstance(config, dict):
        raise UserError(f"{path} is no run configuration: a YAML mapping is expected")
    return config


def _island_names(run: RunDir, config: dict[str, Any], syncer: SyncerFile) -> list[str]:
    """In the order of the configuration; islands that joined later come behind."""
    names = [island["name"] for island in config.get("islands", [])]
    return list(dict.fromkeys([*names, *syncer.islands, *supervised_islands(run)]))


def _syncer(syncer: SyncerFile) -> SyncerStatus:
    state = _STATE_WORDS.get(syncer.state or "", syncer.state) or "absent"
    if not syncer.alive and syncer.pid is not None and state not in ENDED:
        state = "dead"
    return SyncerStatus(
        generation=syncer.generation,
        state=state,
        pids=[syncer.pid] if syncer.pid is not None and syncer.alive else [],
        merges=syncer.merges,
        drops=syncer.drops,
        lost=syncer.lost,
    )


def _island(run: RunDir, name: str, syncer: SyncerFile) -> IslandStatus:
    seen = syncer.islands.get(name, IslandInSyncer())
    supervisor = read_status_file(run, f"supervisor.{name}", SupervisorFile) or SupervisorFile()
    ends = {role: read_status_file(run, f"{role}.{name}", StatusFile) for role in ("agent", "proxy")}
    pids = IslandPids(
        ranks=[pid for pid in supervisor.pids.ranks if supervisor.living(pid)],
        launcher=supervisor.living(supervisor.pids.launcher),
        supervisor=supervisor.pid if supervisor.alive else None,
        **{role: end.pid if end and end.alive else None for role, end in ends.items()},
    )
    incarnations = [number for number in (supervisor.incarnation, seen.incarnation) if number is not None]
    return IslandStatus(
        name=name,
        state=_island_state(supervisor, pids, seen),
        incarnation=max(incarnations, default=None),
        pids=pids,
        step=seen.step,
        tokens=seen.tokens,
        tokens_per_s=seen.tokens_per_s,
        loss=seen.loss,
        merged=seen.merged,
        missed=seen.missed,
        alive=seen.alive and syncer.alive and bool(pids.ranks),
        token_share=seen.token_share,
        restarts=supervisor.restarts,
        reason=supervisor.reason or seen.reason,
    )


def _island_state(supervisor: SupervisorFile, pids: IslandPids, seen: IslandInSyncer) -> str:
    """The supervisor's word, made finer by what the syncer hears of a running learner."""
    if supervisor.state in _ISLAND_ENDED:
        return str(supervisor.state)
    if not pids.supervisor and not pids.ranks:
        return "dead" if supervisor.pid is not None else seen.phase or "waiting"
    state = supervisor.state or "starting"
    if state != "running":
        return state
    if seen.phase in ("starting", "drained", "stopped"):
        return seen.phase
    return state if seen.alive or seen.phase is None else "absent"


def _run_state(
    conductor: StatusFile | None, syncer: SyncerFile, islands: list[IslandStatus]
) -> tuple[RunState, str | None]:
    """The newest living word counts; words of processes that ended count only when nothing lives any more."""
    of_syncer = _STATE_WORDS.get(syncer.state or "", "running")
    if conductor is not None and conductor.alive:
        return _state_with_conductor(conductor, syncer), conductor.reason or syncer.reason
    if syncer.alive:
        return of_syncer, syncer.reason or "the conductor is gone, the run goes on"
    if any(island.pids.ranks for island in islands):
        return "running", "the syncer is gone, the islands train on"
    words = [
        (file.started, _STATE_WORDS.get(file.state or ""), file.reason)
        for file in (conductor, syncer)
        if file
    ]
    for _, word, reason in sorted(words, key=lambda entry: -entry[0]):
        if word in ENDED:
            return word, reason
    return "dead", "its processes are gone without a stop"


def _state_with_conductor(conductor: StatusFile, syncer: SyncerFile) -> RunState:
    of_conductor = _STATE_WORDS.get(conductor.state or "")
    if of_conductor is not None and of_conductor != "running":
        return of_conductor
    from_before = not syncer.alive and (syncer.pid is None or syncer.started < conductor.started)
    if from_before:
        return of_conductor or "preparing"
    of_syncer = _STATE_WORDS.get(syncer.state or "", "running")
    if of_syncer in _STILL_AT_WORK:  # the syncer is done, the conductor is not yet
        return _STILL_AT_WORK[of_syncer]
    return of_syncer if syncer.alive else "running"
