"""The syncer's ledger on record: no island is told of a lease that a syncer after this one would not know of.

Where the record cannot be written, because shared memory is full, the core decides on all the same. Orders then name
the leases that they named before, until a later attempt succeeds; an island that has read those to their end reads on in
its reserve (core/reading.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import replace

from diloco_ds.core.events import Action, GiveBack, Grant, Orders, Phase
from diloco_ds.core.ledger import Ledger
from diloco_ds.exchange.store import Store
from diloco_ds.exchange.tenure import Tenure


class LedgerRecord:
    """The record of `ledger` in `store`, for as long as `tenure` lasts. `tell(event, reason)`: an event of the run."""

    def __init__(
        self, ledger: Ledger, store: Store, tenure: Tenure, tell: Callable[[str, str], None]
    ) -> None:
        self._ledger, self._store, self._tenure, self._tell = ledger, store, tenure, tell
        self._drain: str | None = None  # why the run drains, as long as that is not on record
        self._failing_since: float | None = None  # time.monotonic

    def take(self, actions: Iterable[Action]) -> None:
        """Put on record what `actions` come to, before anybody is told of them."""
        due = False
        for action in actions:
            if isinstance(action, Phase) and action.phase == "drain":
                self._drain, due = action.reason, True
            due = due or isinstance(action, Grant | GiveBack)
        if due:
            self.write()

    def write(self) -> None:
        """Bring the record up to date. That it cannot be is told once; it is tried again with the next call.

        Superseded if a newer syncer has taken the run.
        """
        self._tenure.check()
        try:
            if self._drain is not None:
                self._store.remember_drain(self._drain)
                self._drain = None
            self._store.remember_ledger(self._ledger.state())
        except OSError as error:
            if self._failing_since is None:
                self._failing_since = time.monotonic()
                self._tell(
                    "warning", f"the ledger is not recorded ({error}): nobody gets a lease until it is"
                )
            return
        if self._failing_since is not None:
            seconds = time.monotonic() - self._failing_since
            self._failing_since = None
            self._tell("ledger_recorded", f"for {seconds:.1f} s it could not be; leases are granted again")

    def allowed(self, orders: Orders, before: Orders | None) -> Orders:
        """`orders` as far as they may leave, without a lease or a drain that is not on record; `before`: those the
        island has, None before its first.
        """
        if self._failing_since is None:
            return orders
        reader, leases = (before.reader, before.leases) if before is not None else (0, ())
        phase = orders.phase if self._drain is None else before.phase if before is not None else "run"
        return replace(orders, phase=phase, reader=reader, leases=leases)
