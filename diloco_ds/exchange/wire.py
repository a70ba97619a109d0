"""What travels beside the weights: typed, flat, checked. No pickle.

A message is `magic | format | kind | length | body | crc32`, little endian. The body holds the fields of
its dataclass in order: int as int64, float as float64, str and bytes with a length, a sequence of int as a
count and int64s, a dataclass as its own fields. `unpack` takes exactly what `pack` made and raises
WireError for the rest.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import struct
import types
import typing
import zlib
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, Literal, Self

from diloco_ds.core.events import Answer, Orders, Report

_ENVELOPE = struct.Struct("<4sHHI")
_MAGIC = b"DDSW"
_FORMAT = 4
_CRC = struct.Struct("<I")
_INT = struct.Struct("<q")
_FLOAT = struct.Struct("<d")
_LENGTH = struct.Struct("<I")


class WireError(ValueError):
    """These bytes are not the message they should be, or a value does not fit its field."""


class Message:
    """Base of the dataclasses below: `pack` and `unpack`."""

    __slots__ = ()
    KIND: ClassVar[int]

    def pack(self) -> bytes:
        """The message as bytes; WireError if a value does not fit its field's type or range."""
        self.check()
        body = bytearray()
        _put(body, type(self), self)
        head = _ENVELOPE.pack(_MAGIC, _FORMAT, self.KIND, len(body))
        return head + body + _CRC.pack(zlib.crc32(body, zlib.crc32(head)))

    @classmethod
    def unpack(cls, data: bytes) -> Self:
        """The message of this class in `data`; WireError if it is anything else."""
        if len(data) < _ENVELOPE.size + _CRC.size:
            raise WireError(f"{len(data)} bytes are too short for a {cls.__name__}")
        if zlib.crc32(data[: -_CRC.size]) != _CRC.unpack(data[-_CRC.size :])[0]:
            raise WireError(f"{cls.__name__}: the checksum is wrong")
        magic, layout, kind, length = _ENVELOPE.unpack_from(data)
        if (magic, layout, kind) != (_MAGIC, _FORMAT, cls.KIND):
            raise WireError(
                f"not a {cls.__name__} of format {_FORMAT}: magic {magic!r}, format {layout}, kind {kind}"
            )
        body = _Body(data[_ENVELOPE.size : -_CRC.size])
        if length != len(body.data):
            raise WireError(f"{cls.__name__}: {len(body.data)} bytes where {length} are announced")
        message: Self = body.take(cls)
        body.expect_end()
        message.check()
        return message

    def check(self) -> None:
        """Raise WireError if the fields contradict each other."""


def unpack_one_of(data: bytes, *classes: type[Message]) -> Message:
    """The message in `data`, which must be of one of `classes`; WireError if it is not."""
    if len(data) < _ENVELOPE.size:
        raise WireError(f"{len(data)} bytes are too short for a message")
    kind = _ENVELOPE.unpack_from(data)[2]
    for candidate in classes:
        if kind == candidate.KIND:
            return candidate.unpack(data)
    raise WireError(f"a message of kind {kind} does not belong here")


@dataclass(frozen=True, slots=True)
class ReportRecord(Message):
    """The report register: the core's Report and what only logs and drivers need."""

    KIND: ClassVar[int] = 1
    run_id: str
    layout_digest: str
    report: Report
    loss: float  # of the last inner step; nan before the first
    tokens_per_s: float
    lr_tokens: int  # global tokens at which the inner learning rate stands

    def check(self) -> None:
        """The three lists have an entry for every fragment."""
        report = self.report
        if not len(report.c_steps) == len(report.c_tokens) == len(report.base):
            raise WireError("ReportRecord: c_steps, c_tokens and base have different lengths")


@dataclass(frozen=True, slots=True)
class OrdersRecord(Message):
    """The orders register: the core's Orders, and which syncer gave them."""

    KIND: ClassVar[int] = 2
    run_id: str
    generation: int  # of the syncer; rises with each start
    orders: Orders


@dataclass(frozen=True, slots=True)
class UpdateHeader(Message):
    """Header of a fragment in an outbox: a learner's update."""

    KIND: ClassVar[int] = 3
    run_id: str
    island: str
    incarnation: int
    fragment: int
    round: int  # the global step it was asked for
    base: int  # version of the fragment its steps started from
    steps: int
    tokens: int
    update_id: int  # unique per run; a retry carries the same one
    lease: int  # how far its island had read, as in Answer
    cursor: int
    numel: int
    expert_tokens: tuple[int, ...] = ()  # as in Answer

    def to_answer(self) -> Answer:
        """The event the core is told once the payload is found sound."""
        return Answer(
            island=self.island,
            incarnation=self.incarnation,
            fragment=self.fragment,
            round=self.round,
            base=self.base,
            steps=self.steps,
            tokens=self.tokens,
            update_id=self.update_id,
            lease=self.lease,
            cursor=self.cursor,
            expert_tokens=self.expert_tokens,
        )


