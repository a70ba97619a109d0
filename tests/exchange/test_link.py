"""The link as it runs: mpirun, two processes, real signals. Fragments are large enough to be hit on their way."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import subprocess
from functools import partial
from pathlib import Path

import psutil
import pytest
from played_link import IN_STORE, ON_THE_WAY

from diloco_ds.conductor.shared_memory import remove_shared_memory
from diloco_ds.core.events import Orders, Report
from diloco_ds.exchange.fragment_box import FragmentBox
from diloco_ds.exchange.link_launch import link_command
from diloco_ds.exchange.mailbox import META_CAPACITY, Mailbox
from diloco_ds.exchange.wire import OrdersRecord, ReportRecord, ThetaHeader, UpdateHeader
from diloco_ds.rundir import RunDir, SharedMemory

pytestmark = pytest.mark.slow

LARGE = 12_000_000  # values: 48 MB, 12 chunks
NUMELS = (1000, LARGE, 7)
STATE = 3


class LiveLink:
    """A run directory, both mailboxes, a store, and a link of real processes between them."""

    def __init__(self, root: Path, wait_until) -> None:
        self.run_id = f"test-link-{os.getpid()}"
        self.run = RunDir(root)
        self.shared = SharedMemory(self.run_id)
        self.wait_until = partial(wait_until, seconds=180)
        self.log = open(root / "link.log", "a+b")  # noqa: SIM115 (closed by `close`)
        manifest = {"run_id": self.run_id, "model": {"layout_digest": "layout"}}
        self.run.manifest.write_text(json.dumps(manifest))

    def make_mailboxes(self):
        self.island = Mailbox.create(self.shared.island_end("a"), NUMELS, inbox=True)
        self.syncer = Mailbox.create(self.shared.syncer_end("a"), NUMELS, inbox=False)
        self.shared.store.mkdir()
        self.theta = FragmentBox.create(
            self.shared.store / "theta", [n + STATE for n in NUMELS], META_CAPACITY
        )

    def start(self):
        argv, env = link_command(self.run.root, "a", [])
        self.mpirun = subprocess.Popen(argv, env=env, stdout=self.log, stderr=self.log)

    def start_and_connect(self):
        self.start()
        for role in ("proxy", "agent"):
            self.wait_until(lambda role=role: self.state(role) == "connected", f"{role} connected")

    def status(self, role):
        try:
            status = json.loads(self.run.status(f"{role}.a").read_text())
        except FileNotFoundError:
            return None
        return status if self.belongs_to_this_start(status) else None

    def belongs_to_this_start(self, status):
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(status["pid"])
            return process.create_time() == status["started"] and process.ppid() == self.mpirun.pid
        return False

    def state(self, role):
        status = self.status(role)
        return status and status["state"]

    def pid(self, role):
        return self.mpirun.pid if role == "mpirun" else self.status(role)["pid"]

    def report(self, step):
        zeros = (0,) * len(NUMELS)
        content = Report("a", 1, "running", step, 0, 0.1, zeros, zeros, zeros)
        self.island.report.write(ReportRecord(self.run_id, "layout", content, 1.0, 1.0, 0).pack())

    def reported_step(self):
        newest = self.syncer.report.read()
        return newest and ReportRecord.unpack(newest[1]).report.step

    def order(self, step):
        content = Orders("run", step, 0, (0,) * len(NUMELS))
        self.syncer.orders.write(OrdersRecord(self.run_id, 1, content).pack())

    def ordered_step(self):
        newest = self.island.orders.read()
        return newest and OrdersRecord.unpack(newest[1]).orders.global_step

    def answer(self, fragment, version):
        slot = self.island.outbox.begin(fragment)
        assert slot is not None
        fill(slot, version)
        header = UpdateHeader(self.run_id, "a", 1, fragment, 1, 0, 1, 1, version, 0, 0, NUMELS[fragment])
        self.island.outbox.commit(fragment, version, header.pack())

    def merge(self, fragment, version):
        slot = self.theta.begin(fragment)
        fill(slot, version)
        self.theta.commit(fragment, version, ThetaHeader(self.run_id, 1, version, IN_STORE).pack())

    def arrived(self, box, fragment, version):
        self.wait_until(lambda: box.version(fragment) == version, f"{box.path.name} {fragment} {version}")
        assert is_filled(box.payload(fragment, version), version)

    def is_under_way(self, box, fragment, version):
        try:
            first = box.begun(fragment)[0]
        except RuntimeError:
            return False  # not begun, or whole by now
        return first == version and box.version(fragment) < version

    def ended(self):
        return self.mpirun.poll() is not None

    def close(self):
        self.mpirun.kill()
        self.mpirun.wait()
        self.log.close()
        remove_shared_memory(self.shared.run_id)


def fill(slot, version):
    """Every value depends on its place, so that a shifted or repeated chunk is found out; the first is `version`."""
    values = slot.numpy()
    values[:] = version
    values[1000::1000] += range(1, 1 + len(values[1000::1000]))


def is_filled(payload, version):
    values = payload.numpy()
    marks = values[1000::1000]
    rest = values.copy()
    rest[1000::1000] = version
    return bool((rest == version).all() and (marks - version == range(1, 1 + len(marks))).all())


@pytest.fixture
def live(tmp_path, wait_until):
    link = LiveLink(tmp_path, wait_until)
    yield link
    link.close()


def test_waits_replicates_both_ways_and_ends_when_told(live):
    live.start()
    for role in ("proxy", "agent"):
        live.wait_until(lambda role=role: live.state(role) == "waiting", f"{role} waiting")
    live.make_mailboxes()
    live.report(5)
    live.order(6)
    live.wait_until(lambda: live.reported_step() == 5 and live.ordered_step() == 6)
    for version in (1, 2, 3):
        for fragment in range(3):
            live.answer(fragment, version)
            live.merge(fragment, version)
        for fragment in range(3):
            live.arrived(live.syncer.outbox, fragment, version)
            live.arrived(live.island.inbox, fragment, version)
    assert ThetaHeader.unpack(live.island.inbox.read_header(1)[1]) == ThetaHeader(
        live.run_id, 1, 3, ON_THE_WAY
    )
    for role in ("proxy", "agent"):
        live.wait_until(lambda role=role: counted(live.status(role)) == (9, 9), "counters")
        status = live.status(role)
        assert status["bytes_sent"] == status["bytes_received"] == 3 * 4 * sum(NUMELS)
        assert status["torn"] == status["dropped"] == 0
    ranks = psutil.Process(live.mpirun.pid).children(recursive=True)
    live.mpirun.terminate()
    live.wait_until(live.ended, "SIGTERM ends the link")
    psutil.wait_procs(ranks, timeout=10)
    assert not any(is_alive(rank) for rank in ranks)
    for role in ("proxy", "agent"):
        assert json.loads(live.run.status(f"{role}.a").read_text())["state"] == "stopped"
    live.start()
    live.wait_until(lambda: live.state("agent") == "connected", "connected again")
    live.island.destroy()
    live.wait_until(live.ended, "a link whose mailbox is gone ends")


def counted(status):
    return status["fragments_sent"], status["fragments_received"]


def is_alive(process):
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def stopped_on_the_way(live, role, versions):
    """Stop `role` (a rank) by SIGSTOP while the large fragment is on its way, and return the version of it."""
    ways = (live.syncer.outbox, live.island.inbox)
    pid = live.pid(role)
    for version in versions:
        live.answer(1, version)
        live.merge(1, version)
        live.wait_until(
            lambda version=version: (
                any(live.is_under_way(box, 1, version) for box in ways)
                or all(box.version(1) == version for box in ways)
            )
        )
        os.kill(pid, signal.SIGSTOP)
        if any(live.is_under_way(box, 1, version) for box in ways):
            return version
        os.kill(pid, signal.SIGCONT)  # it was faster
        for box in ways:
            live.arrived(box, 1, version)
    raise AssertionError("unreachable")


def kill(live, victim, stopped):
    """kill -9 of the process `victim`; all of the link ends, and every box holds its last whole fragment."""
    ranks = psutil.Process(live.mpirun.pid).children(recursive=True)
    stopped_pid = live.pid(stopped)
    os.kill(live.pid(victim), signal.SIGKILL)
    if stopped != victim:
        os.kill(stopped_pid, signal.SIGCONT)
    live.wait_until(live.ended, "mpirun has ended")
    live.wait_until(lambda: not any(is_alive(rank) for rank in ranks), "nobody is left")
    for box in (live.syncer.outbox, live.island.inbox):
        held = box.version(1)
        assert held < 0 or is_filled(box.payload(1, held), held)


def test_killed_on_the_way_it_goes_on_where_it_was(live):
    live.make_mailboxes()
    live.start_and_connect()
    versions = itertools.count(1)
    for victim, stopped in (("agent", "agent"), ("proxy", "proxy"), ("mpirun", "agent")):
        version = stopped_on_the_way(live, stopped, versions)
        kill(live, victim, stopped)
        live.report(version)
        live.start_and_connect()
        live.arrived(live.syncer.outbox, 1, version)
        live.arrived(live.island.inbox, 1, version)
        live.wait_until(lambda version=version: live.reported_step() == version)


def test_a_stopped_agent_delays_and_breaks_nothing(live):
    live.make_mailboxes()
    live.start_and_connect()
    agent = live.pid("agent")
    os.kill(agent, signal.SIGSTOP)
    try:
        live.answer(1, 1)
        live.answer(1, 2)
        live.merge(1, 1)
        for version in range(2, 6):
            live.merge(1, version)
            live.order(version)
            live.report(version)
    finally:
        os.kill(agent, signal.SIGCONT)
    live.arrived(live.syncer.outbox, 1, 2)
    live.arrived(live.island.inbox, 1, 5)
    live.wait_until(lambda: live.reported_step() == 5 and live.ordered_step() == 5)
    version = stopped_on_the_way(live, "agent", itertools.count(6))
    proxy = psutil.Process(live.pid("proxy"))
    proxy.cpu_percent()
    used = proxy.cpu_percent(interval=2)
    os.kill(agent, signal.SIGCONT)
    live.arrived(live.syncer.outbox, 1, version)
    live.arrived(live.island.inbox, 1, version)
    assert used < 30, "a proxy whose peer is silent must not spin"
