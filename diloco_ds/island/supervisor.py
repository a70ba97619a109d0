"""The supervisor of an island: starts its learner, watches it, starts it again, and takes over a learner it
finds running.

    python -m diloco_ds.island.supervisor RUN_DIR ISLAND

The learner lives in a session of its own and trains on if the supervisor dies. Exit code 0: the learner ended
as it was asked to (drained or stopped). 1: it was given up. 2: it cannot run as configured. SIGTERM (or
Ctrl-C) asks the learner for a clean end with a checkpoint and kills it after `CLEAN_END_S`; a second one
kills it at once.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import logging
import os
import re
import signal
import socket
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from diloco_ds.config import RunConfig
from diloco_ds.core.events import Report
from diloco_ds.core.fragments import FragmentLayout
from diloco_ds.errors import UserError
from diloco_ds.exchange.failpoint import failpoint
from diloco_ds.exchange.link_launch import clean_environment
from diloco_ds.exchange.mailbox import Mailbox
from diloco_ds.exchange.wire import OrdersRecord, ReportRecord
from diloco_ds.island.launch import devices_of, launch_command, rank_environment
from diloco_ds.island.learner_processes import LearnerProcesses, running_incarnations
from diloco_ds.island.watch import HUNG, Restarts, StepRhythm
from diloco_ds.membership import run_config
from diloco_ds.observe.metrics import MetricsFile
from diloco_ds.rundir import RunDir, SharedMemory, write_atomically, write_json

CLEAN_END_S = 25.0
"""How long a learner that was asked to stop may take to write its checkpoint."""
POLL_S = 0.2
LAUNCHER_WITHIN_S = 3.0
"""For the launcher to end once a rank has that told of an error: its exit code says more. It asks the other ranks to
end and gives them 30 s; those of a broken world may be stuck in a collective operation and hear nothing.
"""
GIVEN_UP = 1
USER_ERROR = 2
"""Exit code of a learner that cannot run as it is configured: starting it again would not help."""
LAST_OWN_CODE = 192
"""Above this, DeepSpeed's launcher means a signal: 256 - number."""
KILLS = {signal.SIGKILL, signal.SIGTERM}
"""Somebody else's doing; any other signal is a failure of the learner's own."""

_ERROR_LINE = re.compile(r"^(?:\[rank\d+\]: )?((?:error: |[\w.]+(?:Error|Exception)\b).*)", re.MULTILINE)

State = Literal["starting", "running", "restarting", "draining", "done", "stopped", "failed"]

log = logging.getLogger("supervisor")


@dataclass
class Status:
    """What status/supervisor.NAME.json holds; written on every change."""

    started: float = field(default_factory=time.time)
    state: State = "starting"
    reason: str = ""
    incarnation: int = 0
    launcher: int | None = None
    ranks: dict[int, int] = field(default_factory=dict)
    restarts: int = 0
    last_exit: int | None = None

    def as_json(self) -> dict[str, Any]:
        """The file's content."""
        return {
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "started": self.started,
            "state": self.state,
            "reason": self.reason,
            "incarnation": self.incarnation,
            "pids": {"launcher": self.launcher, "ranks": list(self.ranks.values())},
            "restarts": self.restarts,
            "last_exit": self.last_exit,
        }


@dataclass(frozen=True)
class Ending:
    """How a learner ended: `final` states are the supervisor's own end, "restarting" is none."""

    state: Literal["done", "stopped", "failed", "restarting"]
    reason: str
    exit_code: int = 0  # the supervisor's own
    failure: str | None = (
        None  # what went wrong in the learner itself, where it was not killed: its error, or HUNG
    )


