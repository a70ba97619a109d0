"""The moments that a peer gives to an island, as the island's proxy finds them: in the peer's own mailbox at the syncer's
end, which the peer's proxy fills. So they lie there once, and pass the syncer without its doing.

The orders of the island name the peer. Towards the island the versions are its own requests, which rise; the peer counts
otherwise, and gives to others too.
"""

from __future__ import annotations

import contextlib

from diloco_ds.exchange.fragment_box import FragmentBox
from diloco_ds.exchange.mailbox import Mailbox
from diloco_ds.exchange.wire import MomentsHeader, OrdersRecord

_NOTHING = -1


class PeerMoments:
    """For the proxy of `island`, whose mailbox at the syncer's end is `mailbox`: a Source of one fragment."""

    def __init__(self, island: str, mailbox: Mailbox) -> None:
        self.path = mailbox.given.path
        self.numels = mailbox.given.numels
        self._island, self._mailbox = island, mailbox
        self._orders_seen = 0
        self._peer = ""
        self._incarnation = 0  # of the island, that the peer gives to
        self._box: FragmentBox | None = None
        self._looked_at = self._held = (
            _NOTHING  # versions in the peer's box: the newest, and the one for this island
        )
        self._version = _NOTHING  # what the latter is to the island

    def version(self, _fragment: int) -> int:
        """See Box."""
        self._follow_orders()
        newest = self._box.version(0) if self._box is not None else _NOTHING
        if self._box is not None and newest != self._looked_at:
            self._looked_at = newest
            self._look_at(self._box)
        return self._version

    def read_header(self, _fragment: int) -> tuple[int, bytes] | None:
        """See Source."""
        meta = self._box.meta(0, self._held) if self._box is not None else None
        return None if meta is None else (self._version, meta)

    def payload_bytes(self, _fragment: int, version: int) -> memoryview | None:
        """See Source."""
        if self._box is None or version != self._version:
            return None
        return self._box.payload_bytes(0, self._held)

    def holds(self, _fragment: int, version: int) -> bool:
        """See Source."""
        return self._box is not None and version == self._version and self._box.holds(0, self._held)

    def pin(self, _fragment: int, _version: int) -> bool:
        """Never: other proxies read there too. That it was overtaken is noticed."""
        return False

    def unpin(self, _fragment: int) -> None:
        """There is no pin."""

    def _follow_orders(self) -> None:
        """Look where the orders say, and anew with each peer they name."""
        if self._mailbox.orders.sequence() == self._orders_seen:
            return
        sequence, payload = self._mailbox.orders.read() or (self._orders_seen, None)
        if payload is None:
            return
        self._orders_seen = sequence
        peer = OrdersRecord.unpack(payload).orders.peer
        self._incarnation = peer.incarnation
        if peer.name != self._peer or self._box is None:
            self._peer = peer.name
            self._box = self._open(peer.name)
            self._looked_at = _NOTHING

    def _open(self, peer: str) -> FragmentBox | None:
        if not peer:
            return None
        folder = self._mailbox.folder
        with contextlib.suppress(FileNotFoundError):  # it has just left: the orders will name another one
            theirs = folder.with_name(peer + folder.name.removeprefix(self._island))
            return FragmentBox.open(theirs / self.path.name)
        return None

    def _look_at(self, box: FragmentBox) -> None:
        newest = box.read_header(0)
        if newest is None:
            return
        header = MomentsHeader.unpack(newest[1])
        if (header.to_island, header.to_incarnation) != (self._island, self._incarnation):
            return
        if header.version > self._version:
            self._held, self._version = newest[0], header.version
