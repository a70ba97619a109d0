"""Which part of every fragment this rank holds, under each ZeRO stage, and how a new global fragment is
written into it.

A rank holds *masters*, fp32 values that its optimizer updates, and *copies*, the parameters its forward pass
uses. ZeRO divides the first over the ranks, and at stage 3 the second as well. All are seen here as ranges of
the flat fragment, so that nobody else needs to know how an island is sharded. DeepSpeed's objects are read
through their attributes; DeepSpeed is not imported.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor, distributed, nn

from diloco_ds.core.fragments import FragmentLayout
from diloco_ds.errors import UserError

How = Literal["overwrite", "mix", "rebase"]


@dataclass(frozen=True, slots=True)
class Slice:
    """A range [start, start + length) of the flat fragment, held in the first `length` elements of flat
    `tensor` from `offset`.
    """

    start: int
    length: int
    tensor: Tensor
    offset: int = 0

    @property
    def stop(self) -> int:
        """End of the range in the fragment."""
        return self.start + self.length

    def values(self) -> Tensor:
        """The values, as a view: looked up anew each time, since DeepSpeed may move a parameter to other
        storage.
        """
        return self.tensor.data.view(-1).narrow(0, self.offset, self.length)

    def moved(self, by: int) -> Slice:
        """The same values, at a range `by` elements further."""
        return replace(self, start=self.start + by)

    def held(self) -> bool:
        """False for a parameter that ZeRO-3 has released: it is gathered again from the ranks' parts when it
        is needed.
        """
        return self.tensor.data.numel() >= self.offset + self.length

    def cut(self, low: int, high: int) -> Slice | None:
        """The part of it inside [low, high) of the fragment; None if empty."""
        start, stop = max(self.start, low), min(self.stop, high)
        return (
            Slice(start, stop - start, self.tensor, self.offset + start - self.start)
            if start < stop
            else None
        )


@dataclass(slots=True)
class FragmentSlices:
    """This rank's parts of one fragment of `numel` elements."""

    numel: int
    owned: list[Slice] = field(
        default_factory=list
    )  # masters this rank answers with: over all ranks, each element once
    masters: list[Slice] = field(default_factory=list)  # all masters this rank holds
    copies: list[Slice] = field(
        default_factory=list
    )  # parameters of the forward pass that are not masters themselves
    shared: list[tuple[int, int]] = field(
        default_factory=list
    )  # ranges some rank has a copy but no master of

    def lacks_master(self, low: int, high: int) -> bool:
        """Whether this rank holds a copy of something in [low, high) whose master it does not hold."""
        copied = [part for copy in self.copies if (part := copy.cut(low, high))]
        return any(self._mastered(part.start, part.stop) < part.length for part in copied)

    def _mastered(self, low: int, high: int) -> int:
        return sum(part.length for master in self.masters if (part := master.cut(low, high)))


@dataclass(frozen=True, slots=True)
class Ranks:
    """The ranks of the island, as far as slices need them."""

    rank: int
    count: int
    device: torch.device
    sum: Callable[[Tensor], None]  # adds a tensor on `device` over the ranks, in place; a collective


def find_slices(
    optimizer: Any,
    parameters: dict[str, nn.Parameter],
    layout: FragmentLayout,
    ranks: Ranks,
    starts: Mapping[str, int],
) -> list[FragmentSlices]:
    """The slices of every fragment. A collective: the ranks compare what they hold.

    `starts`: of a parameter that holds only a part of its tensor, where the part begins (experts.divide_experts).

    UserError if the settings of DeepSpeed leave no fp32 master that can be written.
    """
    finder = _MasterFinder(optimizer)
    found = []
    for index in range(layout.fragments):
        fragment = FragmentSlices(layout.numel(index))
        for placed in layout.tensors_of(index):
            name = placed.spec.name
            _add(fragment, finder, parameters[name], placed.offset + starts.get(name, 0))
        fragment.owned = _own_share(fragment, ranks) if finder.replicated else fragment.masters
        found.append(fragment)
    _check_masters(found)
    _compare(found, layout, ranks)
    return found


