"""Snapshots of the global weights are evaluated as they appear: one at a time, at low priority, in a process of its own."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from diloco_ds.conductor.errand import Errand
from diloco_ds.conductor.parts import module_command
from diloco_ds.rundir import RunDir

EVALUATOR = "diloco_ds.evaluate.evaluator"
ROLE = "evaluator"
LOW_PRIORITY = 10


class Evaluations:
    """Evaluates every snapshot and deletes it afterwards.

    One that fails stays on disk, is told of, and is not tried again.
    """

    def __init__(self, run: RunDir, run_id: str, tell: Callable[..., None]) -> None:
        self.failed: list[Path] = []
        self._run, self._run_id, self._tell = run, run_id, tell
        self._running: tuple[Path, Errand] | None = None

    @property
    def idle(self) -> bool:
        """No evaluation runs and none is waiting."""
        return self._running is None and not self._waiting()

    def poll(self, *, begin: bool = True) -> None:
        """Look after the evaluation that runs and, if one is to `begin`, start the next."""
        if self._running is not None:
            snapshot, errand = self._running
            code = errand.exit_code()
            if code is None:
                return
            self._running = None
            self._close(snapshot, code, errand)
        if begin and (waiting := self._waiting()):
            self._running = (waiting[0], self.start(waiting[0], LOW_PRIORITY))

    def start(self, weights: Path, priority: int, *options: str) -> Errand:
        """An evaluation of the weights in the snapshot or checkpoint directory `weights`."""
        command = module_command(EVALUATOR, self._run, str(weights), *options)
        return Errand(command, self._run.log(ROLE), self._run_id, ROLE, priority)

    def leave_out(self, tokens: int) -> None:
        """No evaluation of the snapshot at this number of tokens: the same weights are evaluated otherwise."""
        shutil.rmtree(self._run.snapshots / str(tokens), ignore_errors=True)

    def cancel(self) -> None:
        """Kill the evaluation that runs; its snapshot waits for a later conductor."""
        if self._running is not None:
            self._running[1].cancel()
            self._running = None

    def _waiting(self) -> list[Path]:
        """Snapshots to evaluate, oldest first."""
        if not self._run.snapshots.is_dir():
            return []
        found = [path for path in self._run.snapshots.iterdir() if path.name.isdigit()]
        return sorted((path for path in found if path not in self.failed), key=lambda path: int(path.name))

    def _close(self, snapshot: Path, code: int, errand: Errand) -> None:
        if code == 0:
            shutil.rmtree(snapshot)
            return
        self.failed.append(snapshot)
        self._tell(
            "warning",
            f"evaluation of {snapshot} failed with exit code {code}: {errand.last_line()}",
            role=ROLE,
        )
