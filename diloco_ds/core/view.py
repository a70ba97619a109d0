"""What the syncer shows of itself: for status, logs and the simulator's account."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from diloco_ds.core.events import RunPhase
from diloco_ds.core.member import Member
from diloco_ds.core.round import FragmentState


@dataclass(frozen=True)
class IslandView:
    """One island as the syncer sees it."""

    alive: bool
    phase: str
    incarnation: int
    step: int
    tokens: int
    merged: int  # rounds it was merged in
    missed: int  # rounds it was asked for and not merged in
    eligible: int  # fragments it could contribute to now
    token_share: float  # its share of all merged tokens, 0..1
    reason: str


@dataclass(frozen=True)
class View:
    """The syncer's account of the run."""

    phase: RunPhase
    global_step: int
    merged_tokens: int
    global_tokens: int
    merges: int
    waiting: str  # what the next round waits for, in words; empty while one is open
    open_rounds: tuple[int, ...]  # global steps
    islands: dict[str, IslandView]


def view_of(
    *,
    phase: RunPhase,
    global_step: int,
    merged_tokens: int,
    global_tokens: int,
    waiting: str,
    open_rounds: tuple[int, ...],
    fragments: Sequence[FragmentState],
    members: Iterable[Member],
) -> View:
    """A View of the syncer's state."""
    total = sum(f.merged_tokens for f in fragments)
    return View(
        phase=phase,
        global_step=global_step,
        merged_tokens=merged_tokens,
        global_tokens=global_tokens,
        merges=sum(f.version for f in fragments),
        waiting=waiting,
        open_rounds=open_rounds,
        islands={m.name: _island(m, fragments, total) for m in members},
    )


def _island(member: Member, fragments: Sequence[FragmentState], total: int) -> IslandView:
    return IslandView(
        alive=member.alive,
        phase=member.phase,
        incarnation=member.incarnation,
        step=member.step,
        tokens=member.tokens,
        merged=member.merged,
        missed=member.missed,
        eligible=sum(member.obstacle(p, f.version) is None for p, f in enumerate(fragments)),
        token_share=member.merged_tokens / total if total else 0.0,
        reason=member.reason,
    )
