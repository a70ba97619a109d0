"""The processes of a learner: found by a mark in their environment, signalled and killed together.

Every process below a launch inherits the mark `run/island/incarnation`. It tells a learner's processes from
all others without any record of process ids: after the death of the supervisor, of the launcher or of both,
nothing is lost and nothing foreign is hit.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from pathlib import Path

import psutil

MARK = "DILOCO_DS_LEARNER"
KILLED_WITHIN_S = 10.0


class LearnerProcesses:
    """Launcher and ranks of one incarnation of an island's learner.

    `popen` is the launcher as this process's own child; None for a learner that another supervisor started.
    """

    def __init__(
        self, run_id: str, island: str, incarnation: int, popen: subprocess.Popen[bytes] | None = None
    ) -> None:
        self.incarnation = incarnation
        self._mark = mark(run_id, island, incarnation)
        self._popen = popen
        self._launcher: psutil.Process | None = None  # of a learner that another supervisor started
        self._ranks: dict[int, psutil.Process] = {}
        self._broken_since: float | None = None

    @classmethod
    def start(
        cls,
        command: list[str],
        environment: dict[str, str],
        log: Path,
        run_id: str,
        island: str,
        incarnation: int,
    ) -> LearnerProcesses:
        """Launch `command` in a session of its own, so that it outlives this process; its output is appended
        to `log`.
        """
        log.parent.mkdir(parents=True, exist_ok=True)
        environment = {**environment, MARK: mark(run_id, island, incarnation)}
        with log.open("ab") as output:
            popen = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return cls(run_id, island, incarnation, popen)

    @property
    def taken_over(self) -> bool:
        """Whether another supervisor started it."""
        return self._popen is None

    @property
    def launcher(self) -> int | None:
        """Process id of the `deepspeed` launcher, None if it is gone; of one taken over also before `find_processes`."""
        if self._popen is not None:
            return self._popen.pid if self._popen.returncode is None else None
        return self._launcher.pid if self._launcher is not None and _alive(self._launcher) else None

    @property
    def ranks(self) -> dict[int, int]:
        """Process ids of the ranks found so far, by rank."""
        return {rank: process.pid for rank, process in sorted(self._ranks.items())}

    def members(self) -> list[psutil.Process]:
        """Every live process of the learner, oldest first."""
        found = [
            process for process in psutil.process_iter() if _environment(process).get(MARK) == self._mark
        ]
        return sorted(found, key=lambda process: process.pid)

    def find_processes(self, expected: int) -> bool:
        """Look for the launcher and the ranks; True when all `expected` ranks have been found. Costs a look at every
        process of the host.
        """
        if len(self._ranks) < expected:
            members = self.members()
            self._ranks = _ranks_among(members)
            self._launcher = next((each for each in members if "RANK" not in _environment(each)), None)
        return len(self._ranks) == expected

    def broken_for(self, now: float) -> float:
        """Seconds, at `now`, since a rank that had been found was first seen to have ended; 0 while all live."""
        if all(_alive(process) for process in self._ranks.values()):
            self._broken_since = None
        elif self._broken_since is None:
            self._broken_since = now
        return now - self._broken_since if self._broken_since is not None else 0.0

    def exit_code(self) -> int | None:
        """None while it runs; else the launcher's exit code (-9 = by SIGKILL).

        The code of a learner that another supervisor started cannot be had: 0 as soon as its launcher or one of its
        ranks is gone.
        """
        if self._popen is not None:
            return self._popen.poll()
        if not self._ranks:
            return None if self.members() else 0
        return None if self.launcher and all(_alive(process) for process in self._ranks.values()) else 0

    def signal_ranks(self, number: signal.Signals) -> int:
        """Send a signal to every rank; returns how many there were."""
        ranks = list(_ranks_among(self.members()).values())
        for process in ranks:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)
        return len(ranks)

    def kill(self) -> None:
        """SIGKILL to every process of the learner; returns when none is left, OSError if one withstands."""
        deadline = time.monotonic() + KILLED_WITHIN_S
        members = self.members()
        while members and time.monotonic() < deadline:
            for process in members:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            psutil.wait_procs(members, timeout=1.0)
            members = self.members()  # again: one may have been born meanwhile
        if self._popen is not None and not members:
            self._popen.wait()
        if members:
            raise OSError(
                f"processes {[process.pid for process in members]} of {self._mark} withstand SIGKILL"
            )


def mark(run_id: str, island: str, incarnation: int) -> str:
    """Value of the environment variable `MARK` for one incarnation."""
    return f"{run_id}/{island}/{incarnation}"


def running_incarnations(run_id: str, island: str) -> list[int]:
    """Incarnations of the island's learner that have live processes on this host, oldest first."""
    prefix = f"{run_id}/{island}/"
    marks = {_environment(process).get(MARK, "") for process in psutil.process_iter()}
    return sorted(int(each.removeprefix(prefix)) for each in marks if each.startswith(prefix))


def _ranks_among(members: list[psutil.Process]) -> dict[int, psutil.Process]:
    """Those of `members` that are ranks: they carry RANK, and their parent does not."""
    numbered = {process.pid: process for process in members if "RANK" in _environment(process)}
    ranks = {}
    for process in numbered.values():
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.ppid() not in numbered:
                ranks[int(_environment(process)["RANK"])] = process
    return ranks


def _environment(process: psutil.Process) -> dict[str, str]:
    """The environment a process was started with; empty for another user's, a dead one, a zombie and this
    process itself.
    """
    if process.pid == os.getpid():
        return {}
    try:
        return process.environ()
    except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess, OSError):
        return {}


def _alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
