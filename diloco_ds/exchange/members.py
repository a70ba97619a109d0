"""What the syncer sees of islands that join and leave (membership.py): events for the core, each once."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

from diloco_ds import membership
from diloco_ds.core.events import Joined, Leave, Left
from diloco_ds.exchange.intake import Intake
from diloco_ds.rundir import RunDir

log = logging.getLogger(__name__)


class Members:
    """The islands of `run`; `open_intake(island)` makes the syncer's end of an island's exchange."""

    def __init__(self, run: RunDir, open_intake: Callable[[str], Intake]) -> None:
        self.open_intake = open_intake
        self._run = run
        self._seen: set[str] | None = None
        self._told_to_leave: set[str] = set()
        self._left: set[str] = set()

    def changes(self, belongs: Callable[[str], bool]) -> Iterator[Joined | Leave | Left]:
        """What is new since the last call. `belongs`: whether the core still counts an island in.

        An island that was told to leave and that the core has let go is noted as left.
        """
        self._left |= membership.left(self._run)
        yield from self._joined()
        for name in membership.leaving(self._run) - self._left:
            if name not in self._told_to_leave:
                self._told_to_leave.add(name)
                yield Leave(name)
            elif not belongs(name):
                self._note_left(name)

    def _joined(self) -> Iterator[Joined | Left]:
        """At the first call all islands; one that left under an earlier syncer is no longer counted in."""
        if self._seen is None:
            self._seen = set()
            names = [island.name for island in membership.run_config(self._run).islands]
            yield from (Left(name, "left before") for name in names if name in self._left)
        else:
            names = [joining.island.name for joining in membership.joinings(self._run)]
        for name in names:
            if name not in self._seen and name not in self._left:
                self._seen.add(name)
                yield Joined(name)

    def _note_left(self, name: str) -> None:
        try:
            membership.note_left(self._run, name)
        except OSError as error:  # at the next look again
            log.warning("%s has left, which cannot be written: %s", name, error)
