"""A checkpoint on its way to disk, and rank 0's side of it, without an engine."""

import json
import threading
import weakref

import pytest

from diloco_ds.island.checkpoints import IslandCheckpoints
from diloco_ds.island.saving import Saver
from diloco_ds.island.writing import WriteError, Writing


class Log:
    def __init__(self):
        self.events = []

    def event(self, name, reason, **fields):
        self.events.append((name, reason, fields))


def full():
    raise OSError(28, "No space left on device")


def test_it_is_written_meanwhile_and_what_it_holds_is_free_afterwards():
    class Held:
        def write(self):
            assert go_on.wait(60)

    go_on, held = threading.Event(), Held()
    there = weakref.ref(held)
    writing = Writing(held.write, background=True)
    del held
    writing.check()
    assert there() is not None
    go_on.set()
    writing.wait()
    assert there() is None


def test_what_could_not_be_written_is_free_too():
    class Held:
        def write(self):
            self.deeper()

        def deeper(self):
            full()

    held = Held()
    there = weakref.ref(held)
    writing = Writing(held.write, background=True)
    del held
    with pytest.raises(OSError, match="No space left"):
        writing.wait()
    assert there() is None


def test_in_the_foreground_it_is_written_on_return():
    done = []
    Writing(lambda: done.append(threading.current_thread()), background=False).wait()
    assert done == [threading.main_thread()]


@pytest.mark.parametrize("background", [True, False])
def test_a_full_disk_is_for_who_waits_and_anything_else_for_who_looks(background):
    writing = Writing(full, background)
    with pytest.raises(OSError, match="No space left"):
        writing.wait()
    writing.check()  # training goes on
    broken = Writing(lambda: 1 / 0, background)
    with pytest.raises(WriteError, match="written: ZeroDivisionError: division by zero"):
        broken.wait()
    with pytest.raises(WriteError):
        broken.check()


def test_a_checkpoint_counts_when_it_is_written_and_not_when_it_failed(tmp_path):
    log = Log()
    saver = Saver(IslandCheckpoints(tmp_path, 2), every_s=0.0, parameters=10, log=log)
    assert saver.due()
    go_on, tag = threading.Event(), IslandCheckpoints.tag(1, 5)

    def write():
        assert go_on.wait(60)
        (tmp_path / tag).mkdir()
        (tmp_path / tag / "master").write_bytes(bytes(100))

    saver.begun(tag, {"step": 5}, 0.25, Writing(write, background=True))
    assert not saver.due(), "one at a time"
    assert IslandCheckpoints(tmp_path, 2).newest() is None
    go_on.set()
    saver.wait()
    assert IslandCheckpoints(tmp_path, 2).newest().facts == {"step": 5, "bytes": 100}
    name, reason, fields = log.events[-1]
    assert (name, reason, fields["seconds"], fields["bytes"]) == (
        "checkpoint",
        f"{tag} is complete",
        0.25,
        100,
    )

    saver.begun(IslandCheckpoints.tag(1, 6), {"step": 6}, 0.0, Writing(full, background=True))
    saver.wait()
    assert saver.failed
    assert log.events[-1][0] == "checkpoint_failed"
    assert "No space left" in log.events[-1][1]
    assert IslandCheckpoints(tmp_path, 2).newest().tag == tag
    assert json.loads((tmp_path / tag / "complete.json").read_text())["step"] == 5
    assert saver.due(), "the next one is tried"


def test_what_is_no_matter_of_the_disk_is_left_to_the_loop(tmp_path):
    log = Log()
    saver = Saver(IslandCheckpoints(tmp_path, 2), every_s=0.0, parameters=10, log=log)
    saver.begun(IslandCheckpoints.tag(1, 6), {"step": 6}, 0.0, Writing(lambda: 1 / 0, background=True))
    saver.wait()
    assert log.events == []


def test_a_slow_one_is_told_of_once(tmp_path):
    log, go_on = Log(), threading.Event()
    saver = Saver(IslandCheckpoints(tmp_path, 2), every_s=0.01, parameters=10, log=log)
    saver.begun(
        IslandCheckpoints.tag(1, 6), {}, 0.0, Writing(lambda: go_on.wait(60) and full(), background=True)
    )
    while not log.events:
        assert not saver.due()
    assert not saver.due()
    go_on.set()
    saver.wait()
    assert [name for name, *_ in log.events] == ["checkpoint_slow", "checkpoint_failed"]


def test_what_a_dead_learner_left_half_written_goes_before_anything_else(tmp_path):
    """Its room would be missing for the next one."""
    checkpoints = IslandCheckpoints(tmp_path, 2)
    half = tmp_path / f".{checkpoints.tag(1, 5)}.partial"
    half.mkdir()
    (half / "master.safetensors").write_bytes(bytes(10))
    Saver(checkpoints, every_s=1.0, parameters=10, log=Log())
    assert not half.exists()
