"""How islands give newer global fragments back to a syncer that has lost its memory.

The syncer opens the folder ``returned`` in shared memory before it makes its store (gathering.py). The proxies, which
wait for the store, write there what their islands hold (``ISLAND.held``); the syncer chooses, and writes what each shall
send (``ISLAND.wanted``); it arrives in a FragmentBox, ``fragments``. As soon as the store is there the links go on as
always. Training goes on all the while; only merges wait, and no longer than the syncer's patience.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from diloco_ds.exchange.channel import Channel
from diloco_ds.exchange.fragment_box import FragmentBox
from diloco_ds.exchange.fragment_transfer import CHUNK, FragmentReceiver
from diloco_ds.exchange.link_messages import Hello, Offer, Return, unpack_link_message
from diloco_ds.exchange.mailbox import META_CAPACITY
from diloco_ds.exchange.replication import LinkIdentity, check_hello
from diloco_ds.exchange.space import private_folder, require_space
from diloco_ds.exchange.traffic import Traffic
from diloco_ds.exchange.wire import ThetaHeader, WireError

NOTE_EVERY_S = 0.2


class Returns:
    """The folder. One syncer makes it, and removes it; proxies open it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._inode = os.stat(folder).st_ino
        self.fragments = FragmentBox.open(folder / "fragments")

    @classmethod
    def create(cls, folder: Path, numels: Sequence[int]) -> Returns:
        """A new one, in place of what a killed syncer left. UserError if there is no room for it."""
        cls.remove(folder)
        partial = _partial(folder)
        private_folder(partial)
        try:
            require_space(partial, FragmentBox.file_size(numels, META_CAPACITY))
            FragmentBox.create(partial / "fragments", numels, META_CAPACITY)
            os.rename(partial, folder)
        except BaseException:
            cls.remove(folder)
            raise
        return cls(folder)

    @staticmethod
    def remove(folder: Path) -> None:
        """Nothing of it is left."""
        shutil.rmtree(folder, ignore_errors=True)
        shutil.rmtree(_partial(folder), ignore_errors=True)

    def is_current(self) -> bool:
        """Whether the folder is still this one."""
        try:
            return os.stat(self.folder).st_ino == self._inode
        except FileNotFoundError:
            return False

    def hold(self, island: str, versions: Sequence[int]) -> None:
        """The island's inbox holds these versions."""
        self._tell(f"{island}.held", versions)

    def held(self, island: str) -> list[int] | None:
        """What the island said it holds; None before."""
        return _read(self.folder / f"{island}.held")

    def note_progress(self, island: str, nbytes: int) -> None:
        """So much has come of the island so far."""
        self._tell(f"{island}.arrived", [nbytes])

    def progress(self, islands: Iterable[str]) -> list[list[int] | None]:
        """What has come of each, as `note_progress` said last."""
        return [_read(self.folder / f"{island}.arrived") for island in islands]

    def want(self, island: str, wanted: Mapping[int, int]) -> None:
        """The island shall send these fragments, in these versions."""
        self._tell(f"{island}.wanted", [wanted.get(p, -1) for p in range(len(self.fragments.numels))])

    def wanted(self, island: str) -> list[int] | None:
        """Per fragment the version that the island shall send, -1 none; None as long as it is asked for nothing."""
        return _read(self.folder / f"{island}.wanted")

    def _tell(self, name: str, values: Sequence[int]) -> None:
        """Write a file of the folder, whole. If the syncer has removed the folder, nobody wants to know any more."""
        partial = self.folder / f".{name}.partial"
        with contextlib.suppress(FileNotFoundError):
            partial.write_text(json.dumps(list(values)))
            os.replace(partial, self.folder / name)


class Returner:
    """The proxy's end of a link while there is no store. `hello` is the agent's, once it has come."""

    def __init__(
        self, channel: Channel, identity: LinkIdentity, folder: Path, traffic: Traffic, chunk: int = CHUNK
    ) -> None:
        self.hello: Hello | None = None
        self._channel, self._identity, self._folder, self._traffic = channel, identity, folder, traffic
        self._chunk = chunk
        self._returns: Returns | None = None
        self._receiver: FragmentReceiver | None = None
        self._asked: list[int] | None = None
        self._arrived, self._next_note = 0, 0.0

    def pump(self) -> bool:
        """Do what can be done now; True while a fragment is on its way, which must not be left half received."""
        while (data := self._channel.receive_message()) is not None:
            try:
                self._take(data)
            except WireError as error:
                self._traffic.drop(str(error))
        if self._receiver is not None and self._receiver.pump():
            self._note_progress(self._receiver.arrived())
            return True
        if self._returns is None or not self._returns.is_current():
            self._open()
        self._ask()
        return False

    def _note_progress(self, arrived: int) -> None:
        if arrived != self._arrived and time.monotonic() >= self._next_note and self._returns is not None:
            self._arrived, self._next_note = arrived, time.monotonic() + NOTE_EVERY_S
            if self._returns.is_current():
                self._returns.note_progress(self._identity.island, arrived)

    def _ask(self) -> None:
        """Tell the agent what the syncer wants of it."""
        wanted = self._returns.wanted(self._identity.island) if self._returns is not None else None
        if wanted is None or wanted == self._asked or self.hello is None:
            return
        self._asked = wanted
        pairs = zip(
            wanted, self.hello.versions[: len(wanted)], strict=True
        )  # moments come after the fragments
        above = tuple(version - 1 if version >= 0 else held for version, held in pairs)
        self._channel.send_message(Return(above).pack())

    def _open(self) -> None:
        """Begin with the folder of the syncer that is there now, if it has one."""
        try:
            self._returns = Returns(self._folder)
        except FileNotFoundError:
            return
        self._receiver = FragmentReceiver(
            self._channel, self._returns.fragments, self._traffic, check=self._check, chunk=self._chunk
        )
        self._asked = None
        if self.hello is not None:
            self._returns.hold(self._identity.island, self.hello.versions)

    def _take(self, data: bytes) -> None:
        message = unpack_link_message(data)
        if isinstance(message, Hello):
            check_hello(message, self._identity)
            self.hello = message
            if self._returns is not None:
                self._returns.hold(self._identity.island, message.versions)
        elif isinstance(message, Offer) and self._receiver is not None:
            self._receiver.offered(message)

    def _check(self, _fragment: int, meta: bytes) -> None:
        header = ThetaHeader.unpack(meta)
        if header.run_id != self._identity.run_id:
            raise WireError(f"it belongs to run {header.run_id}, this is run {self._identity.run_id}")


def _partial(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.partial")


def _read(path: Path) -> list[int] | None:
    try:
        return list(json.loads(path.read_text()))
    except FileNotFoundError:
        return None
