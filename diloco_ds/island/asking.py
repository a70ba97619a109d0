"""A learner that starts without optimizer moments asks for those of a peer, and waits for them, portion by portion.

It takes all of them or none: ZeRO counts the steps for tensors of many fragments together, and moments that are zero under
a count of thousands would make the first steps several times too long.

The syncer names the peer (core/givers.py), or says at once that there is none. The wait for each portion is bounded.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from torch import Tensor

from diloco_ds.core.events import Peer
from diloco_ds.core.screen import is_finite
from diloco_ds.exchange.fragment_box import FragmentBox
from diloco_ds.exchange.wire import MomentsHeader, request_version
from diloco_ds.island.engine import Engine
from diloco_ds.island.lead import FIRST_LEASE_WITHIN_S, WAIT_S, Lead

STEPS_OF_PATIENCE = 15
"""A peer is given at least so many of its own steps for a portion: more than the syncer gives it before it names another."""
_WHOLE, _NOTHING = -1, -2


class Asking:
    """Rank 0's part. `portions` is how many there are, `patience_s` how long one may take; `fits` says of a peer's optimizer
    whether its moments can be taken; `stopped` whether somebody wants this learner to end.
    """

    def __init__(
        self,
        lead: Lead,
        taken: FragmentBox,
        portions: int,
        patience_s: float,
        fits: Callable[[str], bool],
        stopped: Callable[[], bool],
    ) -> None:
        self.told = ""
        """Whose moments were taken, in words; empty if none."""
        self.why_not = ""
        """Why none were taken."""
        self._lead, self._taken, self._portions = lead, taken, portions
        self._patience_s, self._fits, self._stopped = patience_s, fits, stopped
        self._peer = Peer()
        self._request, self._portion = 1, 0
        self._steps = 0  # of the first portion
        self._since = time.monotonic()  # when anything came last

    def next(self) -> list[int]:
        """Wait for the next portion, pin it, and return which it is, its version in `taken`, and the steps of the first one.
        Or _WHOLE or _NOTHING and two zeros: it is over.
        """
        if self._portion == self._portions:
            return self._end(_WHOLE)
        self._lead.ask(self._request, self._portion)
        while not self._is_hopeless():
            header = self._arrived()
            if header is not None and self._is_sound(header):
                self._steps = header.steps if self._portion == 0 else self._steps
                versions = f"{min(header.base)} to {max(header.base)}"
                self.told = (
                    f"optimizer moments of {header.island}, of {header.steps} steps, with versions {versions}"
                )
                return [self._portion, header.version, self._steps]
            time.sleep(WAIT_S)
        self.told = ""
        return self._end(_NOTHING)

    def took(self) -> None:
        """All ranks have taken the portion."""
        self._taken.unpin(0)
        self._request, self._portion = self._request + 1, self._portion + 1
        self._since = time.monotonic()

    def _end(self, how: int) -> list[int]:
        self._lead.ask(0, 0)
        return [how, 0, 0]

    def _is_hopeless(self) -> bool:
        """Follow the orders; whether there is nothing to wait for any more, with `why_not`."""
        orders = self._lead.read_orders()
        incarnation = self._lead.incarnation
        if orders.peer.incarnation == incarnation:
            if orders.peer.name:
                self._follow(orders.peer)
            else:
                self.why_not = orders.peer.reason
        if self._stopped() or orders.phase != "run":
            self.why_not = "it is to end"
        limit = max(self._patience_s, STEPS_OF_PATIENCE * self._peer.step_time)
        if orders.reader != incarnation:  # the syncer does not live, else it had leased blocks
            limit = min(limit, FIRST_LEASE_WITHIN_S)
        if not self.why_not and time.monotonic() - self._since > limit:
            self.why_not = f"nothing came from {self._peer.name or 'the syncer'} for {limit:.0f} s"
        return bool(self.why_not)

    def _follow(self, peer: Peer) -> None:
        """Of another peer all is asked anew."""
        before, self._peer = self._peer, peer
        if (before.name, before.giver_incarnation) == (peer.name, peer.giver_incarnation):
            return
        if before.name:
            self._request, self._portion = self._request + 1, 0
            self._lead.ask(self._request, 0)
        self._since = time.monotonic()

    def _arrived(self) -> MomentsHeader | None:
        """What has come for this request, pinned."""
        version = request_version(self._lead.incarnation, self._request)
        if self._taken.version(0) != version or not self._taken.pin(0, version):
            return None
        meta = self._taken.meta(0, version)
        header = MomentsHeader.unpack(meta) if meta is not None else None
        if header is None or (header.island, header.incarnation) != (
            self._peer.name,
            self._peer.giver_incarnation,
        ):
            self._taken.unpin(0)
            return None
        return header

    def _is_sound(self, header: MomentsHeader) -> bool:
        """Whether it can be taken; if not, with `why_not`, there is no use in the others either."""
        if not self._fits(header.optimizer):
            self.why_not = f"those of {header.island} are of another optimizer, {header.optimizer}"
        elif any(held < asked for held, asked in zip(header.base, self._peer.clock, strict=True)):
            self.why_not = (
                f"those of {header.island} are of versions {header.base}, older than {self._peer.clock}"
            )
        elif not is_finite(_needed(self._taken.payload(0, header.version))):
            self.why_not = f"those of {header.island} are not finite"
        if self.why_not:
            self._taken.unpin(0)
        return not self.why_not


def take_from_peer(engine: Engine, taken: FragmentBox, asking: Asking | None) -> None:
    """All ranks together: take the moments of a peer, all of them or none. `asking` is rank 0's, None on the others."""
    while True:
        engine.broadcast_start(asking.next() if asking is not None else [0, 0, 0])
        portion, version, steps = engine.broadcast_wait()
        if portion == _WHOLE:
            return
        if portion == _NOTHING:
            engine.forget_moments()
            return
        engine.take_moments(portion, _needed(taken.payload(0, version)), steps)
        engine.least([0])  # all ranks have it
        if asking is not None:
            asking.took()


def _needed(payload: Tensor | None) -> Tensor:
    if payload is None:
        raise RuntimeError("moments of a peer are gone from the mailbox while in use")
    return payload
