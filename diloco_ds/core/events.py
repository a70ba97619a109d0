"""What goes into and comes out of the syncer's state machine: `syncer.step(event, now) -> actions`.

Events are facts a driver saw (the live exchange, the simulator, the replay of a tape); actions are what it
must do, each with its
reason in words. All are immutable and carry no payload: weights stay with the driver and are named by
`update_id`.
Times are seconds on the driver's own monotonic clock. Fragments are indices 0..P-1; rounds are the global
steps t = 1, 2, ... they serve.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

LearnerPhase = Literal["starting", "running", "drained", "stopped"]
"""starting: not yet stepping; running; drained: its last updates are written and it ends; stopped: ended
with a checkpoint.
"""

RunPhase = Literal["run", "drain", "stop", "finished"]
"""run; drain: the budget is reached, last updates are collected; stop: a stop was asked for; finished:
nothing more will be merged.
"""


@dataclass(frozen=True, slots=True)
class Report:
    """A learner's metadata after an inner step (Algorithm 1, line 2), or its heartbeat while it starts."""

    island: str
    incarnation: int
    phase: LearnerPhase
    step: int  # step clock t_m
    tokens: int  # that this incarnation has trained on
    step_time: float  # seconds, moving average of its inner step
    c_steps: Sequence[int]  # per fragment: inner steps since its base was adopted
    c_tokens: Sequence[int]  # per fragment: tokens since then
    base: Sequence[int]  # per fragment: adopted version, -1 = holds no global version
    lease: int = 0  # number of the lease it has read from last, 0 = none yet (core/ledger.py)
    cursor: int = 0  # blocks of it that were trained on
    reserve: int = 0  # blocks that this incarnation trained on without a lease
    step_blocks: int = 0  # blocks of one step, 0 = not known yet, or a run without data
    gives: int = 0  # 1 = its optimizer has moments that another island could go on from
    asks: int = (
        0  # number of its request for the moments of a peer, rising within an incarnation; 0 = it needs none
    )
    portion: int = 0  # of the moments, that it asks for (core/portions.py)


@dataclass(frozen=True, slots=True)
class Answer:
    """A learner's fragment has arrived whole and was found sound by the driver."""

    island: str
    incarnation: int
    fragment: int
    round: int  # the global step it was asked for
    base: int  # version of the fragment the learner's steps started from
    steps: int  # c_steps at the snapshot
    tokens: int  # c_tokens at the snapshot
    update_id: int  # unique per run; a retry carries the same one
    lease: int = 0  # at the snapshot, as in Report: all before it was trained on
    cursor: int = 0
    expert_tokens: Sequence[int] = ()  # tokens routed to each of the fragment's experts; none: not counted


@dataclass(frozen=True, slots=True)
class Merged:
    """The driver has carried out a Merge and committed the new version."""

    fragment: int
    round: int
    version: int
    seconds: float  # merge + outer step + commit


@dataclass(frozen=True, slots=True)
class Tick:
    """Only time has passed."""


@dataclass(frozen=True, slots=True)
class Joined:
    """An island belongs to the run from now on (at the start, or `join`)."""

    island: str


@dataclass(frozen=True, slots=True)
class Left:
    """An island belongs to the run no longer: it had left under the syncer before this one (`leave`). An island that its
    supervisor has given up has not left: it is silent, and counts as away.
    """

    island: str
    reason: str


@dataclass(frozen=True, slots=True)
class Leave:
    """An island shall drain: write its last updates and end; they are merged, then it belongs to the run no longer."""

    island: str


@dataclass(frozen=True, slots=True)
class Drain:
    """The run drains already: the syncer before this one had begun to when it died."""

    reason: str


@dataclass(frozen=True, slots=True)
class Stop:
    """Somebody asked the run to stop now; learners write a checkpoint, nothing further is merged."""

    reason: str


Event = Report | Answer | Merged | Tick | Joined | Left | Leave | Drain | Stop


@dataclass(frozen=True, slots=True)
class Want:
    """Ask `island` for `fragment` for `round`; it answers at its next step boundary."""

    island: str
    fragment: int
    round: int
    reason: str


