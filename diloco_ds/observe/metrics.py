"""metrics.jsonl: one JSON record a line, appended by every process of a run and read while it grows.

Every record holds `time` (epoch seconds) and `kind`. The fields of each kind, with units: docs/observing.md.
"""

from __future__ import annotations

import json
import logging
import math
import mmap
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

Kind = Literal["step", "merge", "eval", "event"]
Record = dict[str, Any]

TORN_AFTER_LOOKS = 20
"""Looks, a millisecond apart, after which a line without an end is taken for abandoned."""
LOOK_BACK = 2**28
"""Bytes from the end in which `last_record` looks: a look must stay cheap however long the run."""
MOST_KEPT = 200
"""Events that one process keeps in memory while it cannot write them."""

log = logging.getLogger(__name__)

_to_json = json.JSONEncoder(allow_nan=False, separators=(",", ":")).encode


class MetricsFile:
    """The writing end: one record, one line, one `write(2)` on a descriptor opened with O_APPEND.

    Lines of several processes on one host therefore never mix; a process killed in the middle of a write costs its
    own record only. A disk that is full or gone does not stop the caller. Events are kept and written once writing works
    again, at most MOST_KEPT of them: what they tell of is often that very disk. Other records are counted, and their
    number is written then.
    """

    def __init__(self, path: Path) -> None:
        """Opens `path`, creating it where needed. OSError if that is not possible."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._kept: list[bytes] = []
        self._lost = 0  # records since writing worked last
        self._failing = False
        self._fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)

    def write(self, kind: Kind, /, **fields: Any) -> None:
        """Append a record. NaN and infinities become null, numpy and torch scalars plain numbers.

        `time` is now unless it is among `fields` (something that was seen earlier).
        """
        if self._fd < 0:
            raise ValueError(f"{self.path} is closed")
        line = _line({"time": time.time(), "kind": kind, **fields})
        if self._append(line):
            return
        if kind == "event" and len(self._kept) < MOST_KEPT:
            self._kept.append(line)
        else:
            self._lost += 1

    def close(self) -> None:
        """Close the descriptor, after a last attempt at what is kept; writing afterwards is an error."""
        if self._fd < 0:
            return
        if self._failing and not self._append(b""):
            log.warning("%s: %d records are lost", self.path, self._lost + len(self._kept))
        os.close(self._fd)
        self._fd = -1

    def __enter__(self) -> MetricsFile:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _append(self, line: bytes) -> bool:
        """Write what is still to be told, then `line` (which may be empty); False if the disk does not take all of it."""
        if self._lost:
            lost = {"time": time.time(), "kind": "event", "event": "metrics_lost", "records": self._lost}
            if not self._put(_line(lost)):
                return False
            self._lost = 0
        while self._kept:
            if not self._put(self._kept[0]):
                return False
            self._kept.pop(0)
        if line and not self._put(line):
            return False
        self._failing = False
        return True

    def _put(self, line: bytes) -> bool:
        """Write one line; whether the disk took all of it."""
        if self._ends_torn():
            line = b"\n" + line
        try:
            written = os.write(self._fd, line)
        except OSError as error:
            return self._failed(str(error))
        if written != len(line):
            return self._failed(f"only {written} of {len(line)} bytes were written")
        return True

    def _ends_torn(self) -> bool:
        """True if the file's last line has no end: its writer was killed in the write, or the disk was full.

        A write that another process is just making looks the same, but not for long.
        """
        for _ in range(TORN_AFTER_LOOKS):
            size = os.fstat(self._fd).st_size
            if size == 0 or os.pread(self._fd, 1, size - 1) == b"\n":
                return False
            time.sleep(0.001)
        return True

    def _failed(self, why: str) -> bool:
        if not self._failing:
            log.warning("%s cannot be written (%s): until it can, only events are kept", self.path, why)
        self._failing = True
        return False


class MetricsFollower:
    """The reading end of a growing file: each `read` gives the records that came since the last one."""

    def __init__(self, path: Path, offset: int = 0) -> None:
        """Reads `path` from byte `offset` (the start of a line); the file need not exist yet."""
        self.path = path
        self.offset = offset
        self.damaged = 0
        """Whole lines so far that were no record: leftovers of a full disk."""

    def read(self) -> list[Record]:
        """The new whole records, oldest first. A last line without its end is left for the next call."""
        try:
            with self.path.open("rb") as file:
                file.seek(self.offset)
                block = file.read()
        except FileNotFoundError:
            return []
        end = block.rfind(b"\n") + 1
        self.offset += end
        lines = [line for line in block[:end].split(b"\n") if line.strip()]
        records = [record for line in lines if (record := _parse(line)) is not None]
        self.damaged += len(lines) - len(records)
        return records


def read_metrics(path: Path, since_offset: int = 0) -> list[Record]:
    """All whole records of `path` from byte `since_offset` on; none if there is no such file."""
    return list(iterate_metrics(path, since_offset))


def iterate_metrics(path: Path, since_offset: int = 0) -> Iterator[Record]:
    """The records of `read_metrics` one after another, for files that do not fit into memory."""
    if not path.is_file():
        return
    damaged = 0
    with path.open("rb") as file:
        file.seek(since_offset)
        for line in file:
            if not line.endswith(b"\n") or not line.strip():
                continue
            record = _parse(line)
            damaged += record is None
            if record is not None:
                yield record
    if damaged:
        log.warning("%s: %d damaged lines left out", path, damaged)


def last_record(path: Path, kind: Kind) -> Record | None:
    """The newest whole record of `kind`; None if there is none in the last `LOOK_BACK` bytes of the file."""
    if not path.is_file() or path.stat().st_size == 0:
        return None
    mark = f'"kind":"{kind}"'.encode()
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        end = content.rfind(b"\n") + 1
        oldest = max(end - LOOK_BACK, 0)
        while (at := content.rfind(mark, oldest, end)) >= 0:
            start = content.rfind(b"\n", 0, at) + 1
            if (record := _parse(content[start : content.find(b"\n", at)])) is not None:
                return record
            end = start
    return None


def _parse(line: bytes) -> Record | None:
    """The record in `line`; None if the line holds none."""
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) and "time" in record and "kind" in record else None


def _line(record: Record) -> bytes:
    try:
        text = _to_json(record)
    except (
        ValueError,
        TypeError,
    ):  # not finite, or not one of JSON's own types: rare, so the common case pays nothing
        text = _to_json(_plain(record))
    return text.encode() + b"\n"


def _plain(value: Any) -> Any:
    """`value` as JSON can hold it; TypeError for what has no sensible form."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    if hasattr(value, "tolist"):  # numpy and torch, scalars and arrays
        return _plain(value.tolist())
    raise TypeError(f"a {type(value).__name__} cannot be written as a metric")
