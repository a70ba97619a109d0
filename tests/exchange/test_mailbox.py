"""Mailbox: a private folder of registers, made whole, and refused when shared memory cannot hold it."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from diloco_ds.conductor.shared_memory import remove_shared_memory
from diloco_ds.core.events import Gift, Orders, Peer, Report
from diloco_ds.core.portions import Portions
from diloco_ds.errors import UserError
from diloco_ds.exchange import mailbox as mailbox_module
from diloco_ds.exchange import space
from diloco_ds.exchange.mailbox import Mailbox, moments_capacity, record_capacity
from diloco_ds.exchange.record import Record
from diloco_ds.exchange.wire import MomentsHeader, OrdersRecord, ReportRecord, UpdateHeader
from diloco_ds.rundir import SharedMemory


def test_the_longest_header_fits(tmp_path):
    experts = (0, 3 * 128)  # three layers of 128 in one fragment
    box = Mailbox.create(tmp_path / "m", (4, 9), inbox=False, experts=experts).outbox
    numbers = dict.fromkeys(("incarnation", "fragment", "round", "base", "steps", "tokens"), 2**63 - 1)
    numbers |= dict.fromkeys(("update_id", "lease", "cursor", "numel"), 2**63 - 1)
    header = UpdateHeader("r" * 200, "i" * 32, **numbers, expert_tokens=(2**63 - 1,) * experts[1])
    box.begin(1)
    box.commit(1, 0, header.pack())
    assert UpdateHeader.unpack(box.meta(1, 0)) == header


def test_both_ends(tmp_path):
    island = Mailbox.create(tmp_path / "a.island", (4, 9), inbox=True)
    syncer = Mailbox.create(tmp_path / "a.syncer", (4, 9), inbox=False)
    assert syncer.inbox is None
    assert island.inbox.numels == island.outbox.numels == syncer.outbox.numels == (4, 9)
    assert syncer.taken is None
    assert island.given.numels == island.taken.numels == syncer.given.numels == (Portions((4, 9)).numel,)
    for mailbox, inbox in ((island, True), (syncer, False)):
        boxes = [path for path in mailbox.folder.iterdir() if path.name not in ("report", "orders")]
        assert sum(path.stat().st_size for path in boxes) == Mailbox.file_size((4, 9), inbox)
    assert stat.S_IMODE(os.stat(tmp_path / "a.island").st_mode) == 0o700
    Mailbox.open(tmp_path / "a.island").report.write(b"hello")
    assert island.report.read() == (1, b"hello")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.island", "a.syncer"]


def test_the_longest_report_fits():
    fragments = 500
    longest = (2**63 - 1,) * fragments
    data = {"lease": 2**63 - 1, "cursor": 2**31, "reserve": 2**63 - 1, "step_blocks": 2**31}
    report = Report("i" * 32, 1, "starting", 1, 1, 1.0, longest, longest, longest, **data)
    record = ReportRecord("r" * 200, "d" * 128, report, 0.0, 0.0, 2**63 - 1)
    assert len(record.pack()) <= record_capacity(fragments)


def test_the_longest_orders_and_the_longest_header_of_moments_fit():
    fragments, most = 500, 2**63 - 1
    longest = (most,) * fragments
    peer = Peer(most, "i" * 32, most, 1.0, longest, "r" * 200)
    gift = Gift("i" * 32, most, most, most, longest)
    orders = Orders("finished", most, most, longest, most, (most,) * 30, peer, gift)
    assert len(OrdersRecord("r" * 200, most, orders).pack()) <= record_capacity(fragments)
    header = MomentsHeader("r" * 200, "i" * 32, 1, "j" * 32, 1, 1, 1, 1, longest, "o" * 200)
    assert len(header.pack()) <= moments_capacity(fragments)


def test_one_is_never_overwritten(tmp_path):
    first = Mailbox.create(tmp_path / "m", (4,), inbox=True)
    first.orders.write(b"kept")
    with pytest.raises(UserError, match="already"):
        Mailbox.create(tmp_path / "m", (4,), inbox=True)
    assert Mailbox.open(tmp_path / "m").orders.read() == (1, b"kept")
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


def test_a_failed_creation_leaves_nothing(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError("no more inodes")

    monkeypatch.setattr(mailbox_module.FragmentBox, "create", fail)
    with pytest.raises(OSError, match="inodes"):
        Mailbox.create(tmp_path / "m", (4,), inbox=True)
    assert list(tmp_path.iterdir()) == []


def test_destroying(tmp_path):
    mailbox = Mailbox.create(tmp_path / "m", (4,), inbox=True)
    assert mailbox.is_current()
    mailbox.destroy()
    assert list(tmp_path.iterdir()) == []
    assert not mailbox.is_current()
    with pytest.raises(FileNotFoundError):
        Mailbox.open(tmp_path / "m")
    mailbox.report.write(b"who has it mapped keeps the memory")
    again = Mailbox.create(tmp_path / "m", (4,), inbox=True)
    assert again.is_current()
    assert not mailbox.is_current(), "a mailbox of the same name is another one"


def test_a_model_too_large_for_shared_memory(tmp_path):
    with pytest.raises(UserError, match=r"GiB of shared memory are needed, .* GiB are free.*remount"):
        Mailbox.create(tmp_path / "m", (1 << 45,), inbox=True)
    assert list(tmp_path.iterdir()) == []


def test_what_is_promised_to_sparse_files_counts(tmp_path, monkeypatch):
    monkeypatch.setattr(space, "SharedMemory", lambda run_id: SharedMemoryIn(tmp_path))
    status = os.statvfs(tmp_path)
    free = status.f_bavail * status.f_frsize
    numels = (int(0.3 * free) // 8,)  # a mailbox without inbox then takes 0.3 of what is free
    Mailbox.create(tmp_path / "a", numels, inbox=False)
    Mailbox.create(tmp_path / "b", numels, inbox=False)
    with pytest.raises(UserError, match="promised to runs on this host"):
        Mailbox.create(tmp_path / "c", (int(0.6 * free) // 8,), inbox=False)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


class SharedMemoryIn:
    def __init__(self, root):
        self.root = root


def test_no_shared_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(space, "SharedMemory", lambda run_id: SharedMemoryIn(tmp_path / "shm" / "user"))
    with pytest.raises(UserError, match=r"shm is not there: .*tmpfs"):
        Mailbox.create(tmp_path / "shm" / "user" / "run" / "a", (4,), inbox=True)


def test_a_folder_of_somebody_else(tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "user").symlink_to(tmp_path / "elsewhere")
    monkeypatch.setattr(space, "SharedMemory", lambda run_id: SharedMemoryIn(tmp_path / "user"))
    with pytest.raises(UserError, match="belongs to somebody else"):
        Mailbox.create(tmp_path / "user" / "run" / "a", (4,), inbox=True)


@pytest.mark.parametrize("ends", [1, 10**6])
def test_runs_that_end_meanwhile_remove_the_folder_above(tmp_path, monkeypatch, ends):
    top, made, removed = tmp_path / "user", Path.mkdir, []
    monkeypatch.setattr(space, "SharedMemory", lambda run_id: SharedMemoryIn(top))

    def mkdir(self, *arguments, **settings):
        if self == top / "run" and len(removed) < ends:
            removed.append(top.rmdir())
        made(self, *arguments, **settings)

    monkeypatch.setattr(Path, "mkdir", mkdir)
    if ends == 1:
        assert Mailbox.create(top / "run" / "a", (4,), inbox=True).folder.is_dir()
        return
    with pytest.raises(UserError, match="is removed as soon as it is made"):
        Mailbox.create(top / "run" / "a", (4,), inbox=True)


def test_folders_in_shared_memory_are_private():
    shared = SharedMemory(f"test-mailbox-{os.getpid()}")
    mailbox = Mailbox.create(shared.island_end("a"), (4,), inbox=True)
    try:
        for folder in (shared.root.parent, shared.root, mailbox.folder):
            assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    finally:
        mailbox.destroy()
        remove_shared_memory(shared.run_id)


def test_a_record_of_the_wrong_kind_is_refused(tmp_path):
    mailbox = Mailbox.create(tmp_path / "m", (4,), inbox=False)
    with pytest.raises(UserError, match="not a file of this kind"):
        Record.open(mailbox.folder / "outbox")
