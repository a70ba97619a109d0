"""Batches at a given pace: for drills with more islands than processors."""

from __future__ import annotations

import time

from diloco_ds.island.batches import Batch, Batches


class PacedBatches:
    """`batches`, each at least `least_step_s` seconds after the one before it was given.

    An island that is held up does not make up for it with faster steps afterwards. What is waited shows in the
    step's records as time for data.
    """

    def __init__(self, batches: Batches, least_step_s: float) -> None:
        self._batches, self._least_step_s = batches, least_step_s
        self._given = time.monotonic() - least_step_s

    def next(self) -> Batch:
        """The next batch, when it is time for it."""
        time.sleep(max(0.0, self._given + self._least_step_s - time.monotonic()))
        self._given = time.monotonic()
        return self._batches.next()

    def close(self) -> None:
        """Stop reading ahead."""
        self._batches.close()
