import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from lm_eval.tasks import TaskManager
from tiny_run import MODEL, tiny_text
from transformers import AutoModelForCausalLM, Gemma4TextConfig, PreTrainedModel, PreTrainedTokenizerFast

from diloco_ds.data.tokenizer import train_tokenizer
from diloco_ds.errors import UserError
from diloco_ds.evaluate.tasks import find_tasks, run_tasks

EXAMPLES = {
    "arc_easy_local": 570,
    "arc_challenge_local": 299,
    "boolq_local": 3270,
    "hellaswag_local": 10042,
    "piqa_local": 1838,
    "social_iqa_local": 1954,
    "winogrande_local": 1267,
    "copa_local": 100,
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer(tiny_text(), 320).save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    torch.manual_seed(0)
    fields = {**MODEL["fields"], "max_position_embeddings": 2048}
    config = Gemma4TextConfig(**fields, vocab_size=320, vocab_size_per_layer_input=320)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()


@pytest.mark.slow
def test_local_benchmarks_run_without_a_hub(model, tokenizer, eval_dir):
    rows = run_tasks(model, tokenizer, ["paper_local"], [eval_dir], limit=6, batch_size=4)
    by_task = {(row.task, row.metric): row for row in rows}
    assert {task for task, _ in by_task} == set(EXAMPLES)
    assert ("arc_easy_local", "acc_norm") in by_task
    for row in rows:
        assert row.n == 6
        assert 0 <= row.value <= 1
        assert row.stderr == pytest.approx((row.value * (1 - row.value) / 5) ** 0.5, abs=1e-6)
    assert model.training  # as it was


def test_a_group_counts_all_its_examples(model, tokenizer, eval_dir):
    rows = {row.task: row for row in run_tasks(model, tokenizer, ["minimal_pairs"], [eval_dir], limit=5)}
    assert len(rows) == 9
    members = [row for task, row in rows.items() if task != "minimal_pairs"]
    assert rows["minimal_pairs"].n == sum(row.n for row in members) == 40
    assert rows["minimal_pairs"].value == pytest.approx(sum(row.value for row in members) / 8)


def test_rows_are_all_there_and_prompts_are_the_stock_ones(eval_dir):
    tasks = TaskManager(include_path=[str(eval_dir)], include_defaults=False).load(["paper_local"])["tasks"]
    assert {name: len(task.dataset["validation"]) for name, task in tasks.items()} == EXAMPLES
    arc = tasks["arc_easy_local"]
    doc = arc.dataset["validation"][0]
    assert arc.doc_to_text(doc) == f"Question: {doc['question']}\nAnswer:"
    assert arc.doc_to_choice(doc)[arc.doc_to_target(doc)] == "cellular telephone"
    boolq = tasks["boolq_local"]
    doc = boolq.dataset["validation"][0]
    assert boolq.doc_to_choice(doc)[boolq.doc_to_target(doc)] == ("yes" if doc["answer"] else "no")


@pytest.mark.parametrize("task", ["copa_local", "minimal_pairs_is_are"])
def test_every_text_begins_with_exactly_one_bos(model, tokenizer, eval_dir, task, monkeypatch):
    seen = []
    forward = type(model).forward

    def recorded(self, input_ids=None, **kwargs):
        seen.extend(input_ids.tolist())
        return forward(self, input_ids, **kwargs)

    monkeypatch.setattr(type(model), "forward", recorded)
    run_tasks(model, tokenizer, [task], [eval_dir], limit=3, batch_size=1)
    assert len(seen) == 6
    for ids in seen:
        assert ids[0] == 2
        assert 2 not in ids[1:]


def test_a_tokenizer_that_puts_no_bos_is_respected_and_said_for_gemma(
    tmp_path, tokenizer, model, eval_dir, caplog
):
    plain = PreTrainedTokenizerFast.from_pretrained(tokenizer)
    plain.backend_tokenizer.post_processor = None
    plain.save_pretrained(tmp_path)
    run_tasks(model, tmp_path, ["copa_local"], [eval_dir], limit=1)
    assert "puts no BOS before a text" in caplog.text


def test_what_cannot_be_run_is_one_line(model, tokenizer, eval_dir, tmp_path):
    with pytest.raises(UserError, match="there is no directory"):
        find_tasks(["copa_local"], [tmp_path / "missing"])
    (tmp_path / "gone.yaml").write_text(
        "task: gone\nclass: !function diloco_ds.evaluate.offline_task.OfflineTask\n"
        "stock: arc/arc_easy.yaml\npackage: not_installed_at_all\nrows: x\n"
    )
    with pytest.raises(UserError, match="package 'not_installed_at_all', which is not installed"):
        run_tasks(model, tokenizer, ["gone"], [tmp_path])
    with pytest.raises(UserError, match="Duplicate task"):
        run_tasks(model, tokenizer, ["minimal_pairs", "minimal_pairs_a_an"], [eval_dir])


@pytest.mark.slow
def test_stock_tasks_are_found_and_unknown_ones_named_with_their_nearest(model, tokenizer, eval_dir):
    for tasks, says in (
        (["copa_locl"], r"no task 'copa_locl' .*did you mean 'copa_local'"),
        (["copa_local", "hellaswgg"], r"no task 'hellaswgg' .*did you mean 'hellaswag'"),
        (["arc_easy"], r"'arc_easy' cannot be run: .*allenai/ai2_arc"),  # its data is on the hub
    ):
        with pytest.raises(UserError, match=says) as error:
            run_tasks(model, tokenizer, tasks, [eval_dir])
        assert "\n" not in str(error.value)


@pytest.mark.slow
def test_the_tasks_work_in_lm_evals_own_command(eval_dir):
    command = [
        sys.executable,
        "-m",
        "lm_eval",
        "--model",
        "dummy",
        "--tasks",
        "copa_local,minimal_pairs_a_an",
    ]
    done = subprocess.run(
        [*command, "--include_path", str(eval_dir), "--limit", "4"],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert "copa_local" in done.stdout
    assert "minimal_pairs_a_an" in done.stdout
