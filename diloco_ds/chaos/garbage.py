"""Updates that must never be merged, written where an island's own updates go: into the outbox at its end of the link.

An outbox has one writer. So the ranks are stopped for the moment of the write, and only a fragment is taken of which
they are not writing an update just now. The island's next update of it follows the garbage.
"""

from __future__ import annotations

import dataclasses
import random
import signal
from collections.abc import Callable

import psutil
import torch

from diloco_ds.chaos.schedule import Garbage
from diloco_ds.chaos.signals import send, stop_and_wait
from diloco_ds.chaos.targets import NotThere
from diloco_ds.exchange.fragment_box import FragmentBox
from diloco_ds.exchange.mailbox import Mailbox
from diloco_ds.exchange.wire import UpdateHeader
from diloco_ds.rundir import SharedMemory

OUTLYING = 1e6
"""Factor on the weights of an outlying update."""


def write_garbage(
    run_id: str, island: str, what: Garbage, ranks: list[psutil.Process], choose: random.Random
) -> int:
    """Put garbage into the island's outbox, after its newest update; the fragment it is for.

    NotThere if there is no outbox, or no fragment that was sent twice before and is at rest.
    """
    try:
        outbox = Mailbox.open(SharedMemory(run_id).island_end(island)).outbox
    except FileNotFoundError:
        raise NotThere(f"island {island} has no mailbox") from None
    fragments = list(range(len(outbox.numels)))
    choose.shuffle(fragments)
    try:
        stop_and_wait(ranks)
        for fragment in fragments:
            if _written(outbox, fragment, what, choose):
                return fragment
    finally:
        send(ranks, signal.SIGCONT)
    raise NotThere(f"island {island} has no fragment at rest that was sent twice before")


def _written(outbox: FragmentBox, fragment: int, what: Garbage, choose: random.Random) -> bool:
    newest = outbox.read_header(fragment)
    if newest is None or not outbox.at_rest(fragment):
        return False
    version, meta = newest
    values = outbox.payload(fragment, version)
    slot = outbox.begin(fragment)
    if slot is None or values is None:
        return False
    header = UpdateHeader.unpack(meta)
    slot.copy_(_VALUES.get(what, torch.Tensor.clone)(values))
    outbox.commit(fragment, version + 1, _meta(header, what, version + 1, choose))
    return True


def _meta(header: UpdateHeader, what: Garbage, update_id: int, choose: random.Random) -> bytes:
    if what == "malformed":
        return choose.randbytes(200)
    if what == "replayed":
        return header.pack()
    if what == "wrong_run":
        return dataclasses.replace(header, run_id="another-run", update_id=update_id).pack()
    return dataclasses.replace(header, update_id=update_id).pack()


_VALUES: dict[Garbage, Callable[[torch.Tensor], torch.Tensor]] = {
    "not_finite": lambda values: torch.full_like(values, float("nan")),
    "outlying": lambda values: values * OUTLYING,
}
