import json

import pytest

from diloco_ds.island.step_log import StepLog, divide
from diloco_ds.island.timing import StepResult


def parts(data=0.0, forward=0.0, backward=0.0, optimizer=0.0, exchange=0.0):
    return {
        "data": data,
        "forward": forward,
        "backward": backward,
        "optimizer": optimizer,
        "exchange": exchange,
    }


def test_what_nobody_measured_is_other():
    buckets = divide(2.0, parts(data=0.1, forward=0.5, backward=0.9, optimizer=0.2, exchange=0.1))
    assert buckets["other"] == pytest.approx(0.2)
    assert sum(buckets.values()) == pytest.approx(2.0)


def test_what_was_hidden_behind_the_device_is_left_out():
    buckets = divide(1.0, parts(data=0.2, forward=0.3, backward=0.5, optimizer=0.15, exchange=0.1))
    assert buckets["data"] == 0
    assert buckets["exchange"] == pytest.approx(0.05)
    assert buckets["other"] == 0
    assert sum(buckets.values()) == pytest.approx(1.0)


def test_the_device_never_takes_more_than_the_whole():
    buckets = divide(1.0, parts(forward=0.5, backward=1.0, optimizer=0.5))
    assert buckets["backward"] == pytest.approx(0.5)
    assert sum(buckets.values()) == pytest.approx(1.0)


def test_a_record_goes_out_when_the_device_has_reported_too(tmp_path):
    log = StepLog(tmp_path / "metrics.jsonl", "a", 3)
    log.add(1, 1.0, 0.1, {"decide": 0.05, "adopt": 0.15}, {"step": 11, "tokens": 64})
    log.add(2, 1.0, 0.1, {}, {"step": 12, "tokens": 128})
    log.results([StepResult(1, 2.5, 0.1, 0.3, 0.2)])
    assert log.loss == 2.5
    log.event("started", "because")
    log.results([StepResult(2, float("nan"), 0.1, 0.3, 0.2)])
    log.close()
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    first, event, second = [json.loads(line) for line in lines]
    assert (first["kind"], first["island"], first["incarnation"], first["step"]) == ("step", "a", 3, 11)
    assert first["loss"] == 2.5
    assert set(first["buckets"]) == {"data", "forward", "backward", "optimizer", "exchange", "other"}
    assert sum(first["buckets"].values()) == pytest.approx(first["step_s"])
    assert first["exchange_parts"] == {"decide": 0.05, "adopt": 0.15}
    assert first["buckets"]["exchange"] == pytest.approx(0.2)
    assert (event["kind"], event["event"], event["role"]) == ("event", "started", "learner")
    assert second["loss"] is None  # JSON has no nan
    assert first["time"] <= second["time"]
