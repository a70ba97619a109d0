"""A file mapped into memory and shared between processes: how it is made, and in what order others see it."""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Sequence
from pathlib import Path

from diloco_ds.errors import UserError

PAGE = 4096
WORD = 8

_lock = threading.Lock()


def fence() -> None:
    """Full memory barrier: others see what this process wrote before it, before anything it does after it.

    Python has none of its own. Taking a lock is an atomic read-modify-write with acquire, releasing one a
    store with release; doing both twice keeps anything from passing in either direction, on x86 as on ARM.
    """
    with _lock:
        pass
    with _lock:
        pass


def aligned(nbytes: int, to: int = PAGE) -> int:
    """`nbytes` rounded up to a multiple of `to`."""
    return -(-nbytes // to) * to


def create_mapped_file(path: Path, nbytes: int, header: Sequence[int]) -> None:
    """Make a sparse file of `nbytes` zeros that starts with the int64 `header`: whole, or not at all.

    Raises FileExistsError if `path` is there already.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    fd = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.ftruncate(fd, nbytes)
        os.pwrite(fd, memoryview(b"".join(word.to_bytes(WORD, "little", signed=True) for word in header)), 0)
        os.link(partial, path)
    finally:
        os.close(fd)
        os.unlink(partial)


def map_file(path: Path, magic: int, layout: int) -> tuple[mmap.mmap, memoryview]:
    """Map `path` for reading and writing; returns the mapping and a view of it as int64 words.

    Raises FileNotFoundError if it is not there, UserError if it does not start with `magic` and `layout`.
    """
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        nbytes = os.fstat(fd).st_size
        if nbytes < PAGE or nbytes % PAGE:
            raise UserError(f"{path}: {nbytes} bytes is no size such a file has; remove it")
        mapping = mmap.mmap(fd, nbytes)
    finally:
        os.close(fd)
    words = memoryview(mapping).cast("q")
    if words[0] != magic or words[1] != layout:
        raise UserError(f"{path}: not a file of this kind and version of diloco-ds; remove it")
    return mapping, words
