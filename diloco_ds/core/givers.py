"""Which island gives its optimizer's moments to one that starts without any.

A peer is named only if it has seen what the syncer has: it holds every fragment in the newest version, or in the one
before and the newest is on its way to it. The versions of that moment are the *clock* of the gift: the peer gives nothing
before it has adopted all of them, so what arrives belongs to the weights that the island begins with, or to newer ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from diloco_ds.core.events import Action, Gift, NameGiver, Peer
from diloco_ds.core.member import Member
from diloco_ds.core.roster import Roster
from diloco_ds.core.rounds import Rounds


class Givers:
    """Who gives to whom; all of it is found again from the islands' reports when the syncer restarts."""

    def __init__(self, roster: Roster) -> None:
        self._roster = roster
        self._peers: dict[str, Peer] = {}  # by the island that asked
        self._since: float | None = None  # driver's clock: when this syncer heard somebody ask first

    def hear(self, asker: Member, rounds: Rounds, now: float, actions: list[Action]) -> None:
        """`asker` has reported, at time `now`; `rounds` knows the newest versions."""
        peer = self._peers.get(asker.name)
        if not asker.asks:
            self._peers.pop(asker.name, None)
            return
        if peer is not None and peer.incarnation == asker.incarnation and self._stands(peer):
            return
        self._since = now if self._since is None else self._since
        self._peers.pop(asker.name, None)
        named = self._name(asker, rounds.versions(), now)
        if named is not None:
            self._peers[asker.name] = named
            actions.append(NameGiver(asker.name, named.name, named.reason))

    def peer(self, asker: str) -> Peer:
        """What the orders of `asker` say of the one that gives to it."""
        return self._peers.get(asker, Peer())

    def gift(self, giver: str) -> Gift:
        """What the orders of `giver` say of what it shall give."""
        for name, peer in self._peers.items():
            asker = self._roster.get(name)
            if peer.name == giver and asker is not None and _waits(asker, peer):
                return Gift(name, peer.incarnation, asker.asks, asker.portion, peer.clock)
        return Gift()

    def _stands(self, peer: Peer) -> bool:
        """Whether the decision holds: nobody gives, or the one that was named is still there."""
        giver = self._roster.get(peer.name)
        return not peer.name or (
            giver is not None
            and giver.alive
            and not giver.leaving
            and giver.incarnation == peer.giver_incarnation
        )

    def _name(self, asker: Member, versions: Sequence[int], now: float) -> Peer | None:
        """The decision; None as long as somebody may yet be able to give."""
        if min(versions) < 1:
            return self._nobody(asker, "the run has just begun")
        others = [member for member in self._roster if member is not asker and not member.leaving]
        able = [member for member in others if _is_able(member, versions) and not self._is_busy(member)]
        if able:
            giver = min(able, key=lambda member: (_behind(member, versions), member.name))
            return _peer(asker, giver, versions)
        if any(self._may_become_able(member, now) for member in others):
            return None
        return self._nobody(asker, "no other island has moments to give")

    def _nobody(self, asker: Member, reason: str) -> Peer:
        return Peer(incarnation=asker.incarnation, reason=reason)

    def _is_busy(self, giver: Member) -> bool:
        return bool(self.gift(giver.name).request)

    def _may_become_able(self, member: Member, now: float) -> bool:
        """It gives to another one, is a version behind, or is just starting; or this syncer has not heard of it yet."""
        if member.incarnation == 0:
            return self._since is not None and now < self._since + self._roster.lease
        starts = member.phase == "starting" and not member.asks
        return not member.silent and (starts or (member.alive and bool(member.gives)))


def _waits(asker: Member, peer: Peer) -> bool:
    return asker.incarnation == peer.incarnation and asker.asks > 0 and not asker.silent


def _is_able(member: Member, versions: Sequence[int]) -> bool:
    return member.alive and bool(member.gives) and max(_behind_each(member, versions)) <= 1


def _behind_each(member: Member, versions: Sequence[int]) -> Iterable[int]:
    return [version - base for version, base in zip(versions, member.base, strict=True)]


def _behind(member: Member, versions: Sequence[int]) -> int:
    return sum(_behind_each(member, versions))


def _peer(asker: Member, giver: Member, versions: Sequence[int]) -> Peer:
    behind = sum(each > 0 for each in _behind_each(giver, versions))
    holds = f"all but {behind} fragments" if behind else "every fragment"
    reason = f"{giver.name} trains, and holds {holds} in the newest version"
    return Peer(asker.incarnation, giver.name, giver.incarnation, giver.step_time, tuple(versions), reason)
