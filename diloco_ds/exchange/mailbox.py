"""Mailbox: one end of an island's exchange, a folder of memory-mapped registers (docs/architecture.md).

report    Record        learner rank 0 -> syncer     wire.ReportRecord
orders    Record        syncer -> learner            wire.OrdersRecord
outbox    FragmentBox   learner ranks -> syncer      header wire.UpdateHeader
inbox     FragmentBox   syncer -> learner            header wire.ThetaHeader; at the island's end only
given     FragmentBox   learner ranks -> a peer      header wire.MomentsHeader
taken     FragmentBox   a peer -> learner            header wire.MomentsHeader; at the island's end only

`given` and `taken` hold one portion of an optimizer's moments (core/portions.py), not all of them, and take no memory
before the first is given.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from diloco_ds.core.portions import Portions
from diloco_ds.errors import UserError
from diloco_ds.exchange.fragment_box import FragmentBox
from diloco_ds.exchange.record import Record
from diloco_ds.exchange.space import private_folder, require_space

META_CAPACITY = 1024
"""Bytes for the header of a fragment that tells of no experts."""


def meta_capacity(experts: Sequence[int]) -> int:
    """Bytes for the header of a fragment, given the experts of each: an int64 for each expert, and room for the rest."""
    return META_CAPACITY + 8 * max(experts, default=0)


def record_capacity(fragments: int) -> int:
    """Bytes for a report or orders on so many fragments: three int64 a fragment, and room for the rest."""
    return 2048 + 3 * 8 * fragments


def moments_capacity(fragments: int) -> int:
    """Bytes for the header of a portion of moments: an int64 a fragment, and room for the rest."""
    return META_CAPACITY + 8 * fragments


class Mailbox:
    """The registers in `folder`. `inbox` and `taken` are None at the syncer's end."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._inode = os.stat(folder).st_ino
        self.report = Record.open(folder / "report")
        self.orders = Record.open(folder / "orders")
        self.outbox = FragmentBox.open(folder / "outbox")
        self.given = FragmentBox.open(folder / "given")
        of_an_island = (folder / "inbox").exists()
        self.inbox = FragmentBox.open(folder / "inbox") if of_an_island else None
        self.taken = FragmentBox.open(folder / "taken") if of_an_island else None

    @classmethod
    def create(cls, folder: Path, numels: Sequence[int], inbox: bool, experts: Sequence[int] = ()) -> Mailbox:
        """A new mailbox for fragments of `numels` values and `experts` experts (none given: none), mode 0700: whole, or
        not at all.

        UserError if there is one already, or shared memory is missing, too small, or not ours.
        """
        partial = folder.with_name(f".{folder.name}.{os.getpid()}.partial")
        private_folder(partial)
        try:
            require_space(partial, cls.file_size(numels, inbox, experts))
            capacity = record_capacity(len(numels))
            Record.create(partial / "report", capacity)
            Record.create(partial / "orders", capacity)
            for box in ("outbox", "inbox") if inbox else ("outbox",):
                FragmentBox.create(partial / box, numels, meta_capacity(experts))
            for box in ("given", "taken") if inbox else ("given",):
                FragmentBox.create(partial / box, _portion(numels), moments_capacity(len(numels)))
            os.rename(partial, folder)
        except BaseException as error:
            shutil.rmtree(partial)
            if isinstance(error, OSError) and folder.exists():
                raise UserError(
                    f"{folder}: there is a mailbox already; is the run in progress? else remove it"
                ) from None
            raise
        return cls(folder)

    @classmethod
    def open(cls, folder: Path) -> Mailbox:
        """An existing mailbox; FileNotFoundError if there is none."""
        return cls(folder)

    @staticmethod
    def file_size(numels: Sequence[int], inbox: bool, experts: Sequence[int] = ()) -> int:
        """Bytes of shared memory a mailbox takes once every slot was written (the two records aside)."""
        fragments = FragmentBox.file_size(numels, meta_capacity(experts))
        moments = FragmentBox.file_size(_portion(numels), moments_capacity(len(numels)))
        return (1 + inbox) * (fragments + moments)

    def is_current(self) -> bool:
        """Whether the folder is still this mailbox, not removed and not made anew."""
        try:
            return os.stat(self.folder).st_ino == self._inode
        except FileNotFoundError:
            return False

    def destroy(self) -> None:
        """Remove the folder at once; who has it mapped keeps the memory until it ends."""
        leaving = self.folder.with_name(f".{self.folder.name}.{os.getpid()}.leaving")
        os.rename(self.folder, leaving)
        shutil.rmtree(leaving)


def _portion(numels: Sequence[int]) -> tuple[int]:
    return (Portions(numels).numel,)