@dataclass(frozen=True, slots=True)
class Part:
    """One learner's share in a merge."""

    island: str
    update_id: int
    base: int
    steps: int
    tokens: int
    weight: float  # normalised over the merge
    late: bool  # kept from an earlier round (late = merge_next)
    lease: int = 0  # as in Answer
    cursor: int = 0
    expert_tokens: Sequence[int] = ()

    @classmethod
    def of(cls, a: Answer, weight: float, late: bool) -> Part:
        """What `a` brings to a merge."""
        told = a.lease, a.cursor, a.expert_tokens
        return cls(a.island, a.update_id, a.base, a.steps, a.tokens, weight, late, *told)


@dataclass(frozen=True, slots=True)
class Merge:
    """Merge `parts`, take the outer step and commit the fragment as `version`; then tell the core with
    Merged.
    """

    fragment: int
    round: int
    version: int
    parts: tuple[Part, ...]
    lr_tokens: int  # merged tokens so far: where the outer learning rate's schedule stands
    missed: tuple[str, ...]  # islands that were asked and have no part in it, in alphabetical order
    grace: float  # seconds of its round's grace window; 0 where it was merged without one
    reason: str


@dataclass(frozen=True, slots=True)
class Keep:
    """Keep the payload of a late answer for the fragment's next round (it replaces an older one of the same
    island).
    """

    island: str
    fragment: int
    update_id: int
    base: int
    reason: str


@dataclass(frozen=True, slots=True)
class Drop:
    """Throw the payload away; it is counted."""

    island: str
    fragment: int
    update_id: int
    reason: str


@dataclass(frozen=True, slots=True)
class Skip:
    """A round ended with no merge (nobody had anything to give, or the members went away)."""

    fragment: int
    round: int
    reason: str


@dataclass(frozen=True, slots=True)
class Membership:
    """An island's standing changed; for logs and views."""

    island: str
    alive: bool
    reason: str


@dataclass(frozen=True, slots=True)
class Phase:
    """The run's phase changed."""

    phase: RunPhase
    reason: str


@dataclass(frozen=True, slots=True)
class Grant:
    """Blocks start .. start + size - 1 of the block order are leased to `island`; its orders say so."""

    island: str
    lease: int
    start: int
    size: int
    reason: str


@dataclass(frozen=True, slots=True)
class GiveBack:
    """What is not merged of a lease goes back, to be leased again; `trained` of these blocks were trained on."""

    island: str
    lease: int
    start: int
    size: int
    trained: int
    reason: str


@dataclass(frozen=True, slots=True)
class NameGiver:
    """`giver` gives its optimizer's moments to `island`, which starts without any; '' = nobody does."""

    island: str
    giver: str
    reason: str


Action = Want | Merge | Keep | Drop | Skip | Membership | Phase | Grant | GiveBack | NameGiver


@dataclass(frozen=True, slots=True)
class Gift:
    """What an island shall give of its optimizer's moments: to whom, for which of its requests, which portion."""

    island: str = ""
    incarnation: int = 0  # of that island
    request: int = 0  # 0 = nothing is to be given
    portion: int = 0
    clock: tuple[int, ...] = ()  # per fragment: the version that must have been adopted before


@dataclass(frozen=True, slots=True)
class Peer:
    """Who gives moments to an island that has asked for them; as long as `incarnation` is not its own, that is open."""

    incarnation: int = 0  # of the island that asked
    name: str = ""  # of the giver, '' = nobody gives
    giver_incarnation: int = 0
    step_time: float = 0.0  # seconds, of the giver: it gives at its step boundaries
    clock: tuple[int, ...] = ()  # per fragment: what the giver has adopted at least when it gives
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Orders:
    """All that one island needs to know of the syncer, newest wins (the level, not the edge: losing one
    loses nothing).
    """

    phase: RunPhase
    global_step: int  # t of the newest opened round
    global_tokens: int  # merged + in hand, never falls: where the inner learning rate's schedule stands
    want: tuple[int, ...]  # per fragment: the round an answer is wanted for, 0 = none yet
    reader: int = 0  # incarnation that may read `leases`
    leases: tuple[int, ...] = ()  # number, start and size of each lease not read to its end (core/lease.py)
    peer: Peer = Peer()
    gift: Gift = Gift()
