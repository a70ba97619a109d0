"""All islands of a run: who is heard, whose lease has run out, who has left."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from diloco_ds.core.events import Action, Membership, Part, Report
from diloco_ds.core.member import Counts, Member


class Roster:
    """The members by name. `lease` is the least number of seconds of silence after which an island counts as away."""

    def __init__(self, fragments: int, lease: float) -> None:
        self.lease = lease
        self.next_expiry = float("inf")  # driver's clock: no lease can end before
        self._fragments = fragments
        self._members: dict[str, Member] = {}

    def __iter__(self) -> Iterator[Member]:
        return iter(self._members.values())

    def __contains__(self, island: object) -> bool:
        return island in self._members

    def __getitem__(self, island: str) -> Member:
        return self._members[island]

    def get(self, island: str) -> Member | None:
        """The member called `island`, or None."""
        return self._members.get(island)

    def member(self, island: str) -> Member:
        """The member called `island`, made if it is new."""
        if island not in self._members:
            self._members[island] = Member(island, self._fragments)
        return self._members[island]

    def is_alive(self, island: str) -> bool:
        """Whether the island belongs to the run and is alive."""
        return island in self._members and self._members[island].alive

    def hear(self, report: Report, now: float, most_reached: int, actions: list[Action]) -> Member | None:
        """Take in a report. None for a stranger and for an incarnation that is over."""
        member = self._members.get(report.island)
        if member is None or report.incarnation < member.incarnation:
            return None
        restarted = report.incarnation > member.incarnation > 0
        member.hear(report, now)
        member.limit_lead(most_reached)
        self.next_expiry = min(self.next_expiry, now + member.lease(self.lease))
        if restarted:
            _set_alive(member, False, f"restarted as incarnation {report.incarnation}", actions)
        _set_alive(member, report.phase == "running", f"is {report.phase}", actions)
        return member

    def ready(self, step: int) -> int:
        """How many islands are alive, stay, and have reached global step `step`."""
        return sum(m.alive and not m.leaving and m.reached >= step for m in self._members.values())

    def expire(self, now: float, actions: list[Action]) -> list[Member]:
        """Islands silent past their lease are away: absent, not an error. Returns those that have become so just now."""
        if now < self.next_expiry:
            return []
        self.next_expiry = float("inf")
        expired = []
        for member in self._members.values():
            end = member.last_heard + member.lease(self.lease)
            if member.silent:
                continue
            if now < end:
                self.next_expiry = min(self.next_expiry, end)
                continue
            member.silent = True
            expired.append(member)
            if member.alive:
                _set_alive(member, False, f"silent for {now - member.last_heard:.1f} s", actions)
        return expired

    def account(self, fragment: int, asked: Iterable[str], parts: Sequence[Part]) -> tuple[str, ...]:
        """A merge of `fragment` has taken `parts`: tokens and newest merged base of each. Returns who was asked in vain."""
        missed = tuple(sorted({*asked} & self._members.keys() - {part.island for part in parts}))
        for part in parts:
            member = self._members[part.island]
            member.merged_base[fragment] = max(member.merged_base[fragment], part.base)
        for name, of_it in counts_of(parts, missed).items():
            self._members[name].count(of_it)
        return missed

    def restore(self, fragment: int, merged_base: Mapping[str, int], counts: Mapping[str, Counts]) -> None:
        """Take back what came of the merges of `fragment`, by island."""
        for island, base in merged_base.items():
            self.member(island).merged_base[fragment] = base
        for island, of_it in counts.items():
            self.member(island).count(of_it)

    def remove(self, island: str, reason: str, actions: list[Action]) -> None:
        """The island belongs to the run no longer."""
        del self._members[island]
        actions.append(Membership(island, False, reason))


def counts_of(parts: Iterable[Part], missed: Iterable[str]) -> dict[str, Counts]:
    """What one merge is for each island. One can have two parts in it, a late one beside a new one."""
    counts = {name: Counts(missed=1) for name in missed}
    for part in parts:
        before = counts.get(part.island, Counts())
        counts[part.island] = Counts(merged=1, tokens=before.tokens + part.tokens)
    return counts


def _set_alive(member: Member, alive: bool, reason: str, actions: list[Action]) -> None:
    if member.alive != alive:
        member.alive, member.reason = alive, reason
        actions.append(Membership(member.name, alive, reason))
    elif not alive:
        member.reason = reason
