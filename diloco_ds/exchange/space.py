"""Room in shared memory: a folder of the user's own, and a refusal in words before memory runs out."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from diloco_ds.errors import UserError
from diloco_ds.rundir import SharedMemory

_TRIES = 100
"""At making folders: a run that ends just then removes those that are empty."""


def private_folder(path: Path) -> None:
    """Make `path` and what is missing above it, mode 0700; UserError if that fails or it is not ours.

    A run that ends removes empty folders: only `path` itself can be gone afterwards, so make there what is to stay.
    """
    top = SharedMemory("").root
    ours = [folder for folder in (*reversed(path.parents), path) if folder.is_relative_to(top)] or [path]
    base = ours[0].parent
    if not base.is_dir():
        raise UserError(f"{base} is not there: the exchange needs shared memory (a tmpfs) mounted at {base}")
    for _ in range(_TRIES):
        if _make(ours):
            return
    raise UserError(f"{path}: a folder above it is removed as soon as it is made")


def _make(folders: list[Path]) -> bool:
    """Whether all of them are there now; not if one is gone before the next is made."""
    for folder in folders:
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
            owner = folder.lstat().st_uid
        except FileNotFoundError:
            return False
        except OSError as error:
            raise UserError(f"{folder}: cannot be made ({error.strerror}); it must be writable") from error
        if owner != os.getuid() or folder.is_symlink():
            raise UserError(f"{folder} belongs to somebody else; remove it")
    return True


def require_space(folder: Path, nbytes: int) -> None:
    """UserError if `nbytes` more than what is promised already cannot be had in the file system of `folder`.

    Files there are sparse and fill up as training goes on: what counts is free space less what they may
    still take.
    """
    status = os.statvfs(folder)
    free = status.f_bavail * status.f_frsize
    promised = sum(_unfilled(folder))
    if nbytes > free - promised:
        raise UserError(
            f"{folder}: {_gib(nbytes)} of shared memory are needed, {_gib(free)} are free"
            + (f" and {_gib(promised)} of them promised to runs on this host" if promised else "")
            + "; enlarge /dev/shm (mount -o remount,size=...), train a smaller model, or stop another run"
        )


def _unfilled(folder: Path) -> Iterator[int]:
    """Bytes that the files of this user's runs may still take, in the file system of `folder`."""
    device = os.stat(folder).st_dev
    for parent, _, names in os.walk(SharedMemory("").root):
        for name in names:
            try:
                status = os.stat(os.path.join(parent, name))
            except FileNotFoundError:  # a run ends just now
                continue
            if status.st_dev == device:
                yield max(status.st_size - 512 * status.st_blocks, 0)


def _gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.2f} GiB"
