"""A report while the learner makes no steps: starting, loading and saving take their time, and nobody may
take that for death.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

INTERVAL_S = 1.0


@contextmanager
def heartbeat(beat: Callable[[], None], at_most_s: float | None = None) -> Iterator[None]:
    """Call `beat` now and every second from a thread until the block ends, or until `at_most_s` seconds have
    passed.

    The limit is for what should not take for ever: when the beats stop, the supervisor counts the silence as
    usual.
    """
    ended = threading.Event()

    def run() -> None:
        beats = 0
        while not ended.wait(INTERVAL_S):
            beats += 1
            if at_most_s is not None and beats * INTERVAL_S > at_most_s:
                return
            beat()

    beat()
    thread = threading.Thread(target=run, name="heartbeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
