"""A run for the syncer alone: three fragments, and learners played by the test at the syncer's end of the mailboxes.

What a played learner answers depends on nothing but island, fragment and base version, and every merge takes both
islands: so the state of a fragment at a version is the same however often the syncer was killed on the way.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import time
from pathlib import Path

import torch
import yaml
from safetensors.torch import save_file

from diloco_ds.conductor.shared_memory import remove_shared_memory
from diloco_ds.config import RunConfig
from diloco_ds.core.events import Report
from diloco_ds.core.fragments import FragmentLayout, TensorSpec, balance
from diloco_ds.core.reading import Reading
from diloco_ds.core.returning import VERSION_GAP
from diloco_ds.core.tape import Entry, Header, decode_all
from diloco_ds.exchange import failpoint
from diloco_ds.exchange.fragment_box import FragmentBox
from diloco_ds.exchange.mailbox import Mailbox
from diloco_ds.exchange.merging import Merger
from diloco_ds.exchange.syncer_process import main
from diloco_ds.exchange.wire import OrdersRecord, ReportRecord, UpdateHeader
from diloco_ds.observe.manifest import FORMAT
from diloco_ds.observe.metrics import read_metrics
from diloco_ds.rundir import RunDir, SharedMemory, write_json
from diloco_ds.tensor_file import file_sha256

SPECS = (
    TensorSpec("embed.weight", (5, 4), True),
    TensorSpec("layer.weight", (4, 4), False),
    TensorSpec("layer.bias", (4,), False),
    TensorSpec("head.weight", (3, 4), False),
)
STEPS, TOKENS = 2, 64
"""What every answer of a played learner says it is worth."""
STEP_BLOCKS = 2
"""Blocks a played learner trains on in a step."""
EPOCH_BLOCKS = 1000


class SyncerRun:
    """A run directory with initial weights, its islands `a` and `b`, and the syncers started on it."""

    def __init__(self, root: Path, specs: tuple[TensorSpec, ...] = SPECS, **blocks: dict) -> None:
        self.dir = RunDir(root)
        self.run_id = f"test-{os.getpid()}-{time.monotonic_ns()}"
        self.shared = SharedMemory(self.run_id)
        self.layout = balance(specs, 3, 3)
        self.config = _config(blocks)
        self.history: dict[tuple[int, int], torch.Tensor] = {}
        """The whole payload of every (fragment, version) that was ever adopted."""
        self._pids: list[int] = []
        Merger(self.config, self.layout)  # loads what torch.optim loads late, once for all forked syncers
        root.mkdir(parents=True)
        _write_run(self.dir, self.run_id, self.config, self.layout, specs)

    def start(self, at: str = "") -> int:
        """Start a syncer in a process of its own, which dies at the failpoint `at` (`NAME` or `NAME:COUNT`)."""
        pid = os.fork()
        if pid == 0:
            _be_the_syncer(self.dir, at)
        self._pids.append(pid)
        return pid

    def ended(self, pid: int) -> int | None:
        """The exit code of a syncer (negative: killed by that signal), or None while it runs."""
        found, status = os.waitpid(pid, os.WNOHANG)
        if not found:
            return None
        self._pids.remove(pid)
        return os.waitstatus_to_exitcode(status)

    def wait(self, pid: int, seconds: float = 120) -> int:
        """Wait for a syncer's end."""
        deadline = time.monotonic() + seconds
        while (code := self.ended(pid)) is None:
            assert time.monotonic() < deadline, "the syncer does not end"
            time.sleep(0.002)
        return code

    def kill(self, pid: int) -> None:
        """SIGKILL, and wait until the process is gone."""
        os.kill(pid, signal.SIGKILL)
        assert self.wait(pid) == -signal.SIGKILL

    def mailbox(self, island: str) -> Mailbox:
        """The mailbox of `island` as soon as the syncer has made it."""
        _wait_for(self.shared.syncer_end(island))
        return Mailbox.open(self.shared.syncer_end(island))

    def theta(self) -> FragmentBox:
        """The store's box as soon as it is there."""
        _wait_for(self.shared.store / "theta")
        return FragmentBox.open(self.shared.store / "theta")

    def state(self, fragment: int) -> torch.Tensor:
        """A copy of the newest payload of a fragment: weights, then momentum."""
        box = self.theta()
        payload = box.payload(fragment, box.version(fragment))
        assert payload is not None
        return payload.clone()

    def log(self) -> str:
        """Everything the syncers printed."""
        return self.dir.log("syncer").read_text()

    def remove_shared_memory(self) -> None:
        """What the loss of the host does, or the conductor at the end."""
        remove_shared_memory(self.shared.run_id)

    def close(self) -> None:
        """Kill what still runs; leave no shared memory."""
        for pid in list(self._pids):
            self.kill(pid)
        self.remove_shared_memory()


