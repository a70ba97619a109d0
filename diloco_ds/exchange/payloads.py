"""Payloads of the updates that the core knows of and has not settled yet.

An answer that counts in its round stays where it is, in the outbox of its mailbox, pinned: nothing is copied until it is merged. Late ones
become outer gradients in this process's memory; a killed syncer loses those, and nothing else.
"""

from __future__ import annotations

import torch

from diloco_ds.core.events import Drop, Keep, Merge
from diloco_ds.core.merge import late_gradient
from diloco_ds.exchange.intake import Intake, Update
from diloco_ds.exchange.merging import Payload

_Place = tuple[str, int]
"""Island and fragment."""


class Payloads:
    """At most one waiting update and one kept gradient per island and fragment."""

    def __init__(self, intakes: dict[str, Intake]) -> None:
        self._intakes = intakes
        self._waiting: dict[_Place, Update] = {}
        self._kept: dict[_Place, tuple[int, torch.Tensor]] = {}  # update id, outer gradient

    def set_aside(self, island: str, fragment: int) -> None:
        """A newer update of that fragment is about to be looked at: copy the waiting one, whose pin it will take."""
        waiting = self._waiting.get((island, fragment))
        if waiting is not None:
            self._waiting[island, fragment] = Update(waiting.header, waiting.payload.clone())

    def wait(self, update: Update) -> Update | None:
        """`update` waits for the core's word; returns the one that waited in its place."""
        place = (update.header.island, update.header.fragment)
        before = self._waiting.get(place)
        self._waiting[place] = update
        return before

    def keep(self, action: Keep, base: torch.Tensor) -> None:
        """Turn a late update into an outer gradient against `base`, the version it started from."""
        place = (action.island, action.fragment)
        update = self._waiting.get(place)
        if update is not None and update.header.update_id == action.update_id:
            gradient = torch.empty_like(update.payload)
            late_gradient(base, update.payload, gradient)
            self._kept[place] = (action.update_id, gradient)
            self._settle(place)
        elif self._kept.get(place, (None,))[0] != action.update_id:
            raise KeyError(f"update {action.update_id} of {action.island} was to be kept and is not here")

    def drop(self, action: Drop) -> None:
        """Throw an update away."""
        place = (action.island, action.fragment)
        update = self._waiting.get(place)
        if update is not None and update.header.update_id == action.update_id:
            self._settle(place)
        elif self._kept.get(place, (None,))[0] == action.update_id:
            del self._kept[place]

    def of(self, action: Merge) -> list[Payload]:
        """The payloads of a merge, in the order of its parts."""
        return [self._find((part.island, action.fragment), part.update_id) for part in action.parts]

    def merged(self, action: Merge) -> None:
        """The merge is committed: its payloads are not needed any more."""
        for part in action.parts:
            place = (part.island, action.fragment)
            update = self._waiting.get(place)
            if update is not None and update.header.update_id == part.update_id:
                self._settle(place)
            elif self._kept.get(place, (None,))[0] == part.update_id:
                del self._kept[place]

    def clear(self) -> None:
        """Nothing will be merged any more."""
        for place in list(self._waiting):
            self._settle(place)
        self._kept.clear()

    def _find(self, place: _Place, update_id: int) -> Payload:
        update = self._waiting.get(place)
        if update is not None and update.header.update_id == update_id:
            return Payload(update.payload, is_gradient=False)
        kept_id, gradient = self._kept[place]
        if kept_id != update_id:
            raise KeyError(f"update {update_id} of {place[0]}, fragment {place[1]}, is not here")
        return Payload(gradient, is_gradient=True)

    def _settle(self, place: _Place) -> None:
        del self._waiting[place]
        self._intakes[place[0]].release(place[1])
