"""The observer with the real wandb, offline: what it writes is read back from wandb's own transaction logs."""

from __future__ import annotations

import json
import os
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from recorded_run import GONE, new_run, record_training, write_status

from diloco_ds.config_file import load_config
from diloco_ds.observe import observer
from diloco_ds.observe.metrics import MetricsFile, read_metrics
from diloco_ds.observe.wandb_points import points, wandb_run_of
from diloco_ds.rundir import RunDir

STEP = {
    "time": 5.0,
    "kind": "step",
    "island": "a",
    "incarnation": 2,
    "step": 7,
    "tokens": 700,
    "loss": 2.5,
    "lr": None,
    "step_tokens": 100,
    "tokens_per_s": 200.0,
    "step_s": 0.5,
    "buckets": {"data": 0.1, "forward": 0.4},
    "adopted": [1],
}


def test_points_of_a_step() -> None:
    assert wandb_run_of(STEP) == "island-a"
    assert points(STEP) == {
        "tokens": 700,
        "progress/step": 7,
        "progress/step_tokens": 100,
        "train/loss": 2.5,
        "train/tokens_per_s": 200.0,
        "time/step_s": 0.5,
        "time/data_s": 0.1,
        "time/forward_s": 0.4,
        "_timestamp": 5.0,
    }


def test_points_of_a_merge_and_an_evaluation() -> None:
    merge = {
        "time": 1.0,
        "kind": "merge",
        "tokens": 9,
        "alive": 3,
        "reason": "all",
        "parts": [{"island": "b", "weight": 0.25, "expert_load": 1.5}],
    }
    numbers = {"tokens": 9, "merge/alive": 3, "weight/b": 0.25, "expert_load/b": 1.5}
    assert points(merge) == {**numbers, "_timestamp": 1.0}
    tasks = {"piqa": {"metric": "acc", "value": 0.5, "n": 10}}
    evaluation = {"time": 1.0, "kind": "eval", "tokens": 9, "loss": 2.0, "tasks": tasks}
    assert points(evaluation) == {"tokens": 9, "eval/loss": 2.0, "eval/piqa/acc": 0.5, "_timestamp": 1.0}
    assert wandb_run_of(merge) == wandb_run_of(evaluation) == "syncer"
    assert wandb_run_of({"kind": "event", "time": 1.0, "island": "a"}) is None


def test_disabled_means_nothing_at_all(tmp_path: Path) -> None:
    run = new_run(tmp_path, observe={"wandb": {"mode": "disabled"}})
    record_training(run, steps=10)
    assert start(run).wait(60) == 0
    assert not (run.root / "wandb").exists()


def test_what_is_no_run_directory_is_refused(tmp_path: Path) -> None:
    done = subprocess.run([*COMMAND, str(tmp_path)], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert done.stderr.strip().splitlines() == [
        f"error: {tmp_path} is no run directory: it holds no manifest.json"
    ]


def test_a_place_where_wandb_cannot_write_is_named(tmp_path: Path) -> None:
    run = new_run(tmp_path, observe={"wandb": {"mode": "offline"}})
    (run.root / "wandb").write_text("a file where wandb needs a directory")
    done = subprocess.run([*COMMAND, str(run.root)], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == f"error: {run.root}/wandb cannot be written: File exists"


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, "offline"),
        ({"WANDB_API_KEY": "0" * 40}, "online"),
        ({"WANDB_API_KEY": "0" * 40, "WANDB_MODE": "offline"}, "offline"),
        ({"WANDB_MODE": "disabled"}, "disabled"),
    ],
)
def test_auto_follows_the_users_wandb(
    environment: dict[str, str], expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_IDENTITY_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path))
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    observer.wandb.teardown()
    assert observer.resolve_mode("auto") == expected
    assert observer.resolve_mode("online") == "online"
    observer.wandb.teardown()


COMMAND = [sys.executable, "-m", "diloco_ds.observe.observer"]


def start(run: RunDir, **environment: str) -> subprocess.Popen[bytes]:
    with (run.root / "observer.log").open("ab") as log:
        return subprocess.Popen(
            [*COMMAND, str(run.root)],
            stdout=log,
            stderr=log,
            env={**os.environ, **environment},
            start_new_session=True,
        )


def until(condition: Callable[[], Any], what: str, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds} s for: {what}"
        time.sleep(0.05)


def logged_up_to(run: RunDir) -> int:
    position = run.root / "wandb" / "observer.json"
    return int(json.loads(position.read_text())["offset"]) if position.exists() else 0


