"""How fast a fragment gets from one mailbox into the other over the link, beside a plain copy in memory.

The way is the one of training: commit in one box, agent and proxy as mpirun starts them, commit in the other
box.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from diloco_ds.bench.kept_log import kept_log
from diloco_ds.errors import UserError
from diloco_ds.exchange.fragment_box import FragmentBox
from diloco_ds.exchange.link_launch import link_command
from diloco_ds.exchange.mailbox import META_CAPACITY, Mailbox
from diloco_ds.exchange.space import require_space
from diloco_ds.exchange.store import Mark
from diloco_ds.exchange.wire import ThetaHeader, UpdateHeader
from diloco_ds.rundir import RunDir, SharedMemory, write_json

_ISLAND = "bench"
_LAYOUT = "bench"
_WARM_UP = 3  # versions that touch both slots at both ends for the first time
_LONGEST_WAIT_S = 120.0


@dataclass(frozen=True)
class LinkSpeed:
    """Medians for one fragment size, in MB (10^6 bytes) a second."""

    fragment_mb: int
    up_mb_s: float  # island -> syncer
    down_mb_s: float  # syncer -> island
    memcpy_mb_s: float  # from one slot of a box to the other, one thread


def bench_link(sizes_mb: Sequence[int], repeats: int) -> list[LinkSpeed]:
    """Measure a link on this host, sizes and repeats at least 1; leaves nothing behind but the log of a link that failed.

    UserError if there is no mpirun or too little memory, and where the link fails.
    """
    with _LiveLink(tuple(250_000 * size for size in sizes_mb)) as link:
        return [
            LinkSpeed(
                fragment_mb=size,
                up_mb_s=size / link.seconds(link.island.outbox, link.syncer.outbox, fragment, repeats),
                down_mb_s=size / link.seconds(link.theta, link.inbox, fragment, repeats),
                memcpy_mb_s=size / _memcpy_seconds(link.theta, fragment, repeats),
            )
            for fragment, size in enumerate(sizes_mb)
        ]


class _LiveLink:
    """A link between two mailboxes of its own, with fragments of `numels` values."""

    def __init__(self, numels: tuple[int, ...]) -> None:
        self._numels = numels
        self._run = RunDir(Path(tempfile.mkdtemp(prefix="diloco-ds-bench-")))
        self._shared = SharedMemory(f"bench-link-{os.getpid()}")
        self._mpirun: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> _LiveLink:
        try:
            self._start()
        except BaseException:
            self._clear()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._clear()

    def seconds(self, source: FragmentBox, destination: FragmentBox, fragment: int, repeats: int) -> float:
        """Median time from the commit of a fragment in `source` to its commit in `destination`."""
        return median(
            [self._carry(source, destination, fragment) for _ in range(_WARM_UP + repeats)][_WARM_UP:]
        )

    def _carry(self, source: FragmentBox, destination: FragmentBox, fragment: int) -> float:
        version = source.version(fragment) + 1
        slot = source.begin(fragment)
        while slot is None:  # the agent still has the one before the last
            slot = source.begin(fragment)
        slot.fill_(version)
        source.commit(fragment, version, self._header(source, fragment, version))
        start = time.perf_counter()
        self._wait(lambda: destination.version(fragment) == version)
        return time.perf_counter() - start

    def _header(self, source: FragmentBox, fragment: int, version: int) -> bytes:
        run_id = self._shared.run_id
        if source is self.theta:
            mark = Mark(version=version, round=version, merges=version, tokens=0).to_json()
            return ThetaHeader(run_id, generation=1, round=version, extra=json.dumps(mark).encode()).pack()
        return UpdateHeader(
            run_id=run_id,
            island=_ISLAND,
            incarnation=1,
            fragment=fragment,
            round=version,
            base=0,
            steps=1,
            tokens=1,
            update_id=version,
            lease=0,
            cursor=0,
            numel=self._numels[fragment],
        ).pack()

    def _start(self) -> None:
        write_json(self._run.manifest, {"run_id": self._shared.run_id, "model": {"layout_digest": _LAYOUT}})
        self.island = Mailbox.create(self._shared.island_end(_ISLAND), self._numels, inbox=True)
        self.syncer = Mailbox.create(self._shared.syncer_end(_ISLAND), self._numels, inbox=False)
        assert self.island.inbox is not None
        self.inbox = self.island.inbox
        self._shared.store.mkdir()
        require_space(self._shared.store, FragmentBox.file_size(self._numels, META_CAPACITY))
        self.theta = FragmentBox.create(self._shared.store / "theta", self._numels, META_CAPACITY)
        argv, environment = link_command(self._run.root, _ISLAND, [])
        with open(self._run.root / "link.log", "wb") as log:
            self._mpirun = subprocess.Popen(argv, env=environment, stdout=log, stderr=log)

    def _wait(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + _LONGEST_WAIT_S
        while not condition():
            if self._mpirun is None or self._mpirun.poll() is not None or time.monotonic() > deadline:
                raise UserError(f"bench link: the link failed; {kept_log(self._run.root / 'link.log')}")
            time.sleep(1e-4)

    def _clear(self) -> None:
        if self._mpirun is not None:
            self._mpirun.terminate()
            self._mpirun.wait()
        shutil.rmtree(self._run.root)
        if self._shared.root.exists():
            shutil.rmtree(self._shared.root)


def _memcpy_seconds(box: FragmentBox, fragment: int, repeats: int) -> float:
    version = box.version(fragment)
    source = box.payload(fragment, version)
    target = box.begin(fragment)
    assert source is not None
    assert target is not None
    from_values, to_values = source.numpy(), target.numpy()

    def once() -> float:
        start = time.perf_counter()
        to_values[:] = from_values
        return time.perf_counter() - start

    return median([once() for _ in range(1 + repeats)][1:])


def print_table(speeds: Sequence[LinkSpeed]) -> None:
    """One line a size."""
    print(f"{'fragment':>10} {'island->syncer':>16} {'syncer->island':>16} {'memcpy':>12}   MB/s")
    for speed in speeds:
        print(
            f"{speed.fragment_mb:>7} MB {speed.up_mb_s:>16.0f} {speed.down_mb_s:>16.0f} {speed.memcpy_mb_s:>12.0f}"
        )
