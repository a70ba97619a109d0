"""A whole run on real processes, as a user starts it: `diloco-ds train`, in a directory of its own."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
from tiny_run import tiny_run_file

from diloco_ds.conductor import ending, marks
from diloco_ds.config_file import load_config
from diloco_ds.observe.metrics import MetricsFollower, Record
from diloco_ds.observe.status import Status, read_status
from diloco_ds.rundir import RunDir, SharedMemory

NORMAL_STEPS = 3
"""The longest gap between the steps of an island that nothing has happened to, in its normal steps."""
PATIENCE_S = 300.0
"""For anything that takes seconds on a machine with nothing else to do."""


class LiveRun:
    """The run `directory`/runs/NAME; `settings` as for `tiny_run_file`."""

    def __init__(self, directory: Path, **settings: Any) -> None:
        self.work = directory
        self.run_file = tiny_run_file(directory / "given", **settings)
        self.config = load_config(self.run_file)
        self.dir = RunDir(directory / "runs" / "tiny")
        self.conductor: subprocess.Popen[bytes] | None = None
        self.environment: dict[str, str] = {}
        """More for the environment of the conductor, and so of everything it starts."""
        self._output = directory / "terminal.txt"
        self._follower = MetricsFollower(self.dir.metrics)
        self._records: list[Record] = []
        self._reading = threading.Lock()

    # -- the user's hands

    def train(self, *arguments: str) -> subprocess.Popen[bytes]:
        """Start `diloco-ds train`, by default with the run file."""
        with self._output.open("ab") as output:
            self.conductor = subprocess.Popen(
                [sys.executable, "-m", "diloco_ds.cli", "train", *(arguments or (str(self.run_file),))],
                cwd=self.work,
                env={**os.environ, "OMP_NUM_THREADS": "1", **self.environment},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return self.conductor

    def resume(self) -> subprocess.Popen[bytes]:
        """Start `diloco-ds train --resume`."""
        return self.train("--resume", str(self.dir.root))

    def command(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Any other `diloco-ds` command, to its end."""
        return subprocess.run(
            [sys.executable, "-m", "diloco_ds.cli", *arguments],
            cwd=self.work,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=False,
        )

    def begin(self, *arguments: str) -> subprocess.Popen[bytes]:
        """Start any other `diloco-ds` command; its end is the caller's business."""
        return subprocess.Popen([sys.executable, "-m", "diloco_ds.cli", *arguments], cwd=self.work)

    def press_ctrl_c(self) -> None:
        """SIGINT to the conductor, as a terminal sends it."""
        assert self.conductor is not None
        self.conductor.send_signal(signal.SIGINT)

    def end(self, within_s: float = PATIENCE_S) -> int:
        """Wait for the conductor's end; its exit code."""
        assert self.conductor is not None
        try:
            return self.conductor.wait(within_s)
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"the conductor did not end\n{self.story()}") from None

    # -- what is seen

    def status(self) -> Status:
        """As `diloco-ds status` shows it."""
        return read_status(self.dir.root)

    def island(self, name: str) -> Any:
        """The status of one island."""
        return next(island for island in self.status().islands if island.name == name)

    def records(self, kind: str, **having: Any) -> list[Record]:
        """Records of metrics.jsonl of a kind, with these fields."""
        with self._reading:
            self._records += self._follower.read()
            return [
                record
                for record in self._records
                if record["kind"] == kind and all(record.get(key) == value for key, value in having.items())
            ]

    def follow(self) -> MetricsFollower:
        """Follows what is written from now on."""
        size = self.dir.metrics.stat().st_size if self.dir.metrics.exists() else 0
        return MetricsFollower(self.dir.metrics, size)

    def until(self, condition: Callable[[], Any], what: str, within_s: float = PATIENCE_S) -> Any:
        """The condition's value as soon as it holds; a conductor that ends meanwhile is a failure."""
        deadline = time.monotonic() + within_s
        while True:
            with contextlib.suppress(Exception):  # the run directory may be just coming into being
                if value := condition():
                    return value
            ended = self.conductor is not None and self.conductor.poll() is not None
            if ended or time.monotonic() > deadline:
                why = "the conductor has ended" if ended else f"waited for {within_s:.0f} s"
                raise AssertionError(f"{what}: {why}\n{self.story()}")
            time.sleep(0.05)

    def until_merged_again(self, *islands: str, since: float | None = None) -> float:
        """Wait until each of the islands has a part in a merge made after `since` (epoch seconds); when that was."""
        since = time.time() if since is None else since

        def merged() -> float | None:
            parts = {
                part["island"]: record["time"]
                for record in self.records("merge")
                if record["time"] > since
                for part in record["parts"]
            }
            return max(parts[name] for name in islands) if set(islands) <= set(parts) else None

        return float(self.until(merged, f"{islands} merged again"))

    def until_replaced(self, role: str, victim: int, island: str = "a") -> float:
        """Wait until another process than `victim` fills a role of the exchange; when that was (epoch seconds)."""

        def pid() -> int | None:
            if role == "syncer":
                return next(iter(self.status().syncer.pids), None)
            found: int | None = getattr(self.island(island).pids, role)
            return found

        self.until(lambda: pid() not in (None, victim), f"another {role} is there")
        return time.time()

    def steps(self, island: str, since: float = 0.0, until: float = float("inf")) -> list[Record]:
        """The island's step records that ended between two moments (epoch seconds)."""
        found = self.records("step", island=island)
        return [record for record in found if since <= record["time"] <= until]

    def run_id(self) -> str:
        """From the manifest."""
        return self.dir.run_id()

    def processes(self) -> list[psutil.Process]:
        """Every live process of the run but the conductor."""
        return marks.processes_of(self.run_id())

    def assert_nothing_left(self) -> None:
        """No process of the run, and no shared memory."""
        assert self.processes() == []
        assert not SharedMemory(self.run_id()).root.exists()

    def story(self) -> str:
        """What everybody said, for a failing test."""
        files = [self._output, *sorted((self.dir.root / "logs").glob("*.log"))]
        return "\n".join(f"== {file.name}\n{file.read_text()[-2500:]}" for file in files if file.exists())

    def clean_up(self) -> None:
        """Kill what is left and remove the shared memory."""
        if self.conductor is not None and self.conductor.poll() is None:
            self.conductor.kill()
            self.conductor.wait()
        if self.dir.manifest.exists():
            ending.sweep(self.run_id())


