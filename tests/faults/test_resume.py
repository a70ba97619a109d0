"""Stop and go on: momentum to the bit, learning rate without a break, whatever ended the run before and whatever shape
its islands have now.
"""

import json
import re
import signal
import time

import pytest
import torch
import yaml
from live_run import kill, live_run
from safetensors import safe_open

from diloco_ds.conductor.closing import newest_checkpoint
from diloco_ds.core.fragments import FragmentLayout
from diloco_ds.core.outer import OuterOptimizer
from diloco_ds.core.schedule import token_schedule
from diloco_ds.exchange.store import Store
from diloco_ds.rundir import SharedMemory

pytestmark = pytest.mark.slow

BUDGET, WARMUP = 400_000, 200_000


@pytest.fixture
def run(tmp_path):
    settings = {
        "budget": {"tokens": BUDGET},
        "deepspeed": {"gradient_accumulation_steps": 4},
        "trainer": {"warmup_tokens": WARMUP, "least_step_s": 0.25},
        "syncer": {"checkpoint_every_s": 3.0, "keep_checkpoints": 10},  # none goes while it is compared
    }
    with live_run(tmp_path, **settings) as run:
        yield run


def open_store(run) -> Store:
    """The store, before anything is merged into it."""
    layout = FragmentLayout.from_json(run.dir.layout.read_text())
    buffers = OuterOptimizer(run.config.exchange.outer).buffers
    return Store.open(SharedMemory(run.run_id()).store, layout, buffers, run.run_id())


def assert_store_equals(run, checkpoint) -> None:
    """Weights and outer momentum, to the bit."""
    store = open_store(run)
    with (
        safe_open(checkpoint / "theta.safetensors", "pt") as theta,
        safe_open(checkpoint / "outer.safetensors", "pt") as outer,
    ):
        for fragment in range(store.layout.fragments):
            flat = store.theta(fragment)
            for placed in store.layout.tensors_of(fragment):
                values = flat[placed.offset : placed.offset + placed.spec.numel]
                assert torch.equal(values, theta.get_tensor(placed.spec.name).flatten())
            for name, buffer in store.outer(fragment).items():
                saved = outer.get_tensor(f"{fragment}.{name}")
                assert torch.equal(buffer, saved)
                assert saved.any(), "momentum that is zero would prove nothing"


def assert_learning_rate_has_no_break(run) -> None:
    """It rises once, over the warm-up, and falls once, over all incarnations; never faster than its schedule."""
    schedule = token_schedule("cosine", {}, WARMUP, BUDGET, 3e-3, "test")
    highest = max(record["lr"] for name in "ab" for record in run.steps(name))  # one may be down just then
    assert highest == pytest.approx(3e-3, rel=0.05)
    for name in "ab":
        rates = [record["lr"] for record in run.steps(name)]
        peak = rates.index(max(rates))
        assert rates[: peak + 1] == sorted(rates[: peak + 1])
        assert rates[peak:] == sorted(rates[peak:], reverse=True)
        assert rates[-1] == pytest.approx(3e-3 * schedule(BUDGET), abs=1e-4)
        assert {record["incarnation"] for record in run.steps(name)} >= {1, 2, 3, 4}


def go_on_in_another_shape(run) -> None:
    """Island a with two ranks, b at ZeRO stage 3, and a new island c."""
    root, written, stopped = str(run.dir.root), run.dir.config.read_bytes(), run.status().tokens
    assert "joins when the run goes on" in run.command("join", root, "--island", "c").stdout
    before = len(run.records("event", event="started"))
    run.train("--resume", root, "islands.a.ranks=2", "islands.b.deepspeed.zero_optimization.stage=3")
    run.until_merged_again("a", "b", "c")
    started = {
        record["island"]: record
        for record in run.records("event", event="started")[before:]
        if record.get("role") == "learner"
    }
    shape = "written by ranks 1, expert_parallel 1, zero_stage 1, precision bfloat16"
    for island in "ab":
        assert started[island]["reason"].startswith("weights and optimizer moments of its checkpoint")
        assert started[island]["reason"].endswith(shape)
    assert started["a"]["ranks"] == 2
    assert "there is no own checkpoint" in started["c"]["reason"]
    assert run.status().tokens > stopped
    assert run.dir.config.read_bytes() == written
    changes = yaml.safe_load((run.dir.changes / "0001.yaml").read_text())
    assert changes["settings"] == ["islands.a.ranks=2", "islands.b.deepspeed.zero_optimization.stage=3"]
    (told,) = run.records("event", event="settings_changed")
    assert "islands.a.ranks: 1 -> 2" in told["reason"]


def test_stopped_killed_and_finished(run):
    run.train()
    run.until_merged_again("a", "b", since=0.0)
    merged_fragments = lambda: {record["fragment"] for record in run.records("merge")}  # noqa: E731
    run.until(lambda: merged_fragments() == {0, 1, 2, 3}, "every fragment has its momentum")

    since = time.monotonic()
    run.press_ctrl_c()
    assert run.end(within_s=40) == 130
    assert time.monotonic() - since < 30
    run.assert_nothing_left()
    assert run.status().state == "stopped"
    assert "go on with: diloco-ds train --resume runs/tiny" in (run.work / "terminal.txt").read_text()
    stopped = newest_checkpoint(run.dir)
    merged = json.loads((stopped / "state.json").read_text())["tokens"]
    assert merged > 0
    clocks = {name: run.steps(name)[-1] for name in "ab"}

    run.resume()
    run.until(lambda: SharedMemory(run.run_id()).store.exists(), "the syncer has its store")
    assert_store_equals(run, stopped)
    run.until_merged_again("a", "b")
    for name in "ab":
        again = lambda name=name: [each for each in run.steps(name) if each["incarnation"] == 2]  # noqa: E731
        first = run.until(again, f"{name}'s first step is on record")[0]
        assert first["step"] > clocks[name]["step"]
        assert first["tokens"] > clocks[name]["tokens"]
    run.until(lambda: run.status().tokens > merged, "more is merged")
    alive = run.command("train", "--resume", str(run.dir.root), "islands.a.ranks=2")
    assert alive.returncode == 2
    assert "settings change while it is stopped" in alive.stderr

    kill(run.conductor.pid)
    run.conductor.wait()
    run.conductor = None
    done = run.command("stop", str(run.dir.root))
    assert (done.returncode, done.stdout) == (0, "runs/tiny: stopped\n")
    run.assert_nothing_left()
    second = newest_checkpoint(run.dir)
    assert json.loads((second / "state.json").read_text())["tokens"] > merged

    go_on_in_another_shape(run)
    everything = [*run.processes(), run.conductor]
    for process in everything:
        process.send_signal(signal.SIGSTOP)  # all of them in one moment, as when a host dies
    for process in everything:
        kill(process.pid)
    run.conductor.wait()
    run.conductor = None
    run.until(lambda: run.status().state == "dead", "everything is dead")
    before = run.status().tokens
    hint = run.command("stop", str(run.dir.root))
    assert "goes on from it" in hint.stdout

    run.resume()
    run.until_merged_again("a", "b")
    assert run.status().tokens >= before
    assert re.search(r"starts from the store in shared memory", run.dir.log("syncer").read_text())
    assert run.end(within_s=600) == 0, run.story()
    run.assert_nothing_left()
    assert run.status().state == "finished"
    assert run.dir.export.exists()
    assert_learning_rate_has_no_break(run)
