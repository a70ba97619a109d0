"""Whether an answer may ever be merged: one pure function, a decision and its reason in words."""

from __future__ import annotations

from diloco_ds.core.events import Answer, RunPhase
from diloco_ds.core.member import Member


def refusal(
    answer: Answer, member: Member | None, *, version: int, phase: RunPhase, keeps_late: bool
) -> str | None:
    """Why `answer` must be dropped; None if it may be merged, now or (on an older version) kept for the next merge.

    member: the island as known, None for a stranger. version: the fragment's newest. keeps_late: late answers are
    kept under their own base (`late: merge_next`).
    """
    if member is None:
        return f"{answer.island} does not belong to the run"
    if answer.incarnation < member.incarnation:
        return f"of incarnation {answer.incarnation}; {answer.island} is at {member.incarnation}"
    if phase in ("stop", "finished"):
        return f"the run is in phase {phase}"
    if answer.steps <= 0 or answer.tokens <= 0 or answer.base < 0:
        return "no step on a global version stands behind it: weight 0"
    if answer.base > version:
        return f"its base {answer.base} is newer than the global version {version}"
    if answer.base < version - 1:
        return f"its base {answer.base} is more than one version behind {version}"
    if answer.base <= member.merged_base[answer.fragment]:
        return f"the work on version {answer.base} is merged already"
    if answer.base < version and not keeps_late:
        return f"late: version {version} is out, and late answers are dropped (late: drop)"
    return None