def _add(fragment: FragmentSlices, finder: _MasterFinder, parameter: nn.Parameter, offset: int) -> None:
    """Add the slices of one parameter that lies at `offset` in the fragment."""
    for part in finder.find(parameter):
        if part.tensor.dtype != torch.float32:
            raise UserError(f"deepspeed: the master weights are {part.tensor.dtype}, they must be fp32")
        if not part.held():
            raise UserError(
                "deepspeed: the master weights are not in memory (NVMe offload): they cannot be exchanged"
            )
        fragment.masters.append(part.moved(offset))
    for part in finder.copies(parameter):
        fragment.copies.append(part.moved(offset))


def _own_share(fragment: FragmentSlices, ranks: Ranks) -> list[Slice]:
    """Every rank holds the whole master: an even share of the fragment for each to answer with."""
    low, high = (fragment.numel * index // ranks.count for index in (ranks.rank, ranks.rank + 1))
    return [part for master in fragment.masters if (part := master.cut(low, high))]


def _check_masters(found: Sequence[FragmentSlices]) -> None:
    """Before a step, and after a checkpoint is loaded, every copy is its master rounded; else the map is
    wrong.
    """
    for fragment in found:
        for master, copy in itertools.product(fragment.masters, fragment.copies):
            ours, theirs = master.cut(copy.start, copy.stop), copy.cut(master.start, master.stop)
            if ours is None or theirs is None or not theirs.held():
                continue
            values = theirs.values()
            if not torch.equal(ours.values().to(values.device, values.dtype), values):
                raise UserError("deepspeed: with these settings it cannot be told where master weights lie")


def _compare(found: Sequence[FragmentSlices], layout: FragmentLayout, ranks: Ranks) -> None:
    """Check over all ranks that every element has one owner; learn which tensors `mix` and `rebase` must
    send.
    """
    owned = [sum(part.length for part in fragment.owned) for fragment in found]
    ranges = [(p.fragment, p.offset, p.offset + p.spec.numel) for p in layout.tensors]
    lacking = [int(found[fragment].lacks_master(start, stop)) for fragment, start, stop in ranges]
    counts = torch.tensor(owned + lacking, dtype=torch.int64, device=ranks.device)
    ranks.sum(counts)
    sums = counts.tolist()
    for index, fragment in enumerate(found):
        if sums[index] != fragment.numel:
            raise UserError(
                f"deepspeed: these settings hide master weights: of the {fragment.numel} elements of "
                f"fragment {index} the ranks hold {sums[index]}"
            )
    for (index, start, stop), ranks_lacking in zip(ranges, sums[len(found) :], strict=True):
        if ranks_lacking:
            found[index].shared.append((start, stop))


class _MasterFinder:
    """Finds masters and copies of a parameter; ranges are relative to the flattened parameter."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self._unsharded = {id(parameter): master for parameter, master in _unsharded_masters(optimizer)}
        self.replicated = False  # whether the ranks all hold the same, whole masters (ZeRO-0)

    def find(self, parameter: Any) -> list[Slice]:
        if hasattr(parameter, "ds_id"):
            return self._of_stage_3(parameter)
        if hasattr(parameter, "_hp_mapping"):
            return self._of_stages_1_and_2(parameter)
        self.replicated = True
        return [self._unsharded.get(id(parameter)) or Slice(0, parameter.numel(), parameter)]

    def copies(self, parameter: Any) -> list[Slice]:
        if hasattr(parameter, "ds_id"):
            # The rank's part, and small parameters that stay gathered on every rank.
            parts = [
                Slice(part.start, part.length, parameter.ds_tensor) for part in self._of_stage_3(parameter)
            ]
            return [*parts, Slice(0, parameter.ds_numel, parameter)]
        if hasattr(parameter, "_hp_mapping") or id(parameter) in self._unsharded:
            return [Slice(0, parameter.numel(), parameter)]
        return []

    def _of_stage_3(self, parameter: Any) -> list[Slice]:
        """Rank r holds elements [r * n, r * n + n) of its process group, the last part padded (n = elements
        of `ds_tensor`).
        """
        size = parameter.ds_tensor.numel()
        start = distributed.get_rank(parameter.ds_process_group) * size
        length = min(size, parameter.ds_numel - start)
        group, offset, _ = self._optimizer.grad_position[self._optimizer.get_param_id(parameter)]
        flat = self._optimizer.fp32_partitioned_groups_flat[group]
        return [Slice(start, length, flat, offset)] if length > 0 else []

    def _of_stages_1_and_2(self, parameter: Any) -> list[Slice]:
        mapping = parameter._hp_mapping
        if mapping is None:
            return []
        address = mapping.lp_fragment_address
        return [Slice(address.start, address.numel, mapping.hp_fragment)]


def _unsharded_masters(optimizer: Any) -> Iterator[tuple[nn.Parameter, Slice]]:
    """ZeRO-0 in low precision: each parameter with the whole master that DeepSpeed's wrapper keeps, flat
    (FP16_Optimizer) or not.
    """
    if hasattr(optimizer, "fp32_groups_flat"):
        for group, flat in zip(optimizer.fp16_groups, optimizer.fp32_groups_flat, strict=True):
            offset = 0
            for parameter in group:
                yield parameter, Slice(0, parameter.numel(), flat, offset)
                offset += parameter.numel()
    elif hasattr(optimizer, "fp32_groups"):
        for group, masters in zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True):
            for parameter, master in zip(group, masters, strict=True):
                yield parameter, Slice(0, parameter.numel(), master)


@torch.no_grad()
def undo_first_step(optimizer: Any) -> None:
    """DeepSpeed's low-precision wrappers of ZeRO-0 make a step with zero gradients at the start, to allocate
    the moments: Adam's step counter would be one ahead and the weights decayed once. Undo it.
    """
    masters = list(_unsharded_masters(optimizer))
    for parameter, master in masters:
        master.values().copy_(parameter.data.view(-1))
    if masters:
        optimizer.optimizer.state.clear()
        for group in optimizer.optimizer.param_groups:
            group.pop("step", None)


@torch.no_grad()
def adopt(
    fragment: FragmentSlices, source: Tensor, how: How, alpha: float, snapshot: Tensor | None, ranks: Ranks
) -> None:
    """Write the flat fp32 fragment `source` (host memory) into masters and copies; the optimizer's moments
    are not touched.

    overwrite: source; mix: alpha * own + (1 - alpha) * source; rebase: source + (own - snapshot), where
    `snapshot` is the flat fragment that the island answered with. `overwrite` needs no other rank, `mix` and
    `rebase` do (`renew_copies`).
    """
    if how == "overwrite":
        for part in (*fragment.masters, *fragment.copies):
            _write(part, source)
        return
    for master in fragment.masters:
        own, new = master.values(), _moved(source, master)
        if how == "mix":
            own.lerp_(new, 1 - alpha)
        else:
            if snapshot is None:
                raise ValueError("rebase needs the snapshot that the island answered with")
            own.sub_(_moved(snapshot, master)).add_(new)
    renew_copies(fragment, ranks)


@torch.no_grad()
def renew_copies(fragment: FragmentSlices, ranks: Ranks) -> None:
    """Make every copy its master rounded. A copy whose master lies on another rank comes from there, through one sum over
    the ranks for each such tensor.
    """
    for copy in fragment.copies:
        for master in fragment.masters:
            _copy_overlap(copy, master)
    for low, high in fragment.shared:
        _fill_from_owners(fragment, low, high, ranks)


def _write(part: Slice, source: Tensor) -> None:
    if part.held():
        part.values().copy_(_moved(source, part))


def _moved(source: Tensor, part: Slice) -> Tensor:
    """The part's range of `source`, on the part's device."""
    return source[part.start : part.stop].to(part.tensor.device, non_blocking=True)


def _copy_overlap(copy: Slice, master: Slice) -> None:
    into, new = copy.cut(master.start, master.stop), master.cut(copy.start, copy.stop)
    if into is not None and new is not None and into.held():
        into.values().copy_(new.values(), non_blocking=True)


def _fill_from_owners(fragment: FragmentSlices, low: int, high: int, ranks: Ranks) -> None:
    """Fill the copies in [low, high): each element is a sum over the ranks to which only its owner adds
    anything.
    """
    values = torch.zeros(high - low, dtype=torch.float32, device=ranks.device)
    for owned in fragment.owned:
        if part := owned.cut(low, high):
            values[part.start - low : part.stop - low].copy_(part.values(), non_blocking=True)
    ranks.sum(values)
    for copy in fragment.copies:
        if (part := copy.cut(low, high)) and part.held():
            part.values().copy_(values[part.start - low : part.stop - low])