class PlayedLearner:
    """An island's learner, played at the syncer's end of its link: adopts, answers and reports at every `step`."""

    def __init__(self, run: SyncerRun, name: str, incarnation: int = 1) -> None:
        self.run, self.name, self.incarnation = run, name, incarnation
        self.mailbox = run.mailbox(name)
        self.theta = run.theta()
        count = run.layout.fragments
        self.base = [-1] * count
        self.answered = [0] * count
        self.clock = 0
        self.phase = "running"
        self.next_id = incarnation * 1_000_000
        self.reading = Reading(incarnation, "ab".index(name), STEP_BLOCKS)
        self.read: list[tuple[int, int]] = []
        """Every piece of the block order it has trained on."""

    @property
    def orders(self):
        """The newest orders, None before the first."""
        newest = self.mailbox.orders.read()
        return None if newest is None else OrdersRecord.unpack(newest[1]).orders

    def step(self) -> None:
        """One inner step and its boundary."""
        if self.phase != "running":
            return
        self.clock += 1
        orders = self.orders
        self.adopt()
        if orders is not None and self.reading.has_lease(orders):
            self.read += self.reading.plan_batch(orders)
            self.reading.trained()
        if orders is not None:
            for fragment, round_ in enumerate(orders.want):
                asked = round_ > self.answered[fragment] and self.base[fragment] >= 0
                if orders.phase in ("run", "drain") and asked:
                    self.answered[fragment] = round_
                    self.answer(fragment, round_)
            self.phase = {"stop": "stopped", "drain": "drained", "finished": "drained"}.get(
                orders.phase, "running"
            )
        self.report()

    def adopt(self) -> None:
        """Take over what is new in the store, and note it in the run's history."""
        for fragment in range(len(self.base)):
            version = self.theta.version(fragment)
            payload = self.theta.payload(fragment, version)
            if version > self.base[fragment] and payload is not None:
                self.base[fragment] = version
                self.run.history.setdefault((fragment, version), payload.clone())

    def answer(self, fragment: int, round_: int, /, **changes) -> None:
        """Write an update; `changes` replace fields of its header, or its `values`."""
        values = changes.pop("values", None)
        if values is None:
            values = learned(self.run, self.name, fragment, self.base[fragment])
        self.next_id += 1
        header = {
            "run_id": self.run.run_id,
            "island": self.name,
            "incarnation": self.incarnation,
            "fragment": fragment,
            "round": round_,
            "base": self.base[fragment],
            "steps": STEPS,
            "tokens": TOKENS,
            "update_id": self.next_id,
            "lease": self.reading.position[0],
            "cursor": self.reading.position[1],
            "numel": self.run.layout.numel(fragment),
        }
        self.put(fragment, values, UpdateHeader(**(header | changes)).pack())

    def put(self, fragment: int, values: torch.Tensor, header: bytes) -> None:
        """What the proxy does with an update that has come over the link."""
        outbox = self.mailbox.outbox
        deadline = time.monotonic() + 120
        while (slot := outbox.begin(fragment)) is None:
            assert time.monotonic() < deadline, "the syncer does not give the pinned slot free"
            time.sleep(0.001)
        slot.copy_(values)
        outbox.commit(fragment, outbox.version(fragment) + 1, header)

    def report(self, **changes) -> None:
        """Write a report; `changes` replace fields of the Report."""
        count = len(self.base)
        fields = {
            "island": self.name,
            "incarnation": self.incarnation,
            "phase": self.phase,
            "step": self.clock,
            "tokens": self.clock * TOKENS,
            "step_time": 0.01,
            "c_steps": [STEPS] * count,
            "c_tokens": [TOKENS] * count,
            "base": list(self.base),
            "lease": self.reading.position[0],
            "cursor": self.reading.position[1],
            "reserve": self.reading.reserve,
            "step_blocks": STEP_BLOCKS,
        }
        self.mailbox.report.write(self.record(Report(**(fields | changes))).pack())

    def record(self, report: Report, **changes) -> ReportRecord:
        """The report as it travels."""
        fields = {
            "run_id": self.run.run_id,
            "layout_digest": self.run.layout.digest,
            "report": report,
            "loss": 2.5,
            "tokens_per_s": 1000.0,
            "lr_tokens": 0,
        }
        return ReportRecord(**(fields | changes))


