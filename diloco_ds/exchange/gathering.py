"""The syncer's side of what islands give back (returns.py): it asks, waits as long as something comes, and checks it."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from diloco_ds.core.returning import choose_returns
from diloco_ds.core.screen import is_finite
from diloco_ds.exchange.returns import Returns
from diloco_ds.exchange.wire import ThetaHeader

POLL_S = 0.02

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Returned:
    """A global fragment that an island gave back: flat fp32 weights, and what its header tells of them."""

    island: str
    version: int
    weights: torch.Tensor
    round: int
    merges: int
    tokens: int


def gather(
    returns: Returns, saved: Sequence[int], islands: Iterable[str], patience_s: float
) -> dict[int, Returned]:
    """By fragment, what islands hold that is newer than the versions `saved`.

    An island that has not said what it holds after `patience_s`, or that then sends nothing for as long, is not waited
    for; what it was to send is asked of the next best.
    """
    silent = set(islands)
    held: dict[str, list[int]] = {}
    deadline = time.monotonic() + patience_s
    while silent and time.monotonic() < deadline:
        for island in sorted(silent):
            versions = returns.held(island)
            if versions is not None:
                held[island] = versions
                silent.remove(island)
        time.sleep(POLL_S)
    if silent:
        log.warning("no word from %s within %.0f s of what they hold", ", ".join(sorted(silent)), patience_s)
    while wanted := choose_returns(saved, held):
        late = _receive(returns, wanted, patience_s)
        if not late:
            return _checked(returns, wanted)
        log.warning("%s did not send what they hold within %.0f s", ", ".join(late), patience_s)
        for island in late:
            del held[island]
    return {}


def _receive(returns: Returns, wanted: Mapping[str, Mapping[int, int]], patience_s: float) -> list[str]:
    """Wait until all has come; the islands that have not sent all of theirs though nothing came for `patience_s`."""
    for island, versions in wanted.items():
        returns.want(island, versions)
    seen: object = None
    heard = time.monotonic()
    while True:
        late = {
            island: count
            for island, versions in wanted.items()
            if (count := sum(returns.fragments.version(p) < version for p, version in versions.items()))
        }
        if (now := (late, returns.progress(late))) != seen:
            seen, heard = now, time.monotonic()
        if not late or time.monotonic() - heard > patience_s:
            return sorted(late)
        time.sleep(POLL_S)


def _checked(returns: Returns, wanted: Mapping[str, Mapping[int, int]]) -> dict[int, Returned]:
    found = {}
    for island, versions in wanted.items():
        for fragment, version in versions.items():
            weights = returns.fragments.payload(fragment, version)
            meta = returns.fragments.meta(fragment, version)
            if weights is None or meta is None or not is_finite(weights):
                log.warning("fragment %d, version %d, of %s is not sound", fragment, version, island)
                continue
            header = ThetaHeader.unpack(meta)
            facts = json.loads(header.extra)
            found[fragment] = Returned(
                island, version, weights, header.round, int(facts["merges"]), int(facts["tokens"])
            )
    return found
