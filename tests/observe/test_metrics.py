"""The metrics file: whole lines from many writers, plain numbers, tolerant readers."""

import json
import math
import multiprocessing
import os
import resource
import signal
from multiprocessing.synchronize import Barrier
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco_ds.observe import metrics as metrics_module
from diloco_ds.observe.metrics import MetricsFile, MetricsFollower, last_record, read_metrics

WRITERS, RECORDS = 4, 1000


def _write_many(path: Path, writer: int, start: Barrier) -> None:
    with MetricsFile(path) as metrics:
        start.wait()
        for number in range(RECORDS):
            metrics.write("step", island=f"w{writer}", step=number, text="x" * (37 * number % 5000))


def test_lines_of_several_processes_stay_whole_and_in_order(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    context = multiprocessing.get_context("fork")
    start = context.Barrier(WRITERS)
    writers = [context.Process(target=_write_many, args=(path, index, start)) for index in range(WRITERS)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)
    assert [writer.exitcode for writer in writers] == [0] * WRITERS
    records = [json.loads(line) for line in path.read_text().splitlines() if line]  # none is torn
    assert len(records) == WRITERS * RECORDS
    for index in range(WRITERS):
        mine = [record for record in records if record["island"] == f"w{index}"]
        assert [record["step"] for record in mine] == list(range(RECORDS))
        assert all(len(record["text"]) == 37 * record["step"] % 5000 for record in mine)


def _write_until_killed(path: Path) -> None:
    with MetricsFile(path) as metrics:
        while True:
            metrics.write("step", island="victim", text="y" * 3000)


@pytest.mark.parametrize("attempt", range(5))
def test_a_killed_writer_costs_its_own_last_record_only(tmp_path: Path, attempt: int) -> None:
    path = tmp_path / "metrics.jsonl"
    survivor = MetricsFile(path)
    victim = multiprocessing.get_context("fork").Process(target=_write_until_killed, args=(path,))
    victim.start()
    while path.stat().st_size < 200_000:
        assert victim.is_alive()
        survivor.write("step", island="survivor")
    os.kill(victim.pid, signal.SIGKILL)
    victim.join(10)
    survivor.write("step", island="survivor", last=True)
    survivor.close()
    follower = MetricsFollower(path)
    records = follower.read()
    assert records[-1]["last"] is True
    assert all(record["island"] == "survivor" or len(record["text"]) == 3000 for record in records)
    assert follower.damaged <= 1
    assert follower.offset == path.stat().st_size


def test_events_that_were_kept_are_written_once_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk takes nothing for a while, then a little more than a line at a time."""
    room, write = 0, os.write

    def short(descriptor: int, data: bytes) -> int:
        nonlocal room
        if not room:
            raise OSError(28, "No space left on device")
        written = write(descriptor, data[:room])
        room -= written
        return written

    monkeypatch.setattr(os, "write", short)
    path = tmp_path / "metrics.jsonl"
    with MetricsFile(path) as metrics:
        for number in range(4):
            metrics.write("event", event="warning", number=number)
            metrics.write("step", island="a")
        room = 400
        for number in range(4, 12):
            metrics.write("event", event="warning", number=number)
            room += 150
        room = 10**6
        metrics.write("event", event="warning", number=12)
    records = MetricsFollower(path).read()
    numbers = [record["number"] for record in records if record.get("event") == "warning"]
    assert numbers == list(range(13))
    assert [record["records"] for record in records if record.get("event") == "metrics_lost"] == [4]


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


def _finite(value: object) -> object:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list) else value


@settings(max_examples=60)
@given(value=json_values)
def test_what_is_written_is_read_back_without_nan(
    tmp_path_factory: pytest.TempPathFactory, value: object
) -> None:
    path = tmp_path_factory.mktemp("metrics") / "metrics.jsonl"
    with MetricsFile(path) as metrics:
        metrics.write("event", value=value)
    assert path.read_text().count("\n") == 1
    assert [record["value"] for record in read_metrics(path)] == [_finite(value)]


def test_numpy_and_torch_values_become_plain_numbers(tmp_path: Path) -> None:
    with MetricsFile(tmp_path / "m") as metrics:
        metrics.write(
            "step",
            a=np.float32(1.5),
            b=torch.tensor(2.5),
            c=np.array([1, 2]),
            d=np.float64("nan"),
            e={"f": math.inf},
        )
    (record,) = read_metrics(tmp_path / "m")
    assert (record["a"], record["b"], record["c"], record["d"], record["e"]) == (
        1.5,
        2.5,
        [1, 2],
        None,
        {"f": None},
    )


def test_what_has_no_form_in_json_is_refused(tmp_path: Path) -> None:
    with MetricsFile(tmp_path / "m") as metrics, pytest.raises(TypeError, match="object cannot be written"):
        metrics.write("event", value=object())
    assert read_metrics(tmp_path / "m") == []


def test_follower_leaves_an_unfinished_line_for_later(tmp_path: Path) -> None:
    path = tmp_path / "m"
    follower = MetricsFollower(path)
    assert follower.read() == []
    line = b'{"time":1.0,"kind":"step","step":%d}\n'
    path.write_bytes(line % 1 + (line % 2)[:10])
    assert [record["step"] for record in follower.read()] == [1]
    assert follower.read() == []
    with path.open("ab") as file:
        file.write((line % 2)[10:] + line % 3)
    assert [record["step"] for record in follower.read()] == [2, 3]
    assert [record["step"] for record in read_metrics(path, since_offset=len(line % 1))] == [2, 3]


def test_a_new_writer_ends_a_torn_line_so_that_its_own_records_are_read(tmp_path: Path) -> None:
    path = tmp_path / "m"
    path.write_bytes(b'{"time":1.0,"kind":"step","st')
    with MetricsFile(path) as metrics:
        metrics.write("step", step=7)
    follower = MetricsFollower(path)
    assert [record["step"] for record in follower.read()] == [7]
    assert follower.damaged == 1


def _write_against_a_full_disk(path: Path) -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    with MetricsFile(path) as metrics:
        metrics.write("step", step=1)
        resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 20, unlimited[1]))
        metrics.write("step", step=2)  # torn after 20 bytes
        metrics.write("event", event="warning", reason="the disk is full")
        metrics.write("step", step=3)  # nothing written
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
        metrics.write("step", step=4)


def test_a_full_disk_loses_records_but_counts_them_keeps_events_and_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "m"
    process = multiprocessing.get_context("fork").Process(target=_write_against_a_full_disk, args=(path,))
    process.start()
    process.join(30)
    assert process.exitcode == 0
    records = read_metrics(path)
    assert [record.get("step") for record in records] == [1, None, None, 4]
    assert (records[1]["event"], records[1]["records"]) == ("metrics_lost", 2)
    assert (records[2]["event"], records[2]["reason"]) == ("warning", "the disk is full")
    assert records[2]["time"] <= records[1]["time"], "when it happened, not when it could be written"


def test_last_record_is_the_newest_whole_one_of_its_kind(tmp_path: Path) -> None:
    path = tmp_path / "m"
    assert last_record(path, "eval") is None
    with MetricsFile(path) as metrics:
        metrics.write("step", step=1)
        assert last_record(path, "eval") is None
        metrics.write("eval", loss=3.0)
        metrics.write("eval", loss=2.0)
        metrics.write("step", step=2)
    with path.open("ab") as file:
        file.write(b'{"time":1,"kind":"eval", broken\n{"time":9,"kind":"eval","loss":1')
    found = last_record(path, "eval")
    assert found is not None
    assert found["loss"] == 2.0


def test_writing_to_a_closed_file_is_an_error(tmp_path: Path) -> None:
    metrics = MetricsFile(tmp_path / "m")
    metrics.close()
    with pytest.raises(ValueError, match="closed"):
        metrics.write("step", step=1)


def test_what_is_kept_has_a_bound_and_is_written_at_the_end_at_the_latest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics_module, "MOST_KEPT", 2)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with MetricsFile(tmp_path / "m") as metrics:
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
        try:
            for number in range(5):
                metrics.write("event", event="warning", number=number)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    lost, *kept = read_metrics(tmp_path / "m")
    assert (lost["event"], lost["records"]) == ("metrics_lost", 3)
    assert [event["number"] for event in kept] == [0, 1]
