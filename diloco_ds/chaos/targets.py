"""The living processes that a fault is aimed at, found through what the run says of itself."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable

import psutil

from diloco_ds.island.learner_processes import LearnerProcesses, running_incarnations
from diloco_ds.observe.status import IslandStatus, Status, read_status
from diloco_ds.rundir import RunDir


class NotThere(Exception):
    """What the fault is aimed at does not run at this moment: in words, which."""


class Targets:
    """The processes of `run` as of now."""

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self.status: Status = read_status(run.root)

    def processes(self, target: str) -> list[psutil.Process]:
        """Those that `target` names: an island's ranks, a part of an island, or a part of the run. NotThere if none."""
        if target == "syncer":
            pids: list[int | None] = [*self.status.syncer.pids]
        elif target == "conductor":
            pids = [self.status.conductor_pid]
        else:
            pids = self._of_island(target)
        return _living(pids, f"{target} does not run")

    def link(self, island: str) -> list[psutil.Process]:
        """Both ends of the island's link: proxy and agent."""
        ends = self._island(island).pids
        return _living([ends.proxy, ends.agent], f"the link of {island} does not run")

    def host(self, island: str) -> list[psutil.Process]:
        """All that would die with the island's host: the supervisor, everything below the launcher, the agent."""
        run_id, pids = self.status.run_id, self._island(island).pids
        learners = [
            process.pid
            for incarnation in running_incarnations(run_id, island)
            for process in LearnerProcesses(run_id, island, incarnation).members()
        ]
        return _living([pids.supervisor, *learners, pids.agent], f"nothing of {island} runs")

    def writers(self) -> list[psutil.Process]:
        """Everybody who writes checkpoints, status or metrics: syncer, supervisors, launchers, ranks, links."""
        pids: list[int | None] = [*self.status.syncer.pids]
        for island in self.status.islands:
            own = island.pids
            pids += [own.supervisor, own.launcher, *own.ranks, own.agent, own.proxy]
        return _living(pids, "nothing of the run runs")

    def living_islands(self) -> list[str]:
        """Islands whose learner runs."""
        return [island.name for island in self.status.islands if island.pids.ranks]

    def _of_island(self, target: str) -> list[int | None]:
        name, _, part = target.partition(".")
        pids = self._island(name).pids
        if not part:
            return [*pids.ranks]
        if part == "mpirun":
            return [self._mpirun(name)]
        if part.startswith("rank"):
            rank = int(part.removeprefix("rank"))
            return [pids.ranks[rank]] if rank < len(pids.ranks) else []
        pid: int | None = getattr(pids, part)
        return [pid]

    def _island(self, name: str) -> IslandStatus:
        for island in self.status.islands:
            if island.name == name:
                return island
        raise NotThere(f"island {name} has not started")

    def _mpirun(self, island: str) -> int | None:
        """The process that the conductor started as the island's link."""
        path = self._run.status("conductor")
        parts = json.loads(path.read_text()).get("parts", {}) if path.exists() else {}
        recorded = parts.get(f"link.{island}", {})
        with contextlib.suppress(psutil.NoSuchProcess, KeyError):
            if psutil.Process(recorded["pid"]).create_time() == recorded["create_time"]:
                return int(recorded["pid"])
        return None


def _living(pids: Iterable[int | None], why_none: str) -> list[psutil.Process]:
    found = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            if pid is not None:
                found.append(psutil.Process(pid))
    if not found:
        raise NotThere(why_none)
    return found
