"""FragmentBox: the newest value of every fragment in shared memory, as flat fp32, with version and header.

Per fragment two slots. A writer fills the slot that does not hold the newest version, possibly from many
processes, and then commits it with one store of the version: a crash at any byte leaves the last whole
fragment readable. Nobody waits for anybody: a reader that copies checks afterwards that its version is
still there, and one that must not be overtaken pins it, whereupon the writer's `begin` has no slot to give
until the pin is gone.

Versions rise for the life of a run. A writer that starts over goes on above every number it may have used.

    words      magic, format, fragments, meta capacity, numel of every fragment
    control    per fragment: pin, claim, 2 x (version, meta length, meta crc32), 2 x meta bytes; versions are
               kept as version + 1, so that the zeros of a new file mean: no pin, no claim, nothing written
    payload    per fragment: 2 x fp32[numel], each on a page boundary, as registering it with a GPU needs

The file is sparse: a slot that was never written takes no memory.

Payloads are given as tensors or as bytes. torch is imported with the first tensor only: the processes that just carry
bytes (links) or look at headers (supervisors) start, and start again, in a fraction of the time.
"""

from __future__ import annotations

import ctypes
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from diloco_ds.errors import UserError
from diloco_ds.exchange.failpoint import failpoint
from diloco_ds.exchange.mapping import WORD, aligned, create_mapped_file, fence, map_file

if TYPE_CHECKING:
    from torch import Tensor

_MAGIC = int.from_bytes(b"DDS-BOX\0", "little")
_FORMAT = 1
_FIXED_WORDS = 4
_PIN, _CLAIM, _SLOT, _SLOT_WORDS = 0, 1, 2, 3
_CONTROL_WORDS = _SLOT + 2 * _SLOT_WORDS


