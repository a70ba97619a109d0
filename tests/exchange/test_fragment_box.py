"""FragmentBox: whole fragments only, versions that rise, pins that hold, no byte lost to a crash."""

from __future__ import annotations

import multiprocessing
import random

import numpy as np
import pytest
import torch

from diloco_ds.errors import UserError
from diloco_ds.exchange import fragment_box
from diloco_ds.exchange.fragment_box import FragmentBox

NUMELS = (5, 3000, 1024)


@pytest.fixture
def box(tmp_path):
    return FragmentBox.create(tmp_path / "box", NUMELS, 64)


def put(box, fragment, version):
    slot = box.begin(fragment)
    assert slot is not None
    slot.numpy()[:] = version
    box.commit(fragment, version, b"v%d" % version)


def content(box, fragment, version):
    values = set(box.payload(fragment, version).tolist())
    assert len(values) == 1, "a mixed fragment"
    return values.pop()


def test_an_empty_box(box):
    for fragment in range(3):
        assert box.version(fragment) == -1
        assert box.read_header(fragment) is None
        assert box.payload(fragment, 0) is None
        assert box.payload(fragment, -1) is None
        assert not box.holds(fragment, -1)
        assert not box.pin(fragment, -1)
        assert not box.pin(fragment, 0)


def test_the_two_newest_versions_are_readable(box, tmp_path):
    reader = FragmentBox.open(tmp_path / "box")
    assert reader.numels == NUMELS
    for version in (0, 1, 5, 6):
        put(box, 1, version)
        assert reader.version(1) == version
        assert reader.read_header(1) == (version, b"v%d" % version)
        assert content(reader, 1, version) == version
    assert content(reader, 1, 5) == 5
    assert reader.meta(1, 5) == b"v5"
    assert reader.payload(1, 1) is None
    assert reader.meta(1, 1) is None
    assert reader.version(0) == reader.version(2) == -1


def test_beginning_takes_the_older_version_and_only_committing_shows_the_new(box):
    put(box, 0, 0)
    put(box, 0, 1)
    slot = box.begin(0)
    slot.fill_(9)
    assert not box.holds(0, 0)
    assert box.version(0) == 1
    assert content(box, 0, 1) == 1
    assert box.begin(0).data_ptr() == slot.data_ptr() == box.begun(0).data_ptr()
    box.commit(0, 2, b"")
    assert content(box, 0, 2) == 9
    assert box.read_header(0) == (2, b"")


def test_refusals(box, tmp_path):
    put(box, 0, 3)
    put(box, 0, 4)
    with pytest.raises(RuntimeError, match="not begun"):
        box.commit(0, 5, b"")
    with pytest.raises(RuntimeError, match="not begun"):
        box.begun(0)
    box.begin(0)
    with pytest.raises(ValueError, match="not above 4"):
        box.commit(0, 4, b"")
    with pytest.raises(ValueError, match="65 bytes"):
        box.commit(0, 5, bytes(65))
    with pytest.raises(FileExistsError):
        FragmentBox.create(tmp_path / "box", NUMELS, 64)
    with pytest.raises(FileNotFoundError):
        FragmentBox.open(tmp_path / "none")
    with pytest.raises(ValueError, match="elements"):
        FragmentBox.create(tmp_path / "empty", (3, 0), 64)
    for junk in (b"", bytes(8192), (tmp_path / "box").read_bytes() + bytes(4096)):
        (tmp_path / "junk").write_bytes(junk)
        with pytest.raises(UserError, match="junk"):
            FragmentBox.open(tmp_path / "junk")


def test_slots_lie_on_pages_of_one_mapping(box, tmp_path):
    assert box.address % 4096 == 0
    assert box.nbytes == (tmp_path / "box").stat().st_size == FragmentBox.file_size(NUMELS, 64)
    for fragment, numel in enumerate(NUMELS):
        for _ in range(2):
            put(box, fragment, box.version(fragment) + 1)
            payload = box.payload(fragment, box.version(fragment))
            assert payload.dtype == torch.float32
            assert payload.shape == (numel,)
            assert payload.data_ptr() % 4096 == 0
            assert box.address <= payload.data_ptr() <= box.address + box.nbytes - 4 * numel


def test_unwritten_slots_take_no_memory(tmp_path):
    large = FragmentBox.create(tmp_path / "large", (1 << 30, 1 << 20), 64)
    put(large, 1, 0)
    assert large.nbytes > 8 << 30
    assert 512 * (tmp_path / "large").stat().st_blocks < 16 << 20


def test_more_than_two_gib_in_one_fragment(tmp_path):
    large = FragmentBox.create(tmp_path / "large", ((1 << 31) + 5,), 64)
    slot = large.begin(0)
    slot[-1] = 7
    large.commit(0, 0, b"")
    assert FragmentBox.open(tmp_path / "large").payload(0, 0)[-1] == 7


