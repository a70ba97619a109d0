"""The small messages between the two ends of a link."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from diloco_ds.exchange.wire import Message, unpack_one_of


@dataclass(frozen=True, slots=True)
class Hello(Message):
    """First of all, both ways: who is here, and what the sender of this message holds of what it will
    receive.
    """

    KIND: ClassVar[int] = 16
    run_id: str
    layout_digest: str
    numels: tuple[int, ...]
    record_digest: int  # of the newest value of the record, 0 = none
    versions: tuple[int, ...]  # per fragment, -1 = none


@dataclass(frozen=True, slots=True)
class Value(Message):
    """A new value of the sender's record."""

    KIND: ClassVar[int] = 17
    payload: bytes


@dataclass(frozen=True, slots=True)
class Taken(Message):
    """The last Value has arrived; the next may come. So there is never a queue of old values."""

    KIND: ClassVar[int] = 18


@dataclass(frozen=True, slots=True)
class Offer(Message):
    """The sender has this version of a fragment."""

    KIND: ClassVar[int] = 19
    fragment: int
    version: int
    meta: bytes


@dataclass(frozen=True, slots=True)
class Accept(Message):
    """Send it now: the buffers are waiting."""

    KIND: ClassVar[int] = 20
    fragment: int
    version: int


@dataclass(frozen=True, slots=True)
class Return(Message):
    """To the agent, in place of a Hello: the syncer has lost its memory; offer what the inbox holds above these versions."""

    KIND: ClassVar[int] = 21
    above: tuple[int, ...]  # per fragment


def unpack_link_message(data: bytes) -> Message:
    """Any of the messages above; WireError for anything else."""
    return unpack_one_of(data, Hello, Value, Taken, Offer, Accept, Return)