class FragmentBox:
    """The fragments in the file `path`. `numels[p]` is the number of fp32 values of fragment p."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._mapping, self._words = map_file(path, _MAGIC, _FORMAT)
        count, self.meta_capacity = self._words[2], self._words[3]
        if not 0 < count <= len(self._words) - _FIXED_WORDS or self.meta_capacity < 0:
            raise UserError(f"{path}: damaged: it claims {count} fragments; remove it")
        self.numels = tuple(self._words[_FIXED_WORDS : _FIXED_WORDS + count])
        if min(self.numels) < 1 or self.file_size(self.numels, self.meta_capacity) != len(self._mapping):
            raise UserError(f"{path}: damaged: its size does not fit its fragments; remove it")
        control = _control_start(count)
        self._control = [(control + p * _control_size(self.meta_capacity)) // WORD for p in range(count)]
        self._starts = _payload_starts(control + count * _control_size(self.meta_capacity), self.numels)
        self._tensors: dict[tuple[int, int], Tensor] = {}  # by fragment and slot, made when first asked for

    @classmethod
    def create(cls, path: Path, numels: Sequence[int], meta_capacity: int) -> FragmentBox:
        """A new, empty box; FileExistsError if `path` is there."""
        if not numels or min(numels) < 1:
            raise ValueError(f"numels {list(numels)}: a box has fragments, and a fragment has elements")
        header = (_MAGIC, _FORMAT, len(numels), meta_capacity, *numels)
        create_mapped_file(path, cls.file_size(numels, meta_capacity), header)
        return cls(path)

    @classmethod
    def open(cls, path: Path) -> FragmentBox:
        """An existing box; FileNotFoundError if there is none, UserError if the file is something else."""
        return cls(path)

    @staticmethod
    def file_size(numels: Sequence[int], meta_capacity: int) -> int:
        """Bytes such a box takes once every slot was written."""
        control = aligned(_control_start(len(numels)) + len(numels) * _control_size(meta_capacity))
        return control + sum(2 * aligned(4 * numel) for numel in numels)

    @property
    def address(self) -> int:
        """Address of the whole mapping, page-aligned; with `nbytes` what cudaHostRegister takes."""
        return ctypes.addressof(ctypes.c_char.from_buffer(self._mapping))

    @property
    def nbytes(self) -> int:
        """Size of the whole mapping in bytes."""
        return len(self._mapping)

    # Reading

    def version(self, fragment: int) -> int:
        """Newest committed version, -1 if there is none. Costs two reads of memory: made for polling."""
        return max(self._version(fragment, 0), self._version(fragment, 1))

    def holds(self, fragment: int, version: int) -> bool:
        """Whether `version` is still readable; asked after copying, it says whether the copy is whole."""
        fence()
        return self._slot_of(fragment, version) is not None

    def payload(self, fragment: int, version: int) -> Tensor | None:
        """fp32[numel] view of the slot that holds `version`, or None if it was overwritten or never there."""
        slot = self._slot_of(fragment, version)
        fence()
        return None if slot is None else self._tensor(fragment, slot)

    def payload_bytes(self, fragment: int, version: int) -> memoryview | None:
        """As `payload`, a view of 4 * numel bytes."""
        slot = self._slot_of(fragment, version)
        fence()
        return None if slot is None else self._bytes(fragment, slot)

    def meta(self, fragment: int, version: int) -> bytes | None:
        """The header bytes committed with `version`, or None if it was overwritten or never there."""
        slot = self._slot_of(fragment, version)
        if slot is None:
            return None
        fence()
        word = self._slot_word(fragment, slot)
        length, checksum = self._words[word + 1], self._words[word + 2]
        start = self._meta_start(fragment, slot)
        meta = self._mapping[start : start + min(max(length, 0), self.meta_capacity)]
        if not self.holds(fragment, version):
            return None
        if zlib.crc32(meta) != checksum:
            raise RuntimeError(
                f"{self.path}: the header of fragment {fragment}, version {version}, is damaged"
            )
        return meta

    def read_header(self, fragment: int) -> tuple[int, bytes] | None:
        """(version, header bytes) of the newest version, or None if nothing was committed yet."""
        while (version := self.version(fragment)) >= 0:
            meta = self.meta(fragment, version)
            if meta is not None:
                return version, meta
        return None

    def pin(self, fragment: int, version: int) -> bool:
        """Keep `version` from being overwritten; False if it is gone or going. There is one pin per fragment.

        A pin outlives its reader, who calls `clear_pins` when it starts again.
        """
        control = self._control[fragment]
        self._words[control + _PIN] = version + 1
        fence()
        claimed = self._words[control + _CLAIM] == version + 1
        if claimed or self._slot_of(fragment, version) is None:
            self.unpin(fragment)
            return False
        return True

    def unpin(self, fragment: int) -> None:
        """Give the pinned version free."""
        fence()
        self._words[self._control[fragment] + _PIN] = 0

    def clear_pins(self) -> None:
        """Give free whatever an earlier life of this reader had pinned."""
        for fragment in range(len(self.numels)):
            self.unpin(fragment)

    # Writing

    def begin(self, fragment: int) -> Tensor | None:
        """The slot to fill, fp32[numel], or None while a reader has it pinned. The older version goes.

        Called again before `commit` it gives the same slot; what was filled in before may lie there.
        """
        slot = self._begin(fragment)
        return None if slot is None else self._tensor(fragment, slot)

    def begin_bytes(self, fragment: int) -> memoryview | None:
        """As `begin`, a view of 4 * numel bytes."""
        slot = self._begin(fragment)
        return None if slot is None else self._bytes(fragment, slot)

    def _begin(self, fragment: int) -> int | None:
        control = self._control[fragment]
        slot = self._free_slot(fragment)
        word = self._slot_word(fragment, slot)
        old = self._words[word]
        if old:
            # Claim, then look at the pin; a reader pins, then looks at the claim: one sees the other.
            self._words[control + _CLAIM] = old
            fence()
            if self._words[control + _PIN] == old:
                self._words[control + _CLAIM] = 0
                return None
            failpoint("box.claimed")
            self._words[word] = 0
            self._words[control + _CLAIM] = 0
        fence()
        failpoint("box.begun")
        return slot

    def at_rest(self, fragment: int) -> bool:
        """Whether both slots hold a whole version: nobody has begun to fill one."""
        return min(self._version(fragment, 0), self._version(fragment, 1)) >= 0

    def begun(self, fragment: int) -> Tensor:
        """The slot that another process has begun, for those who fill a part of it; RuntimeError without."""
        return self._tensor(fragment, self._begun_slot(fragment))

    def commit(self, fragment: int, version: int, meta: bytes) -> None:
        """Make the begun slot the newest version, with `meta` as its header. All its payload must be written.

        `version` must be above the newest one (ValueError); `begin` must have given a slot (RuntimeError).
        """
        if version <= self.version(fragment):
            raise ValueError(
                f"{self.path}: version {version} of fragment {fragment} is not above {self.version(fragment)}"
            )
        if len(meta) > self.meta_capacity:
            raise ValueError(f"{self.path}: a header of {len(meta)} bytes does not fit {self.meta_capacity}")
        slot = self._begun_slot(fragment)
        word = self._slot_word(fragment, slot)
        start = self._meta_start(fragment, slot)
        self._words[word + 1] = len(meta)
        self._words[word + 2] = zlib.crc32(meta)
        self._mapping[start : start + len(meta)] = meta
        failpoint("box.filled")
        fence()
        self._words[word] = version + 1
        failpoint("box.committed")

    # Geometry

    def _slot_word(self, fragment: int, slot: int) -> int:
        return self._control[fragment] + _SLOT + slot * _SLOT_WORDS

    def _version(self, fragment: int, slot: int) -> int:
        return self._words[self._slot_word(fragment, slot)] - 1

    def _slot_of(self, fragment: int, version: int) -> int | None:
        for slot in (0, 1):
            if version >= 0 and self._version(fragment, slot) == version:
                return slot
        return None

    def _free_slot(self, fragment: int) -> int:
        return 0 if self._version(fragment, 1) > self._version(fragment, 0) else 1

    def _begun_slot(self, fragment: int) -> int:
        slot = self._free_slot(fragment)
        if self._version(fragment, slot) >= 0:
            raise RuntimeError(f"{self.path}: fragment {fragment} was not begun")
        return slot

    def _meta_start(self, fragment: int, slot: int) -> int:
        return (self._control[fragment] + _CONTROL_WORDS) * WORD + slot * aligned(self.meta_capacity, WORD)

    def _bytes(self, fragment: int, slot: int) -> memoryview:
        start = self._starts[fragment][slot]
        return memoryview(self._mapping)[start : start + 4 * self.numels[fragment]]

    def _tensor(self, fragment: int, slot: int) -> Tensor:
        import torch

        key = fragment, slot
        if key not in self._tensors:
            start, numel = self._starts[fragment][slot], self.numels[fragment]
            values = torch.frombuffer(self._mapping, dtype=torch.float32, count=numel, offset=start)
            self._tensors[key] = values
        return self._tensors[key]


def _control_start(fragments: int) -> int:
    return aligned((_FIXED_WORDS + fragments) * WORD, 64)


def _control_size(meta_capacity: int) -> int:
    return aligned(_CONTROL_WORDS * WORD + 2 * aligned(meta_capacity, WORD), 64)


def _payload_starts(control_end: int, numels: Sequence[int]) -> list[tuple[int, int]]:
    starts, start = [], aligned(control_end)
    for numel in numels:
        step = aligned(4 * numel)
        starts.append((start, start + step))
        start += 2 * step
    return starts
