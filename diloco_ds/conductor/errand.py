"""One process that does one thing and ends: an evaluation, the export, the report."""

from __future__ import annotations

import contextlib
import subprocess
from pathlib import Path

import psutil

from diloco_ds.conductor import marks
from diloco_ds.conductor.part import Command


class Errand:
    """`command`, started at once, its output appended to `log`. `priority` is a nice value: 0 as usual, 19 last."""

    def __init__(self, command: Command, log: Path, run_id: str, role: str, priority: int = 0) -> None:
        self.log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        argv, environment = command
        with log.open("ab") as output:
            self._output_starts = output.tell()
            self._popen = subprocess.Popen(
                argv,
                env=marks.marked(environment, run_id, role),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        with contextlib.suppress(psutil.NoSuchProcess):
            psutil.Process(self._popen.pid).nice(priority)

    def exit_code(self) -> int | None:
        """None while it runs."""
        return self._popen.poll()

    def last_line(self) -> str:
        """The last line it printed: of one that failed, why."""
        with self.log.open("rb") as log:
            log.seek(self._output_starts)
            lines = log.read().decode(errors="replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "it printed nothing")

    def cancel(self) -> None:
        """Kill it and wait for its end."""
        self._popen.kill()
        self._popen.wait()
