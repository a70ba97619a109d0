"""A checkpoint on its way to disk, and rank 0's side of it, without an engine."""

import json
import threading
import weakref

import pytest

from diloco_ds.island.checkpoints import IslandCheckpoints
from diloco_ds.island.saving import Saver
from diloco_ds.island.writing import Writing


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
    with pytest.raises(RuntimeError) as caught:
        broken.wait()
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    with pytest.raises(RuntimeError):
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
    ((name, reason, fields),) = log.events
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
