"""What a run goes on from when the syncer's memory is lost: its last checkpoint, and newer global fragments that islands
still hold.

Decisions only. An island's inbox holds every global fragment in the newest version that reached it, weights without the
outer optimizer's state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

VERSION_GAP = 1_000_000
"""Versions left out for every generation since a checkpoint: more than one fragment can be merged in one generation."""


@dataclass(frozen=True, slots=True)
class Origin:
    """The versions that a fragment's weights and the outer optimizer's state are of; `island` returned the weights."""

    weights: int
    outer: int
    island: str | None = None


def choose_returns(saved: Sequence[int], held: Mapping[str, Sequence[int]]) -> dict[str, dict[int, int]]:
    """Per island the fragments that it shall return, and in which version.

    saved: per fragment the version in the checkpoint; held: per island what its inbox holds. Of a fragment the newest
    version is taken, if it is newer than the checkpoint's; islands that hold the same share the work.
    """
    chosen: dict[str, dict[int, int]] = {}
    for fragment, version in enumerate(saved):
        newest = max((versions[fragment] for versions in held.values()), default=version)
        if newest <= version:
            continue
        holders = [name for name in sorted(held) if held[name][fragment] == newest]
        least_busy = min(holders, key=lambda name: len(chosen.get(name, {})))
        chosen.setdefault(least_busy, {})[fragment] = newest
    return chosen


def first_version(saved: int, generations: int, returned: int | None) -> int:
    """The version a fragment goes on with: above every number that may have been used before, whoever saw it.

    saved: its version in the checkpoint, written `generations` generations ago; returned: the version an island gave back.
    """
    return max(saved + VERSION_GAP * generations, (returned or 0) + 1)


def in_words(origins: Sequence[Origin], merges_ahead: Mapping[int, int]) -> str:
    """What came back and what did not. merges_ahead: per returned fragment, merges that its weights are ahead of its
    outer optimizer's state.
    """
    returned = {p: origin for p, origin in enumerate(origins) if origin.island is not None}
    if not returned:
        return (
            f"no island held a newer fragment: all {len(origins)} are those of the checkpoint, "
            "and merges made since it, if any, are lost"
        )
    givers = ", ".join(sorted({str(origin.island) for origin in returned.values()}))
    behind = ", ".join(f"{p} by {merges_ahead[p]}" for p in sorted(returned))
    return (
        f"the weights of {len(returned)} of {len(origins)} fragments are newer than the checkpoint, returned by {givers}; "
        f"the outer optimizer's state is the checkpoint's, behind the weights by that many merges: fragment {behind}; "
        "merges that reached no island are lost"
    )
