"""How an island goes: told to drain, or gone before this syncer began; its last work is merged before it is gone."""

from __future__ import annotations

from diloco_ds.core.events import Action
from diloco_ds.core.roster import Roster
from diloco_ds.core.rounds import Rounds


def ask_to_leave(roster: Roster, island: str, round_: int) -> None:
    """Tell the island to drain, with a request for everything it has; `round_` is the global step that is asked for."""
    member = roster.get(island)
    if member is not None:
        member.leaving = True
        member.want = [round_] * len(member.want)


def give_up(roster: Roster, rounds: Rounds, island: str, reason: str, actions: list[Action]) -> None:
    """The island will not come back: gone at once, or when what it has handed in is merged."""
    member = roster.get(island)
    if member is None:
        return
    member.leaving, member.alive, member.reason = True, False, reason
    if not rounds.hold_work_of(island):
        roster.remove(island, reason, actions)


def remove_left(roster: Roster, rounds: Rounds, now: float, actions: list[Action]) -> None:
    """Islands that leave are gone once they have drained and are merged, or are silent past their lease."""
    for member in [m for m in roster if m.leaving]:
        if rounds.hold_work_of(member.name):
            continue
        if member.phase == "drained" and not any(map(member.owed, range(len(member.want)))):
            roster.remove(member.name, "left, its last work is merged", actions)
        elif now >= member.last_heard + member.lease(roster.lease):
            roster.remove(member.name, f"left: {member.reason}", actions)
