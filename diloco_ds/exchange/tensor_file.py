"""Writing a safetensors file piece by piece, so that saving never needs the memory of a second model.

The `safetensors` library writes tensors that are all in memory. Here the header comes first and the values
follow in any number of pieces, in the order of the tensors; the result is an ordinary file that
`safetensors` reads.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from math import prod
from pathlib import Path

import torch


class TensorFileWriter:
    """Write fp32 tensors `(name, shape)` to `path`, which must not exist; OSError when the disk is full."""

    def __init__(self, path: Path, tensors: Sequence[tuple[str, tuple[int, ...]]]) -> None:
        header = _header(tensors)
        self.path = path
        self._left = sum(prod(shape) for _, shape in tensors)
        self._sha256 = hashlib.sha256()
        self._file = open(path, "xb", buffering=0)  # noqa: SIM115 (closed by `close` or `abandon`)
        self._put(header)

    def write(self, values: torch.Tensor) -> None:
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


def _header(tensors: Sequence[tuple[str, tuple[int, ...]]]) -> bytes:
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    start = 0
    for name, shape in tensors:
        end = start + 4 * prod(shape)
        entries[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [start, end]}
        start = end
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)  # the values start at a multiple of 8 bytes
    return len(text).to_bytes(8, "little") + text


def file_sha256(path: Path) -> str:
    """sha256 of a file, hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
