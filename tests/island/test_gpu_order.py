"""A whole step with its boundary on a stand-in for a GPU: what goes to which stream, and that the host never waits.

The stand-in records copies, streams, events and everything that would make the host wait for the device. That the real
device does as it is ordered is not shown here.
"""

import pytest
import torch
from island.test_transfer import FakeCuda

from diloco_ds.core.fragments import TensorSpec, balance
from diloco_ds.island import slices
from diloco_ds.island.inner_snapshot import Piece
from diloco_ds.island.inner_state import staged
from diloco_ds.island.slices import FragmentSlices, Slice
from diloco_ds.island.transfer import HostMemory
from diloco_ds.model.experts import ExpertLayer, RoutedTokens
from diloco_ds.sim.tiny_experts import TinyExperts

GPU = torch.device("cuda")
BLOCKING = ("item", "tolist", "cpu", "numpy")


class Watched(FakeCuda):
    """Notes every copy with the stream it is given to, and whether it may run behind the host's back."""

    def __init__(self, monkeypatch):
        super().__init__(monkeypatch)
        self.pinned, self.copies, self.waits = [], [], []
        copy, to = torch.Tensor.copy_, torch.Tensor.to

        def watched_copy(into, source, non_blocking=False):
            self.copies.append((self.current, non_blocking))
            self.log.append(f"copy on {self.current}")
            return copy(into, source)

        def watched_to(tensor, *arguments, non_blocking=False):
            self.copies.append((self.current, non_blocking))
            return to(tensor, *arguments)

        monkeypatch.setattr(torch.Tensor, "copy_", watched_copy)
        monkeypatch.setattr(torch.Tensor, "to", watched_to)
        for name in BLOCKING:
            monkeypatch.setattr(torch.Tensor, name, self.waiting(name))
        monkeypatch.setattr(torch.cuda, "synchronize", self.waiting("torch.cuda.synchronize"))
        monkeypatch.setattr(torch.cuda, "cudart", lambda: self)

    def waiting(self, name):
        def wait(*_arguments, **_named):
            self.waits.append(name)
            raise AssertionError(f"{name} makes the host wait for the device")

        return wait

    def cudaHostRegister(self, address, nbytes, flags):
        self.pinned.append((address, nbytes, flags))
        return self.answer if hasattr(self, "answer") else 0

    def cudaHostUnregister(self, address):
        self.pinned = [each for each in self.pinned if each[0] != address]
        return 0


@pytest.fixture
def cuda(monkeypatch):
    return Watched(monkeypatch)


def fragment():
    """Six elements: two masters, and low-precision copies of them."""
    masters = [Slice(0, 2, torch.zeros(2)), Slice(2, 4, torch.ones(4))]
    copies = [Slice(0, 6, torch.zeros(6, dtype=torch.bfloat16))]
    return FragmentSlices(6, owned=masters, masters=masters, copies=copies)


def test_a_boundary_orders_push_optimizer_and_adoption_on_the_device_alone(cuda):
    memory, held = HostMemory(GPU), fragment()
    answer = memory.take(held.owned, torch.zeros(6))
    pushed = list(cuda.copies)
    assert pushed == [("side", True), ("side", True)]  # asynchronous, beside the step
    memory.hold_writers()  # before the optimizer's step, or the adoption
    slices.adopt(held, torch.arange(6.0), "overwrite", 0.0, None, ranks=None)
    adoption = memory.mark()
    assert cuda.log == [
        "side waits for main",  # the answer is of the step that was given to the main stream before it
        "copy on side",
        "copy on side",
        "event 1 on side",
        "main waits for event 1",  # who changes masters comes after who reads them
        *["copy on main"] * 3,
        "event 2 on main",
    ]
    assert {stream for stream, _ in cuda.copies[len(pushed) :]} == {"main"}
    assert (answer.done(), adoption.done()) == (False, False)
    cuda.passed = 1
    assert (answer.done(), adoption.done()) == (True, False)
    cuda.passed = 2
    assert adoption.done()
    assert (cuda.waited, cuda.waits) == (0, [])


