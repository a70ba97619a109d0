"""Requests to stop: Ctrl-C, SIGTERM, and SIGHUP when the terminal is closed."""

from __future__ import annotations

import signal
from types import FrameType


class Stops:
    """Counts requests to stop. While `interrupting`, one is raised as KeyboardInterrupt at once instead.

    A signal that was ignored when the program started (SIGHUP under nohup) stays ignored.
    """

    def __init__(self) -> None:
        self.count = 0
        self.interrupting = True
        self.signal: signal.Signals | None = None
        """The first one."""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self._take)

    @property
    def exit_code(self) -> int:
        """What a program ended by the first request exits with: 128 + the signal's number."""
        return 128 + int(self.signal or signal.SIGINT)

    def _take(self, number: int, _frame: FrameType | None) -> None:
        self.count += 1
        self.signal = self.signal or signal.Signals(number)
        if self.interrupting:
            raise KeyboardInterrupt