def transaction_log(path: Path) -> Iterator[Any]:
    """The records of a .wandb file: LevelDB's log format (32 KiB blocks) after a header of 7 bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    content = path.read_bytes()
    assert content[:4] == b":W&B"
    at, collected = 7, b""
    while at + 7 <= len(content):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        _, length, kind = struct.unpack("<IHB", content[at : at + 7])
        collected += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield Record.FromString(collected)
            collected = b""


class Logged:
    """One offline wandb run as it lies on disk."""

    def __init__(self, directory: Path) -> None:
        (path,) = directory.glob("*.wandb")
        records = list(transaction_log(path))
        self.run = next(record.run for record in records if record.WhichOneof("record_type") == "run")
        self.ended = any(record.WhichOneof("record_type") == "exit" for record in records)
        self.axis = {
            record.metric.glob_name: record.metric.step_metric
            for record in records
            if record.metric.glob_name
        }
        self.rows = [
            {
                "/".join(item.nested_key) or item.key: json.loads(item.value_json)
                for item in record.history.item
            }
            for record in records
            if record.WhichOneof("record_type") == "history"
        ]

    def column(self, name: str) -> list[float]:
        return [row[name] for row in self.rows if name in row]


def logged(run: RunDir) -> dict[str, Logged]:
    """Offline runs by wandb id; the newest of each."""
    found = [Logged(directory) for directory in sorted((run.root / "wandb").glob("offline-run-*"))]
    return {each.run.run_id: each for each in found}


@pytest.mark.slow
def test_a_run_its_resumption_and_its_end(tmp_path: Path) -> None:
    run = new_run(tmp_path, observe={"wandb": {"mode": "offline", "project": "trial"}})
    write_status(run, "conductor", state="running")
    record_training(run, steps=40)
    process = start(run)
    until(lambda: logged_up_to(run) == run.metrics.stat().st_size, "the records so far are logged")
    with MetricsFile(run.metrics) as metrics:
        metrics.write(
            "step", island="a", step=41, tokens=39_000, loss=1.5
        )  # fewer tokens: back from a checkpoint
        metrics.write("step", island="late", step=1, tokens=41_000, loss=1.25)
    os.killpg(process.pid, signal.SIGINT)  # Ctrl-C reaches everybody; only SIGTERM ends the observer
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0, (run.root / "observer.log").read_text()

    prefix = run.run_id()
    first = logged(run)
    assert set(first) == {f"{prefix}-{name}" for name in ("island-a", "island-b", "island-late", "syncer")}
    a, syncer = first[f"{prefix}-island-a"], first[f"{prefix}-syncer"]
    assert a.column("train/loss") == pytest.approx([3 + 5 / number for number in range(1, 41)] + [1.5])
    assert a.column("tokens") == [*range(1000, 41_000, 1000), 39_000]
    assert len(first[f"{prefix}-island-b"].rows) == 20
    assert first[f"{prefix}-island-late"].column("train/loss") == [1.25]
    assert len(syncer.column("merge/alive")) == 40
    assert syncer.column("eval/pairs/acc") == [0.75]
    assert {(each.run.run_group, each.run.project, each.ended) for each in first.values()} == {
        (f"run {prefix}", "trial", True)
    }
    assert {each.run.job_type for each in first.values()} == {"island", "syncer"}
    assert a.axis == {"*": "tokens"}

    with MetricsFile(run.metrics) as metrics:
        metrics.write("step", island="a", step=42, tokens=42_000, loss=1.0)
    write_status(run, "conductor", pid=GONE, state="finished")
    assert start(run).wait(60) == 0  # the run is over: it logs the rest and ends by itself
    again = logged(run)[f"{prefix}-island-a"]
    assert again.column("train/loss") == [1.0]
    assert len(list((run.root / "wandb").glob("offline-run-*"))) == 5


@pytest.mark.slow
def test_wandb_killed_under_it_ends_the_observer_with_a_word(tmp_path: Path) -> None:
    run = new_run(tmp_path, observe={"wandb": {"mode": "offline"}})
    write_status(run, "conductor", state="running")
    record_training(run, steps=5)
    process = start(run)
    until(lambda: logged_up_to(run) == run.metrics.stat().st_size, "the records so far are logged")
    children = psutil.Process(process.pid).children()
    assert [child.name() for child in children] == ["wandb-core"]
    children[0].kill()
    with MetricsFile(run.metrics) as metrics:
        for number in range(2000):
            metrics.write("step", island="a", step=number, tokens=number, loss=1.0)
    assert process.wait(90) == 1
    warnings = [record for record in read_metrics(run.metrics) if record.get("role") == "observer"]
    assert [warning["event"] for warning in warnings] == ["warning"]
    assert "wandb failed" in warnings[0]["reason"]


@pytest.mark.slow
def test_a_server_out_of_reach_means_offline(tmp_path: Path) -> None:
    run = new_run(tmp_path, observe={"wandb": {"mode": "online"}})
    record_training(run, steps=5)
    write_status(run, "conductor", pid=GONE, state="finished")
    impatient = (
        "from diloco_ds.observe import observer as o; o.INIT_TIMEOUT_S = 2.0; raise SystemExit(o.main())"
    )
    nowhere = {"WANDB_BASE_URL": "http://127.0.0.1:9", "WANDB_API_KEY": "0" * 40}
    done = subprocess.run(
        [sys.executable, "-c", impatient, str(run.root)],
        env={**os.environ, **nowhere},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert logged(run)[f"{run.run_id()}-island-a"].column("train/loss") == pytest.approx(
        [3 + 5 / n for n in range(1, 6)]
    )
    warnings = [record["reason"] for record in read_metrics(run.metrics) if record.get("role") == "observer"]
    assert len(warnings) == 1
    assert "wandb cannot be reached" in warnings[0]


def test_what_is_not_uploaded_in_time_is_told_of_once(tmp_path: Path) -> None:
    class Run:
        """A wandb run that ends as it is told to."""

        def __init__(self, slow: bool) -> None:
            self.slow = slow

        def finish(self) -> None:
            if self.slow:
                raise TimeoutError("Timed out finishing run.")

    run = new_run(tmp_path, observe={"wandb": {"mode": "online"}})
    watching = observer.Observer(run, load_config(run.config), "online")
    watching._wandb_runs = {"island-a": Run(slow=True), "island-b": Run(slow=False), "syncer": Run(slow=True)}
    watching.finish()
    watching.finish()
    (warning,) = [record for record in read_metrics(run.metrics) if record.get("role") == "observer"]
    assert "not all of island-a, syncer was uploaded within 10 s" in warning["reason"]
    assert f"wandb sync {run.root}/wandb/run-*" in warning["reason"]
