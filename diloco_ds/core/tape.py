"""The tape of a run: every event that went into the state machine and every action that came out, as text.

One record is one line of JSON that ends with the CRC-32 of what stands before it:

    {"tape":4,"run_id":"4f1c","layout":"9b0e...","generation":1,"state":{},"threads":1,"crc":"5c1d0a3e"}
    {"at":12.5,"kind":"Want","value":{"island":"a","fragment":3,...},"crc":"0b77e1f2"}

Each generation of the syncer begins with a header. Floats are written so that they are read back exactly. A
last line without its newline was torn by a crash: it is reported, and to be cut off before more is appended.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, get_args

from diloco_ds.core.events import Action, Event, Merge, Part
from diloco_ds.errors import UserError

VERSION = 4

_CRC = b',"crc":"'
_TYPES: dict[str, Any] = {cls.__name__: cls for cls in (*get_args(Event), *get_args(Action))}


class TapeError(UserError):
    """The tape is damaged, or of another format, run or layout: one line that names the record and its byte."""


@dataclass(frozen=True, slots=True)
class Header:
    """A generation of the syncer begins. `state` is what the state machine was restored from, as JSON; `threads` of CPU
    take the sums of its merges.
    """

    run_id: str
    layout_digest: str
    generation: int
    state: Mapping[str, Any] = field(default_factory=dict)
    threads: int = 1


@dataclass(frozen=True, slots=True)
class Entry:
    """An event or action, at `at` seconds on the monotonic clock of its generation."""

    at: float
    value: Event | Action

    @property
    def is_event(self) -> bool:
        """Whether it went into the state machine (else it came out)."""
        return isinstance(self.value, Event)


@dataclass(frozen=True, slots=True)
class Torn:
    """The last line is not whole; the tape's sound part ends before byte `offset`."""

    offset: int
    size: int


def encode_header(header: Header) -> bytes:
    """The record that begins a generation."""
    return _line(
        {
            "tape": VERSION,
            "run_id": header.run_id,
            "layout": header.layout_digest,
            "generation": header.generation,
            "state": header.state,
            "threads": header.threads,
        }
    )


def encode(at: float, value: Event | Action) -> bytes:
    """The record of an event or action at `at` seconds."""
    return _line({"at": at, "kind": type(value).__name__, "value": value})


def decode_all(
    lines: Iterable[bytes], run_id: str | None = None, layout_digest: str | None = None
) -> Iterator[Header | Entry | Torn]:
    """The records of a tape, in order; a Torn comes last if the last line is not whole.

    `lines` is an open binary file, or io.BytesIO: lines that end with the newline and contain no other.
    Sequences come back as tuples.
    TapeError at a damaged record, a first record that is no header, another version, a run or layout other
    than the one given or than the first header's, or a generation that does not rise.
    """
    offset = 0
    last: Header | None = None
    for number, line in enumerate(lines, start=1):
        if not line.endswith(b"\n"):
            yield Torn(offset, len(line))
            return
        try:
            record = _parse(line)
            if isinstance(record, Header):
                _check_header(record, last, run_id, layout_digest)
                last = record
            elif last is None:
                raise ValueError("a tape begins with a header, this does not")
        except (ValueError, KeyError, TypeError) as error:
            raise TapeError(f"tape: record {number} at byte {offset}: {error}") from error
        yield record
        offset += len(line)


def _line(record: dict[str, Any]) -> bytes:
    text = json.dumps(record, separators=(",", ":"), default=_plain)[:-1].encode("ascii")
    return text + _CRC + _crc(text) + b'"}\n'


def _plain(value: Any) -> Any:
    """What JSON knows in place of one of our dataclasses, or of a sequence that is no list or tuple."""
    if is_dataclass(value):
        return {each.name: getattr(value, each.name) for each in fields(value)}
    return list(value)


def _crc(text: bytes) -> bytes:
    return b"%08x" % zlib.crc32(text)


def _parse(line: bytes) -> Header | Entry:
    text, separator, rest = line.rpartition(_CRC)
    if not separator or rest != _crc(text) + b'"}\n':
        raise ValueError("damaged, its checksum does not match")
    record = json.loads(text + b"}")
    if "tape" not in record:
        return Entry(record["at"], _value(record["kind"], record["value"]))
    if record["tape"] != VERSION:
        raise ValueError(f"a tape of format {record['tape']}, this program reads format {VERSION}")
    named = (record["run_id"], record["layout"], record["generation"])
    return Header(*named, record["state"], record["threads"])


def _value(kind: str, values: dict[str, Any]) -> Event | Action:
    if kind not in _TYPES:
        raise ValueError(f"unknown kind '{kind}'")
    cls = _TYPES[kind]
    if cls is Merge:
        values["parts"] = [Part(**_tuples(part)) for part in values["parts"]]
    value: Event | Action = cls(**_tuples(values))
    return value


def _tuples(values: dict[str, Any]) -> dict[str, Any]:
    return {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}


def _check_header(header: Header, last: Header | None, run_id: str | None, layout_digest: str | None) -> None:
    if last is not None:
        run_id, layout_digest = last.run_id, last.layout_digest
        if header.generation <= last.generation:
            raise ValueError(f"generation {header.generation} follows generation {last.generation}")
    if run_id not in (None, header.run_id):
        raise ValueError(f"of run {header.run_id}, not of {run_id}")
    if layout_digest not in (None, header.layout_digest):
        raise ValueError(f"of fragment layout {header.layout_digest}, not of {layout_digest}")
