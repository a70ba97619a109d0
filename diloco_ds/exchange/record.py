"""Record: a small value in shared memory that one process writes and any number read; the newest wins.

Two slots; value n lies in slot n mod 2. The writer takes the mark (the sequence number) off the older slot,
fills it, and puts the mark on: whoever dies or looks in between finds the other slot whole. The checksum is
a second line of defence.

    words   magic, format, capacity
    slot    sequence (0 = none), length, crc32, payload bytes
"""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

from diloco_ds.errors import UserError
from diloco_ds.exchange.failpoint import failpoint
from diloco_ds.exchange.mapping import PAGE, WORD, aligned, create_mapped_file, fence, map_file

_MAGIC = int.from_bytes(b"DDS-REC\0", "little")
_FORMAT = 1
_SLOTS_START = 64
_SLOT_HEADER = 3 * WORD


class Record:
    """One register of at most `capacity` bytes, kept in the file `path`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._mapping, self._words = map_file(path, _MAGIC, _FORMAT)
        self.capacity = self._words[2]
        if self.capacity < 1 or len(self._mapping) != _file_size(self.capacity):
            raise UserError(
                f"{path}: damaged: its size does not fit its capacity ({self.capacity}); remove it"
            )
        self._slot_starts = (_SLOTS_START, _SLOTS_START + _slot_size(self.capacity))

    @classmethod
    def create(cls, path: Path, capacity: int) -> Record:
        """A new, empty record for values of up to `capacity` bytes; FileExistsError if `path` is there."""
        if capacity < 1:
            raise ValueError(f"capacity {capacity}: must be positive")
        create_mapped_file(path, _file_size(capacity), (_MAGIC, _FORMAT, capacity))
        return cls(path)

    @classmethod
    def open(cls, path: Path) -> Record:
        """An existing record; FileNotFoundError if there is none, UserError if the file is something else."""
        return cls(path)

    def sequence(self) -> int:
        """Number of the newest value, 0 if there is none yet. Costs two reads of memory: made for polling."""
        return max(self._words[start // WORD] for start in self._slot_starts)

    def write(self, payload: bytes) -> int:
        """Make `payload` the newest value; returns its sequence number. Only one process may write."""
        if len(payload) > self.capacity:
            raise ValueError(f"{self.path}: {len(payload)} bytes do not fit the record's {self.capacity}")
        sequence = self.sequence() + 1
        start = self._slot_starts[sequence % 2]
        mark = start // WORD
        self._words[mark] = 0
        fence()
        failpoint("record.invalidated")
        body = start + _SLOT_HEADER
        self._words[mark + 1] = len(payload)
        self._words[mark + 2] = _checksum(sequence, payload)
        self._mapping[body : body + len(payload)] = payload
        failpoint("record.filled")
        fence()
        self._words[mark] = sequence
        failpoint("record.written")
        return sequence

    def read(self) -> tuple[int, bytes] | None:
        """The newest whole value as (sequence, payload), or None if nothing was written yet.

        Never waits for the writer: a slot that is being overwritten means that a newer one is there.
        """
        while True:
            newest = self.sequence()
            for sequence in (newest, newest - 1):
                payload = self._value(sequence)
                if payload is not None:
                    return sequence, payload
            if self.sequence() == newest:
                return None

    def _value(self, sequence: int) -> bytes | None:
        if sequence < 1:
            return None
        start = self._slot_starts[sequence % 2]
        mark = start // WORD
        if self._words[mark] != sequence:
            return None
        fence()
        length, checksum = self._words[mark + 1], self._words[mark + 2]
        body = start + _SLOT_HEADER
        payload = self._mapping[body : body + min(max(length, 0), self.capacity)]
        return payload if _checksum(sequence, payload) == checksum else None


def _checksum(sequence: int, payload: bytes) -> int:
    return zlib.crc32(payload, zlib.crc32(struct.pack("<qq", sequence, len(payload))))


def _slot_size(capacity: int) -> int:
    return aligned(_SLOT_HEADER + capacity, 64)


def _file_size(capacity: int) -> int:
    return aligned(_SLOTS_START + 2 * _slot_size(capacity), PAGE)
