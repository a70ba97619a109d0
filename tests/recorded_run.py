"""A run directory as the processes of a run leave it, made without them."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import yaml
from tiny_run import tiny_config

from diloco_ds.observe.manifest import write_manifest
from diloco_ds.observe.metrics import MetricsFile
from diloco_ds.rundir import RunDir

GONE = 2**22 + 1
"""A process id that no process can have."""

BEGIN = 1_700_000_000.0
"""Epoch seconds at which the recorded training begins."""


def new_run(directory: Path, **settings: Any) -> RunDir:
    """A run directory in `directory` with a manifest and a configuration; `settings` as for `tiny_config`."""
    run = RunDir(directory / "run")
    config = tiny_config(directory, budget={"tokens": 1_000_000}, **settings)
    run.root.mkdir()
    run.config.write_text(yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False))
    write_manifest(
        run.root,
        config,
        argv=["diloco-ds", "train", "run.yaml"],
        data={"train": {"tokens": 5_000_000, "sha256": "ab" * 32}},
        initial_weights_sha256="cd" * 32,
        layout_digest="ef" * 32,
        parameters=6_300_000,
    )
    return run


def write_status(run: RunDir, role: str, **content: Any) -> None:
    """A status file of `role`; without a `pid` of its own it is this process's."""
    path = run.status(role)
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({"pid": os.getpid(), "started": time.time(), **content}))


def record_training(run: RunDir, steps: int = 100) -> None:
    """Metrics of two islands with a step a second of 1000 tokens; b dies after half of them and is back 20 s later."""
    buckets = {
        "data": 0.1,
        "forward": 0.2,
        "backward": 0.4,
        "optimizer": 0.2,
        "exchange": 0.05,
        "other": 0.05,
    }
    half = steps // 2
    with MetricsFile(run.metrics) as metrics:
        metrics.write("event", time=BEGIN, event="started", role="conductor", reason="new run")
        for number in range(1, steps + 1):
            for island in "ab":
                if island == "b" and half < number <= half + 20:
                    continue
                metrics.write(
                    "step",
                    time=BEGIN + number,
                    island=island,
                    incarnation=2 if island == "b" and number > half else 1,
                    step=number,
                    tokens=1000 * number,
                    global_tokens=2000 * number,
                    step_tokens=1000,
                    step_s=1.0,
                    loss=3.0 + 5.0 / number,
                    buckets=buckets,
                )
            merged = ["a"] if half < number <= half + 20 else ["a", "b"]
            metrics.write(
                "merge",
                time=BEGIN + number + 0.5,
                fragment=number % 4,
                round=number,
                version=number // 4,
                tokens=1900 * number,
                alive=len(merged),
                eligible=len(merged),
                merged=len(merged),
                token_share=0.95,
                parts=[{"island": island, "weight": 1 / len(merged)} for island in merged],
            )
            if number % 25 == 0:
                metrics.write(
                    "eval",
                    time=BEGIN + number,
                    tokens=1900 * number,
                    loss=3 + 5 / number,
                    bits_per_byte=1.5,
                    n=2048,
                )
        metrics.write(
            "event", time=BEGIN + half, event="learner_restarting", island="b", reason="rank 0 <killed>"
        )
        tasks = {"pairs": {"metric": "acc", "value": 0.75, "stderr": 0.0125, "n": 1200}}
        metrics.write(
            "eval",
            time=BEGIN + steps,
            tokens=1900 * steps,
            loss=2.5,
            bits_per_byte=1.25,
            n=2048,
            stderr=0.02,
            tasks=tasks,
        )
