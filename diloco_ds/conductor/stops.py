"""Requests to stop: Ctrl-C, SIGTERM, and SIGHUP when the terminal is closed."""

from __future__ import annotations

import signal
import sys
import threading
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sys import UnraisableHookArgs

_AGAIN_AFTER_S = 0.02


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
        sys.unraisablehook = self._ask_again

    @property
    def exit_code(self) -> int:
        """What a program ended by the first request exits with: 128 + the signal's number."""
        return 128 + int(self.signal or signal.SIGINT)

    def _take(self, number: int, _frame: FrameType | None) -> None:
        self.count += 1
        self.signal = self.signal or signal.Signals(number)
        if self.interrupting:
            raise KeyboardInterrupt

    def _ask_again(self, lost: UnraisableHookArgs) -> None:
        """Python drops what is raised in a destructor or a weak reference's callback: interrupt once more, out of it."""
        if self.interrupting and isinstance(lost.exc_value, KeyboardInterrupt):
            again = threading.Timer(_AGAIN_AFTER_S, self._interrupt)
            again.daemon = True
            again.start()
        else:
            sys.__unraisablehook__(lost)

    def _interrupt(self) -> None:
        if self.interrupting:  # else it is counted, and the run will see it
            self.count -= 1
            main = threading.main_thread().ident
            assert main is not None, "it has started"
            signal.pthread_kill(main, self.signal or signal.SIGINT)