@pytest.mark.parametrize(("how", "snapshot"), [("mix", None), ("rebase", torch.zeros(6))])
def test_mix_and_rebase_wait_for_nothing_either(cuda, how, snapshot):
    held = fragment()
    slices.adopt(held, torch.arange(6.0), how, 0.5, snapshot, ranks=None)
    assert cuda.copies
    assert all(asynchronous for _, asynchronous in cuda.copies)
    assert (cuda.waited, cuda.waits) == (0, [])


def test_a_step_that_follows_waits_once_more_on_the_device_and_never_on_the_host(cuda):
    memory, held = HostMemory(GPU), fragment()
    memory.hold_writers()
    assert cuda.log == []  # nothing was pushed yet: nothing to wait for
    for _ in range(2):
        memory.take(held.owned, torch.zeros(6))
        memory.hold_writers()
    assert [line for line in cuda.log if line.startswith("main")] == [
        "main waits for event 1",
        "main waits for event 2",
    ]
    assert cuda.waited == 0


def test_tokens_of_experts_are_counted_and_told_without_a_wait(cuda):
    memory, layer = HostMemory(GPU), TinyExperts(3, 4)
    layout = balance([TensorSpec("up", (3, 4, 4), False, 0)], 1, 1)
    routed = RoutedTokens([ExpertLayer(layer)], layout, torch.device("cpu"))
    out = torch.zeros(3, dtype=torch.int64)
    layer(torch.zeros(2, 4), torch.tensor([[0, 2], [2, 1]]), torch.ones(2, 2))
    transfer = memory.bring(routed.answered(0), out)
    routed.adopted(0, keeps=False)
    assert cuda.log == ["side waits for main", "copy on side", "event 1 on side"]
    assert not transfer.done()
    assert (cuda.waited, cuda.waits) == (0, [])
    assert torch.equal(out, torch.tensor([1, 1, 2]))


def test_a_checkpoint_is_copied_beside_the_step_into_pinned_memory(cuda, monkeypatch):
    """What is saved is of one boundary: who changes masters waits, on the device, until it is copied."""
    rooms, empty = [], torch.empty

    def watched_empty(numel, *, dtype, pin_memory):
        rooms.append((numel, dtype, pin_memory))
        return empty(numel, dtype=dtype)

    monkeypatch.setattr(torch, "empty", watched_empty)
    memory = HostMemory(GPU)
    pieces = [
        Piece("up", 0, Slice(0, 2, torch.tensor([1.0, 2.0]))),
        Piece("down", 3, Slice(7, 3, torch.arange(4.0), 1)),
    ]
    copied = staged(pieces, memory)
    memory.hold_writers()
    assert cuda.log == [
        "side waits for main",
        "copy on side",
        "copy on side",
        "event 1 on side",
        "main waits for event 1",
    ]
    assert rooms == [(5, torch.float32, True)]
    assert all(asynchronous for _, asynchronous in cuda.copies)
    assert not copied.done()
    assert (cuda.waited, cuda.waits) == (0, [])
    assert [(piece.tensor, piece.start) for piece in pieces] == [("up", 0), ("down", 3)]
    assert torch.equal(pieces[0].part.values(), torch.tensor([1.0, 2.0]))
    assert torch.equal(pieces[1].part.values(), torch.tensor([1.0, 2.0, 3.0]))


def test_the_mailbox_itself_is_page_locked_until_the_end(cuda):
    memory = HostMemory(GPU)
    memory.pin(4096, 8192)
    memory.pin(65536, 4096)
    assert cuda.pinned == [(4096, 8192, 0), (65536, 4096, 0)]
    memory.close()
    assert cuda.pinned == []


def test_memory_that_cannot_be_page_locked_is_refused_with_the_remedy(cuda):
    cuda.answer = 2
    with pytest.raises(slices.UserError, match=r"8192 bytes .*CUDA error 2.*ulimit -l"):
        HostMemory(GPU).pin(4096, 8192)
