"""The log of a process that failed in a bench, kept when everything else of the bench is removed."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path


def kept_log(log: Path) -> str:
    """Copy `log` to a new file among the temporary ones; where it is now, in words, with the last line of it."""
    lines = log.read_text(errors="replace").split("\n") if log.is_file() else []
    last = next((line.strip() for line in reversed(lines) if line.strip()), None)
    if last is None:
        return "it printed nothing"
    descriptor, copy = tempfile.mkstemp(prefix=f"diloco-ds-bench-{log.stem}-", suffix=".log")
    os.close(descriptor)
    shutil.copyfile(log, copy)
    return f"its last line: {last}; all of them: {copy}"
