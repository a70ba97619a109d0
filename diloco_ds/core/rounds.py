"""What is on its way: the open rounds and, per fragment, its version and the late answers kept for its next merge."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from diloco_ds.core.events import Action, Answer, Drop, Keep
from diloco_ds.core.member import Member
from diloco_ds.core.round import FragmentState, Round


class Rounds:
    """Open rounds by global step, and the state of every fragment. `quorum` is K of every round opened."""

    def __init__(self, fragments: int, quorum: int) -> None:
        self.fragments = [FragmentState() for _ in range(fragments)]
        self._quorum = quorum
        self._open: dict[int, Round] = {}

    def __iter__(self) -> Iterator[Round]:
        return iter(list(self._open.values()))

    def __len__(self) -> int:
        return len(self._open)

    def open(self, step: int, fragment: int, now: float, patience: float) -> Round:
        """Open the round of global step `step`; it is skipped without a quorum within `patience` seconds."""
        round_ = Round(step, fragment, self._quorum, opened=now, expires=now + patience)
        self._open[step] = round_
        return round_

    def close(self, round_: Round) -> None:
        """The round is over, merged or skipped."""
        del self._open[round_.step]

    def clear(self) -> None:
        """No round is open any more."""
        self._open.clear()

    def of(self, fragment: int) -> Round | None:
        """The open round of `fragment`; there is one at most."""
        return next((r for r in self._open.values() if r.fragment == fragment), None)

    def all_committed(self) -> bool:
        """Whether every merge that was decided is carried out."""
        return all(fragment.committed for fragment in self.fragments)

    def versions(self) -> tuple[int, ...]:
        """The newest version of every fragment."""
        return tuple(fragment.version for fragment in self.fragments)

    def kept(self, fragment: int) -> dict[str, Answer]:
        """Late answers of the fragment by island."""
        return self.fragments[fragment].kept

    def contributed(self, round_: Round) -> set[str]:
        """Islands of whom there is something to merge: on a slow link it comes after its round has ended, and is kept."""
        return {*round_.answers, *self.kept(round_.fragment)}

    def keep(self, answer: Answer, actions: list[Action]) -> None:
        """Keep it for the fragment's next merge: one of each island, the newest."""
        self.forget_kept(answer, actions, bases=range(answer.base + 1))
        self.kept(answer.fragment)[answer.island] = answer
        reason = (
            f"asked for round {answer.round}: kept, on version {answer.base}, for the fragment's next merge"
        )
        actions.append(Keep(answer.island, answer.fragment, answer.update_id, answer.base, reason))

    def forget_kept(self, answer: Answer, actions: list[Action], bases: Collection[int]) -> None:
        """A newer answer takes the place of one kept on one of `bases`: on the same base both tell of the same steps."""
        kept = self.kept(answer.fragment)
        older = kept.get(answer.island)
        if older is not None and older.base in bases and older.update_id != answer.update_id:
            del kept[answer.island]
            reason = f"kept on version {older.base}; a newer answer on version {answer.base} takes its place"
            actions.append(Drop(answer.island, answer.fragment, older.update_id, reason))

    def hold_work_of(self, island: str) -> bool:
        """Whether anything of the island waits to be merged."""
        in_rounds = any(island in r.answers for r in self._open.values())
        return in_rounds or any(island in f.kept for f in self.fragments)

    def still_expect(self, member: Member, now: float, lease: float) -> bool:
        """Whether the last round has to wait for the island: it has not drained, or what it owes is still on its way.

        Not for one that is away, and no longer than its lease after it was last heard.
        """
        if member.phase == "running":
            return member.alive
        if member.phase != "drained" or now >= member.last_heard + member.lease(lease):
            return False
        return any(member.owed(r.fragment) and not self._handed_in(member, r) for r in self._open.values())

    def _handed_in(self, member: Member, round_: Round) -> bool:
        answers = (round_.answers.get(member.name), self.kept(round_.fragment).get(member.name))
        return any(answer is not None and answer.round == round_.step for answer in answers)
