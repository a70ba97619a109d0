"""The tape on disk: generations, what a kill left, a disk that is full for a while."""

from __future__ import annotations

import os

import pytest

from diloco_ds.core.events import Joined, Tick
from diloco_ds.core.tape import Entry, Header, decode_all
from diloco_ds.exchange import tape_file
from diloco_ds.exchange.tape_file import TapeFile


def untold(event, reason):
    raise AssertionError(f"{event} is told: {reason}")


def header(generation):
    return Header("run", "layout", generation, {"marks": []})


def records(path):
    return list(decode_all(path.read_bytes().splitlines(keepends=True), "run", "layout"))


def test_generations_follow_each_other_and_a_torn_end_is_cut_off(tmp_path):
    path = tmp_path / "tape.bin"
    tape = TapeFile(path, header(1), untold)
    tape.append(0.5, Joined("a"), [])
    tape.close()
    with path.open("ab") as file:
        file.write(b'{"at":0.7,"kind":"Ti')
    tape = TapeFile(path, header(2), untold)
    tape.append(0.1, Tick(), [])
    tape.close()
    assert records(path) == [header(1), Entry(0.5, Joined("a")), header(2), Entry(0.1, Tick())]


def full_disk(monkeypatch, takes):
    """Writes put down `takes` bytes, then fail."""
    real = os.pwrite

    def pwrite(fd, data, offset):
        if not takes:
            raise OSError(28, "No space left on device")
        return real(fd, data[: takes.pop()], offset)

    monkeypatch.setattr(tape_file.os, "pwrite", pwrite)


def test_a_full_disk_delays_records_and_loses_none(tmp_path, monkeypatch):
    path = tmp_path / "tape.bin"
    tape = TapeFile(path, header(1), untold)
    full_disk(monkeypatch, [11])
    for second in range(3):
        tape.append(float(second), Tick(), [])
    monkeypatch.undo()
    tape.append(3.0, Tick(), [])
    tape.close()
    assert records(path) == [header(1), *(Entry(float(second), Tick()) for second in range(4))]


def test_a_disk_that_stays_full_ends_the_tape_without_a_hole_and_that_is_told(tmp_path, monkeypatch):
    path, told = tmp_path / "tape.bin", []
    tape = TapeFile(path, header(1), lambda *event: told.append(event))
    monkeypatch.setattr(tape_file, "MOST_HELD_BACK", 200)
    full_disk(monkeypatch, [11])
    for second in range(10):
        tape.append(float(second), Tick(), [])
    monkeypatch.undo()
    tape.append(10.0, Tick(), [])
    tape.close()
    assert records(path) == [header(1)]
    ((event, reason),) = told
    assert event == "tape_ended"
    assert reason.startswith("the tape of generation 1 ends here: the disk did not take ")
    assert "more is not held back" in reason


def test_what_is_held_back_at_the_end_is_written_or_told(tmp_path, monkeypatch):
    path, told = tmp_path / "tape.bin", []
    tape = TapeFile(path, header(1), lambda *event: told.append(event))
    full_disk(monkeypatch, [])
    tape.append(0.0, Tick(), [])
    monkeypatch.undo()
    tape.close()
    assert (records(path), told) == ([header(1), Entry(0.0, Tick())], [])
    tape = TapeFile(path, header(2), lambda *event: told.append(event))
    full_disk(monkeypatch, [11])
    tape.append(1.0, Tick(), [])
    tape.close()
    assert records(path) == [header(1), Entry(0.0, Tick()), header(2)]
    assert [(event, "and the syncer ends" in reason) for event, reason in told] == [("tape_ended", True)]


def test_a_tape_that_cannot_be_opened_is_the_users_to_put_right(tmp_path):
    from diloco_ds.errors import UserError

    (tmp_path / "tape.bin").mkdir()
    with pytest.raises(UserError, match="cannot be written"):
        TapeFile(tmp_path / "tape.bin", header(1), untold)
