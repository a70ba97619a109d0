"""Batches at a set pace: for drills with more islands than processors."""

from __future__ import annotations

import time
from typing import Any

from diloco_ds.island.batches import Batches


class PacedBatches(Batches):
    """Batches, each given at least `least_step_s` seconds after the one before it; `arguments` as for `Batches`.

    An island that is held up does not make up for it with faster steps afterwards. What is waited shows in the
    step's records as time for data.
    """

    def __init__(self, least_step_s: float, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._least_step_s = least_step_s
        self._given = time.monotonic() - least_step_s

    def next(self) -> Any:
        """The next batch, when it is time for it."""
        time.sleep(max(0.0, self._given + self._least_step_s - time.monotonic()))
        self._given = time.monotonic()
        return super().next()
