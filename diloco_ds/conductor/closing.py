"""What is done once a run is finished: the last evaluations, the export, the report. Each in a process of its own."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from diloco_ds.conductor.errand import Errand
from diloco_ds.conductor.evaluations import Evaluations
from diloco_ds.conductor.part import Command
from diloco_ds.exchange.link_launch import clean_environment
from diloco_ds.rundir import RunDir


class Closing:
    """The works of the end, one after the other: take the next of an iterator, then wait until `busy` is False.

    One that fails is told of and noted in `failures`; the others are done all the same.
    """

    def __init__(self, run: RunDir, run_id: str, evaluations: Evaluations, tell: Callable[..., None]) -> None:
        self.failures: list[str] = []
        self._run, self._run_id, self._evaluations, self._tell = run, run_id, evaluations, tell
        self._errand: Errand | None = None
        self._doing = ""

    def evaluate_and_export(self) -> Iterator[str]:
        """Evaluations of snapshots that still wait, the final one with its tasks, the Hugging Face export."""
        checkpoint = newest_checkpoint(self._run)
        if checkpoint is None:
            self._fail("export", f"there is no checkpoint in {self._run.syncer_checkpoints}")
            return
        self._evaluations.leave_out(int(json.loads((checkpoint / "state.json").read_text())["tokens"]))
        if not self._evaluations.idle:
            yield "evaluation of snapshots"
        self.failures += [f"evaluation of {snapshot} failed" for snapshot in self._evaluations.failed]
        cores = len(os.sched_getaffinity(0))
        self._errand = self._evaluations.start(checkpoint, 0, "--tasks", "--threads", str(cores))
        yield self._named("final evaluation")
        if self._run.export.exists():  # of a conductor that was killed after it
            shutil.rmtree(self._run.export)
        self._errand = self._command("export", str(self._run.root), str(self._run.export))
        yield self._named("export")

    def report(self) -> Iterator[str]:
        """The HTML report."""
        self._errand = self._command("report", str(self._run.root))
        yield self._named("report")

    def busy(self) -> bool:
        """Whether the work last begun goes on."""
        if self._errand is None:
            self._evaluations.poll()
            return not self._evaluations.idle
        code = self._errand.exit_code()
        if code is None:
            return True
        if code != 0:
            self._fail(self._doing, f"exit code {code}: {self._errand.last_line()}; see {self._errand.log}")
        self._errand = None
        return False

    def cancel(self) -> None:
        """Break off what is being done."""
        self._evaluations.cancel()
        if self._errand is not None:
            self._errand.cancel()
            self._errand = None

    def _named(self, work: str) -> str:
        self._doing = work
        return work

    def _command(self, name: str, *arguments: str) -> Errand:
        command: Command = (
            [sys.executable, "-m", "diloco_ds.cli", name, *arguments],
            clean_environment(os.environ),
        )
        return Errand(command, self._run.log(name), self._run_id, name)

    def _fail(self, work: str, why: str) -> None:
        self.failures.append(f"{work} failed: {why}")
        self._tell("warning", self.failures[-1], role=work)


def newest_checkpoint(run: RunDir) -> Path | None:
    """The newest whole checkpoint of the global weights, or None."""
    from diloco_ds.exchange.syncer_checkpoint import checkpoints

    found = checkpoints(run.syncer_checkpoints)
    return found[-1] if found else None
