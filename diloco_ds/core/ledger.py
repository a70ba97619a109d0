"""The ledger: which island reads which blocks, and what has become of every block. Pure, a part of the syncer's core.

The blocks of a run are one endless order (data/shard.py). The ledger cuts it into leases. Every block that was ever
leased is in one of three accounts:

    merged   every fragment has merged an update whose island had trained on the block
    leased   an island holds it: it is to be trained on, or was and is not merged
    free     it was given back, and is the first to be leased again

So what was leased once is read to the end before anything newer is begun. A lease belongs to one incarnation of an
island. When that ends, falls silent or leaves, what is not merged goes back, trained on or not: its work is gone, and the
blocks that were trained on are so twice. Their number is about what an island trains on in a rotation, since that
is how long it takes until every fragment of it is merged.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from diloco_ds.core.events import Action, GiveBack, Grant, Membership, Part, Report
from diloco_ds.core.lease import Lease, Position, flat

LEASE_ROTATIONS = 2
"""A lease is what its island reads in so many rotations, and at least as much is in hand beside what it is reading. So
it reads on for two rotations without the syncer, twice as long as there is work of it that is not merged. Long leases
cost nothing: of one that is given back, what was not trained on is nobody's loss.
"""

Span = tuple[int, int]
"""Blocks start .. end - 1 of the block order."""

MOST_IN_HAND = 16
"""Leases named in an island's orders; more can only be where others gave back many small pieces."""

NUMBER_GAP = 1_000_000
"""Numbers left out after a checkpoint: more leases than one syncer can have granted since it was written."""


@dataclass(frozen=True)
class Accounts:
    """Blocks by what has become of them. merged + leased + free == epochs * epoch_blocks, if epoch_blocks is known.

    Each is counted for itself, so that `lost` is a check and not a definition.
    """

    epoch_blocks: int
    epochs: int  # begun
    merged: int
    leased: int
    free: int  # given back, and never leased in the newest epoch
    trained_twice: int  # given back though trained on, read by two islands, and of the reserve
    reserve: int  # trained on with no lease in hand (core/reading.py)
    lost: int  # once leased, and in none of the three accounts; 0


@dataclass
class Holder:
    """An island in the ledger."""

    incarnation: int = 0
    position: Position = (0, 0)  # as reported
    merged: Position = (0, 0)  # every fragment has merged what lies before it
    reserve: int = 0  # as reported by this incarnation
    tokens: int = 0  # trained on, as reported by this incarnation
    tokens_before: int = 0  # trained on by the incarnations before it
    leases: list[Lease] = field(default_factory=list)  # not wholly merged, by number
    lost: list[Lease] = field(default_factory=list)  # given back, and perhaps still being read

    @property
    def trained(self) -> int:
        """Tokens that the island has trained on, over all its incarnations."""
        return self.tokens_before + self.tokens

    def ahead(self) -> list[Lease]:
        """Leases with blocks that it has not reported as trained on."""
        return [lease for lease in self.leases if lease.before(self.position) < lease.size]


