"""Copies and timing as a GPU would see them: a stand-in for CUDA records what is given to which stream.

It shows the order and that the host is never made to wait; that the real device does as ordered is not shown
here.
"""

import contextlib

import pytest
import torch

from diloco_ds.island.slices import Slice
from diloco_ds.island.timing import StepTimer
from diloco_ds.island.transfer import HostMemory


class FakeCuda:
    """Streams are names; `log` is the order of what was given to them; the host learns what `passed` says."""

    def __init__(self, monkeypatch):
        self.log, self.passed, self.current, self.events, self.waited = [], 0, "main", 0, 0
        monkeypatch.setattr(torch.cuda, "Stream", lambda device: FakeStream(self, "side"))
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: FakeStream(self, self.current))
        monkeypatch.setattr(torch.cuda, "stream", self.stream)
        monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing=False: FakeEvent(self))

    @contextlib.contextmanager
    def stream(self, stream):
        before, self.current = self.current, stream.name
        yield
        self.current = before


class FakeStream:
    def __init__(self, cuda, name):
        self.cuda, self.name = cuda, name

    def wait_stream(self, other):
        self.cuda.log.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event):
        self.cuda.log.append(f"{self.name} waits for event {event.number}")

    def synchronize(self):
        self.cuda.waited += 1


class FakeEvent:
    def __init__(self, cuda):
        self.cuda = cuda
        cuda.events += 1
        self.number = cuda.events

    def record(self):
        self.cuda.log.append(f"event {self.number} on {self.cuda.current}")

    def query(self):
        return self.number <= self.cuda.passed

    def synchronize(self):
        self.cuda.waited += 1
        self.cuda.passed = max(self.cuda.passed, self.number)

    def elapsed_time(self, later):
        return 1000.0 * (later.number - self.number)


@pytest.fixture
def cuda(monkeypatch):
    return FakeCuda(monkeypatch)


def test_an_answer_leaves_on_a_side_stream_and_only_the_device_waits(cuda):
    memory = HostMemory(torch.device("cuda"))
    master, out = torch.arange(6.0), torch.zeros(8)
    transfer = memory.take([Slice(2, 3, master, offset=1)], out)
    assert cuda.log == ["side waits for main", "event 1 on side"]
    memory.hold_writers()
    assert cuda.log[2:] == ["main waits for event 1"]
    assert not transfer.done()
    cuda.passed = 1
    assert transfer.done()
    assert cuda.waited == 0
    assert out.tolist() == [0, 0, 1, 2, 3, 0, 0, 0]


def test_an_adoption_is_done_when_the_main_stream_has_passed_it(cuda):
    memory = HostMemory(torch.device("cuda"))
    transfer = memory.mark()
    assert cuda.log == ["event 1 on main"]
    assert not transfer.done()
    transfer.wait()
    assert transfer.done()
    assert cuda.waited == 1


def test_close_waits_for_every_copy(cuda):
    HostMemory(torch.device("cuda")).close()
    assert cuda.waited == 2  # both streams


def test_on_a_cpu_a_copy_is_done_at_once():
    memory = HostMemory(torch.device("cpu"))
    out = torch.zeros(2)
    assert memory.take([Slice(0, 2, torch.ones(2))], out).done()
    assert out.tolist() == [1, 1]
    memory.hold_writers()
    assert memory.mark().done()
    memory.pin(0, 10)
    memory.close()


def step(timer, loss):
    timer.begin()
    for part in ("forward", "backward", "forward", "backward", "optimizer"):
        timer.lap(part)
    timer.end(torch.tensor(loss))


def test_results_on_a_gpu_come_when_the_device_has_passed_them_without_a_wait(cuda, monkeypatch):
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *shape, dtype, pin_memory: empty(*shape, dtype=dtype))
    timer = StepTimer(torch.device("cuda"))
    step(timer, 1.5)
    assert timer.finished() == []
    step(timer, 2.5)
    cuda.passed = 7  # the first step's: its start, five parts, and the copy of the loss
    (first,) = timer.finished()
    assert (first.step, first.loss, first.forward, first.backward, first.optimizer) == (1, 1.5, 2, 2, 1)
    assert cuda.waited == 0
    (second,) = timer.finished(wait=True)
    assert (second.step, second.loss) == (2, 2.5)


def test_results_on_a_cpu_are_those_of_the_step_just_made():
    timer = StepTimer(torch.device("cpu"))
    for number in (1, 2):
        step(timer, float(number))
        (result,) = timer.finished()
        assert (result.step, result.loss) == (number, float(number))
        assert min(result.forward, result.backward, result.optimizer) >= 0
    assert timer.finished() == []
