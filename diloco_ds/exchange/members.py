"""What the syncer sees of islands that join and leave (membership.py): events for the core, each once."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

from diloco_ds import membership
from diloco_ds.core.events import Joined, Leave, Left
from diloco_ds.errors import UserError
from diloco_ds.exchange.intake import Intake
from diloco_ds.rundir import RunDir

log = logging.getLogger(__name__)


class Members:
    """The islands of `run`. `open_intake(island)` makes the syncer's end of an island's exchange; `tell(event, reason)`
    tells an event of the run.
    """

    def __init__(
        self, run: RunDir, open_intake: Callable[[str], Intake], tell: Callable[[str, str], None]
    ) -> None:
        self.intakes: dict[str, Intake] = {}
        """Of islands that have joined, there when their Joined is seen; to be taken."""
        self._run, self._open_intake, self._tell = run, open_intake, tell
        self._seen: set[str] | None = None
        self._put_off: set[str] = set()
        self._told_to_leave: set[str] = set()
        self._left: set[str] = set()

    def changes(self, belongs: Callable[[str], bool]) -> Iterator[Joined | Leave | Left]:
        """What is new since the last call. `belongs`: whether the core still counts an island in.

        An island that was told to leave and that the core has let go is noted as left. What stands in the way of an island's
        intake is the caller's at the first call, as it is with everything that a syncer starts from; later the island joins
        when it can.
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
        starts = self._seen is None
        if self._seen is None:
            self._seen = set()
            names = [island.name for island in membership.run_config(self._run).islands]
            yield from (Left(name, "left before") for name in names if name in self._left)
        else:
            names = [joining.island.name for joining in membership.joinings(self._run)]
        for name in names:
            if name not in self._seen and name not in self._left and self._opened(name, starts):
                self._seen.add(name)
                yield Joined(name)

    def _opened(self, name: str, starts: bool) -> bool:
        """Whether the island's intake is there now. That it has to wait for room in shared memory is told once."""
        try:
            self.intakes[name] = self._open_intake(name)
        except (OSError, UserError) as error:
            if starts:
                raise
            if name not in self._put_off:
                self._put_off.add(name)
                self._tell("warning", f"{name} cannot join yet: {error}; tried again until it can")
            return False
        return True

    def _note_left(self, name: str) -> None:
        try:
            membership.note_left(self._run, name)
        except OSError as error:  # at the next look again
            log.warning("%s has left, which cannot be written: %s", name, error)
