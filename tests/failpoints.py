"""Failpoints of a live run, armed while it goes on: one process of it dies, or stands still, at a named place."""

from __future__ import annotations

import itertools
import json
import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Armed:
    """A place that waits for a process."""

    path: Path

    @property
    def place(self) -> str:
        """Its name."""
        return self.path.parent.name

    def hit(self) -> int | None:
        """Process id of the one that was signalled there; None as long as none has come by."""
        return next((int(path.suffix[1:]) for path in self.path.parent.glob(f"{self.path.name}.*")), None)


class Failpoints:
    """The folder that `DILOCO_DS_FAILPOINT=@FOLDER` names (diloco_ds/exchange/failpoint.py)."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._numbers = itertools.count()
        folder.mkdir()

    @property
    def environment(self) -> dict[str, str]:
        """For the environment of the processes that can be hit."""
        return {"DILOCO_DS_FAILPOINT": f"@{self.folder}"}

    def arm(self, place: str, signal: str = "SIGKILL", **environment: str) -> Armed:
        """Signal the next process that comes by the place and has these variables (shell patterns) in its environment."""
        armed = Armed(self.folder / place / str(next(self._numbers)))
        armed.path.parent.mkdir(exist_ok=True)
        partial = armed.path.with_suffix(".partial")
        partial.write_text(json.dumps({"signal": signal, "environment": environment}))
        os.replace(partial, armed.path)
        return armed
