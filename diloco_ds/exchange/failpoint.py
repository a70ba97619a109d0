"""Failpoints: named places at which a test lets this process die, or stand still.

``DILOCO_DS_FAILPOINT=store.before_commit:3`` kills the process the third time it comes by the place
``store.before_commit``. ``DILOCO_DS_FAILPOINT=@FOLDER`` lets the test choose while a run goes on, and hit one
process of it, once: a file ``FOLDER/store.before_commit/ANY`` that holds

    {"signal": "SIGKILL", "environment": {"DILOCO_DS_ROLE": "link.a", "OMPI_COMM_WORLD_RANK": "1"}}

is for the first process that comes by and has these variables (shell patterns) in its environment: it renames the file to
``ANY.PID`` and sends itself the signal.

The variable is read here and nowhere else, once, when the module is imported; without it a failpoint costs two
comparisons.
"""

from __future__ import annotations

import fnmatch
import json
import os
import signal
from pathlib import Path

_given = os.environ.get("DILOCO_DS_FAILPOINT", "")
_folder = Path(_given[1:]) if _given.startswith("@") else None
_name, _, _count = _given.partition(":")
_left = int(_count or 1) if _folder is None else 0


def failpoint(name: str) -> None:
    """Die here if the environment names this place and it has been passed often enough, or if this process is waited
    for here.
    """
    global _left
    if _folder is not None:
        _look_into(_folder, name)
    if name != _name:
        return
    _left -= 1
    if _left == 0:
        os.kill(os.getpid(), signal.SIGKILL)


def _look_into(folder: Path, name: str) -> None:
    if not (folder / name).is_dir():
        return
    for armed in [path for path in (folder / name).iterdir() if not path.suffix]:
        try:
            order = json.loads(armed.read_text())
            if _is_meant(order["environment"]):
                os.rename(armed, armed.with_suffix(f".{os.getpid()}"))
                os.kill(os.getpid(), signal.Signals[order["signal"]])
        except FileNotFoundError:  # another process was quicker
            continue


def _is_meant(wanted: dict[str, str]) -> bool:
    return all(fnmatch.fnmatchcase(os.environ.get(key, ""), pattern) for key, pattern in wanted.items())
