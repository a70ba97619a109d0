"""What a syncer goes on with that has lost its memory: a checkpoint, or the initial weights, and what islands give back."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import torch

from diloco_ds.core.fragments import FragmentLayout
from diloco_ds.core.returning import Origin, first_version, in_words
from diloco_ds.errors import UserError
from diloco_ds.exchange.gathering import Returned, gather
from diloco_ds.exchange.intake import open_intake
from diloco_ds.exchange.returns import Returns
from diloco_ds.exchange.store import Mark
from diloco_ds.rundir import SharedMemory

Ask = Callable[[Sequence[int]], Mapping[int, Returned]]
"""What islands hold that is newer than these versions, by fragment."""

log = logging.getLogger(__name__)


class Recovery:
    """For the syncer of `generation`; `begin`, then `go_on` for every fragment.

    origins: afterwards, what every fragment goes on from; empty where the run just begins. lost: in words, what did not come
    back; None where nothing was lost.
    """

    def __init__(self, generation: int, ask: Ask) -> None:
        self.origins: list[Origin] = []
        self.generation, self._ask = generation, ask
        self._saved_by = 0
        self._complete = True
        self._returned: Mapping[int, Returned] = {}
        self._ahead: dict[int, int] = {}

    def begin(self, versions: Sequence[int], saved_by: int, *, complete: bool) -> None:
        """What is on disk has these versions and was written by the generation `saved_by`. `complete`: nothing was merged
        after it.
        """
        self.origins, self._ahead = [], {}
        self._saved_by, self._complete = saved_by, complete
        self._returned = {} if complete else self._ask(versions)

    def go_on(self, mark: Mark, weights: torch.Tensor) -> Mark:
        """The mark with which the next fragment goes on; `weights`, those on disk, are replaced if an island gave newer
        ones back.
        """
        fragment = len(self.origins)
        back = self._returned.get(fragment)
        version = first_version(mark.version, self.generations, back.version if back else None)
        if back is None:
            self.origins.append(Origin(mark.version, mark.version))
            return replace(mark, version=version)
        weights.copy_(back.weights)
        self.origins.append(Origin(back.version, mark.version, back.island))
        self._ahead[fragment] = back.merges - mark.merges
        return replace(mark, version=version, round=back.round, merges=back.merges, tokens=back.tokens)

    @property
    def generations(self) -> int:
        """How many syncers ago what is on disk was written."""
        return self.generation - self._saved_by

    @property
    def lost(self) -> str | None:
        """In words, what did not come back; None where nothing was lost."""
        return None if self._complete else in_words(self.origins, self._ahead)


def ask_islands(
    islands: Iterable[str], run_id: str, layout: FragmentLayout, versions: Sequence[int], patience_s: float
) -> dict[int, Returned]:
    """Ask the islands over their links, for at most about `patience_s` if none has anything to say; 0: do not ask."""
    names = list(islands)
    if not patience_s:
        return {}
    for island in names:
        open_intake(island, run_id, layout)  # its link waits for it
    folder = SharedMemory(run_id).returned
    log.info("asks %s for global fragments that are newer than the checkpoint", ", ".join(names))
    try:
        returns = Returns.create(folder, layout.numels)
    except UserError as error:  # no room: what is on disk must do
        log.warning("islands are not asked for newer fragments: %s", error)
        return {}
    try:
        return gather(returns, versions, names, patience_s)
    finally:
        Returns.remove(folder)