@dataclass(frozen=True, slots=True)
class MomentsHeader(Message):
    """Header of a portion of an optimizer's moments (core/portions.py) that an island gives to another."""

    KIND: ClassVar[int] = 5
    run_id: str
    island: str  # that gives
    incarnation: int
    to_island: str
    to_incarnation: int
    request: int  # of that island, as in Report.asks
    portion: int
    steps: int  # steps of the optimizer that the moments are of
    base: tuple[int, ...]  # per fragment: version that the giver had adopted
    optimizer: str  # what decides which moments there are, as JSON (island/moments.py)

    @property
    def version(self) -> int:
        """Under which the island that asked keeps it: rising over its requests and incarnations."""
        return request_version(self.to_incarnation, self.request)


def request_version(incarnation: int, request: int) -> int:
    """The version of what belongs to an island's request of that number; rising over incarnations."""
    return incarnation << 32 | request


@dataclass(frozen=True, slots=True)
class ThetaHeader(Message):
    """Header of a global fragment, in the syncer's store (with the store's own `extra`) and in inboxes."""

    KIND: ClassVar[int] = 4
    run_id: str
    generation: int
    round: int
    extra: bytes = b""


def _put(body: bytearray, kind: Any, value: Any) -> None:
    try:
        if kind is int:
            body += _INT.pack(value)
        elif kind is float:
            body += _FLOAT.pack(value)
        elif kind is str:
            _put(body, bytes, value.encode())
        elif kind is bytes:
            body += _LENGTH.pack(len(value)) + value
        elif _choices(kind):
            if value not in _choices(kind):
                raise WireError(f"{value!r} is none of {', '.join(_choices(kind))}")
            _put(body, str, value)
        elif _is_int_sequence(kind):
            body += _LENGTH.pack(len(value)) + struct.pack(f"<{len(value)}q", *value)
        else:
            for name, field_kind in _fields(kind).items():
                _put(body, field_kind, getattr(value, name))
    except (struct.error, TypeError, AttributeError, UnicodeError) as error:
        raise WireError(f"{value!r} does not fit a field of type {kind}: {error}") from error


class _Body:
    """A cursor over the body of a message."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self._at = 0

    def take(self, kind: Any) -> Any:
        """The next value, of type `kind`."""
        if kind is int:
            return _INT.unpack(self._bytes(_INT.size))[0]
        if kind is float:
            return _FLOAT.unpack(self._bytes(_FLOAT.size))[0]
        if kind is bytes:
            return self._bytes(self._length())
        if kind is str or _choices(kind):
            return self._text(kind)
        if _is_int_sequence(kind):
            count = self._length()
            return struct.unpack(f"<{count}q", self._bytes(8 * count))
        return kind(**{name: self.take(field_kind) for name, field_kind in _fields(kind).items()})

    def expect_end(self) -> None:
        """WireError if something follows."""
        if self._at != len(self.data):
            raise WireError(f"{len(self.data) - self._at} bytes too many")

    def _text(self, kind: Any) -> str:
        try:
            text = self._bytes(self._length()).decode()
        except UnicodeDecodeError as error:
            raise WireError(f"not UTF-8: {error}") from error
        if kind is not str and text not in _choices(kind):
            raise WireError(f"{text!r} is none of {', '.join(_choices(kind))}")
        return text

    def _length(self) -> int:
        return int(_LENGTH.unpack(self._bytes(_LENGTH.size))[0])

    def _bytes(self, count: int) -> bytes:
        piece = self.data[self._at : self._at + count]
        if len(piece) != count:
            raise WireError(f"{count} bytes wanted, {len(piece)} left")
        self._at += count
        return piece


def _choices(kind: Any) -> tuple[str, ...]:
    return typing.get_args(kind) if typing.get_origin(kind) is Literal else ()


def _is_int_sequence(kind: Any) -> bool:
    return typing.get_origin(kind) in (collections.abc.Sequence, tuple) and typing.get_args(kind)[0] is int


@cache
def _fields(kind: type) -> types.MappingProxyType[str, Any]:
    """Name and type of the fields of a dataclass, in order."""
    hints = typing.get_type_hints(kind)
    return types.MappingProxyType({field.name: hints[field.name] for field in dataclasses.fields(kind)})