class Supervisor:
    """Watches over the learner of one island. Only one per island can exist: UserError where another one
    does.
    """

    def __init__(self, run: RunDir, island: str) -> None:
        self._run, self._island = run, island
        self._config = _config_of(run, island)
        self._lock = _lock(run.status(f"supervisor.{island}").with_suffix(".lock"), island)
        self._run_id = run.run_id()
        self._mailbox = self._open_mailbox()
        self._log_start = 0  # where this incarnation's output begins
        self._metrics = MetricsFile(run.metrics)
        self._restarts = Restarts()
        self._status = Status()
        self._stops = 0
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._count_stop)

    def run(self) -> int:
        """Supervise until the learner has ended for good; the exit code."""
        learner = self._take_over() or self._launch()
        while True:
            rhythm = StepRhythm()
            since = time.monotonic()
            ending = self._watch(learner, rhythm)
            self._status.last_exit = learner.exit_code()
            learner.kill()
            if ending.state == "restarting":
                stepped_for_s = time.monotonic() - since if rhythm.stepping else None
                ending = self._pause(ending, stepped_for_s, rhythm.step)
            if ending.state != "restarting":
                return self._end(ending)
            learner = self._launch()

    def _take_over(self) -> LearnerProcesses | None:
        """The learner that runs already, started by a supervisor that is gone; remains of older ones are
        killed.
        """
        running = running_incarnations(self._run_id, self._island)
        if not running:
            return None
        *older, learner = [LearnerProcesses(self._run_id, self._island, each) for each in running]
        for old in older:
            old.kill()
        learner.find_processes(self._config.island(self._island).ranks)
        if learner.launcher is None:
            learner.kill()
            return None
        self._log_start = self._run.log(self._island).stat().st_size  # no error before now has ended it
        self._status.incarnation = learner.incarnation
        self._change("starting", f"took over incarnation {learner.incarnation}, which was running", learner)
        return learner

    def _open_mailbox(self) -> Mailbox:
        """The island's end of its link: it outlives learners and supervisors, so there may be one already."""
        folder = SharedMemory(self._run_id).island_end(self._island)
        layout = FragmentLayout.from_json(self._run.layout.read_text())
        if folder.exists():
            mailbox = Mailbox.open(folder)
        else:
            mailbox = Mailbox.create(folder, layout.numels, inbox=True, experts=layout.experts)
        if mailbox.inbox is None or mailbox.outbox.numels != layout.numels:
            raise UserError(f"{folder}: its fragments are not those of the run's layout; remove it")
        return mailbox

    def _launch(self) -> LearnerProcesses:
        if not self._mailbox.is_current():
            self._mailbox = self._open_mailbox()
        log_file = self._run.log(self._island)
        self._log_start = log_file.stat().st_size if log_file.exists() else 0
        self._status.incarnation = _next_incarnation(self._run.island_checkpoints(self._island))
        failpoint("supervisor.launching")
        environment = clean_environment(os.environ)
        devices = devices_of(self._config, self._island, environment)
        learner = LearnerProcesses.start(
            launch_command(self._run.root, self._config, self._island, devices),
            rank_environment(self._config, self._island, environment),
            log_file,
            self._run_id,
            self._island,
            self._status.incarnation,
        )
        self._change("starting", f"incarnation {learner.incarnation} started", learner)
        return learner

    def _watch(self, learner: LearnerProcesses, rhythm: StepRhythm) -> Ending:
        """Return when the learner has ended or must end."""
        ranks = self._config.island(self._island).ranks
        while True:
            if self._stops:
                return self._stop(learner)
            code = learner.exit_code()
            if code is not None:
                return self._ending(learner, code)
            if len(learner.ranks) < ranks and learner.find_processes(ranks):
                self._write_status(learner)
            if rhythm.stepping and (reason := self._broken(learner)):
                log_file = self._run.log(self._island)
                return Ending("restarting", f"{reason}; see {log_file}", failure=self._last_error())
            if not self._mailbox.is_current():
                return Ending("restarting", f"its mailbox {self._mailbox.folder} was removed")
            self._observe(learner, rhythm)
            if reason := rhythm.hung(time.monotonic()):
                return Ending("restarting", reason, failure=HUNG)
            time.sleep(POLL_S)

    def _broken(self, learner: LearnerProcesses) -> str | None:
        """Why it cannot go on though its launcher runs, if so. In a run that ends, ranks end one after the other."""
        seconds = learner.broken_for(time.monotonic())
        if not seconds or self._orders_phase() not in (None, "run"):
            return None
        _, report = self._report_of(learner)
        if report is not None and report.phase == "running" and self._last_error() is None:
            return "a rank is gone without a word, as if killed"
        return "a rank has ended, and the others wait for it" if seconds > LAUNCHER_WITHIN_S else None

    def _observe(self, learner: LearnerProcesses, rhythm: StepRhythm) -> None:
        sequence, report = self._report_of(learner)
        if report is None:
            return
        stepping = report.phase == "running"
        rhythm.observe(sequence, report.step if stepping else None, time.monotonic())
        state: State = "running" if stepping else "starting"
        if report.phase == "drained" or self._orders_phase() == "drain":
            state = "draining"
        if state != self._status.state:
            self._change(state, f"incarnation {learner.incarnation} is {report.phase}", learner)

    def _report_of(self, learner: LearnerProcesses) -> tuple[int, Report | None]:
        """Sequence number and report of this very learner; None while there is only an older one's."""
        sequence, payload = self._mailbox.report.read() or (0, None)
        report = ReportRecord.unpack(payload).report if payload is not None else None
        return sequence, report if report and report.incarnation == learner.incarnation else None

    def _orders_phase(self) -> str | None:
        _, payload = self._mailbox.orders.read() or (0, None)
        return OrdersRecord.unpack(payload).orders.phase if payload is not None else None

    def _ending(self, learner: LearnerProcesses, code: int) -> Ending:
        """What the end of the launcher with `code` means."""
        _, report = self._report_of(learner)
        said = report.phase if report else None
        if said == "drained":
            return Ending("done", "its last updates are written")
        if said == "stopped":
            return Ending("stopped", "ended with a checkpoint, as it was asked to")
        error = self._last_error()
        if code == USER_ERROR:
            return Ending("failed", error or f"it cannot run as configured ({_in_words(code)})", USER_ERROR)
        how = (
            "its launcher or a rank has ended"
            if learner.taken_over
            else f"the learner ended with {_in_words(code)}"
        )
        why = how + (f": {error}" if error else "")
        if said == "running" and self._orders_phase() in ("stop", "finished"):
            return Ending("stopped", f"the run ends, and {why}")
        own = None if code == 0 or _signal(code) in KILLS else error or _in_words(code)
        return Ending("restarting", f"{why}; see {self._run.log(self._island)}", failure=own)

    def _last_error(self) -> str | None:
        """The last line of this incarnation's output that tells of an error."""
        with self._run.log(self._island).open("rb") as output:
            output.seek(self._log_start)
            text = output.read().decode(errors="replace")
        errors = _ERROR_LINE.findall(text)
        return str(errors[-1]) if errors else None

    def _stop(self, learner: LearnerProcesses) -> Ending:
        """Ask the ranks for a clean end; after `CLEAN_END_S`, or at a second request, the caller's kill ends
        them.
        """
        deadline = time.monotonic() + CLEAN_END_S
        asked = learner.signal_ranks(signal.SIGTERM)
        failpoint("supervisor.stopping")
        while asked and self._stops < 2 and learner.exit_code() is None and time.monotonic() < deadline:
            time.sleep(POLL_S / 2)
        _, report = self._report_of(learner)
        clean = report is not None and report.phase in ("stopped", "drained")
        return Ending("stopped", "asked to stop: " + ("it wrote a checkpoint" if clean else "it was killed"))

    def _pause(self, ending: Ending, stepped_for_s: float | None, step: int | None) -> Ending:
        """Wait before the next start; returns the given ending, or a final one if there is no next start."""
        delay = self._restarts.ended(stepped_for_s, ending.failure, step)
        if delay is None:
            return Ending("failed", f"{self._restarts.why()}; the last: {ending.reason}", GIVEN_UP)
        self._status.restarts = self._restarts.count
        self._change("restarting", f"{ending.reason}; next start in {delay:.0f} s")
        until = time.monotonic() + delay
        while time.monotonic() < until:
            if self._stops:
                return Ending("stopped", "asked to stop while no learner ran")
            time.sleep(POLL_S / 2)
        return ending

    def _end(self, ending: Ending) -> int:
        assert ending.state != "restarting"
        self._change(ending.state, ending.reason)
        self._metrics.close()
        return ending.exit_code

    def _change(self, state: State, reason: str, learner: LearnerProcesses | None = None) -> None:
        """Tell everybody of a new state: status file, log, metrics."""
        self._status.state, self._status.reason = state, reason
        log.info("%s: %s: %s", self._island, state, reason)
        self._metrics.write(
            "event",
            event=f"learner_{state}",
            role="supervisor",
            island=self._island,
            incarnation=self._status.incarnation,
            reason=reason,
        )
        self._write_status(learner)

    def _write_status(self, learner: LearnerProcesses | None) -> None:
        self._status.launcher = learner.launcher if learner else None
        self._status.ranks = learner.ranks if learner else {}
        try:
            write_json(self._run.status(f"supervisor.{self._island}"), self._status.as_json())
        except OSError as error:  # a full disk must not end the supervision
            log.warning("%s: the status file cannot be written: %s", self._island, error)

    def _count_stop(self, _number: int, _frame: object) -> None:
        self._stops += 1


