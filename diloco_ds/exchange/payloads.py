"""Payloads of the updates that the core knows of and has not settled yet.

An answer that counts in its round stays where it is, in the outbox of its mailbox, pinned: nothing is copied
until it is merged. Late ones are kept in this process's memory; a killed syncer loses those, and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch

from diloco_ds.core.events import Answer, Keep, Merge
from diloco_ds.core.merge import late_payload
from diloco_ds.exchange.merging import Payload

_Key = tuple[str, int]
"""Island and update id."""


class Payloads:
    """By fragment, island and update id. `release(island, fragment)` unpins what lies in an outbox; `anchor` is what
    late updates are measured from.
    """

    def __init__(
        self, fragments: int, release: Callable[[str, int], None], anchor: Literal["global", "base"]
    ) -> None:
        self._release, self._anchor = release, anchor
        self._held: list[dict[_Key, Payload]] = [{} for _ in range(fragments)]
        self._pinned: dict[tuple[str, int], int] = {}  # island and fragment: the update in the outbox

    def holds(self, island: str, fragment: int, update_id: int) -> bool:
        """Whether this update is here already: then a retry brings nothing new."""
        return (island, update_id) in self._held[fragment]

    def values(self, island: str, fragment: int, update_id: int) -> torch.Tensor:
        """The payload of an update that is here."""
        return self._held[fragment][island, update_id].values

    def set_aside(self, island: str, fragment: int) -> None:
        """A newer update is about to take the one pin of an outbox's fragment: copy what is pinned now."""
        update_id = self._pinned.pop((island, fragment), None)
        if update_id is not None:
            held = self._held[fragment]
            values = held[island, update_id].values.clone()
            held[island, update_id] = Payload(values, is_gradient=False)

    def add(self, answer: Answer, values: torch.Tensor) -> None:
        """`values`, pinned in the island's outbox, waits for what the core says of `answer`."""
        self._held[answer.fragment][answer.island, answer.update_id] = Payload(values, is_gradient=False)
        self._pinned[answer.island, answer.fragment] = answer.update_id

    def keep(self, action: Keep, base: torch.Tensor) -> None:
        """Keep a late update out of its outbox; `base` is the version it started from."""
        key = (action.island, action.update_id)
        payload = self._held[action.fragment][key]
        if payload.is_gradient:
            return
        self._held[action.fragment][key] = Payload(*late_payload(self._anchor, base, payload.values))
        self._unpin(action.island, action.fragment, action.update_id)

    def drop(self, island: str, fragment: int, update_id: int) -> None:
        """Forget an update."""
        self._held[fragment].pop((island, update_id), None)
        self._unpin(island, fragment, update_id)

    def of(self, action: Merge) -> list[Payload]:
        """The payloads of a merge, in the order of its parts."""
        held = self._held[action.fragment]
        return [held[part.island, part.update_id] for part in action.parts]

    def clear(self, fragment: int) -> None:
        """The fragment is merged, or will not be: nothing that came before counts any more."""
        for island, update_id in list(self._held[fragment]):
            self.drop(island, fragment, update_id)

    def _unpin(self, island: str, fragment: int, update_id: int) -> None:
        if self._pinned.get((island, fragment)) == update_id:
            del self._pinned[island, fragment]
            self._release(island, fragment)
