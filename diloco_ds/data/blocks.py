"""Blocks of tokens on disk: fixed-length training examples in one memory-mapped array."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from numpy.typing import DTypeLike, NDArray
from torch import Tensor


class BlockWriter:
    """Writes rows of `length` numbers to a .npy file that grows; how many there will be need not be known."""

    def __init__(self, path: Path, length: int, dtype: DTypeLike) -> None:
        self.length = length
        self.rows = 0
        self._dtype = np.dtype(dtype)
        self._file: BinaryIO = path.open("wb")
        self._write_header()
        self._data_start = self._file.tell()

    def write(self, rows: NDArray[np.generic]) -> None:
        """Append `rows` [n, length]."""
        self._file.write(np.ascontiguousarray(rows, dtype=self._dtype).data)
        self.rows += len(rows)

    def close(self) -> None:
        """Write the final number of rows into the header; the format leaves room for that."""
        self._file.seek(0)
        self._write_header()
        if self._file.tell() != self._data_start:
            raise RuntimeError(f"the header of {self._file.name} has grown")
        self._file.close()

    def _write_header(self) -> None:
        header = {
            "descr": np.lib.format.dtype_to_descr(self._dtype),
            "fortran_order": False,
            "shape": (self.rows, self.length),
        }
        np.lib.format.write_array_header_1_0(self._file, header)


class BlockFile:
    """Packed blocks: [blocks, sequence_length] of uint16 or uint32, mapped into memory."""

    def __init__(self, blocks: NDArray[np.generic]) -> None:
        self._blocks = blocks

    @classmethod
    def open(cls, path: Path) -> BlockFile:
        """Map the file at `path`. OSError or ValueError if it is missing or no block file."""
        blocks = np.load(path, mmap_mode="r", allow_pickle=False)
        if blocks.ndim != 2:
            raise ValueError(f"{path} holds no blocks: its shape is {blocks.shape}")
        return cls(blocks)

    def __len__(self) -> int:
        return len(self._blocks)

    @property
    def sequence_length(self) -> int:
        """Tokens of a block."""
        return int(self._blocks.shape[1])

    def __getitem__(self, index: int) -> NDArray[np.generic]:
        """Block `index`, [sequence_length]; a view, not to be written to."""
        return self._blocks[index]

    def batch(self, indices: Sequence[int]) -> Tensor:
        """The blocks `indices`, in that order, as int64 [len(indices), sequence_length]."""
        return torch.from_numpy(self._blocks[np.asarray(indices, dtype=np.int64)].astype(np.int64))


@dataclass(frozen=True)
class HeldOut:
    """Held-out blocks, and for every token how many bytes of the text it stands for."""

    blocks: BlockFile
    token_bytes: BlockFile

    @classmethod
    def open(cls, blocks: Path, token_bytes: Path) -> HeldOut:
        """Map both files, which have the same shape."""
        return cls(BlockFile.open(blocks), BlockFile.open(token_bytes))

    def __len__(self) -> int:
        return len(self.blocks)

    def predicted_bytes(self, indices: Sequence[int]) -> int:
        """Bytes of text behind the predicted tokens of the blocks `indices`: all but each block's first."""
        return int(self.token_bytes.batch(indices)[:, 1:].sum())
