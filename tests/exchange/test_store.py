"""The store: weights and momentum under one mark, whole after a crash at any write, never held up by a reader."""

from __future__ import annotations

import os
import threading

import pytest
import torch

from diloco_ds.conductor.shared_memory import remove_shared_memory
from diloco_ds.core.fragments import TensorSpec, balance
from diloco_ds.errors import UserError
from diloco_ds.exchange.store import Mark, Store, flatten, payload_numels
from diloco_ds.rundir import SharedMemory

LAYOUT = balance([TensorSpec("embed", (7, 3), True), TensorSpec("matrix", (40, 50), False)], 2, 4)
BUFFERS = ("exp_avg", "exp_avg_sq")


@pytest.fixture
def shared():
    memory = SharedMemory(f"test-store-{os.getpid()}")
    yield memory
    remove_shared_memory(memory.run_id)


def put(store, fragment, version):
    """Commit `version`: every value of the payload is the version, or the version and its buffer's number."""
    theta, buffers = store.begin(fragment)
    theta.fill_(version)
    for number, name in enumerate(BUFFERS, start=1):
        buffers[name].fill_(version + number / 4)
    norms = (0.1, float(version))
    mark = Mark(
        version,
        10 * version,
        version,
        64 * version,
        {"a": version - 1},
        {"step": float(version)},
        norms=norms,
    )
    store.commit(fragment, mark, generation=1)


def fill(store):
    for fragment in range(LAYOUT.fragments):
        put(store, fragment, 0)


def make(shared):
    return Store.create(shared.store, LAYOUT, BUFFERS, shared.run_id, fill)


def reopen(shared):
    return Store.open(shared.store, LAYOUT, BUFFERS, shared.run_id)


def assert_whole(store, fragment, versions):
    mark = store.mark(fragment)
    assert mark.version in versions
    assert mark.scalars == {"step": float(mark.version)}
    assert bool((store.theta(fragment) == mark.version).all())
    for number, name in enumerate(BUFFERS, start=1):
        assert bool((store.outer(fragment)[name] == mark.version + number / 4).all())


def test_weights_buffers_and_mark_come_back_together(shared):
    store = make(shared)
    for version in range(1, 4):
        put(store, 1, version)
    again = reopen(shared)
    assert again.mark(1) == Mark(3, 30, 3, 192, {"a": 2}, {"step": 3.0})
    assert again.mark(1).norms == (0.1, 3.0)
    assert again.mark(0).version == 0
    assert_whole(again, 1, {3})
    assert bool((again.theta_of(1, 2) == 2).all())
    assert again.theta_of(1, 1) is None
    assert payload_numels(LAYOUT, BUFFERS) == (63, 6000)


@pytest.mark.parametrize(
    "place",
    ["box.claimed", "box.begun", "store.before_commit", "box.filled", "box.committed", "store.after_commit"],
)
def test_killed_at_any_write_the_last_commit_is_whole(shared, dies_at, place):
    store = make(shared)
    put(store, 1, 1)
    dies_at(place, lambda: put(reopen(shared), 1, 2))
    again = reopen(shared)
    assert_whole(again, 1, {2} if place in ("box.committed", "store.after_commit") else {1})
    put(again, 1, 3)
    assert_whole(reopen(shared), 1, {3})


@pytest.mark.parametrize("place", ["box.begun", "store.after_commit", "store.filled"])
def test_a_store_appears_whole_or_not_at_all(shared, dies_at, place):
    dies_at(place, lambda: make(shared))
    assert not shared.store.exists()
    assert_whole(make(shared), 1, {0})
    assert [path.name for path in shared.root.iterdir()] == ["store"]


def test_a_copy_taken_while_merging_goes_on_is_of_one_version(shared):
    store = make(shared)
    done = threading.Event()

    def merge():
        for version in range(1, 2000):
            put(store, 1, version)
        done.set()

    writer = threading.Thread(target=merge)
    writer.start()
    out, seen = torch.empty(store.payload_numel(1)), set()
    while not done.is_set():
        mark = store.copy(1, out)
        seen.add(mark.version)
        values = out.view(3, -1)
        assert bool((values[0] == mark.version).all())
        assert bool((values[2] == mark.version + 0.5).all())
    writer.join()
    assert len(seen) > 1


def test_a_pin_left_by_a_dead_reader_does_not_stop_merges(shared):
    store = make(shared)
    put(store, 0, 1)
    assert store._box.pin(0, 0)
    put(store, 0, 2)
    assert_whole(store, 0, {2})


def test_another_runs_or_layouts_store_is_refused(shared):
    make(shared)
    with pytest.raises(UserError, match="belongs to run"):
        Store.open(shared.store, LAYOUT, BUFFERS, "another")
    with pytest.raises(UserError, match="not those of the run's layout"):
        Store.open(shared.store, LAYOUT, ("momentum_buffer",), shared.run_id)


def test_draining_is_remembered(shared):
    assert make(shared).drain_reason() is None
    reopen(shared).remember_drain("the budget is reached")
    assert reopen(shared).drain_reason() == "the budget is reached"


def test_flatten_refuses_a_wrong_shape():
    out = torch.empty(LAYOUT.numel(0))
    with pytest.raises(ValueError, match="embed"):
        flatten(LAYOUT, 0, lambda name: torch.zeros(3, 7), out)
