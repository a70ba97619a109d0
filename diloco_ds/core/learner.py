"""The learner's half of the algorithm (Algorithm 1): its step clock, its counters, and what it does at a step boundary."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from diloco_ds.core.events import Orders

AdoptionHow = Literal["overwrite", "mix", "rebase", "none"]
LateHow = Literal["merge_next", "drop"]

NO_BASE = -1
"""Base version of a fragment of which the learner holds no global version."""


@dataclass(frozen=True, slots=True)
class Boundary:
    """What a learner does at one step boundary, in the order of the fields.

    answer: (fragment, round) pairs, snapshots under the own base. adopt: (fragment, version) pairs, after the answers.
    end: leave the training loop.
    """

    answer: tuple[tuple[int, int], ...]
    adopt: tuple[tuple[int, int], ...]
    end: Literal["drain", "stop"] | None


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What an answer says of itself: the base it started from, and the inner steps and tokens made since."""

    base: int
    steps: int
    tokens: int


class LearnerClock:
    """Step clock and, per fragment, the base version and the steps and tokens since it was adopted.

    With `late = merge_next` a learner that finds both a request and a newer version answers first, under its own base,
    and adopts then: so the work of a slow learner is merged one rotation later instead of being thrown away. With
    `drop` it adopts first, and only what was done on the newest base is ever sent. With adoption `none` weights are
    never touched: a new version is only acknowledged, and the counters go on from the snapshot it was made of.
    """

    def __init__(self, fragments: int, adoption: AdoptionHow, late: LateHow) -> None:
        self.adoption = adoption
        self.late = late
        self.step = 0  # step clock t_m
        self.steps = 0  # inner steps made in this island's life, as far as its checkpoints know
        self.tokens = 0  # tokens trained in this island's life, as far as its checkpoints know
        self.trained = 0  # tokens trained by this incarnation
        self.base = [NO_BASE] * fragments
        self.answered_round = [0] * fragments
        self._origin_steps = [0] * fragments
        self._origin_tokens = [0] * fragments
        self._snapshot: list[tuple[int, int] | None] = [
            None
        ] * fragments  # (steps, tokens) at the last answer under this base

    def holds(self, versions: Sequence[int]) -> None:
        """The weights in use are these global versions, with no step made on them (initial weights: all 0)."""
        self.base = list(versions)
        for p in range(len(self.base)):
            self._restart(p)

    def stepped(self, tokens: int) -> None:
        """One inner step on `tokens` tokens is done."""
        self.step += 1
        self.steps += 1
        self.tokens += tokens
        self.trained += tokens

    def c_steps(self) -> list[int]:
        """Per fragment: inner steps since its base."""
        return [self.steps - origin for origin in self._origin_steps]

    def c_tokens(self) -> list[int]:
        """Per fragment: tokens since its base."""
        return [self.tokens - origin for origin in self._origin_tokens]

    def has_snapshot(self, fragment: int) -> bool:
        """Whether it was answered since its base was adopted: then `rebase` keeps the steps made since that answer."""
        return self._snapshot[fragment] is not None

    def plan(self, orders: Orders, inbox: Sequence[int]) -> Boundary:
        """What to do at this boundary, given the newest orders and the version of each fragment in the inbox (-1: none).

        Changes nothing; `answered` and `adopted` record what was done.
        """
        newer = [p for p, version in enumerate(inbox) if version > self.base[p]]
        fresh = set(newer) if self.late == "drop" and self.adoption != "none" else set()
        answer = [
            (p, round_)
            for p, round_ in enumerate(orders.want)
            if round_ > self.answered_round[p] and self._can_answer(p) and p not in fresh
        ]
        end: Literal["drain", "stop"] | None = None
        if orders.phase in ("drain", "finished"):
            end = "drain"
        elif orders.phase == "stop":
            end, answer = "stop", []
        return Boundary(tuple(answer), tuple((p, inbox[p]) for p in newer) if end is None else (), end)

    def answered(self, fragment: int, round_: int) -> Snapshot:
        """The fragment is being answered for `round_` with the weights of now; returns what its header says."""
        self.answered_round[fragment] = round_
        self._snapshot[fragment] = (self.steps, self.tokens)
        steps = self.steps - self._origin_steps[fragment]
        return Snapshot(self.base[fragment], steps, self.tokens - self._origin_tokens[fragment])

    def adopted(self, fragment: int, version: int, orders: Orders) -> None:
        """`version` of the fragment was adopted (or, with adoption `none`, acknowledged).

        The step clock moves up to the global step, a request that was open is void, and the counters start anew: from
        the snapshot where the steps made since are kept (`rebase`, `none`), else from now.
        """
        snapshot = self._snapshot[fragment]
        keeps = self.adoption in ("rebase", "none")
        self.base[fragment] = version
        self._restart(fragment)
        if keeps and snapshot is not None:
            self._origin_steps[fragment], self._origin_tokens[fragment] = snapshot
        self.answered_round[fragment] = max(self.answered_round[fragment], orders.want[fragment])
        self.step = max(self.step, orders.global_step)

    def state(self) -> dict[str, Any]:
        """Everything that outlives the incarnation, as plain JSON-able values, for a checkpoint."""
        return {
            "step": self.step,
            "steps": self.steps,
            "tokens": self.tokens,
            "base": list(self.base),
            "answered_round": list(self.answered_round),
            "origin_steps": list(self._origin_steps),
            "origin_tokens": list(self._origin_tokens),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Take `state()` back. Snapshots are not part of it: a restored learner rebases from nothing, it overwrites."""
        self.step, self.steps, self.tokens = int(state["step"]), int(state["steps"]), int(state["tokens"])
        self.base = [int(v) for v in state["base"]]
        self.answered_round = [int(v) for v in state["answered_round"]]
        self._origin_steps = [int(v) for v in state["origin_steps"]]
        self._origin_tokens = [int(v) for v in state["origin_tokens"]]
        self._snapshot = [None] * len(self.base)

    def _can_answer(self, fragment: int) -> bool:
        return self.base[fragment] != NO_BASE and self.steps > self._origin_steps[fragment]

    def _restart(self, fragment: int) -> None:
        self._origin_steps[fragment], self._origin_tokens[fragment] = self.steps, self.tokens
        self._snapshot[fragment] = None
