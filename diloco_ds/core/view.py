"""What the syncer shows of itself: for status, logs and the simulator's account."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
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
    tokens: int  # it has trained on since the run began, over all its incarnations
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
    trained_tokens: int  # by all islands since the run began, also by those that have left
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
    trained: Mapping[str, int],
    members: Iterable[Member],
) -> View:
    """A View of the syncer's state. `trained`: tokens by island, as reported."""
    total = sum(f.merged_tokens for f in fragments)
    members = list(members)
    # An update can come before the report that counts its steps: what is merged of an island it has trained on.
    merged = {m.name: -(-m.merged_tokens // len(fragments)) for m in members}
    tokens = {name: max(trained.get(name, 0), merged.get(name, 0)) for name in {**trained, **merged}}
    return View(
        phase=phase,
        global_step=global_step,
        merged_tokens=merged_tokens,
        trained_tokens=sum(tokens.values()),
        global_tokens=global_tokens,
        merges=sum(f.version for f in fragments),
        waiting=waiting,
        open_rounds=open_rounds,
        islands={m.name: _island(m, tokens[m.name], fragments, total) for m in members},
    )


def _island(member: Member, tokens: int, fragments: Sequence[FragmentState], total: int) -> IslandView:
    return IslandView(
        alive=member.alive,
        phase=member.phase,
        incarnation=member.incarnation,
        step=member.step,
        tokens=tokens,
        merged=member.merged,
        missed=member.missed,
        eligible=sum(member.obstacle(p, f.version) is None for p, f in enumerate(fragments)),
        token_share=member.merged_tokens / total if total else 0.0,
        reason=member.reason,
    )