def _config_of(run: RunDir, island: str) -> RunConfig:
    if not run.config.is_file():
        raise UserError(f"{run.root} is no run directory: it has no {run.config.name}")
    config = run_config(run)
    names = [each.name for each in config.islands]
    if island not in names:
        raise UserError(f"{run.config}: no island '{island}'; there are {', '.join(names)}")
    return config


def _lock(path: Path, island: str) -> int:
    """Hold `path` until this process ends; children do not inherit it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UserError(
            f"island '{island}' has a supervisor already ({path} is locked); end that one first"
        ) from None
    return descriptor


def _next_incarnation(checkpoints: Path) -> int:
    """One more than ever before for this island; on disk before it is used."""
    path = checkpoints / "incarnation"
    number = int(path.read_text()) + 1 if path.exists() else 1
    write_atomically(path, f"{number}\n")
    return number


def _in_words(code: int) -> str:
    """An exit code; DeepSpeed's launcher gives signals as 256 - number, the system as -number."""
    number = _signal(code)
    if number is None:
        return f"exit code {code}"
    with contextlib.suppress(ValueError):
        return f"exit code {code} ({signal.Signals(number).name})"
    return f"exit code {code}"


def _signal(code: int) -> int | None:
    """The signal that the exit code tells of, if any."""
    return -code if code < 0 else 256 - code if code > LAST_OWN_CODE else None


def main(arguments: list[str] | None = None) -> int:
    """Supervise one island until its learner has ended for good."""
    parser = argparse.ArgumentParser(prog="python -m diloco_ds.island.supervisor", description=__doc__)
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("island")
    given = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    with contextlib.suppress(
        PermissionError
    ):  # leader of its group already: it has been given a session or a job of its own
        os.setsid()
    try:
        return Supervisor(RunDir(given.run_dir), given.island).run()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return USER_ERROR


if __name__ == "__main__":
    sys.exit(main())
