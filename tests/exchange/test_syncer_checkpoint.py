"""Checkpoints of the global state: bit-equal, whole or absent, checked before use, few; and the files themselves."""

from __future__ import annotations

import json
import os
from functools import partial

import pytest
import torch
from safetensors.torch import load_file, save_file

from diloco_ds.conductor.shared_memory import remove_shared_memory
from diloco_ds.core.fragments import TensorSpec, balance
from diloco_ds.core.returning import VERSION_GAP, Origin
from diloco_ds.exchange.gathering import Returned
from diloco_ds.exchange.recovery import Recovery
from diloco_ds.exchange.store import Mark, Store
from diloco_ds.exchange.syncer_checkpoint import (
    BadCheckpoint,
    Facts,
    checkpoints,
    mark_complete,
    remove_unfinished,
    restore_checkpoint,
    save,
    save_checkpoint,
)
from diloco_ds.rundir import SharedMemory
from diloco_ds.tensor_file import TensorFileWriter, file_sha256

LAYOUT = balance(
    [TensorSpec("embed", (7, 3), True), TensorSpec("matrix", (4, 5), False), TensorSpec("scalar", (), False)],
    2,
    4,
)
BUFFERS = ("momentum_buffer",)
FACTS = Facts(run_id="ignored", generation=3, global_step=17, tokens=640, merges=9, time=1.5)


@pytest.fixture
def new_store():
    names = []

    def make(fill, run_id="checkpoint"):
        shared = SharedMemory(f"test-{run_id}-{os.getpid()}-{len(names)}")
        names.append(shared.run_id)
        return Store.create(shared.store, LAYOUT, BUFFERS, run_id, fill)

    yield make
    for name in names:
        remove_shared_memory(name)


def restored(path, returned=None):
    """Fills a store from the checkpoint `path`, written a generation ago."""
    return partial(
        restore_checkpoint, path, recovery=Recovery(FACTS.generation + 1, lambda versions: returned or {})
    )


def fill_at_random(store, version=4):
    generator = torch.Generator().manual_seed(version)
    for fragment in range(LAYOUT.fragments):
        theta, buffers = store.begin(fragment)
        for tensor in (theta, *buffers.values()):
            tensor.copy_(torch.randn(tensor.shape, generator=generator))
        mark = Mark(version + fragment, 17, 5, 640, {"a": 3}, {"outer_steps": 5.0}, norms=(0.5, 0.1))
        store.commit(fragment, mark, generation=3)


def facts(run_id="checkpoint"):
    return Facts(run_id, FACTS.generation, FACTS.global_step, FACTS.tokens, FACTS.merges, FACTS.time)


def test_a_checkpoint_gives_weights_momentum_and_marks_back_bit_for_bit(tmp_path, new_store):
    store = new_store(fill_at_random)
    save(tmp_path / "000001", store, facts(), with_outer=True)
    again = new_store(restored(tmp_path / "000001"))
    for fragment in range(LAYOUT.fragments):
        assert torch.equal(again.theta(fragment), store.theta(fragment))
        assert torch.equal(again.outer(fragment)["momentum_buffer"], store.outer(fragment)["momentum_buffer"])
        mark = again.mark(fragment)
        assert mark.version == 4 + fragment + VERSION_GAP
        assert mark.norms == (0.5, 0.1)
        assert (mark.tokens, mark.round, mark.merged, mark.scalars) == (
            640,
            17,
            {"a": 3},
            {"outer_steps": 5.0},
        )


def test_the_weights_lie_there_under_their_names(tmp_path, new_store):
    store = new_store(fill_at_random)
    save(tmp_path / "640", store, facts(), with_outer=False)
    assert sorted(path.name for path in (tmp_path / "640").iterdir()) == ["state.json", "theta.safetensors"]
    tensors = load_file(tmp_path / "640" / "theta.safetensors")
    assert {name: tuple(t.shape) for name, t in tensors.items()} == {
        "embed": (7, 3),
        "matrix": (4, 5),
        "scalar": (),
    }
    for placed in LAYOUT.tensors:
        span = store.theta(placed.fragment)[placed.offset : placed.offset + placed.spec.numel]
        assert torch.equal(tensors[placed.spec.name].reshape(-1), span)
    state = json.loads((tmp_path / "640" / "state.json").read_text())
    assert (state["tokens"], state["global_step"], state["generation"]) == (640, 17, 3)
    assert state["files"] == {"theta.safetensors": file_sha256(tmp_path / "640" / "theta.safetensors")}
    assert [mark["version"] for mark in state["fragments"]] == [4, 5]