@contextlib.contextmanager
def live_run(directory: Path, **settings: Any) -> Iterator[LiveRun]:
    """A run that is not started yet; whatever is left of it at the end is removed."""
    run = LiveRun(directory, **settings)
    try:
        yield run
    finally:
        run.clean_up()


def normal_step(run: LiveRun, island: str, before: float) -> float:
    """Seconds that nine in ten of the island's last 20 steps before a moment took at most."""
    seconds = [record["step_s"] for record in run.steps(island, until=before)[-20:]]
    return statistics.quantiles(seconds, n=10)[-1]


def assert_no_gap(run: LiveRun, island: str, since: float, until: float) -> None:
    """No time between the ends of two steps is longer than three normal steps.

    Normal is what nine in ten steps took before; or, where the machine is busier meanwhile, three in four since, but at most
    half as much again.
    """
    ends = sorted(record["time"] for record in run.steps(island, since, until))
    gap = max(later - earlier for earlier, later in itertools.pairwise([since, *ends, until]))
    meanwhile = [record["step_s"] for record in run.steps(island, since, until)]
    busier = statistics.quantiles(meanwhile, n=4)[-1] if len(meanwhile) > 1 else 0.0
    before = normal_step(run, island, since)
    normal = max(before, min(busier, 1.5 * before))
    assert gap <= NORMAL_STEPS * normal, f"{gap:.2f} s without a step of {island}; normally {normal:.2f} s"


def kill(pid: int) -> None:
    """kill -9."""
    os.kill(pid, signal.SIGKILL)


def written(run: LiveRun, path: Path) -> Any:
    """A JSON file of the run directory."""
    return json.loads((run.dir.root / path).read_text())