class Ledger:
    """Leases for the islands of one run. `rotation`: inner steps until each of the `fragments` had its turn (H).

    epoch_blocks: blocks in an epoch of the block order; 0 if unknown, then free blocks of an epoch are not counted.
    """

    def __init__(self, fragments: int, rotation: int, epoch_blocks: int = 0) -> None:
        self._fragments, self._rotation, self._epoch_blocks = fragments, rotation, epoch_blocks
        self._frontier = 0  # no block from here on was ever leased
        self._number = 0  # of the newest lease
        self._free: list[Span] = []  # what was given back: sorted, apart from each other
        self._merged = self._trained_twice = self._reserve = 0
        self._holders: dict[str, Holder] = {}
        # of each fragment, by island: the newest merged cursor
        self._cursors: list[dict[str, Position]] = [{} for _ in range(fragments)]
        # by fragment and version: merges that are decided, not yet committed
        self._merging: dict[tuple[int, int], list[Part]] = {}
        self._leaving: dict[str, str] = {}  # islands whose leases go back when no merge is under way, and why

    def hear(self, report: Report, *, serve: bool, actions: list[Action]) -> None:
        """Take in how far an island has read. `serve`: it may be granted what it needs to read on."""
        holder = self._holders.setdefault(report.island, Holder())
        if report.incarnation != holder.incarnation:
            if self._merging:
                return  # its next report comes when what was merged of its predecessor is known
            self._trained_twice += self._give_back(report.island, f"{report.island} was restarted", actions)
            self._holders[report.island] = holder = Holder(
                report.incarnation, merged=holder.merged, tokens_before=holder.trained
            )
        holder.tokens = max(holder.tokens, report.tokens)
        self._take_reserve(holder, report.reserve)
        if 0 < report.lease <= self._number:
            self._take_position(holder, max(holder.position, (report.lease, report.cursor)))
        if serve and report.island not in self._leaving:
            self._grant(report.island, holder, report.step_blocks, actions)

    def leases(self, island: str) -> tuple[int, tuple[int, ...]]:
        """For the island's orders: the incarnation that may read, and the leases it has not read to their end, flat."""
        holder = self._holders.get(island)
        return (0, ()) if holder is None else (holder.incarnation, flat(holder.ahead()[:MOST_IN_HAND]))

    def trained(self) -> dict[str, int]:
        """Tokens that each island has trained on, as reported, over all incarnations; also of islands that have left."""
        return {island: holder.trained for island, holder in self._holders.items()}

    def lose(self, island: str, reason: str) -> None:
        """What `island` holds goes back, as soon as no merge is under way."""
        if island in self._holders:
            self._leaving[island] = reason

    def merging(self, fragment: int, version: int, parts: Iterable[Part]) -> None:
        """A merge is decided; what it holds counts when it is committed."""
        read = [part for part in parts if part.lease]
        if read:
            self._merging[fragment, version] = read

    def merged(self, fragment: int, version: int) -> None:
        """The driver has committed the merge."""
        for part in self._merging.pop((fragment, version), ()):
            self._take_cursor(fragment, part.island, (part.lease, part.cursor))

    def settle(self, actions: list[Action], members: Container[str], *, over: bool) -> None:
        """Give back, unless a merge is under way, what islands held that are lost or, as `actions` tell, removed.

        `members`: the islands of the run. `over`: nothing more is merged or trained on, everything goes back.
        """
        for action in actions:
            if isinstance(action, Membership) and action.island not in members:
                self.lose(action.island, action.reason)
        if self._merging:
            return
        leaving, self._leaving = self._leaving, {}
        for island, reason in leaving.items():
            self._trained_twice += self._give_back(island, reason, actions)
        if over:
            for island in self._holders:
                self._give_back(island, "the run is finished", actions)

    def accounts(self) -> Accounts:
        """The accounts as of now."""
        given_back = sum(end - start for start, end in self._free)
        epochs = max(1, -(-self._frontier // self._epoch_blocks)) if self._epoch_blocks else 0
        never_leased = epochs * self._epoch_blocks - self._frontier if epochs else 0
        leased = sum(
            lease.size - lease.before(holder.merged)
            for holder in self._holders.values()
            for lease in holder.leases
        )
        return Accounts(
            epoch_blocks=self._epoch_blocks,
            epochs=epochs,
            merged=self._merged,
            leased=leased,
            free=given_back + never_leased,
            trained_twice=self._trained_twice,
            reserve=self._reserve,
            lost=self._frontier - self._merged - leased - given_back,
        )

    # ---- durable state ----

    def state(self) -> dict[str, Any]:
        """All but the merged cursors, which are committed with each fragment: JSON-able. Nothing in it depends on a merge
        that is not committed.
        """
        return {
            "frontier": self._frontier,
            "number": self._number,
            "free": self._free,
            "merged": self._merged,
            "trained_twice": self._trained_twice,
            "reserve": self._reserve,
            "holders": {island: asdict(holder) for island, holder in self._holders.items()},
        }

    def restore(self, state: Mapping[str, Any], cursors: Sequence[Mapping[str, Sequence[int]]]) -> None:
        """Take back `state()`, empty for a run that has not begun, and per fragment the newest merged cursors."""
        if state:
            self._frontier, self._number = state["frontier"], state["number"]
            self._free = [(start, end) for start, end in state["free"]]
            self._merged = state["merged"]
            self._trained_twice, self._reserve = state["trained_twice"], state["reserve"]
            self._holders = {island: _holder(values) for island, values in state["holders"].items()}
        for fragment, newest in enumerate(cursors):
            for island, (lease, blocks) in newest.items():
                self._take_cursor(fragment, island, (lease, blocks))

    def reopen(self, generations: int) -> None:
        """What was restored is older than what the islands know: all leases go back, numbers go on above a gap.

        `generations`: how many syncers ago it was written; each of them may have leased from there.
        """
        for island in self._holders:
            self._trained_twice += self._give_back(island, "the syncer goes on from a checkpoint", [])
        self._number += NUMBER_GAP * generations

    # ---- small things ----

    def _grant(self, island: str, holder: Holder, step_blocks: int, actions: list[Action]) -> None:
        """Lease it what is missing to a whole lease in hand, beside the one it reads."""
        size = LEASE_ROTATIONS * self._rotation * step_blocks
        ahead = holder.ahead()
        while len(ahead) < MOST_IN_HAND and sum(lease.size for lease in ahead[1:]) < size:
            lease, reason = self._next_lease(size)
            holder.leases.append(lease)
            ahead.append(lease)
            actions.append(Grant(island, *lease, f"{reason}, for {island} to read on"))

    def _next_lease(self, size: int) -> tuple[Lease, str]:
        """At most `size` blocks: the first that were given back, else the first that were never leased."""
        self._number += 1
        if not self._free:
            start, self._frontier = self._frontier, self._frontier + size
            return Lease(self._number, start, size), "never leased before"
        start, end = self._free.pop(0)
        if end - start > size:
            self._free.insert(0, (start + size, end))
        return Lease(self._number, start, min(size, end - start)), "given back before"

    def _take_reserve(self, holder: Holder, reserve: int) -> None:
        blocks = max(reserve - holder.reserve, 0)
        self._reserve += blocks
        self._trained_twice += blocks
        holder.reserve += blocks

    def _take_position(self, holder: Holder, position: Position) -> None:
        """It has read to `position`; of leases that it has lost it reads on in one, or has left all of them."""
        if any(lease.number == position[0] for lease in holder.lost):
            self._trained_twice += _between(holder.lost, holder.position, position)
        else:
            holder.lost = []
        holder.position = position

    def _take_cursor(self, fragment: int, island: str, position: Position) -> None:
        if position[0] > self._number:  # granted after the checkpoint that this ledger was restored from
            return
        newest = self._cursors[fragment]
        newest[island] = max(newest.get(island, (0, 0)), position)
        holder = self._holders.get(island)
        if holder is None:
            return
        merged = min(cursors.get(island, (0, 0)) for cursors in self._cursors)
        self._merged += _between(holder.leases, holder.merged, merged)
        holder.merged = max(holder.merged, merged)
        holder.leases = [lease for lease in holder.leases if lease.before(holder.merged) < lease.size]

    def _give_back(self, island: str, reason: str, actions: list[Action]) -> int:
        """All that is not merged of its leases is free; returns how many blocks of it were trained on."""
        holder, again = self._holders[island], 0
        for lease in holder.leases:
            merged = lease.before(holder.merged)
            trained = max(lease.before(holder.position) - merged, 0)
            again += trained
            self._put_back(lease.start + merged, lease.start + lease.size)
            actions.append(
                GiveBack(island, lease.number, lease.start + merged, lease.size - merged, trained, reason)
            )
        holder.lost, holder.leases = [*holder.lost, *holder.leases], []
        return again

    def _put_back(self, start: int, end: int) -> None:
        insort(self._free, (start, end))
        self._free = list(_joined(self._free))


def _between(leases: Iterable[Lease], start: Position, end: Position) -> int:
    """Blocks of `leases` between two positions; none if `end` is not behind `start`."""
    return sum(max(lease.before(end) - lease.before(start), 0) for lease in leases)


def _joined(spans: Iterable[Span]) -> Iterator[Span]:
    """Sorted spans that do not overlap, those that touch made one."""
    last: Span | None = None
    for start, end in spans:
        if last is not None and last[1] == start:
            last = (last[0], end)
            continue
        if last is not None:
            yield last
        last = (start, end)
    if last is not None:
        yield last


def _holder(values: Mapping[str, Any]) -> Holder:
    counted = ("incarnation", "reserve", "tokens", "tokens_before")
    counts = {name: int(values[name]) for name in counted}
    position, merged = ((int(pair[0]), int(pair[1])) for pair in (values["position"], values["merged"]))
    leases, lost = ([Lease(*each) for each in values[key]] for key in ("leases", "lost"))
    return Holder(position=position, merged=merged, leases=leases, lost=lost, **counts)
