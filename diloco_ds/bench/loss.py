"""Peak memory and time of the loss over a large vocabulary: in chunks, and as one writes it without them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
from torch import Tensor, nn

from diloco_ds.errors import UserError
from diloco_ds.model.loss import chunked_cross_entropy

MB = 2**20
_PEAK_RESET = "5"
"""Written to clear_refs, this sets the peak of the resident memory to what it is now (man 5 proc)."""


@dataclass(frozen=True)
class LossCost:
    """One way to compute loss and gradients; `chunk` None: all tokens at once."""

    chunk: int | None
    peak_mb: float  # MiB above what hidden states, weights and their gradients take anyway
    seconds: float  # median of a forward and backward pass


@dataclass(frozen=True)
class LossShape:
    """Hidden states [tokens, width] and an output embedding [vocabulary, width], in `precision` (bf16 or fp32)."""

    vocabulary: int
    width: int
    tokens: int
    precision: str

    @property
    def logits_mb(self) -> float:
        """MiB of all logits in fp32."""
        return 4 * self.tokens * self.vocabulary / MB


def bench_loss(shape: LossShape, chunks: Sequence[int], repeats: int) -> list[LossCost]:
    """The plain loss first, then each chunk size; repetitions take turns. On the GPU if there is one.

    Sizes are at least 1. UserError for more memory than there is.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    _require_memory(shape, device)
    hidden, weight, targets = _inputs(shape, device)
    ways: dict[int | None, Callable[[], Tensor]] = {None: lambda: _plain(hidden, weight, targets)}
    for chunk in chunks:
        ways[chunk] = lambda chunk=chunk: chunked_cross_entropy(hidden, weight, None, targets, chunk)  # type: ignore[misc]
    costs: dict[int | None, list[tuple[float, float]]] = {chunk: [] for chunk in ways}
    for _ in range(1 + repeats):
        for way, loss in ways.items():
            costs[way].append(_measured(loss, hidden, weight, device))
    return [
        LossCost(way, max(peak for peak, _ in found[1:]), median(seconds for _, seconds in found[1:]))
        for way, found in costs.items()
    ]


def _plain(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """As transformers computes it: all logits, then fp32."""
    return nn.functional.cross_entropy(nn.functional.linear(hidden, weight).float(), targets)


def _inputs(shape: LossShape, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(shape.tokens, shape.width, generator=generator)
    weight = 0.02 * torch.randn(shape.vocabulary, shape.width, generator=generator)
    targets = torch.randint(shape.vocabulary, (shape.tokens,), generator=generator)
    dtype = torch.bfloat16 if shape.precision == "bf16" else torch.float32
    leaves = [each.to(device, dtype).requires_grad_() for each in (hidden, weight)]
    for leaf in leaves:
        leaf.grad = torch.zeros_like(leaf)
    return leaves[0], leaves[1], targets.to(device)


def _measured(
    loss: Callable[[], Tensor], hidden: Tensor, weight: Tensor, device: torch.device
) -> tuple[float, float]:
    """Peak (MiB, above what was there before) and seconds of a forward and backward pass."""
    before = _restart_peak(device)
    began = time.perf_counter()
    loss().backward()
    if device.type == "cuda":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    assert hidden.grad is not None
    assert weight.grad is not None
    if not (hidden.grad.isfinite().all() and weight.grad.any()):
        raise RuntimeError("the loss gave no gradients")
    return (_peak(device) - before) / MB, seconds


def _restart_peak(device: torch.device) -> int:
    """Bytes in use now, from which the peak is counted anew."""
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    Path("/proc/self/clear_refs").write_text(_PEAK_RESET)
    return _status("VmRSS")


def _peak(device: torch.device) -> int:
    return torch.cuda.max_memory_allocated() if device.type == "cuda" else _status("VmHWM")


def _status(field: str) -> int:
    """Bytes of a field of /proc/self/status, which has them in KiB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return 1024 * int(value.split()[0])
    raise RuntimeError(f"/proc/self/status has no {field}")


def _require_memory(shape: LossShape, device: torch.device) -> None:
    """The plain loss holds the logits in bf16 and, at its peak, three times in fp32."""
    import psutil

    needed = 3.5 * shape.logits_mb + 6 * shape.vocabulary * shape.width / MB
    there = (
        torch.cuda.mem_get_info()[0] if device.type == "cuda" else psutil.virtual_memory().available
    ) / MB
    if needed > there:
        raise UserError(
            f"bench loss: about {needed / 1024:.1f} GiB are needed without chunks, {there / 1024:.1f} are free; "
            "take fewer --tokens"
        )
