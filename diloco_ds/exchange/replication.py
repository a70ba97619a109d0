"""Link: keeps the registers at one end of an island's exchange equal to those at the other.

Each end has a record and a fragment box that it sends, and a record and a fragment box that it receives. The
two ends tell each other what they hold, then whatever is newer travels, and nothing else: a link that starts
again goes on where the last one was killed. Nothing here blocks, and no order of calls can do harm.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

from diloco_ds.exchange.channel import Channel
from diloco_ds.exchange.fragment_transfer import FragmentReceiver, FragmentSender
from diloco_ds.exchange.link_messages import Accept, Hello, Offer, Return, Taken, Value, unpack_link_message
from diloco_ds.exchange.record import Record
from diloco_ds.exchange.traffic import Traffic
from diloco_ds.exchange.wire import Message, WireError


@dataclass(frozen=True)
class LinkIdentity:
    """What both ends of a link must agree on."""

    run_id: str
    layout_digest: str
    island: str
    numels: tuple[int, ...]


class Link:
    """One end. `check_record` raises WireError for a value that is foreign; it is then dropped and counted.

    `returner`, at an island's end, sends what the inbox holds to a syncer that has lost its memory (returns.py).
    """

    def __init__(
        self,
        channel: Channel,
        identity: LinkIdentity,
        traffic: Traffic,
        *,
        record_out: Record,
        record_in: Record,
        check_record: Callable[[bytes], None],
        sender: FragmentSender,
        receiver: FragmentReceiver,
        returner: FragmentSender | None = None,
    ) -> None:
        self.traffic = traffic
        self.connected = False
        self._channel = channel
        self._identity = identity
        self._record_in = record_in
        self._check_record = check_record
        self._records = _RecordSender(channel, record_out, traffic)
        self._sender = sender
        self._receiver = receiver
        self._returner = returner
        self._returning = False
        channel.send_message(self._hello().pack())

    def pump(self) -> bool:
        """Move what is newer, as far as it goes without waiting. False if there was nothing to do."""
        busy = False
        while (data := self._channel.receive_message()) is not None:
            self._take(data)
            busy = True
        if not self.connected:
            return self._returner.pump() if self._returning and self._returner is not None else busy
        steps = (self._records.pump(), self._sender.pump(), self._receiver.pump())
        return busy or any(steps)

    def _hello(self) -> Hello:
        return Hello(
            run_id=self._identity.run_id,
            layout_digest=self._identity.layout_digest,
            numels=self._identity.numels,
            record_digest=_newest_digest(self._record_in),
            versions=self._receiver.versions(),
        )

    def _take(self, data: bytes) -> None:
        try:
            self._dispatch(unpack_link_message(data))
        except WireError as error:
            self.traffic.drop(str(error))

    def _dispatch(self, message: Message) -> None:
        match message:
            case Hello():
                self.meet(message)
            case Return() if self._returner is not None:
                self._returner.start(message.above)
                self._returning = True
            case Value():
                self._channel.send_message(Taken().pack())
                self._check_record(message.payload)
                self._record_in.write(message.payload)
                self.traffic.records_received += 1
            case Taken():
                self._records.taken()
            case Offer():
                self._receiver.offered(message)
            case Accept() if self._returning and self._returner is not None:
                self._returner.accepted(message)
            case Accept():
                self._sender.accepted(message)

    def meet(self, hello: Hello) -> None:
        """The other end is there: replicate from now on. WireError if it does not belong to this one."""
        check_hello(hello, self._identity)
        self._returning = False
        self._records.start(hello.record_digest)
        self._sender.start(hello.versions)
        self.connected = True


def check_hello(theirs: Hello, ours: LinkIdentity) -> None:
    """WireError unless the hello is the other end's of this very link."""
    if theirs.run_id != ours.run_id:
        raise WireError(f"the other end belongs to run {theirs.run_id}, this one to {ours.run_id}")
    if theirs.layout_digest != ours.layout_digest or theirs.numels != ours.numels:
        raise WireError(f"the other end has layout {theirs.layout_digest}, this one {ours.layout_digest}")


class _RecordSender:
    """Sends the newest value of a record, one at a time."""

    def __init__(self, channel: Channel, source: Record, traffic: Traffic) -> None:
        self._channel = channel
        self._source = source
        self._traffic = traffic
        self._sent = 0
        self._under_way = False

    def start(self, peer_digest: int) -> None:
        """The receiver holds a value with this digest: no need to send the same again."""
        newest = self._source.read()
        if newest is not None and _digest(newest[1]) == peer_digest:
            self._sent = newest[0]

    def taken(self) -> None:
        """The receiver has the last one."""
        self._under_way = False

    def pump(self) -> bool:
        """Send if there is something new and the last one has arrived."""
        if self._under_way or self._source.sequence() == self._sent:
            return False
        newest = self._source.read()
        if newest is None:
            return False
        self._sent = newest[0]
        self._under_way = True
        self._channel.send_message(Value(newest[1]).pack())
        self._traffic.records_sent += 1
        return True


def _newest_digest(record: Record) -> int:
    newest = record.read()
    return 0 if newest is None else _digest(newest[1])


def _digest(payload: bytes) -> int:
    """64 bits that tell two values apart; a crc32 would not, as the values end with their own."""
    return int.from_bytes(hashlib.blake2b(payload, digest_size=8).digest(), "little", signed=True)
