"""The step boundary (docs/architecture.md): what all ranks of an island do together after each inner step.

Rank 0 decides (island/lead.py). The decision travels as a few integers over the CPU group; then every rank
writes its slices of wanted fragments and adopts its slices of new ones. Nothing here waits for any process
but the island's own ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Protocol

from torch import Tensor

from diloco_ds import config
from diloco_ds.core.reading import PIECES, Piece
from diloco_ds.exchange.failpoint import failpoint
from diloco_ds.exchange.fragment_box import FragmentBox
from diloco_ds.island.completion import Completion
from diloco_ds.island.routing import Routing
from diloco_ds.island.slices import How
from diloco_ds.island.timing import Laps
from diloco_ds.island.transfer import DeviceCopy

NOTHING = -1
_PIECES_SIZE = 2 * PIECES


class Then(IntEnum):
    """What follows the boundary."""

    STEP = 0
    WAIT = 1  # no further step; a boundary again, since an answer could not be written yet
    DRAINED = 2  # every update is written: a checkpoint, and the end
    STOP = 3  # a checkpoint, and the end


@dataclass(frozen=True)
class Adopt:
    """Take `version` of the fragment from the inbox; `snapshot` is the outbox version that rebase measures
    from, if there is one.
    """

    version: int
    snapshot: int | None = None


@dataclass(frozen=True)
class Decision:
    """What all ranks do at one boundary, the same on each."""

    then: Then
    save: bool  # write a checkpoint
    step: int  # the island's step clock
    lr_tokens: int  # where the learning rate of the next step stands
    adopt: dict[int, Adopt] = field(default_factory=dict)  # by fragment
    answer: tuple[int, ...] = ()  # fragments to write into the outbox; rank 0 has begun them
    give: int = NOTHING  # the portion of the moments to write for a peer; rank 0 has begun it
    read: tuple[Piece, ...] = ()  # the batch to read ahead now (core/reading.py); none where no step follows

    def encode(self, fragments: int) -> list[int]:
        """The decision as `encoded_size(fragments)` integers."""
        per_fragment = [NOTHING] * (3 * fragments)
        for fragment, adopt in self.adopt.items():
            snapshot = NOTHING if adopt.snapshot is None else adopt.snapshot
            per_fragment[3 * fragment : 3 * fragment + 2] = [adopt.version, snapshot]
        for fragment in self.answer:
            per_fragment[3 * fragment + 2] = 1
        start = [self.then, self.save, self.step, self.lr_tokens, self.give]
        return [*start, *encode_pieces(self.read), *per_fragment]

    @classmethod
    def decode(cls, values: Sequence[int]) -> Decision:
        """The decision that `encode` made `values` of."""
        then, save, step, lr_tokens, give, *rest = values
        read, rest = decode_pieces(rest[:_PIECES_SIZE]), rest[_PIECES_SIZE:]
        fragments = range(len(rest) // 3)
        adopt = {
            fragment: Adopt(
                rest[3 * fragment], None if rest[3 * fragment + 1] == NOTHING else rest[3 * fragment + 1]
            )
            for fragment in fragments
            if rest[3 * fragment] != NOTHING
        }
        answer = tuple(fragment for fragment in fragments if rest[3 * fragment + 2] == 1)
        return cls(Then(then), bool(save), step, lr_tokens, adopt, answer, give, read)


def encoded_size(fragments: int) -> int:
    """Integers of an encoded decision."""
    return 5 + _PIECES_SIZE + 3 * fragments


def encode_pieces(pieces: Sequence[Piece]) -> list[int]:
    """The pieces of a batch as 2 * PIECES integers."""
    values = [value for piece in pieces for value in piece]
    return values + [0] * (_PIECES_SIZE - len(values))


def decode_pieces(values: Sequence[int]) -> tuple[Piece, ...]:
    """The pieces that `encode_pieces` made `values` of."""
    pairs = zip(values[::2], values[1::2], strict=True)
    return tuple((start, blocks) for start, blocks in pairs if blocks)


class Ranks(Protocol):
    """What a boundary needs of the engine."""

    rank: int
    world_size: int

    def broadcast_start(self, values: Sequence[int]) -> None: ...

    def broadcast_wait(self) -> list[int]: ...

    def write_fragment(self, fragment: int, out: Tensor) -> DeviceCopy: ...

    def write_moments(self, portion: int, out: Tensor) -> DeviceCopy: ...

    def adopt_fragment(
        self, fragment: int, source: Tensor, how: How, alpha: float, snapshot: Tensor | None
    ) -> DeviceCopy: ...


class Boundary:
    """One rank's part in the boundaries of its island; `laps` follows how long its parts take."""

    def __init__(
        self,
        ranks: Ranks,
        inbox: FragmentBox,
        outbox: FragmentBox,
        given: FragmentBox,
        completion: Completion,
        adoption: config.Adoption,
        laps: Laps,
        routing: Routing | None = None,
    ) -> None:
        self._ranks, self._inbox, self._outbox, self._given = ranks, inbox, outbox, given
        self._completion, self._routing = completion, routing
        self._laps = laps
        self._alpha = adoption.alpha
        if adoption.how == "none":  # rank 0 then never decides that anything is adopted
            self._how: How = "overwrite"
        else:
            self._how = adoption.how

    def agree(self, decision: Decision | None) -> Decision:
        """Rank 0's decision on every rank; the other ranks give None."""
        if self._ranks.world_size == 1:
            assert decision is not None
            return decision
        fragments = len(self._outbox.numels)
        self._ranks.broadcast_start(decision.encode(fragments) if decision else [0] * encoded_size(fragments))
        return Decision.decode(self._ranks.broadcast_wait())

    def carry_out(self, decision: Decision, finish: Callable[[], None] | None) -> None:
        """Answer and give, then adopt. `finish` (rank 0's) is called when the copies of all ranks are done, now or
        soon.

        A fragment that is both wanted and replaced is sent as it was before.
        """
        transfers = [transfer for fragment in decision.answer for transfer in self._answer(fragment)]
        if decision.give != NOTHING:
            transfers.append(self._ranks.write_moments(decision.give, self._given.begun(0)))
            failpoint("learner.giving")
        self._laps.lap("answer")
        transfers += [self._adopt(fragment, adopt) for fragment, adopt in decision.adopt.items()]
        self._laps.lap("adopt")
        if transfers:
            self._completion.boundary(transfers, finish)
        self._laps.lap("complete")

    def _answer(self, fragment: int) -> list[DeviceCopy]:
        transfers = [self._ranks.write_fragment(fragment, self._outbox.begun(fragment))]
        if self._routing is not None:
            transfers += self._routing.answer(fragment)
        failpoint("learner.written")
        return transfers

    def _adopt(self, fragment: int, adopt: Adopt) -> DeviceCopy:
        if self._routing is not None:
            self._routing.adopted(fragment, keeps=self._how == "rebase")
        source = _needed(self._inbox.payload(fragment, adopt.version), fragment, adopt.version)
        failpoint("learner.adopting")
        if self._how != "rebase":
            return self._ranks.adopt_fragment(fragment, source, self._how, self._alpha, None)
        if adopt.snapshot is None:  # nothing was sent under the old base, or it was sent just now
            return self._ranks.adopt_fragment(fragment, source, "overwrite", self._alpha, None)
        snapshot = _needed(self._outbox.payload(fragment, adopt.snapshot), fragment, adopt.snapshot)
        return self._ranks.adopt_fragment(fragment, source, "rebase", self._alpha, snapshot)


def _needed(payload: Tensor | None, fragment: int, version: int) -> Tensor:
    if payload is None:
        raise RuntimeError(f"version {version} of fragment {fragment} is gone from the mailbox while in use")
    return payload
