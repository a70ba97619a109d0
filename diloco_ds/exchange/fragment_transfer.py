"""How one fragment box follows another over a channel: the newest version of every fragment, whole or not at
all.

The sender offers what is newer than what the receiver has. The receiver accepts one offer at a time, as soon
as its own box has a free slot, and receives straight into that slot. A transfer is a fixed number of data
messages: the chunks of the fragment and a trailer. If the fragment is overwritten under the sender's hands,
the rest of the messages are empty, and the receiver commits nothing; the newer version is on offer by then.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from diloco_ds.exchange.box_chain import Destination, Source
from diloco_ds.exchange.channel import Channel, Transfer
from diloco_ds.exchange.failpoint import failpoint
from diloco_ds.exchange.link_messages import Accept, Offer
from diloco_ds.exchange.traffic import Traffic
from diloco_ds.exchange.wire import WireError

CHUNK = 4 << 20
"""Bytes of a chunk: stays in cache, and a small message waits for no more than the chunks in flight."""

_IN_FLIGHT = 2
_TRAILER = struct.Struct("<qqq")  # fragment, version, numel


class FragmentSender:
    """Offers the fragments of `source`, of which the first `numels[p]` values travel.

    With `pin` the version on its way is pinned (where this is the box's only reader); without, being
    overtaken is noticed. `header(fragment, meta)` makes the header that travels out of the one in the box.
    """

    def __init__(
        self,
        channel: Channel,
        source: Source,
        numels: Sequence[int],
        traffic: Traffic,
        *,
        pin: bool,
        header: Callable[[int, bytes], bytes] = lambda _, meta: meta,
        chunk: int = CHUNK,
    ) -> None:
        self._channel = channel
        self._source = source
        self._numels = numels
        self._traffic = traffic
        self._pin = pin
        self._header = header
        self._chunk = chunk
        self._offered: list[int] = []
        self._accepted: deque[Accept] = deque()
        self._current: _Outgoing | None = None

    def start(self, peer_versions: Sequence[int]) -> None:
        """The receiver holds `peer_versions`: offer what is newer from now on."""
        self._offered = list(peer_versions)

    def accepted(self, accept: Accept) -> None:
        """The receiver waits for this version; it may say so before the end of the last transfer is seen
        here.
        """
        self._accepted.append(accept)

    def pump(self) -> bool:
        """Offer what is new, send on what was accepted; True if a transfer is under way or something was
        sent.
        """
        offered = [self._offer(fragment) for fragment in range(len(self._offered))]
        if self._current is None and self._accepted:
            self._current = self._begin(self._accepted.popleft())
        if self._current is None:
            return any(offered)
        if self._current.advance():
            self._finish(self._current)
        return True

    def _begin(self, accept: Accept) -> _Outgoing:
        fragment, version = accept.fragment, accept.version
        data = self._source.payload_bytes(fragment, version)
        if data is not None and self._pin and not self._source.pin(fragment, version):
            data = None
        if data is not None:
            data = data[: 4 * self._numels[fragment]]
        failpoint("link.sending")
        chunks = -(-4 * self._numels[fragment] // self._chunk)
        return _Outgoing(self._channel, self._source, fragment, version, data, self._chunk, chunks)

    def _offer(self, fragment: int) -> bool:
        if self._source.version(fragment) <= self._offered[fragment]:
            return False
        header = self._source.read_header(fragment)
        if header is None:
            return False
        version, meta = header
        self._offered[fragment] = version
        try:
            self._channel.send_message(Offer(fragment, version, self._header(fragment, meta)).pack())
        except WireError as error:
            self._traffic.drop(f"{self._source.path}, fragment {fragment}: {error}")
        return True

    def _finish(self, sent: _Outgoing) -> None:
        self._current = None
        if self._pin:
            self._source.unpin(sent.fragment)
        if sent.data is None:
            self._traffic.torn += 1
            return
        self._traffic.sent(sent.fragment, len(sent.data))


@dataclass
class _Outgoing:
    """A fragment on its way out. `data` becomes None once the version was overwritten."""

    channel: Channel
    source: Source
    fragment: int
    version: int
    data: memoryview | None
    chunk: int
    chunks: int
    sent: int = 0
    in_flight: deque[Transfer] = field(default_factory=deque)
    trailer: Transfer | None = None

    def advance(self) -> bool:
        """Send what can be sent; True once everything has gone."""
        if self.trailer is not None:
            return self.trailer.done()
        while self.in_flight and self.in_flight[0].done():
            self.in_flight.popleft()
        while self.sent < self.chunks and len(self.in_flight) < _IN_FLIGHT:
            start = self.sent * self.chunk
            self.in_flight.append(self.channel.send(self._still_whole()[start : start + self.chunk]))
            self.sent += 1
        if not self.in_flight:
            self.trailer = self.channel.send(self._make_trailer())
        return False

    def _still_whole(self) -> memoryview:
        if self.data is not None and not self.source.holds(self.fragment, self.version):
            self.data = None
        return memoryview(b"") if self.data is None else self.data

    def _make_trailer(self) -> memoryview:
        whole = self._still_whole()
        return memoryview(_TRAILER.pack(self.fragment, self.version, len(whole) // 4) if len(whole) else b"")


class FragmentReceiver:
    """Fills `destination` with what the sender offers. `check(fragment, meta)` raises WireError for what is
    foreign. Of the offers that wait, fragments below `urgent` go first.
    """

    def __init__(
        self,
        channel: Channel,
        destination: Destination,
        traffic: Traffic,
        *,
        check: Callable[[int, bytes], None],
        urgent: int = 0,
        chunk: int = CHUNK,
    ) -> None:
        self._channel = channel
        self._destination = destination
        self._traffic = traffic
        self._check = check
        self._urgent = urgent
        self._chunk = chunk
        self._offers: dict[int, Offer] = {}  # the newest of each fragment, the longest waiting first
        self._current: _Incoming | None = None

    def versions(self) -> tuple[int, ...]:
        """The newest version of every fragment that is here already."""
        return tuple(map(self._destination.version, range(len(self._destination.numels))))

    def arrived(self) -> int:
        """Bytes that have come so far, of the fragment on its way too: whether a slow link moves at all."""
        return self._traffic.bytes_received + (0 if self._current is None else self._current.arrived)

    def offered(self, offer: Offer) -> None:
        """The sender has this; WireError if it is not for us."""
        if not 0 <= offer.fragment < len(self._destination.numels):
            raise WireError(f"there is no fragment {offer.fragment}")
        self._check(offer.fragment, offer.meta)
        self._offers[offer.fragment] = offer

    def pump(self) -> bool:
        """Accept an offer if there is room for it, receive on; True if a transfer is under way."""
        if self._current is None:
            self._current = self._accept()
        if self._current is None:
            return False
        if self._current.advance():
            self._finish(self._current)
        return True

    def _accept(self) -> _Incoming | None:
        for fragment, offer in sorted(self._offers.items(), key=lambda each: each[0] >= self._urgent):
            if offer.version <= self._destination.version(fragment):
                del self._offers[fragment]
                continue
            slot = self._destination.begin_bytes(fragment)
            if slot is None:  # a reader has it pinned: its turn comes
                continue
            del self._offers[fragment]
            self._channel.send_message(Accept(fragment, offer.version).pack())
            failpoint("link.receiving")
            return _Incoming(self._channel, offer, slot, self._chunk)
        return None

    def _finish(self, received: _Incoming) -> None:
        self._current = None
        if not received.whole:
            self._traffic.torn += 1
            return
        offer = received.offer
        self._destination.commit(offer.fragment, offer.version, offer.meta)
        self._traffic.received(offer.fragment, len(received.data))


@dataclass
class _Incoming:
    """A fragment on its way in."""

    channel: Channel
    offer: Offer
    data: memoryview
    chunk: int
    posted: int = 0  # bytes
    arrived: int = 0  # bytes
    whole: bool = True
    in_flight: deque[tuple[Transfer, int]] = field(default_factory=deque)
    trailer_bytes: bytearray = field(default_factory=lambda: bytearray(_TRAILER.size))
    trailer: Transfer | None = None

    def advance(self) -> bool:
        """Receive what has come; True once the trailer is here."""
        while self.in_flight and self.in_flight[0][0].done():
            transfer, expected = self.in_flight.popleft()
            self.whole &= transfer.nbytes == expected
            self.arrived += transfer.nbytes
        while self.posted < len(self.data) and len(self.in_flight) < _IN_FLIGHT:
            piece = self.data[self.posted : self.posted + self.chunk]
            self.in_flight.append((self.channel.receive(piece), len(piece)))
            self.posted += len(piece)
        if self.in_flight:
            return False
        if self.trailer is None:
            self.trailer = self.channel.receive(memoryview(self.trailer_bytes))
        if not self.trailer.done():
            return False
        expected_trailer = _TRAILER.pack(self.offer.fragment, self.offer.version, len(self.data) // 4)
        self.whole &= self.trailer.nbytes == _TRAILER.size and bytes(self.trailer_bytes) == expected_trailer
        return True
