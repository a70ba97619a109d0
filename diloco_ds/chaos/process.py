"""The process that injects the schedule of a run, `train --chaos`: `python -m diloco_ds.chaos.process RUN_DIR`.

The schedule begins when the islands step. Started again it goes on behind the last fault of which the run's
metrics tell.
"""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path
from types import FrameType

from diloco_ds.chaos.injector import Injector, Record, islands_of
from diloco_ds.chaos.schedule import load_schedule
from diloco_ds.errors import UserError
from diloco_ds.observe.metrics import iterate_metrics
from diloco_ds.observe.status import read_status
from diloco_ds.rundir import RunDir

POLL_S = 0.2


class EndRequest:
    """Whether somebody asked this process to end: SIGTERM or Ctrl-C."""

    def __init__(self) -> None:
        self._asked = False
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._ask)

    def __call__(self) -> bool:
        return self._asked

    def _ask(self, _number: int, _frame: FrameType | None) -> None:
        self._asked = True


def already_done(run: RunDir) -> int:
    """How many faults of the run's own schedule were injected, or missed, before."""
    told = ("fault", "chaos_missed")
    records = (each for each in iterate_metrics(run.metrics) if each.get("role") == "chaos")
    return 1 + max((int(each["number"]) for each in records if each.get("event") in told), default=-1)


def main(arguments: list[str]) -> int:
    """Inject the schedule of the run in `arguments`; exit code 2 for what the user can put right."""
    run, stop = RunDir(Path(arguments[0])), EndRequest()
    try:
        schedule = load_schedule(run.chaos, islands_of(run))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    while read_status(run.root).state == "preparing" and not stop():
        time.sleep(POLL_S)
    Injector(run, schedule, _print, first=already_done(run)).run(stop)
    return 0


def _print(record: Record) -> None:
    print(f"{record['event']}: {record['reason']}", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
