"""The observer: a process of its own that follows metrics.jsonl into Weights & Biases.

    python -m diloco_ds.observe.observer RUN_DIR

One wandb group per run, one wandb run per island and one for the syncer, plotted against tokens: the wandb
step only counts records, so a learner that goes back to a checkpoint loses no point. The ids of the wandb
runs follow from the run id, so a resumed run goes on in the same ones. Training does not depend on the
observer: when wandb cannot be reached it logs offline, when wandb fails it says so and ends.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import wandb
from wandb.sdk.lib import wbauth

from diloco_ds.config import RunConfig
from diloco_ds.errors import UserError
from diloco_ds.membership import run_config
from diloco_ds.observe.manifest import read_manifest
from diloco_ds.observe.metrics import MetricsFile, MetricsFollower
from diloco_ds.observe.status import ENDED, read_status
from diloco_ds.observe.wandb_points import SYNCER, points, wandb_run_of
from diloco_ds.rundir import RunDir, write_json

POLL_S = 1.0
STATUS_EVERY = 10  # polls between two looks at whether the run has ended
INIT_TIMEOUT_S = 30.0
FINISH_TIMEOUT_S = 10.0
"""How long the end of the wandb runs, all at once, may take; what is not uploaded by then stays in the run directory.
The conductor waits a little longer (conductor/ending.py).
"""

Mode = Literal["online", "offline", "disabled"]

log = logging.getLogger("observer")


class Observer:
    """Logs the records of one run directory that no observer before it has logged."""

    def __init__(self, run: RunDir, config: RunConfig, mode: Mode) -> None:
        self._run, self._config, self._mode = run, config, mode
        self._manifest = read_manifest(run.root)
        self._position = _wandb_directory(run) / "observer.json"
        self._follower = MetricsFollower(run.metrics, _logged_up_to(self._position))
        self._wandb_runs: dict[str, wandb.Run] = {}

    def log_new(self) -> int:
        """Log what has come since the last call; returns the number of points."""
        logged = 0
        for record in self._follower.read():
            name = wandb_run_of(record)
            if name is not None:
                self._wandb_run(name).log(points(record))
                logged += 1
        if logged:
            ids = {name: run.id for name, run in self._wandb_runs.items()}
            write_json(self._position, {"offset": self._follower.offset, "mode": self._mode, "runs": ids})
        return logged

    def finish(self) -> None:
        """End all wandb runs; waits until they are written (offline) or uploaded (online).

        What takes longer than FINISH_TIMEOUT_S to upload is told of and left in the run directory.
        """
        if not self._wandb_runs:
            return
        unsent = []
        with ThreadPoolExecutor(len(self._wandb_runs)) as together:
            ending = {name: together.submit(run.finish) for name, run in self._wandb_runs.items()}
            for name, ended in ending.items():
                try:
                    ended.result()
                except TimeoutError:
                    unsent.append(name)
        self._wandb_runs.clear()
        if unsent:
            what = f"not all of {', '.join(unsent)} was uploaded within {FINISH_TIMEOUT_S:.0f} s"
            warn(self._run, f"wandb: {what}; upload the rest with wandb sync {self._run.root}/wandb/run-*")

    def _wandb_run(self, name: str) -> wandb.Run:
        if name not in self._wandb_runs:
            self._wandb_runs[name] = self._start(name)
        return self._wandb_runs[name]

    def _start(self, name: str) -> wandb.Run:
        try:
            return self._init(name)
        except Exception as error:  # wandb raises its own errors, its service's, and the system's
            if self._mode != "online" and not self._wandb_runs:
                raise UserError(f"wandb does not start: {_first_line(error)}") from error
            if self._mode != "online":
                raise
            warn(
                self._run,
                f"wandb cannot be reached ({_first_line(error)}); logging offline: upload with wandb sync",
            )
        self._go_offline()
        return self._init(name)

    def _go_offline(self) -> None:
        """End what is online; every wandb run goes on offline, under the same id, with its next record."""
        self.finish()
        wandb.teardown()  # a run that failed to start keeps its id taken in wandb's service
        self._mode = "offline"

    def _init(self, name: str) -> wandb.Run:
        run_id = self._manifest["run_id"]
        run = wandb.init(
            project=self._config.observe.wandb.project,
            entity=self._config.observe.wandb.entity,
            id=f"{run_id}-{name}",
            name=f"{self._run.root.name} {name}",
            group=f"{self._run.root.name} {run_id}",
            job_type="syncer" if name == SYNCER else "island",
            dir=str(self._run.root),
            config={"run": self._config.model_dump(mode="json"), "manifest": self._manifest},
            mode=self._mode,
            resume="allow"
            if self._mode == "online"
            else None,  # offline files of one id are joined by `wandb sync`
            reinit="create_new",
            settings=wandb.Settings(
                silent=True,
                console="off",
                disable_git=True,
                save_code=False,
                x_disable_stats=name != SYNCER,  # once a host is enough
                init_timeout=INIT_TIMEOUT_S,
                finish_timeout=FINISH_TIMEOUT_S,
                finish_timeout_raises=True,
            ),
        )
        run.define_metric("tokens", hidden=True)
        run.define_metric("*", step_metric="tokens", step_sync=False)
        return run


def resolve_mode(setting: str) -> Mode:
    """`auto`: WANDB_MODE where it is set, else online if the user is logged in to wandb, else offline."""
    if setting != "auto":
        return setting  # type: ignore[return-value]
    settings = wandb.setup().settings
    if "WANDB_MODE" in os.environ:
        return {"run": "online", "dryrun": "offline"}.get(settings.mode, settings.mode)  # type: ignore[return-value]
    logged_in = wbauth.authenticate_session(host=settings.base_url, source="diloco-ds", prompt=False)
    return "online" if logged_in else "offline"


def observe(run: RunDir, stop: threading.Event) -> None:
    """Follow the run until `stop` is set or the run has ended; then log what is left and finish."""
    config = run_config(run)
    mode = "disabled" if config.observe.wandb.mode == "disabled" else resolve_mode(config.observe.wandb.mode)
    if mode == "disabled":
        return
    observer = Observer(run, config, mode)
    log.info("wandb: %s, project %s, group of run %s", mode, config.observe.wandb.project, run.run_id())
    polls = 0
    while not stop.is_set():
        observer.log_new()
        if polls % STATUS_EVERY == 0 and _is_over(run):
            break
        polls += 1
        stop.wait(POLL_S)
    observer.log_new()
    observer.finish()


def main(arguments: list[str] | None = None) -> int:
    """The process. Exit code 0: everything is logged; 1: wandb failed underway, a new start goes on from there;
    2: it cannot work (no run directory, wandb does not start), and the reason is the last line it printed.
    """
    parser = argparse.ArgumentParser(
        prog="python -m diloco_ds.observe.observer", description="metrics.jsonl into wandb"
    )
    parser.add_argument("run_dir", type=Path, help="run directory; a finished run is logged whole")
    run = RunDir(parser.parse_args(arguments).run_dir)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the conductor, which ends the observer last
    os.nice(10)
    try:
        read_manifest(run.root)
        observe(run, stop)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except Exception as error:  # whatever wandb may raise
        log.exception("wandb failed")
        warn(run, f"wandb failed: {_first_line(error)}")
        return 1
    return 0


def warn(run: RunDir, reason: str) -> None:
    """Tell the user, in the log and among the run's events."""
    log.warning("%s", reason)
    with MetricsFile(run.metrics) as metrics:
        metrics.write("event", event="warning", role="observer", reason=reason)


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


def _is_over(run: RunDir) -> bool:
    """The run has ended, and no conductor is about to go on with it (it writes its status file when all is started)."""
    status = read_status(run.root)
    return status.conductor_pid is None and status.state in ENDED and run.status("conductor").exists()


def _wandb_directory(run: RunDir) -> Path:
    """Where wandb writes. Made here, since wandb would go somewhere else without a word where it cannot write."""
    directory = run.root / "wandb"
    try:
        directory.mkdir(exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            return directory
    except OSError as error:
        raise UserError(f"{directory} cannot be written: {error.strerror}") from error


def _logged_up_to(position: Path) -> int:
    """Byte of metrics.jsonl up to which an earlier observer of this run came."""
    state: dict[str, Any] = json.loads(position.read_text()) if position.is_file() else {}
    return int(state.get("offset", 0))


if __name__ == "__main__":
    sys.exit(main())