@pytest.mark.parametrize(
    "place", ["checkpoint.tensors", "checkpoint.before_rename", "checkpoint.after_rename"]
)
def test_killed_while_saving(tmp_path, new_store, dies_at, place):
    store = new_store(fill_at_random)
    save_checkpoint(tmp_path, store, facts(), keep=2)
    dies_at(place, lambda: save_checkpoint(tmp_path, store, facts(), keep=2))
    found = [path.name for path in checkpoints(tmp_path)]
    assert found == (["000001", "000002"] if place == "checkpoint.after_rename" else ["000001"])
    remove_unfinished(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == found
    new_store(restored(checkpoints(tmp_path)[-1]))


def test_only_the_newest_are_kept(tmp_path, new_store):
    store = new_store(fill_at_random)
    for _ in range(5):
        save_checkpoint(tmp_path, store, facts(), keep=2)
    assert [path.name for path in checkpoints(tmp_path)] == ["000004", "000005"]


def damage(path):
    data = bytearray(path.read_bytes())
    data[-3] ^= 4
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda path: damage(path / "theta.safetensors"), "theta.safetensors is damaged"),
        (lambda path: damage(path / "outer.safetensors"), "outer.safetensors is damaged"),
        (lambda path: (path / "outer.safetensors").unlink(), "outer.safetensors"),
        (lambda path: (path / "state.json").write_text("{"), "000001"),
        (lambda path: (path / "state.json").unlink(), "state.json"),
    ],
)
def test_a_damaged_checkpoint_is_refused(tmp_path, new_store, spoil, why):
    path = save_checkpoint(tmp_path, new_store(fill_at_random), facts(), keep=1)
    spoil(path)
    with pytest.raises(BadCheckpoint, match=why):
        new_store(restored(path))


def test_another_runs_checkpoint_is_refused(tmp_path, new_store):
    path = save_checkpoint(tmp_path, new_store(fill_at_random, "other"), facts("other"), keep=1)
    with pytest.raises(BadCheckpoint, match="run_id is other, not checkpoint"):
        new_store(restored(path))


def test_a_failing_disk_leaves_nothing_behind(tmp_path, new_store, monkeypatch):
    store = new_store(fill_at_random)

    def no_space(self, values):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(TensorFileWriter, "write", no_space)
    with pytest.raises(OSError, match="No space left"):
        save_checkpoint(tmp_path, store, facts(), keep=2)
    assert list(tmp_path.iterdir()) == []


def test_a_file_written_in_pieces_is_what_safetensors_writes(tmp_path):
    tensors = {"a": torch.randn(3, 4), "b": torch.randn(()), "c": torch.randn(5)}
    writer = TensorFileWriter(tmp_path / "pieces", [(name, tuple(t.shape)) for name, t in tensors.items()])
    flat = torch.cat([t.reshape(-1) for t in tensors.values()])
    for piece in (flat[:7], flat[7:8], flat[8:]):
        writer.write(piece)
    assert writer.close() == file_sha256(tmp_path / "pieces")
    save_file(tensors, tmp_path / "whole")
    for name, tensor in load_file(tmp_path / "pieces").items():
        assert torch.equal(tensor, load_file(tmp_path / "whole")[name])


def test_too_much_or_too_little_is_an_error(tmp_path):
    writer = TensorFileWriter(tmp_path / "file", [("a", (4,))])
    with pytest.raises(ValueError, match="do not fit"):
        writer.write(torch.zeros(5))
    writer.write(torch.zeros(3))
    with pytest.raises(ValueError, match="1 values are missing"):
        writer.close()
    writer.abandon()


def test_what_an_island_gave_back_is_newer_than_the_checkpoint_and_has_its_momentum(tmp_path, new_store):
    """Weights, round, merges and tokens are the island's; the outer optimizer's state is the checkpoint's."""
    before = new_store(fill_at_random)
    path = save_checkpoint(tmp_path, before, facts(), keep=1)
    newer = torch.arange(LAYOUT.numel(1), dtype=torch.float32)
    back = {1: Returned("b", 8, newer, round=29, merges=8, tokens=1000)}
    recovery = Recovery(FACTS.generation + 2, lambda versions: back if versions == [4, 5] else {})
    store = new_store(partial(restore_checkpoint, path, recovery=recovery))
    assert torch.equal(store.theta(0), before.theta(0))
    assert torch.equal(store.theta(1), newer)
    for fragment in range(2):
        assert torch.equal(
            store.outer(fragment)["momentum_buffer"], before.outer(fragment)["momentum_buffer"]
        )
    mark = store.mark(1)
    assert (mark.round, mark.merges, mark.tokens, mark.merged) == (29, 8, 1000, {"a": 3})
    assert mark.scalars == {"outer_steps": 5.0}
    assert [store.mark(p).version for p in range(2)] == [4 + 2 * VERSION_GAP, 5 + 2 * VERSION_GAP]
    assert recovery.origins == [Origin(4, 4), Origin(8, 5, "b")]
    assert "fragment 1 by 3;" in recovery.lost


def test_after_the_last_checkpoint_of_a_clean_end_nobody_is_asked(tmp_path, new_store):
    path = save_checkpoint(tmp_path, new_store(fill_at_random), facts(), keep=1)
    asked = []
    for _ in range(2):
        recovery = Recovery(FACTS.generation + 1, lambda versions: asked.append(versions) or {})
        new_store(partial(restore_checkpoint, path, recovery=recovery))
        mark_complete(path)
    assert asked == [[4, 5]]
    assert recovery.lost is None