def learned(run: SyncerRun, island: str, fragment: int, base: int) -> torch.Tensor:
    """The fragment of `island` after some steps on version `base`."""
    start = run.history[fragment, base][: run.layout.numel(fragment)]
    seed = 1000 * (base % VERSION_GAP) + 10 * fragment + "ab".index(island)
    return start - 0.1 * torch.randn(start.numel(), generator=torch.Generator().manual_seed(seed))


def play(run: SyncerRun, learners, until, seconds: float = 120) -> None:
    """Let the learners step until `until()` holds."""
    deadline = time.monotonic() + seconds
    while not until():
        assert time.monotonic() < deadline, f"it does not come to that; the syncer's log:\n{run.log()}"
        for learner in learners:
            learner.step()
        time.sleep(0.002)


def versions_at_least(learner: PlayedLearner, version: int):
    """A condition for `play`: every fragment has that version, and the learner has adopted it."""
    return lambda: min(learner.base) >= version


def _config(blocks: dict) -> RunConfig:
    exchange = {
        "fragments": 3,
        "period": 3,
        "overlap": 1,
        "quorum": 2,
        "grace": {"safety": 0.0},
        **blocks.pop("exchange", {}),
    }
    syncer = {
        "lease_s": 20.0,
        "checkpoint_every_s": 3600.0,
        "return_within_s": 0.0,
        **blocks.pop("syncer", {}),
    }
    rest = {
        "name": "syncer-test",
        "budget": {"tokens": 10**9},
        "model": {"config_file": "none.yaml"},
        "tokenizer": {"path": "none"},
        "data": {"sources": [{"hub": "none"}], "sequence_length": 8},
        "islands": [{"name": "a"}, {"name": "b"}],
        "deepspeed": {},
    }
    return RunConfig.model_validate({**rest, **blocks, "exchange": exchange, "syncer": syncer})


def _write_run(run: RunDir, run_id: str, config: RunConfig, layout: FragmentLayout, specs) -> None:
    generator = torch.Generator().manual_seed(0)
    run.config.write_text(yaml.safe_dump(config.model_dump(mode="json")))
    run.layout.write_text(layout.to_json())
    run.initial_weights.parent.mkdir()
    save_file(
        {spec.name: torch.randn(spec.shape, generator=generator) for spec in specs}, run.initial_weights
    )
    model = {
        "layout_digest": layout.digest,
        "initial_weights_sha256": file_sha256(run.initial_weights),
    }
    write_json(
        run.manifest,
        {"run_id": run_id, "format": FORMAT, "model": model, "data": {"train_blocks": EPOCH_BLOCKS}},
    )
    run.log("syncer").parent.mkdir()
    run.log("syncer").touch()


def _be_the_syncer(run: RunDir, at: str) -> None:
    """Never returns: a process that is a syncer and nothing of the test."""
    code = 1
    try:
        name, _, count = at.partition(":")
        failpoint._name, failpoint._left = name, int(count or 1)
        output = os.open(run.log("syncer"), os.O_WRONLY | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
        sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
        logging.root.handlers.clear()  # pytest's own
        code = main([str(run.root)])
        sys.stderr.flush()
    except BaseException:
        import traceback

        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(code)


def _wait_for(path: Path) -> None:
    deadline = time.monotonic() + 120
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} does not appear"
        time.sleep(0.002)


def both(run):
    return [PlayedLearner(run, "a"), PlayedLearner(run, "b")]


def events(run, event):
    return [r for r in read_metrics(run.dir.metrics) if r["kind"] == "event" and r["event"] == event]


def tape(run):
    """(kind, value, time) of every record; a header has no time."""
    lines = run.dir.tape.read_bytes().splitlines(keepends=True)
    for record in decode_all(lines, run.run_id, run.layout.digest):
        if isinstance(record, Header):
            yield "Header", record, None
        elif isinstance(record, Entry):
            yield type(record.value).__name__, record.value, record.at


def status(run):
    path = run.dir.status("syncer")
    return json.loads(path.read_text()) if path.exists() else {}


def assert_same_history(history, reference, gap=0):
    compared = 0
    for (fragment, version), payload in history.items():
        expected = reference.get((fragment, version - gap if version >= VERSION_GAP else version))
        if expected is not None:
            assert torch.equal(payload, expected), f"fragment {fragment}, version {version}"
            compared += 1
    assert compared >= 6
