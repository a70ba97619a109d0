import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file
from tiny_run import tiny_config

from diloco_ds.cli import main
from diloco_ds.config_file import save_config
from diloco_ds.data.prepare import prepare
from diloco_ds.errors import UserError
from diloco_ds.evaluate.evaluation import evaluate_model
from diloco_ds.evaluate.heldout import heldout_loss
from diloco_ds.evaluate.tasks import Row
from diloco_ds.model.build import build_config
from diloco_ds.model.export import export
from diloco_ds.model.initial import initial_model, load_initial, write_initial_weights
from diloco_ds.observe.manifest import write_manifest
from diloco_ds.observe.metrics import read_metrics
from diloco_ds.rundir import RunDir


@pytest.fixture
def run(tmp_path: Path, eval_dir: Path) -> RunDir:
    """A run directory as the conductor makes it, with a snapshot of other weights than the initial ones."""
    settings = {"tasks": ["copa_local"], "task_dirs": [str(eval_dir)], "limit": 4, "heldout_tokens": 640}
    config = tiny_config(tmp_path, evaluation=settings)
    prepared = prepare(config, tmp_path, Console(quiet=True))
    hf_config = build_config(config.model, prepared.vocab_size, prepared.special_tokens)
    model = initial_model(config.model, hf_config, 1, tmp_path / "scratch")
    run = RunDir(tmp_path / "run")
    run.root.mkdir()
    save_config(config, run.config)
    shutil.copytree(prepared.tokenizer, run.tokenizer)
    write_manifest(
        run.root,
        config,
        argv=[],
        data=prepared.as_dict(),
        initial_weights_sha256=write_initial_weights(model, run.model_config),
        layout_digest="",
        parameters=1,
    )
    snapshot = run.snapshots / "4096"
    snapshot.mkdir(parents=True)
    weights = {name: tensor * 1.25 for name, tensor in load_file(run.initial_weights).items()}
    save_file(weights, snapshot / "theta.safetensors")
    (snapshot / "state.json").write_text(json.dumps({"tokens": 4096, "global_step": 17, "more": "ignored"}))
    return run


def evaluator(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "diloco_ds.evaluate.evaluator", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "COLUMNS": "200"},
    )


def expected(run: RunDir, weights: Path) -> dict:
    from diloco_ds.evaluate.evaluation import prepared_of

    heldout = prepared_of(run).open_heldout()
    assert heldout is not None
    return heldout_loss(load_initial(run.model_config, weights), heldout, 8, 640, "cpu")


@pytest.mark.slow
def test_the_process_evaluates_a_snapshot_and_records_it(run):
    done = evaluator(run.root, run.snapshots / "4096", "--tasks")
    assert done.returncode == 0, done.stderr
    wanted = expected(run, run.snapshots / "4096" / "theta.safetensors")
    assert wanted["loss"] != pytest.approx(expected(run, run.initial_weights)["loss"], rel=1e-3)

    result = json.loads((run.evaluations / "4096.json").read_text())
    assert (result["tokens"], result["global_step"]) == (4096, 17)
    assert result["heldout"] == pytest.approx(wanted, rel=1e-5)
    (task,) = result["tasks"]
    assert (task["task"], task["metric"], task["n"]) == ("copa_local", "acc", 4)

    (record,) = read_metrics(run.metrics)
    assert record["kind"] == "eval"
    assert (record["tokens"], record["global_step"], record["n"]) == (4096, 17, wanted["tokens"])
    assert record["loss"] == pytest.approx(wanted["loss"], rel=1e-5)
    assert record["bits_per_byte"] == pytest.approx(wanted["bits_per_byte"], rel=1e-5)
    assert record["tasks"]["copa_local"] == {key: task[key] for key in ("metric", "value", "stderr", "n")}
    assert "bits per byte" in done.stdout
    assert "copa_local" in done.stdout

    broken = run.snapshots / "5000"
    broken.mkdir()
    failed = evaluator(run.root, broken)
    assert failed.returncode == 2
    assert failed.stderr.strip().splitlines()[-1] == f"{broken} is no snapshot: it holds no state.json"
    assert len(read_metrics(run.metrics)) == 1


@pytest.mark.slow
def test_a_run_is_evaluated_at_its_newest_weights(run, capsys):
    with pytest.raises(UserError, match="no global weights yet"):
        evaluate_model(str(run.root), tasks=[])
    for number, factor in ((9, 1.5), (10, 0.5)):
        checkpoint = run.syncer_checkpoints / f"{number:06}"
        checkpoint.mkdir(parents=True)
        weights = {name: tensor * factor for name, tensor in load_file(run.initial_weights).items()}
        save_file(weights, checkpoint / "theta.safetensors")
    newest = run.syncer_checkpoints / "000010" / "theta.safetensors"
    result = evaluate_model(str(run.root), tasks=[], device="cpu")
    assert result.heldout == pytest.approx(expected(run, newest), rel=1e-6)

    export(run.snapshots / "4096" / "theta.safetensors", run.model_config, run.tokenizer, run.export)
    result = evaluate_model(str(run.root), device="cpu")
    assert result.heldout == pytest.approx(
        expected(run, run.snapshots / "4096" / "theta.safetensors"), rel=1e-5
    )
    assert [row.task for row in result.rows()] == ["held-out text", "held-out text", "copa_local"]
    assert all(isinstance(row, Row) for row in result.rows())

    # The export is a Hugging Face model with its tokenizer: it can be evaluated without the run.
    arguments = ["eval", str(run.export), "--tasks", "copa_local", "--task-dir", *_dirs(run), "--limit", "4"]
    capsys.readouterr()
    assert main([*arguments, "--json"]) == 0
    alone = json.loads(capsys.readouterr().out)
    assert alone["heldout"] is None
    assert alone["tasks"][0]["value"] == result.rows()[2].value
    assert main(arguments) == 0
    assert "standard error" in capsys.readouterr().out


def _dirs(run: RunDir) -> list[str]:
    from diloco_ds.config_file import load_config

    return load_config(run.config).evaluation.task_dirs


def test_what_cannot_be_evaluated_is_one_line(run, tmp_path):
    for target, tasks, says in (
        (tmp_path, [], "is a model, not a run"),
        (tmp_path, ["copa_local"], "is neither a run directory nor a causal Hugging Face model"),
    ):
        with pytest.raises(UserError, match=says) as error:
            evaluate_model(str(target), tasks=tasks, task_dirs=_dirs(run))
        assert "\n" not in str(error.value)
    shutil.rmtree(tmp_path / "cache")
    export(run.snapshots / "4096" / "theta.safetensors", run.model_config, run.tokenizer, run.export)
    with pytest.raises(UserError, match="prepared data is no longer at"):
        evaluate_model(str(run.root), tasks=[])


@pytest.mark.parametrize("device", ["tpu", "cuda:99", "meta", "cpu:x"])
def test_a_device_that_is_not_there_is_one_line(tmp_path, monkeypatch, capsys, device):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert main(["eval", str(tmp_path), "--device", device]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.endswith(
        f"--device: there is no '{device}' on this host; there is cpu, cuda, cuda:0, cuda:1"
    )


def test_an_evaluation_in_half_precision_is_close(run):
    from diloco_ds.evaluate.evaluation import prepared_of

    heldout = prepared_of(run).open_heldout()
    model = load_initial(run.model_config)
    exact = heldout_loss(model, heldout, 8, 640, "cpu")["loss"]
    assert heldout_loss(model.to(torch.bfloat16), heldout, 8, 640, "cpu")["loss"] == pytest.approx(
        exact, rel=2e-2
    )
