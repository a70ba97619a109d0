"""The island's own checkpoints on disk: which one is whole and newest, and which ones go.

A checkpoint is a directory that the ranks fill (inner_state.py), `i00003-s000001200` for incarnation 3 at step
clock 1200. It counts once its `complete.json` is there, which is written last; a half-written one is never loaded and is
removed when the next one is complete.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diloco_ds.rundir import write_atomically, write_json

MARK = "complete.json"
_NAME = re.compile(r"i(\d{5,})-s(\d{9,})")

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Checkpoint:
    """A whole checkpoint: its directory's name (the tag) and the facts written when it was complete."""

    tag: str
    facts: dict[str, Any]


class IslandCheckpoints:
    """The directory `root` of one island's checkpoints; at most `keep` whole ones stay. One process writes
    marks and removes.
    """

    def __init__(self, root: Path, keep: int) -> None:
        self.root, self._keep = root, keep

    def newest(self) -> Checkpoint | None:
        """The newest whole checkpoint, None if there is none. A newer incarnation's is newer whatever its
        step.
        """
        for tag in reversed(self._tags()):
            facts = self._facts(tag)
            if facts is not None:
                return Checkpoint(tag, facts)
        return None

    @staticmethod
    def tag(incarnation: int, step: int) -> str:
        """Name of the checkpoint that `incarnation` writes at step clock `step`."""
        return f"i{incarnation:05d}-s{step:09d}"

    def complete(self, tag: str, facts: dict[str, Any]) -> None:
        """Mark `tag` as whole (all its files are written), and remove what it makes superfluous."""
        _bring_to_disk(self.root / tag)
        write_json(self.root / tag / MARK, facts)
        whole = [each for each in self._tags() if self._facts(each) is not None]
        kept = {tag, *whole[-self._keep :]}
        for old in self._tags():
            if old not in kept:
                self._remove(old)
        self.remove_leavings()

    def remove_leavings(self) -> None:
        """Remove what a learner left half written when it died. Nothing may be on its way to disk."""
        for path in self.root.glob(".i*-s*.partial"):
            self._remove(path.name)

    def withdraw(self, tag: str) -> None:
        """Let `tag` no longer count as whole: it could not be loaded."""
        (self.root / tag / MARK).unlink(missing_ok=True)

    def room_for_another(self, least_bytes: int) -> str | None:
        """Why another checkpoint cannot be written, or None if it can: it takes what the newest takes, or
        `least_bytes`.
        """
        newest = self.newest()
        size = newest.facts.get("bytes", least_bytes) if newest else least_bytes
        try:
            write_atomically(self.root / ".probe", "can this disk be written?")  # no figure tells of a quota
            (self.root / ".probe").unlink()
            free = shutil.disk_usage(self.root).free
        except OSError as error:
            return f"{self.root} cannot be written: {error.strerror}"
        if free > 1.1 * size:
            return None
        return f"{self.root}: {free / 1e6:.0f} MB are free, a checkpoint takes {size / 1e6:.0f} MB"

    def size(self, tag: str) -> int:
        """Bytes of the files of `tag`."""
        return sum(file.stat().st_size for file in (self.root / tag).rglob("*") if file.is_file())

    def _tags(self) -> list[str]:
        if not self.root.is_dir():
            return []
        matches = [match for path in self.root.iterdir() if (match := _NAME.fullmatch(path.name))]
        return [match[0] for match in sorted(matches, key=lambda match: (int(match[1]), int(match[2])))]

    def _facts(self, tag: str) -> dict[str, Any] | None:
        try:
            facts: dict[str, Any] = json.loads((self.root / tag / MARK).read_text())
        except (FileNotFoundError, ValueError):
            return None
        return facts

    def _remove(self, tag: str) -> None:
        try:
            # The mark first, so that no half-removed one counts as whole.
            (self.root / tag / MARK).unlink(missing_ok=True)
            shutil.rmtree(self.root / tag)
        except OSError as error:
            log.warning("the old checkpoint %s cannot be removed: %s", self.root / tag, error)


def _bring_to_disk(directory: Path) -> None:
    """Wait until every file below `directory` is on the disk: the mark must not get there before them."""
    for path in [*directory.rglob("*"), directory]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
