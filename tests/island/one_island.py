"""A real island for tests: run directory, supervisor process, and the test in the place of syncer and link."""

import contextlib
import json
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console
from safetensors.torch import load_file
from tiny_run import tiny_config

from diloco_ds.conductor.prepare import new_run
from diloco_ds.conductor.shared_memory import remove_shared_memory
from diloco_ds.core.events import Orders, Peer
from diloco_ds.core.fragments import FragmentLayout
from diloco_ds.exchange.mailbox import Mailbox
from diloco_ds.exchange.wire import OrdersRecord, ReportRecord, ThetaHeader, UpdateHeader
from diloco_ds.island.learner_processes import LearnerProcesses, running_incarnations
from diloco_ds.observe.metrics import read_metrics
from diloco_ds.rundir import SharedMemory

START_S = 240  # a start on a machine that does much else


class OneIsland:
    """The island `a` of a run of its own; `settings` as for `tiny_config`."""

    def __init__(self, directory: Path, **settings):
        self.config = tiny_config(directory, islands=1, **settings)
        self.run = new_run(self.config, directory / "run", ["test"], Console(quiet=True))
        self.run_id = self.run.run_id()
        self.layout = FragmentLayout.from_json(self.run.layout.read_text())
        self.fragments = range(self.layout.fragments)
        self.folder = SharedMemory(self.run_id).island_end("a")
        self.supervisors = []
        self.mailbox = None
        self.orders = Orders("run", 0, 0, (0,) * self.layout.fragments)

    # -- processes

    def supervise(self):
        """Start a supervisor."""
        with open(self.run.root / "supervisor.out", "ab") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "diloco_ds.island.supervisor", str(self.run.root), "a"],
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        self.supervisors.append(process)
        self.wait_for(lambda: self.folder.exists() or process.poll() is not None)
        if self.mailbox is None and self.folder.exists():
            self.mailbox = Mailbox.open(self.folder)
        return process

    def wait_for(self, condition, seconds=START_S):
        """The condition's value as soon as it holds."""
        deadline = time.monotonic() + seconds
        while not (value := condition()):
            if time.monotonic() > deadline:
                raise TimeoutError(self.story())
            self._lease()
            time.sleep(0.02)
        return value

    def story(self):
        """What the processes said, for a failing test."""
        files = [self.run.root / "supervisor.out", self.run.log("a")]
        return "\n".join(file.read_text()[-3000:] for file in files if file.exists())

    def status(self):
        path = self.run.status("supervisor.a")
        return json.loads(path.read_text()) if path.exists() else {}

    def clean_up(self):
        """End every process and remove the shared memory, whatever state the test left."""
        for process in self.supervisors:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGKILL)
            process.wait()
        for incarnation in running_incarnations(self.run_id, "a"):
            LearnerProcesses(self.run_id, "a", incarnation).kill()
        remove_shared_memory(self.run_id)

    # -- the test as syncer

    def order(self, **changes):
        """Give orders: the last ones with these changes. `want`: {fragment: round}."""
        if "want" in changes:
            want = list(self.orders.want)
            for fragment, round_ in changes["want"].items():
                want[fragment] = round_
            changes["want"] = tuple(want)
        self.orders = replace(self.orders, **changes)
        self.mailbox.orders.write(OrdersRecord(self.run_id, 1, self.orders).pack())

    def _lease(self):
        """What the syncer does when it hears of a new incarnation: lease it blocks, here more than it will read, and say
        whose moments it can have: nobody's.
        """
        record = self.report() if self.mailbox is not None else None
        if record and record.report.step_blocks and record.report.incarnation != self.orders.reader:
            number = record.report.incarnation
            peer = Peer(number, reason="it is the only island")
            self.order(reader=number, leases=(number, 10**6 * number, 10**6), peer=peer)

    def put(self, fragment, version, values):
        """A new global fragment arrives in the island's inbox."""
        inbox = self.mailbox.inbox
        self.wait_for(lambda: inbox.begin(fragment) is not None, 30)
        inbox.begun(fragment).copy_(values)
        inbox.commit(fragment, version, ThetaHeader(self.run_id, 1, version).pack())

    def answer(self, fragment, round_):
        """The island's answer for the round as (header, values), None until it is there."""
        newest = self.mailbox.outbox.read_header(fragment)
        header = UpdateHeader.unpack(newest[1]) if newest else None
        if header is None or header.round < round_:
            return None
        return header, self.mailbox.outbox.payload(fragment, newest[0]).clone()

    def report(self):
        newest = self.mailbox.report.read()
        return ReportRecord.unpack(newest[1]) if newest else None

    def stepping(self, incarnation):
        """The report of this incarnation once it makes steps."""
        record = self.report()
        if record and record.report.incarnation == incarnation and record.report.phase == "running":
            return record
        return None

    def makes_steps(self, number=3):
        """True once `number` further steps were reported."""
        first = self.report().report.tokens
        tokens = self.config.deepspeed["train_micro_batch_size_per_gpu"] * self.config.data.sequence_length
        return self.wait_for(lambda: self.report().report.tokens >= first + number * tokens, 60)

    # -- what there is to compare

    def initial(self, fragment):
        """The initial weights of a fragment, flat."""
        weights = load_file(self.run.initial_weights)
        return torch.cat([weights[placed.spec.name].flatten() for placed in self.layout.tensors_of(fragment)])

    def random(self, fragment, seed):
        """Weights that nobody has by chance."""
        generator = torch.Generator().manual_seed(seed)
        return 0.05 * torch.randn(self.layout.numel(fragment), generator=generator)

    def steps(self):
        return [record for record in read_metrics(self.run.metrics) if record["kind"] == "step"]

    def events(self, name):
        return [record for record in read_metrics(self.run.metrics) if record.get("event") == name]


def alive(pid):
    """Whether a process runs (a zombie does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
