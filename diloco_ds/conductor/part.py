"""One process of a run that the conductor keeps running: started, taken over, watched, started again."""

from __future__ import annotations

import contextlib
import logging
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import psutil

from diloco_ds.conductor import marks
from diloco_ds.island.watch import Restarts
from diloco_ds.observe.status_files import StatusFile, read_status_file
from diloco_ds.rundir import RunDir

USER_ERROR = 2
"""Exit code of a process that cannot run as configured."""
STEADY_AFTER_S = 10.0
"""A process that lived this long did start: its end counts as a death, not as a start that failed."""

State = Literal["new", "running", "waiting", "ended", "failed"]
Command = tuple[list[str], dict[str, str]]

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Endings:
    """What counts as an end for good, and not as a death: states in the part's own status file, and its exit code."""

    well: frozenset[str] = frozenset()
    badly: frozenset[str] = frozenset()
    by_exit_code: bool = True  # 0: it is done, 2: it cannot run as configured
    give_up_after: int = 10  # starts in a row that did not last


class Part:
    """The process for `role`; `command` gives its argv and environment at each start.

    Its output goes to the log of the role. It runs in a session of its own, so that Ctrl-C and the conductor's
    death leave it alone.
    """

    def __init__(
        self,
        run: RunDir,
        run_id: str,
        role: str,
        command: Callable[[], Command],
        endings: Endings | None = None,
    ) -> None:
        self.role = role
        self.state: State = "new"
        self.reason = ""
        self._run, self._run_id, self._command = run, run_id, command
        self._endings = endings or Endings()
        self._process: psutil.Process | None = None
        self._popen: subprocess.Popen[bytes] | None = None
        self._started_at = self._start_due = 0.0
        self._restarts = Restarts(
            shortest_s=0.5,
            longest_s=30.0,
            healthy_after_s=STEADY_AFTER_S,
            give_up_after=self._endings.give_up_after,
        )

    @property
    def over(self) -> bool:
        """True when it has ended for good."""
        return self.state in ("ended", "failed")

    @property
    def pid(self) -> int | None:
        """Process id while it runs."""
        return self._process.pid if self._process is not None and self.state == "running" else None

    def record(self) -> dict[str, Any] | None:
        """What a later conductor needs to find the process again; None if it does not run."""
        if self._process is None or self.state != "running":
            return None
        return {
            "pid": self._process.pid,
            "create_time": self._process.create_time(),
            "restarts": self._restarts.count,
        }

    def start(self) -> None:
        """Start the process; what an earlier one of the role left running is killed first.

        OSError if it cannot be started.
        """
        marks.kill(lambda: marks.processes_of(self._run_id, self.role))
        argv, environment = self._command()
        path = self._run.log(self.role)
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab") as output:
            self._popen = subprocess.Popen(
                argv,
                env=marks.marked(environment, self._run_id, self.role),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._process = psutil.Process(self._popen.pid)
        self.state, self._started_at = "running", time.monotonic()

    def take_over(self, record: dict[str, Any]) -> bool:
        """Watch the process that an earlier conductor recorded; False if it is gone."""
        try:
            process = psutil.Process(record["pid"])
            same = process.create_time() == record["create_time"] and process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False
        if same:
            self._process, self.state, self._started_at = (
                process,
                "running",
                time.monotonic() - STEADY_AFTER_S,
            )
        return same

    def end(self, reason: str) -> None:
        """It is not needed any more; the caller has ended the process, or there is none."""
        self.state, self.reason = "ended", reason

    def poll(self) -> str | None:
        """Look after the process, and start it again when that is due; what has changed, in words."""
        if self.state == "waiting" and time.monotonic() >= self._start_due:
            return self._start_again()
        if self.state != "running" or self.alive():
            return None
        return self._died()

    def alive(self) -> bool:
        """Whether the process runs. A child that has ended is reaped by this."""
        if self._popen is not None:
            return self._popen.poll() is None
        if self._process is None:
            return False
        with contextlib.suppress(psutil.NoSuchProcess):
            return self._process.is_running() and self._process.status() != psutil.STATUS_ZOMBIE
        return False

    def exit_code(self) -> int | None:
        """The exit code of the process that has ended; None where that is not to be known (it was taken over)."""
        return None if self._popen is None else self._popen.poll()

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process, if it runs."""
        if self._process is not None and self.alive():
            with contextlib.suppress(psutil.NoSuchProcess):
                self._process.send_signal(number)

    def _start_again(self) -> str:
        try:
            self.start()
        except OSError as error:  # no room for its log, no process to be had: that may pass
            self._await_restart(f"it cannot be started ({error})", lived=0.0)
            return self.reason
        return "started again"

    def _died(self) -> str:
        code, said = self.exit_code(), self._own_words()
        lived = time.monotonic() - self._started_at
        if said is not None and said.state in self._endings.well:
            self.state, self.reason = "ended", said.reason or str(said.state)
        elif said is not None and said.state in self._endings.badly:
            self.state, self.reason = "failed", said.reason or str(said.state)
        elif code == 0 and self._endings.by_exit_code:
            self.state, self.reason = "ended", "it is done"
        elif code == USER_ERROR and self._endings.by_exit_code:
            self.state, self.reason = "failed", self._last_error()
        else:
            self._await_restart("it ended" if code is None else f"it ended with exit code {code}", lived)
        return self.reason

    def _await_restart(self, what: str, lived: float) -> None:
        delay = self._restarts.ended(lived if lived >= STEADY_AFTER_S else None)
        if delay is None:
            self.state = "failed"
            starts = self._restarts.barren
            self.reason = f"given up: {starts} starts in a row did not last; see {self._run.log(self.role)}"
            return
        self.state, self._start_due = "waiting", time.monotonic() + delay
        self.reason = f"{what}; next start in {delay:.1f} s; see {self._run.log(self.role)}"

    def _own_words(self) -> StatusFile | None:
        """The status file, if it is this process's own."""
        said = read_status_file(self._run, self.role, StatusFile)
        return (
            said if said is not None and self._process is not None and said.pid == self._process.pid else None
        )

    def _last_error(self) -> str:
        lines = self._run.log(self.role).read_text(errors="replace").splitlines()
        said = [line.removeprefix("error: ") for line in lines if line.strip()]
        return f"{said[-1] if said else 'it cannot run as configured'}; see {self._run.log(self.role)}"
