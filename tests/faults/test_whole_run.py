"""A run from `diloco-ds train` to its end: everything the user was promised is there, and it is right."""

import json
import math
from pathlib import Path

import pytest
import torch
from live_run import live_run
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from diloco_ds.conductor.closing import newest_checkpoint
from diloco_ds.model.initial import load_initial
from diloco_ds.observe.metrics import read_metrics

REPOSITORY = Path(__file__).parents[2]
BUDGET = 80_000

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run that has ended, its exit code, and what it printed."""
    directory = tmp_path_factory.mktemp("whole")
    evaluation = {
        "every_tokens": BUDGET // 3,
        "tasks": ["minimal_pairs_is_are"],
        "task_dirs": [str(REPOSITORY / "eval")],
        "limit": 20,
    }
    settings = {
        "budget": {"tokens": BUDGET},
        "deepspeed": {"gradient_accumulation_steps": 4},
        "evaluation": evaluation,
        "observe": {"wandb": {"mode": "offline"}},
        "trainer": {"warmup_tokens": 2048, "least_step_s": 0.2},  # no island is done before the other starts
    }
    with live_run(directory, **settings) as run:
        run.train()
        code = run.end(within_s=600)
        yield run, code


def test_it_ends_well_and_leaves_nothing_behind(finished):
    run, code = finished
    assert code == 0, run.story()
    run.assert_nothing_left()
    status = run.status()
    assert (status.state, status.conductor_pid) == ("finished", None)
    assert status.tokens >= 0.95 * BUDGET
    assert not list(run.dir.snapshots.iterdir())


def test_the_run_directory_holds_what_the_user_was_promised(finished):
    run, _ = finished
    root = run.dir.root
    for name in (
        "manifest.json",
        "config.yaml",
        "layout.json",
        "metrics.jsonl",
        "report.html",
        "hf/config.json",
        "hf/tokenizer.json",
        "checkpoints/syncer",
        "checkpoints/islands/a",
        "checkpoints/islands/b",
    ):
        assert (root / name).exists(), name
    assert list((root / "wandb").glob("offline-run-*"))
    assert "<svg" in run.dir.report.read_text() or "data:image/png" in run.dir.report.read_text()


def test_the_last_lines_say_where_everything_lies(finished):
    run, _ = finished
    last = (run.work / "terminal.txt").read_text().split("\nfinished\n")[-1]
    for place in ("runs/tiny/hf", "runs/tiny/report.html", "runs/tiny/metrics.jsonl", "runs/tiny/wandb"):
        assert place in last
    assert "minimal_pairs_is_are" in last


def test_the_export_gives_the_logits_of_the_global_weights(finished):
    run, _ = finished
    weights = newest_checkpoint(run.dir) / "theta.safetensors"
    exported = AutoModelForCausalLM.from_pretrained(run.dir.export).eval()
    ours = load_initial(run.dir.model_config, weights).eval()
    tokens = AutoTokenizer.from_pretrained(run.dir.export)(
        "The farmers are in the field.", return_tensors="pt"
    )
    with torch.no_grad():
        assert torch.equal(exported(**tokens).logits, ours(**tokens).logits)
    initial = load_file(run.dir.initial_weights)
    assert any(not torch.equal(initial[name], tensor) for name, tensor in load_file(weights).items())


def test_the_heldout_loss_of_the_global_weights_falls(finished):
    run, _ = finished
    evaluations = run.records("eval")
    assert len(evaluations) >= 2
    untrained = math.log(320)  # a guess among all entries of the vocabulary
    assert evaluations[-1]["loss"] < min(evaluations[0]["loss"], untrained - 1.5)
    assert evaluations[-1]["bits_per_byte"] < evaluations[-1]["loss"] / math.log(2)
    score = evaluations[-1]["tasks"]["minimal_pairs_is_are"]
    assert score["n"] == 20
    assert 0 < score["stderr"] < 0.2


def test_the_metrics_keep_their_schema(finished):
    run, _ = finished
    records = read_metrics(run.dir.metrics)
    assert {record["kind"] for record in records} == {"step", "merge", "eval", "event"}
    steps = [record for record in records if record["kind"] == "step"]
    for name in "ab":
        clocks = [record["step"] for record in steps if record["island"] == name]
        assert clocks == sorted(clocks)
        assert len(clocks) > 5
    for record in steps:
        assert {"time", "island", "step", "tokens", "loss", "lr", "buckets", "step_s"} <= set(record)
        assert sum(record["buckets"].values()) == pytest.approx(record["step_s"], rel=0.02, abs=1e-3)
    for record in (record for record in records if record["kind"] == "merge"):
        assert sum(part["weight"] for part in record["parts"]) == pytest.approx(1.0)
    manifest = json.loads(run.dir.manifest.read_text())
    assert manifest["run_id"] == run.status().run_id


def test_a_finished_run_is_not_gone_on_with(finished):
    run, _ = finished
    done = run.command("train", "--resume", str(run.dir.root))
    assert done.returncode == 0
    assert done.stdout == "runs/tiny is finished: there is nothing to go on with\n"


def test_the_commands_work_on_it(finished):
    run, _ = finished
    status = json.loads(run.command("status", str(run.dir.root), "--json").stdout)
    assert {"run_id", "state", "global_step", "tokens", "target_tokens", "syncer", "islands"} <= set(status)
    assert {"generation", "state", "pids", "merges"} <= set(status["syncer"])
    assert {"ranks", "launcher", "supervisor", "agent", "proxy"} == set(status["islands"][0]["pids"])
    assert run.command("export", str(run.dir.root), str(run.work / "out")).stdout == f"{run.work / 'out'}\n"
    assert (run.work / "out" / "model.safetensors").exists()
    again = run.command("export", str(run.dir.root), str(run.work / "out"))
    assert (again.returncode, again.stderr.count("\n")) == (2, 1)
    half = run.work / "half"
    exported = json.loads(
        run.command("export", str(run.dir.root), str(half), "--dtype", "float16", "--json").stdout
    )
    assert {key: exported[key] for key in ("out", "dtype", "tokens")} == {
        "out": str(half),
        "dtype": "float16",
        "tokens": status["tokens"],
    }
    assert run.command("report", str(run.dir.root)).returncode == 0
    assert "bits per byte" in run.command("eval", str(run.dir.root), "--tasks", "").stdout
    stopped = run.command("stop", str(run.dir.root))
    assert (stopped.returncode, stopped.stdout) == (0, "runs/tiny: nothing of it is running\n")


def test_the_plan_was_right(finished):
    """Bytes on the wire, fragment by fragment; and the optimizer's memory, which is in its checkpoint.

    Of versions that follow one another while an island starts, only the newest is sent.
    """
    run, _ = finished
    plan = json.loads(run.command("plan", str(run.run_file), "--json").stdout)
    per_step, period = plan["wire"]["bytes_per_step"], plan["fragments"]["period"]
    merges = json.loads(run.dir.status("syncer").read_text())["merges"]
    for name in "ab":
        proxy = json.loads(run.dir.status(f"proxy.{name}").read_text())
        assert period <= proxy["fragments_sent"] <= period + merges
        assert proxy["bytes_sent"] == pytest.approx(per_step * proxy["fragments_sent"], rel=0.05)
        assert proxy["bytes_received"] == pytest.approx(per_step * proxy["fragments_received"], rel=0.05)
        memory = plan["islands"][name]["rank_memory"]
        newest = max(run.dir.island_checkpoints(name).glob("*/island.json")).parent
        tensors = ("master", "exp_avg", "exp_avg_sq")
        held = sum((newest / f"{each}.safetensors").stat().st_size for each in tensors)
        assert held == pytest.approx(memory["master"] + memory["moments"], rel=0.05)
        assert held == pytest.approx(plan["islands"][name]["checkpoint_bytes"], rel=0.05)  # of its one rank


def test_its_tape_replays(finished):
    run, _ = finished
    verdict = json.loads(run.command("replay", str(run.dir.root), "--json").stdout)
    merges = run.records("merge")
    assert verdict["identical"] is True
    assert verdict["merges"] == len(merges)
    last = run.command("replay", str(run.dir.root), "--explain", str(merges[-1]["round"]))
    assert all(f"in it: {part['island']} with" in last.stdout for part in merges[-1]["parts"])
