"""The process at one end of an island's link: `mpirun -n 2 python -m diloco_ds.exchange.link RUN_DIR ISLAND`.

Rank 0 is the proxy, on the syncer's host; rank 1 the agent, on the island's. They hold no state: everything
is in the mailboxes and in the syncer's store. So they may die at any time, and do so at the first sign of
trouble: by SIGKILL to themselves, because anything gentler waits for the other rank in MPI_Finalize. mpirun
then ends the other one, and the conductor starts the link again.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn, TypeVar

import psutil

from diloco_ds.errors import UserError
from diloco_ds.exchange.channel import Channel
from diloco_ds.exchange.failpoint import failpoint
from diloco_ds.exchange.fragment_box import FragmentBox
from diloco_ds.exchange.link_ends import agent_link, proxy_link
from diloco_ds.exchange.mailbox import Mailbox
from diloco_ds.exchange.replication import Link, LinkIdentity
from diloco_ds.exchange.returns import Returner
from diloco_ds.exchange.space import private_folder
from diloco_ds.exchange.traffic import Traffic
from diloco_ds.rundir import RunDir, SharedMemory, write_json

_BUSY_PAUSE_S = 1e-4
_IDLE_PAUSE_S = 5e-3
_STATUS_EVERY_S = 1.0
_WATCH_EVERY_S = 0.2

_log = logging.getLogger(__name__)
_T = TypeVar("_T")


class LinkProcess:
    """One end of the link of `island` in the run at `run_dir`."""

    def __init__(self, run_dir: RunDir, island: str, rank: int) -> None:
        self.run_dir = run_dir
        self.island = island
        self.role = ("proxy", "agent")[rank]
        self._shared = SharedMemory(run_dir.run_id())
        self._started = psutil.Process().create_time()
        self._next_status = 0.0
        self._stopping = False
        signal.signal(signal.SIGTERM, self._stop)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the conductor, who then ends the links

    def run(self, channel: Channel) -> None:
        """Wait for the mailbox, then replicate until SIGTERM or until the mailbox is removed."""
        folder = self._mailbox_folder()
        mailbox = self._wait_for(lambda: Mailbox.open(folder), folder)
        if mailbox is None:
            return
        failpoint("link.connecting")
        link = self._connect(channel, mailbox)
        if link is not None:
            self._pump(link, mailbox)

    def write_status(self, state: str, link: Link | None = None) -> None:
        """The status file of this process."""
        counters = link.traffic.counters() if link else {}
        me = {"pid": os.getpid(), "host": socket.gethostname(), "started": self._started}
        status = {**me, "state": state, "island": self.island}
        try:
            write_json(self.run_dir.status(f"{self.role}.{self.island}"), {**status, **counters})
        except OSError as error:  # a full disk must not end the link
            _log.warning("the status file cannot be written: %s", error)

    def _connect(self, channel: Channel, mailbox: Mailbox) -> Link | None:
        identity = LinkIdentity(
            run_id=self._shared.run_id,
            layout_digest=_layout_digest(self.run_dir),
            island=self.island,
            numels=mailbox.outbox.numels,
        )
        if self.role == "agent":
            return agent_link(channel, mailbox, identity)
        path = self._shared.store / "theta"
        returner = Returner(channel, identity, self._shared.returned, Traffic())
        theta = self._wait_for(lambda: FragmentBox.open(path), path, meanwhile=returner.pump)
        if theta is None:
            return None
        while returner.pump() and not self._stopping:  # what is half received
            time.sleep(_BUSY_PAUSE_S)
        link = proxy_link(channel, mailbox, theta, identity)
        if returner.hello is not None:
            link.meet(returner.hello)
        return link

    def _pump(self, link: Link, mailbox: Mailbox) -> None:
        pause = _BUSY_PAUSE_S
        while not self._stopping:
            busy = link.pump()
            pause = _BUSY_PAUSE_S if busy else min(1.5 * pause, _IDLE_PAUSE_S)
            self._each_second(link, mailbox)
            time.sleep(pause)
        failpoint("link.stopping")
        self.write_status("stopped", link)

    def _each_second(self, link: Link, mailbox: Mailbox) -> None:
        if time.monotonic() < self._next_status:
            return
        self._next_status = time.monotonic() + _STATUS_EVERY_S
        self.write_status("connected" if link.connected else "connecting", link)
        if not mailbox.is_current():
            _log.warning("%s was removed or made anew: this link ends", mailbox.folder)
            self._stopping = True

    def _wait_for(
        self, opened: Callable[[], _T], path: Path, meanwhile: Callable[[], bool] = lambda: False
    ) -> _T | None:
        """What `opened` returns as soon as it finds its file, or None on SIGTERM; `meanwhile()` is True while busy."""
        self.write_status("waiting")
        _log.info("waits for %s", path)
        while not self._stopping:
            try:
                return opened()
            except FileNotFoundError:
                time.sleep(_BUSY_PAUSE_S if meanwhile() else _IDLE_PAUSE_S)
        self.write_status("stopped")
        return None

    def _mailbox_folder(self) -> Path:
        end = self._shared.island_end if self.role == "agent" else self._shared.syncer_end
        return end(self.island)

    def _stop(self, *_: object) -> None:
        self._stopping = True


def _layout_digest(run_dir: RunDir) -> str:
    return str(json.loads(run_dir.manifest.read_text())["model"]["layout_digest"])


def watch_parent() -> None:
    """Die as soon as the launcher (mpirun, or its daemon on another host) is gone, even inside a call of MPI."""
    launcher = os.getppid()

    def watch() -> None:
        while os.getppid() == launcher:
            time.sleep(_WATCH_EVERY_S)
        print("the launcher of this link is gone: it ends", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="watch-parent", daemon=True).start()


def main(arguments: list[str]) -> NoReturn:
    """Run one end of a link; never returns, and never leaves through MPI_Finalize."""
    watch_parent()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s link %(message)s")
    try:
        run_dir, island = RunDir(Path(arguments[0])), arguments[1]
        private_folder(SharedMemory(run_dir.run_id()).link_scratch(island))  # on another host nobody made it
        from diloco_ds.exchange.link_mpi import MPI, MpiChannel  # initialises MPI: only here, after the watch

        world = MPI.COMM_WORLD
        LinkProcess(run_dir, island, world.rank).run(MpiChannel(world))
    except UserError as error:
        _die(str(error))
    except BaseException:
        _log.exception("this end of the link fails")
        _die("it ends by SIGKILL to itself")
    sys.stderr.flush()
    os._exit(0)


def _die(why: str) -> NoReturn:
    _log.error("%s", why)
    sys.stderr.flush()
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("unreachable")


if __name__ == "__main__":
    main(sys.argv[1:])
