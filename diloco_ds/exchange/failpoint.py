"""Failpoints: named places at which a test lets this process die by SIGKILL.

``DILOCO_DS_FAILPOINT=store.after_payload:3`` kills the process the third time it comes by the place
``store.after_payload``. The variable is read here and nowhere else, once, when the module is imported;
without it a failpoint costs one comparison.
"""

from __future__ import annotations

import os
import signal

_name, _, _count = os.environ.get("DILOCO_DS_FAILPOINT", "").partition(":")
_left = int(_count or 1)


def failpoint(name: str) -> None:
    """Die here if the environment names this place and it has been passed often enough."""
    global _left
    if name != _name:
        return
    _left -= 1
    if _left == 0:
        os.kill(os.getpid(), signal.SIGKILL)
