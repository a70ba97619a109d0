"""Balanced tensor fragmentation: which tensor travels in which fragment, where in it, and when."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from diloco_ds.errors import UserError


@dataclass(frozen=True)
class TensorSpec:
    """A tensor that travels: its name in the model, its shape, and whether it is a token embedding.

    expert_layer: which layer of experts it belongs to, counted from 0 over the model; it is then [experts, ...]. None
    for every other tensor.
    """

    name: str
    shape: tuple[int, ...]
    embedding: bool
    expert_layer: int | None = None

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def experts(self) -> int:
        """Experts whose weights it holds, 0 for a tensor of another kind."""
        return 0 if self.expert_layer is None else self.shape[0]


@dataclass(frozen=True)
class Placed:
    """A tensor's place: elements offset .. offset + spec.numel of the flat fp32 fragment."""

    spec: TensorSpec
    fragment: int
    offset: int


@dataclass(frozen=True)
class FragmentLayout:
    """Every travelling tensor's place, and each fragment's turn: fragment p is synchronised at the global
    steps t with t mod period = offsets[p]. `tensors` are sorted by fragment, then by offset.
    """

    tensors: tuple[Placed, ...]
    period: int
    offsets: tuple[int, ...]

    @property
    def fragments(self) -> int:
        """P, the number of fragments."""
        return len(self.offsets)

    @cached_property
    def _by_fragment(self) -> tuple[tuple[Placed, ...], ...]:
        lists: list[list[Placed]] = [[] for _ in self.offsets]
        for placed in self.tensors:
            lists[placed.fragment].append(placed)
        return tuple(tuple(placed) for placed in lists)

    def tensors_of(self, fragment: int) -> tuple[Placed, ...]:
        """The tensors of a fragment, by ascending offset; they fill it without a gap."""
        return self._by_fragment[fragment]

    @cached_property
    def numels(self) -> tuple[int, ...]:
        """Elements of each fragment."""
        return tuple(sum(placed.spec.numel for placed in tensors) for tensors in self._by_fragment)

    def numel(self, fragment: int) -> int:
        """Elements of one fragment."""
        return self.numels[fragment]

    def embedding(self, fragment: int) -> bool:
        """Whether the fragment holds token embeddings and nothing else."""
        return all(placed.spec.embedding for placed in self.tensors_of(fragment))

    def expert_layers(self, fragment: int) -> dict[int, int]:
        """Experts of each layer of experts of which the fragment holds tensors, by ascending layer: what is told of a
        fragment's experts comes in this order.
        """
        tensors = self.tensors_of(fragment)
        found = {p.spec.expert_layer: p.spec.experts for p in tensors if p.spec.expert_layer is not None}
        return dict(sorted(found.items()))

    @cached_property
    def experts(self) -> tuple[int, ...]:
        """Of each fragment the experts of all its `expert_layers`; 0 where it holds none."""
        return tuple(sum(self.expert_layers(p).values()) for p in range(self.fragments))

    def fragment_at(self, step: int) -> int | None:
        """The fragment whose turn global step `step` is, or None if it is nobody's."""
        return self._turns.get(step % self.period)

    def next_step(self, step: int) -> int:
        """The first global step after `step` that serves a fragment."""
        step += 1
        while self.fragment_at(step) is None:
            step += 1
        return step

    @cached_property
    def _turns(self) -> dict[int, int]:
        return {offset: fragment for fragment, offset in enumerate(self.offsets)}

    def to_json(self) -> str:
        """Canonical JSON: equal layouts give equal text."""
        tensors = [
            {
                "name": placed.spec.name,
                "shape": list(placed.spec.shape),
                "embedding": placed.spec.embedding,
                "fragment": placed.fragment,
                "offset": placed.offset,
                **({} if placed.spec.expert_layer is None else {"expert_layer": placed.spec.expert_layer}),
            }
            for placed in self.tensors
        ]
        value = {"period": self.period, "offsets": list(self.offsets), "tensors": tensors}
        return json.dumps(value, sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> FragmentLayout:
        """The layout written by `to_json`. UserError if the text is anything else."""
        try:
            value = json.loads(text)
            tensors = tuple(
                Placed(
                    TensorSpec(
                        entry["name"], tuple(entry["shape"]), entry["embedding"], entry.get("expert_layer")
                    ),
                    entry["fragment"],
                    entry["offset"],
                )
                for entry in value["tensors"]
            )
            layout = cls(tensors, value["period"], tuple(value["offsets"]))
            layout._check()
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise UserError(f"not a fragment layout: {type(error).__name__}: {error}") from error
        return layout

    def _check(self) -> None:
        if len(self._turns) != self.fragments or not all(
            0 <= offset < self.period for offset in self.offsets
        ):
            raise ValueError(f"offsets {list(self.offsets)} are not distinct in 0..{self.period - 1}")
        filled = [0] * self.fragments
        experts: dict[int, int] = {}
        for placed in self.tensors:
            if placed.fragment < 0 or placed.offset != filled[placed.fragment]:
                raise ValueError(f"tensor '{placed.spec.name}' does not follow the one before it")
            filled[placed.fragment] += placed.spec.numel
            layer = placed.spec.expert_layer
            if layer is not None and experts.setdefault(layer, placed.spec.experts) != placed.spec.experts:
                raise ValueError(f"'{placed.spec.name}' has another number of experts than its layer {layer}")
        if not filled or not all(filled):
            raise ValueError("there is a fragment without tensors")

    @cached_property
    def digest(self) -> str:
        """SHA-256 (hex) of the canonical JSON: what two processes compare before they exchange fragments."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()


def balance(specs: Sequence[TensorSpec], fragments: int, period: int) -> FragmentLayout:
    """Divide whole tensors into at most `fragments` fragments of about equal size, token embeddings apart.

    Greedy bin packing (LPT, largest tensor first into the lightest fragment), as in Decoupled DiLoCo. Every
    embedding is a fragment of its own, the first ones; if `fragments` leaves no room for that, embeddings
    share, and `fragments` = 1 puts everything together. There are fewer fragments if there are fewer tensors.
    Inside a fragment tensors keep the order of `specs`; turns are spread evenly over the period. UserError
    for no tensors, an empty tensor, a name given twice, or more fragments than the period has steps.
    """
    _check_specs(specs)
    count = min(fragments, len(specs))
    if not 1 <= count <= period:
        raise UserError(
            f"{count} fragments do not fit a period of {period} steps: each needs a step of its own"
        )
    bins = _bins(specs, count)
    tensors: list[Placed] = []
    for fragment, members in enumerate(bins):
        offset = 0
        for index in sorted(members):
            tensors.append(Placed(specs[index], fragment, offset))
            offset += specs[index].numel
    return FragmentLayout(tuple(tensors), period, tuple(p * period // len(bins) for p in range(len(bins))))


def _check_specs(specs: Sequence[TensorSpec]) -> None:
    if not specs:
        raise UserError("the model has no tensor to exchange: every parameter is frozen or local")
    seen: set[str] = set()
    for spec in specs:
        if spec.name in seen:
            raise UserError(f"tensor '{spec.name}' is given twice; tied weights travel once")
        if spec.numel == 0:
            raise UserError(f"tensor '{spec.name}' of shape {list(spec.shape)} has no elements")
        seen.add(spec.name)


def _bins(specs: Sequence[TensorSpec], count: int) -> list[list[int]]:
    """Indices into `specs`, per fragment."""
    embeddings = [index for index, spec in enumerate(specs) if spec.embedding]
    others = [index for index, spec in enumerate(specs) if not spec.embedding]
    if count == 1 or not embeddings or not others:
        return _longest_first(specs, list(range(len(specs))), count)
    own = min(len(embeddings), count - 1)
    rest = min(len(others), count - own)
    return _longest_first(specs, embeddings, own) + _longest_first(specs, others, rest)


def _longest_first(specs: Sequence[TensorSpec], indices: Sequence[int], count: int) -> list[list[int]]:
    """LPT (Graham 1969): at most 4/3 - 1/(3*count) of the optimal largest bin. Ties go by position."""
    bins: list[list[int]] = [[] for _ in range(count)]
    loads = [0] * count
    for index in sorted(indices, key=lambda index: (-specs[index].numel, index)):
        lightest = loads.index(min(loads))
        bins[lightest].append(index)
        loads[lightest] += specs[index].numel
    return bins
