"""Rank 0's part in giving the optimizer's moments to a peer that has none: a portion at a time, between two steps.

The peer asks for a portion when it has the one before. So a portion is all that ever lies in the mailbox, and the island
that gives is held up by no more than one copy at a boundary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from diloco_ds.core.events import Gift
from diloco_ds.exchange.fragment_box import FragmentBox
from diloco_ds.exchange.wire import MomentsHeader, request_version
from diloco_ds.island.portioned_moments import OwnMoments

_LOOKS = 100
"""Steps after which is looked for moments: the first of a run in fp16 are skipped. Who has none by then never will."""


class Giver(NamedTuple):
    """Who gives."""

    run_id: str
    island: str
    incarnation: int


class Giving:
    """The portions that `giver` writes into `given`."""

    def __init__(self, giver: Giver, given: FragmentBox) -> None:
        self._giver, self._given = giver, given
        self._last = Gift()  # the newest one that was begun
        self._count = 0  # of those
        self._writing = False
        self.own: Callable[[], OwnMoments | None] = lambda: None
        """What there is to give now."""
        self.able = False
        """Whether there is anything; looked at after the first steps (`stepped`)."""
        self._looks = _LOOKS

    def stepped(self) -> None:
        """The optimizer has made a step."""
        if self._looks and not self.able:
            self._looks -= 1
            self.able = self.own() is not None

    def begin(self, gift: Gift, base: Sequence[int]) -> MomentsHeader | None:
        """The header of the portion that is written at this boundary, for which its slot is begun. None if nothing
        is asked for that was not given, or it has to wait: for versions to be adopted (`base` are those that are), or
        for the slot.
        """
        if not gift.request or gift == self._last or self._writing:
            return None
        if any(held < asked for held, asked in zip(base, gift.clock, strict=True)):
            return None
        own = self.own()
        if own is None or self._given.begin(0) is None:
            return None
        self._last, self._writing = gift, True
        self._count += 1
        return MomentsHeader(
            *self._giver,
            to_island=gift.island,
            to_incarnation=gift.incarnation,
            request=gift.request,
            portion=gift.portion,
            steps=own.steps,
            base=tuple(base),
            optimizer=own.optimizer,
        )

    def commit(self, header: MomentsHeader) -> None:
        """All ranks have written it: it may go."""
        version = request_version(self._giver.incarnation, self._count)  # rises over incarnations too
        self._given.commit(0, version, header.pack())
        self._writing = False
