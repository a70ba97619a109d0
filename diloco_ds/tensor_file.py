"""Reading and writing safetensors files piece by piece, so that neither needs the memory of a second model.

The `safetensors` library writes tensors that are all in memory. Here the header comes first and the values
follow: one after the other (`TensorFileWriter`), or in any order, by ranges, from several processes
(`TensorFile`). The results are ordinary files that `safetensors` reads.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

CHUNK_BYTES = 16 << 20
"""Of values on another device or of another dtype, so much passes through a buffer at a time."""

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


class Stored(NamedTuple):
    """What a file says of a tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]


class TensorFile:
    """A safetensors file whose tensors are read and written in place, by ranges of their flat elements.

    ValueError for a file that is none.
    """

    def __init__(self, path: Path, *, writable: bool = False) -> None:
        self.path = path
        self._fd = os.open(path, os.O_RDWR if writable else os.O_RDONLY)
        try:
            self._places = _read_header(self._fd)
        except (ValueError, KeyError, TypeError, struct.error) as error:
            os.close(self._fd)
            raise ValueError(f"{path}: not a safetensors file: {error}") from error

    @classmethod
    def create(cls, path: Path, tensors: Mapping[str, Stored]) -> TensorFile:
        """A new file for `tensors`, open for writing; their values are zero until they are written.
        OSError if it exists or the disk has no room for it.
        """
        header = _header(tensors)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            os.posix_fallocate(fd, 0, len(header) + sum(_nbytes(*each) for each in tensors.values()))
            _write_all(fd, memoryview(header), 0)
        finally:
            os.close(fd)
        return cls(path, writable=True)

    @property
    def tensors(self) -> dict[str, Stored]:
        """Dtype and shape by name, in the order of the file."""
        return {name: place[0] for name, place in self._places.items()}

    def write(self, name: str, start: int, values: Tensor) -> None:
        """Make `values` (flat, any dtype and device) the elements of `name` from `start` on."""
        stored, offset = self._place(name, start, values)
        for chunk in values.split(max(1, CHUNK_BYTES // stored.dtype.itemsize)):
            data = chunk.to("cpu", stored.dtype).contiguous()
            _write_all(self._fd, _bytes_of(data), offset)
            offset += data.nbytes

    def read(self, name: str, start: int, into: Tensor) -> None:
        """Fill `into` (flat, any dtype and device) with the elements of `name` from `start` on."""
        stored, offset = self._place(name, start, into)
        direct = into.device.type == "cpu" and into.dtype == stored.dtype and into.is_contiguous()
        for chunk in into.split(max(1, CHUNK_BYTES // stored.dtype.itemsize)):
            buffer = chunk if direct else torch.empty(chunk.numel(), dtype=stored.dtype)
            _read_all(self._fd, _bytes_of(buffer), offset, self.path)
            if not direct:
                chunk.copy_(buffer)
            offset += buffer.nbytes

    def tensor(self, name: str) -> Tensor:
        """A whole tensor."""
        stored = self._places[name][0]
        values = torch.empty(prod(stored.shape), dtype=stored.dtype)
        self.read(name, 0, values)
        return values.view(stored.shape)

    def close(self) -> None:
        """Close the file; what was written is the system's to bring to disk."""
        os.close(self._fd)

    def __enter__(self) -> TensorFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _place(self, name: str, start: int, values: Tensor) -> tuple[Stored, int]:
        """Dtype and shape of `name`, and the file's byte where its element `start` lies."""
        stored, begin = self._places[name]
        if values.dim() != 1 or not 0 <= start <= prod(stored.shape) - values.numel():
            raise ValueError(
                f"{self.path}: {name}, shape {list(stored.shape)}, has no {values.numel()} elements from {start} on"
            )
        return stored, begin + start * stored.dtype.itemsize


class TensorFileWriter:
    """Write fp32 tensors `(name, shape)` to `path`, which must not exist; OSError when the disk is full."""

    def __init__(self, path: Path, tensors: Sequence[tuple[str, tuple[int, ...]]]) -> None:
        header = _header({name: Stored(torch.float32, shape) for name, shape in tensors})
        self.path = path
        self._left = sum(prod(shape) for _, shape in tensors)
        self._sha256 = hashlib.sha256()
        self._file = open(path, "xb", buffering=0)  # noqa: SIM115 (closed by `close` or `abandon`)
        self._put(header)

    def write(self, values: Tensor) -> None:
        """Append `values`, flat fp32 on the CPU: the next elements in the order of the tensors."""
        if values.dtype != torch.float32 or values.dim() != 1 or values.numel() > self._left:
            raise ValueError(
                f"{self.path}: {values.numel()} values of {values.dtype} do not fit the {self._left} left"
            )
        self._left -= values.numel()
        self._put(values.numpy())

    def close(self) -> str:
        """Bring the file to disk and return its sha256 (hexadecimal)."""
        if self._left:
            raise ValueError(f"{self.path}: {self._left} values are missing")
        os.fsync(self._file.fileno())
        self._file.close()
        return self._sha256.hexdigest()

    def abandon(self) -> None:
        """Close without further ado; the file is not whole."""
        self._file.close()

    def _put(self, data: bytes | object) -> None:
        rest = memoryview(data).cast("B")  # type: ignore[arg-type]
        self._sha256.update(rest)
        while rest:  # a raw write may take less than all of it: over 2 GiB, or when the disk is nearly full
            rest = rest[self._file.write(rest) :]


def file_sha256(path: Path) -> str:
    """sha256 of a file, hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _header(tensors: Mapping[str, Stored]) -> bytes:
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    start = 0
    for name, stored in tensors.items():
        end = start + _nbytes(*stored)
        entries[name] = {
            "dtype": _NAMES[stored.dtype],
            "shape": list(stored.shape),
            "data_offsets": [start, end],
        }
        start = end
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)  # the values start at a multiple of 8 bytes
    return len(text).to_bytes(8, "little") + text


def _read_header(fd: int) -> dict[str, tuple[Stored, int]]:
    """Per tensor what is stored, and the byte of the file at which its values begin."""
    (length,) = struct.unpack("<Q", os.pread(fd, 8, 0))
    size = os.fstat(fd).st_size
    if length > size - 8:
        raise ValueError("its header is longer than the file")
    entries = json.loads(os.pread(fd, length, 8))
    entries.pop("__metadata__", None)
    places = {}
    for name, entry in entries.items():
        stored = Stored(_DTYPES[entry["dtype"]], tuple(entry["shape"]))
        start, end = entry["data_offsets"]
        if end - start != _nbytes(*stored) or 8 + length + end > size:
            raise ValueError(f"the values of {name} are not whole")
        places[name] = stored, 8 + length + start
    return places


def _nbytes(dtype: torch.dtype, shape: Sequence[int]) -> int:
    return dtype.itemsize * prod(shape)


def _bytes_of(values: Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU."""
    return memoryview(values.detach().view(torch.uint8).numpy()).cast("B")  # type: ignore[arg-type]


def _write_all(fd: int, data: memoryview, offset: int) -> None:
    while data:  # one call may take less than all of it
        done = os.pwrite(fd, data, offset)
        data, offset = data[done:], offset + done


def _read_all(fd: int, into: memoryview, offset: int, path: Path) -> None:
    while into:
        done = os.preadv(fd, [into], offset)
        if not done:
            raise OSError(f"{path}: the file is shorter than its header says")
        into, offset = into[done:], offset + done
