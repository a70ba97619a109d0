"""A run's shared memory on this host is removed when nobody needs it any more."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path

from diloco_ds.rundir import SharedMemory


def remove_shared_memory(run_id: str) -> None:
    """Remove everything of the run. OSError if it withstands."""
    root = SharedMemory(run_id).root
    shutil.rmtree(root, ignore_errors=True)  # an island on this host may be removing its part just now
    if root.exists():
        raise OSError(f"{root} cannot be removed")
    _remove_if_empty(root.parent)


def remove_island_memory(run_id: str, island: str) -> None:
    """Remove an island's end of its exchange, and the folders above it if nothing else is in them."""
    memory = SharedMemory(run_id)
    for folder in (memory.island_end(island), memory.link_scratch(island)):
        shutil.rmtree(folder, ignore_errors=True)
    _remove_if_empty(memory.root)
    _remove_if_empty(memory.root.parent)


def _remove_if_empty(folder: Path) -> None:
    """Remove `folder` unless something is in it: another run's, or another island's."""
    with contextlib.suppress(OSError):
        folder.rmdir()
