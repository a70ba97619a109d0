"""Copies between fragments in host memory and the device, beside the step's own work.

On a GPU answers leave on a stream of their own, out of pinned memory's reach of the step; the main stream
waits for them on the device, not on the host, before anything changes what they read. On a CPU a copy is done
when the call returns.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from diloco_ds.errors import UserError
from diloco_ds.island.slices import Slice


class DeviceCopy:
    """One copy under way. The host memory it reads or writes must be left alone until it is done. `source` is kept for it:
    device memory that is given free is used again while another stream still reads it.
    """

    def __init__(self, event: torch.cuda.Event | None, source: Tensor | None = None) -> None:
        self._event, self._source = event, source

    def done(self) -> bool:
        """Whether it has ended; never blocks."""
        return self._event is None or bool(self._event.query())

    def wait(self) -> None:
        """Block until it has ended."""
        if self._event is not None:
            self._event.synchronize()


class HostMemory:
    """Moves slices to and from host memory."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._reading: torch.cuda.Event | None = None
        self._pinned: list[int] = []

    @torch.no_grad()
    def take(self, slices: Iterable[Slice], out: Tensor) -> DeviceCopy:
        """Copy `slices` into their ranges of `out`, a flat fp32 fragment in host memory."""
        if self._stream is None:
            _copy_out(slices, out)
            return DeviceCopy(None)
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            _copy_out(slices, out)
            self._reading = torch.cuda.Event()
            self._reading.record()
        return DeviceCopy(self._reading)

    @torch.no_grad()
    def bring(self, values: Tensor, out: Tensor) -> DeviceCopy:
        """Copy `values`, which nobody writes to any more, into `out` in host memory."""
        if self._stream is None:
            out.copy_(values)
            return DeviceCopy(None)
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            out.copy_(values, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
        return DeviceCopy(event, values)

    def room(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Flat host memory that the device copies into directly."""
        return torch.empty(numel, dtype=dtype, pin_memory=self._stream is not None)

    def hold_writers(self) -> None:
        """Whatever the main stream does next waits, on the device, for the copies that still read masters."""
        if self._reading is not None:
            torch.cuda.current_stream().wait_event(self._reading)

    def mark(self) -> DeviceCopy:
        """A transfer that is done when all that was given to the main stream so far is."""
        if self._stream is None:
            return DeviceCopy(None)
        event = torch.cuda.Event()
        event.record()
        return DeviceCopy(event)

    def pin(self, address: int, nbytes: int) -> None:
        """Page-lock a mapped range so that the GPU copies to and from it directly; on a CPU there is nobody
        to tell.
        """
        if self._stream is None:
            return
        code = int(torch.cuda.cudart().cudaHostRegister(address, nbytes, 0))
        if code != 0:
            raise UserError(
                f"{nbytes} bytes of shared memory cannot be page-locked for the GPU (CUDA error {code}); "
                "raise the limit of locked memory (ulimit -l unlimited)"
            )
        self._pinned.append(address)

    def close(self) -> None:
        """Wait for every copy and undo `pin`."""
        if self._stream is None:
            return
        self._stream.synchronize()
        torch.cuda.current_stream().synchronize()
        while self._pinned:
            torch.cuda.cudart().cudaHostUnregister(self._pinned.pop())


def _copy_out(slices: Iterable[Slice], out: Tensor) -> None:
    for part in slices:
        out[part.start : part.stop].copy_(part.values(), non_blocking=True)