def test_a_pin_keeps_its_version(box, tmp_path):
    writer, reader = box, FragmentBox.open(tmp_path / "box")
    put(writer, 1, 0)
    assert reader.pin(1, 0)
    put(writer, 1, 1)
    assert writer.begin(1) is None
    assert content(reader, 1, 0) == 0
    assert reader.holds(1, 0)
    assert writer.begin(0) is not None, "a pin is on one fragment"
    reader.unpin(1)
    put(writer, 1, 2)
    assert not reader.holds(1, 0)
    assert not reader.pin(1, 0)
    assert writer.begin(1) is not None, "a pin that failed leaves nothing behind"


def test_a_version_that_is_being_claimed_cannot_be_pinned(box, tmp_path, monkeypatch):
    reader = FragmentBox.open(tmp_path / "box")
    put(box, 1, 0)
    put(box, 1, 1)
    tried = []

    def try_to_pin(place):
        if place == "box.claimed":
            tried.append(reader.pin(1, 0))

    monkeypatch.setattr(fragment_box, "failpoint", try_to_pin)
    assert box.begin(1) is not None
    assert tried == [False]


def test_pins_are_cleared_when_the_reader_restarts(box, tmp_path):
    put(box, 0, 0)
    put(box, 2, 0)
    reader = FragmentBox.open(tmp_path / "box")
    assert reader.pin(0, 0)
    assert reader.pin(2, 0)
    put(box, 0, 1)
    put(box, 2, 1)
    assert box.begin(0) is None
    assert box.begin(2) is None
    FragmentBox.open(tmp_path / "box").clear_pins()
    assert box.begin(0) is not None
    assert box.begin(2) is not None


@pytest.mark.parametrize(
    ("place", "newest", "older_left"),
    [
        ("box.claimed", 1, True),
        ("box.begun", 1, False),
        ("box.filled", 1, False),
        ("box.committed", 2, False),
    ],
)
def test_death_within_a_write(box, tmp_path, dies_at, place, newest, older_left):
    put(box, 1, 0)
    put(box, 1, 1)
    dies_at(place, lambda: put(box, 1, 2))
    survivor = FragmentBox.open(tmp_path / "box")
    assert survivor.read_header(1) == (newest, b"v%d" % newest)
    assert content(survivor, 1, newest) == newest
    assert survivor.pin(1, newest), "the newest version can always be pinned"
    survivor.unpin(1)
    assert survivor.holds(1, 0) == older_left
    for version in (3, 4, 5):
        put(survivor, 1, version)
        assert content(survivor, 1, version) == version


def test_a_writer_killed_at_random_moments(box, tmp_path, killed_when):
    chance = random.Random(2)

    def write_for_ever():
        while True:
            put(box, 1, box.version(1) + 1)

    for _ in range(30):
        goal = box.version(1) + chance.randrange(1, 300)
        killed_when(lambda goal=goal: box.version(1) >= goal, write_for_ever)
        survivor = FragmentBox.open(tmp_path / "box")
        version, meta = survivor.read_header(1)
        assert version >= goal
        assert meta == b"v%d" % version
        assert content(survivor, 1, version) == version


def test_readers_beside_a_fast_writer(box, tmp_path, in_child):
    """A copy that still `holds`, and anything pinned, is never mixed; a reader's pin delays nobody for ever."""
    enough = multiprocessing.Event()

    def write_many():
        writer = FragmentBox.open(tmp_path / "box")
        while not enough.is_set():
            slot = writer.begin(1)
            if slot is not None:
                version = writer.version(1) + 1
                slot.numpy()[:] = version
                writer.commit(1, version, b"v%d" % version)

    join = in_child(write_many)
    chance = random.Random(3)
    pinned = copied = 0
    newest = set()
    while (
        copied < 50 or pinned < 200 or len(newest) < 200
    ):  # as often as it takes: the two race on every machine
        version = box.version(1)
        if version < 0:
            continue
        newest.add(version)
        if chance.random() < 0.5:
            copy = np.array(box.payload(1, version)) if box.payload(1, version) is not None else None
            if copy is not None and box.holds(1, version):
                assert (copy == version).all()
                copied += 1
        elif box.pin(1, version):
            assert box.meta(1, version) == b"v%d" % version
            assert (box.payload(1, version).numpy() == version).all()
            assert box.holds(1, version)
            box.unpin(1)
            pinned += 1
    enough.set()
    join()


def _fill_part(path, rank, ranks, barrier):
    box = FragmentBox.open(path)
    for version in range(20):
        if rank == 0:
            assert box.begin(1) is not None
        barrier.wait()
        part = slice(rank * NUMELS[1] // ranks, (rank + 1) * NUMELS[1] // ranks)
        box.begun(1).numpy()[part] = version
        barrier.wait()
        if rank == 0:
            box.commit(1, version, b"")
        barrier.wait()
        assert (box.payload(1, version).numpy() == version).all()
        barrier.wait()


def test_many_processes_fill_one_slot(box, tmp_path):
    fork = multiprocessing.get_context("fork")
    barrier = fork.Barrier(4, timeout=30)
    ranks = [fork.Process(target=_fill_part, args=(tmp_path / "box", rank, 4, barrier)) for rank in range(4)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    assert [rank.exitcode for rank in ranks] == [0, 0, 0, 0]
    assert content(box, 1, 19) == 19
