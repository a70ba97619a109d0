"""A run as a user conducts it, for drills: every step of it is a `diloco-ds` command in a process of its own."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from diloco_ds.drill.told import Told, sort_out
from diloco_ds.errors import UserError
from diloco_ds.observe.metrics import MetricsFollower, Record, read_metrics
from diloco_ds.observe.status import Status, read_status
from diloco_ds.rundir import RunDir

POLL_S = 0.5
STOPPED_WITHIN_S = 60.0

Value = TypeVar("Value")


class Live:
    """A run that `train` has started in `root`; what its commands print goes to ROOT.txt."""

    def __init__(self, root: Path, train: subprocess.Popen[bytes]) -> None:
        self.dir = RunDir(root)
        self._train = train
        self._follower = MetricsFollower(self.dir.metrics)
        self._records: list[Record] = []

    def told(self) -> Told:
        """What the run has told so far."""
        self._records += self._follower.read()
        return sort_out(self._records)

    def status(self) -> Status | None:
        """As `diloco-ds status` has it; None before there is a run directory."""
        with contextlib.suppress(UserError):
            return read_status(self.dir.root)
        return None

    def until(self, condition: Callable[[], Value | None], what: str) -> Value:
        """The condition's value as soon as it has one. UserError if the run ends before."""
        while True:
            ended = self._train.poll() is not None
            if (value := condition()) is not None:
                return value
            if ended:
                raise UserError(f"the run ended before {what}: {_last_words(self.dir.root)}")
            time.sleep(POLL_S)

    def until_all_are_merged(self) -> float:
        """Wait until every island of the configuration was merged once; when that was (epoch seconds)."""

        def merged() -> float | None:
            status, told = self.status(), self.told()
            names = {island.name for island in status.islands} if status else {""}
            return told.all_merged_at() if names <= told.steps.keys() else None

        return self.until(merged, "all its islands were merged")

    def until_tokens(self, tokens: float) -> float:
        """Wait until so many are merged; when that was (epoch seconds)."""

        def reached() -> float | None:
            merges = self.told().merges
            return merges[-1]["time"] if merges and merges[-1]["tokens"] >= tokens else None

        return self.until(reached, f"{tokens:.0f} tokens were merged")

    def command(self, name: str, *arguments: str) -> subprocess.Popen[bytes]:
        """Start `diloco-ds NAME RUN_DIR ...`."""
        return _start(self.dir.root, name, str(self.dir.root), *arguments)

    def carry_out(self, name: str, *arguments: str) -> float:
        """`command`, to its end; when it ended (epoch seconds). UserError if it failed."""
        if self.command(name, *arguments).wait() != 0:
            raise UserError(f"diloco-ds {name} failed: {_last_words(self.dir.root)}")
        return time.time()

    def until_finished(self) -> Told:
        """Wait for the end of the run, and all it told. UserError unless it finished."""
        if self._train.wait() != 0:
            raise UserError(f"the run did not finish: {_last_words(self.dir.root)}")
        return self.told()

    def stop(self) -> None:
        """Stop the run, if it still goes on: with checkpoints, or, where that takes too long, at once."""
        for _ in range(2):
            if self._train.poll() is None:
                self._train.send_signal(signal.SIGTERM)  # SIGINT is ignored below a shell's &
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._train.wait(STOPPED_WITHIN_S)


@contextlib.contextmanager
def live_run(root: Path, run_file: Path, settings: list[str]) -> Iterator[Live]:
    """`diloco-ds train` of `run_file` with `settings` (key=value) in the new directory `root`.

    It is stopped if the block is left before it has finished.
    """
    root.parent.mkdir(parents=True, exist_ok=True)
    run = Live(root, _start(root, "train", str(run_file), *settings, "--run-dir", str(root)))
    try:
        yield run
    finally:
        run.stop()


def told_of(root: Path) -> Told:
    """What an ended run in `root` told."""
    return sort_out(read_metrics(RunDir(root).metrics))


def _start(root: Path, *arguments: str) -> subprocess.Popen[bytes]:
    """In a session of its own, so that Ctrl-C reaches the drill alone, which then stops the run."""
    with _output(root).open("ab") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "diloco_ds.cli", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def _output(root: Path) -> Path:
    return root.with_name(f"{root.name}.txt")


def _last_words(root: Path) -> str:
    """The last line that the run's commands printed, and where the others are."""
    lines = [line for line in _output(root).read_text().splitlines() if line.strip()]
    return f"{lines[-1] if lines else 'without a word'}; see {_output(root)}"
