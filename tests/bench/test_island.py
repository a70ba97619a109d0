"""The island's benchmark: the three loops really train by turns, and its arithmetic."""

import json
import tempfile

import psutil
import pytest
import torch
from tiny_run import tiny_config, tiny_run_file
from torch import nn

from diloco_ds.bench.contestant import Turn
from diloco_ds.bench.island import LOOPS, Measured, bench_config
from diloco_ds.bench.island_table import numbers
from diloco_ds.bench.plain_loop import PlainTrainer
from diloco_ds.bench.plain_settings import PlainSettings
from diloco_ds.cli import main
from diloco_ds.core.fragments import TensorSpec, balance

pytestmark = pytest.mark.usefixtures("same_signals")

ADAMW = {"type": "AdamW", "params": {"lr": 1e-2, "betas": [0.9, 0.95], "torch_adam": True}}


@pytest.mark.slow
def test_three_loops_train_by_turns_and_nothing_is_left(tmp_path, capsys, monkeypatch):
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    run_file = tiny_run_file(tmp_path)
    assert main(["bench", "island", str(run_file), "--turns", "1", "--steps", "5", "--json"]) == 0
    value = json.loads(capsys.readouterr().out)
    assert set(value["loops"]) == {"plain", "alone", "exchange"}
    for loop in value["loops"].values():
        assert loop["steps"] >= 5
        assert loop["tokens_per_s"]["median"] > 0
        assert sum(loop["buckets"].values()) == pytest.approx(loop["step_s"])
    assert value["run"]["step_tokens"] == 4 * 64
    alone, exchange = value["loops"]["alone"], value["loops"]["exchange"]
    assert alone["fragments_per_step"] == {"answered": 0, "adopted": 0}
    assert min(exchange["fragments_per_step"].values()) > 0
    assert 0 < value["exchange_share"] < 1
    assert not list(temporary.iterdir())
    ours = [each for each in psutil.Process().children(recursive=True) if each.status() != "zombie"]
    assert not [each for each in ours if "diloco_ds" in " ".join(each.cmdline())]


def turn(step_s, **fields):
    buckets = {
        "data": 0.0,
        "forward": step_s,
        "backward": 0.0,
        "optimizer": 0.0,
        "exchange": 0.0,
        "other": 0.0,
    }
    return Turn(
        [
            {
                "step_s": step_s,
                "step_tokens": 100,
                "buckets": {**buckets, **fields.pop("buckets", {})},
                **fields,
            }
        ]
        * 2
    )


def test_ratios_are_taken_between_turns_that_stood_side_by_side(tmp_path):
    boundary = {
        "exchange_parts": {"adopt": 0.02},
        "answered": [1],
        "adopted": [1, 2],
        "buckets": {"exchange": 0.02},
    }
    turns = {
        "plain": [turn(1.0), turn(2.0), turn(4.0)],
        "alone": [turn(2.0, **boundary), turn(4.0, **boundary), turn(4.0, **boundary)],
        "exchange": [turn(2.0, **boundary), turn(4.0, **boundary), turn(8.0, **boundary)],
    }
    config = tiny_config(tmp_path)
    layout = balance([TensorSpec("w", (4, 2), False)], 1, 1)
    value = numbers(Measured(bench_config(config, config.islands[0]), "CPU", layout, turns))
    assert value["ratios"]["alone/plain"] == {"median": 0.5, "lowest": 0.5, "highest": 1.0}
    assert value["ratios"]["exchange/alone"] == {"median": 1.0, "lowest": 0.5, "highest": 1.0}
    assert value["loops"]["plain"]["tokens_per_s"] == {"median": 50.0, "lowest": 25.0, "highest": 100.0}
    assert "exchange_parts" not in value["loops"]["plain"]
    assert value["loops"]["exchange"]["exchange_parts"]["adopt"] == pytest.approx(0.02)
    assert value["loops"]["exchange"]["fragments_per_step"] == {"answered": 1, "adopted": 2}
    assert value["exchange_share"] == pytest.approx(0.02 / (14 / 3))


def test_the_loops_differ_in_nothing_but_their_names(tmp_path):
    config = tiny_config(tmp_path, exchange={"quorum": 2})
    loops = bench_config(config, config.islands[1]).islands
    assert [loop.name for loop in loops] == list(LOOPS)
    assert len({loop.model_copy(update={"name": "x"}).model_dump_json() for loop in loops}) == 1


class Line(nn.Module):
    """A model whose forward pass is its loss, as LossModel."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 5))

    def forward(self, batch):
        return ((batch * self.weight).sum(dim=1) - 1).square().mean()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_plain_step_is_that_of_a_loop_over_the_whole_batch(precision):
    deepspeed = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.1,
        "optimizer": ADAMW,
        "bf16": {"enabled": precision == "bf16"},
    }
    trainer = PlainTrainer(Line(), PlainSettings.of(deepspeed, 1), torch.device("cpu"), compiled=False)
    plain, batch = Line(), torch.arange(20.0).view(4, 5)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, betas=(0.9, 0.95))
    for _ in range(3):
        loss = plain(batch)
        loss.backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        trainer.step(batch.to(torch.bfloat16) if precision == "bf16" else batch)
        (result,) = trainer.timer.finished()
        assert result.loss == pytest.approx(loss.item(), rel=0.1 if precision == "bf16" else 1e-5)
    (master,) = trainer._masters
    assert master.dtype == torch.float32
    assert torch.allclose(master, plain.weight, atol=2e-3 if precision == "bf16" else 1e-6)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"train_micro_batch_size_per_gpu": 3}, (3, 1)),
        ({"train_batch_size": 24, "gradient_accumulation_steps": 3}, (4, 3)),
        ({"train_batch_size": 24, "train_micro_batch_size_per_gpu": 3}, (3, 4)),
        ({"train_batch_size": 24}, (12, 1)),
    ],
)
def test_any_two_of_the_batch_sizes_give_the_third(given, expected):
    settings = PlainSettings.of({**given, "optimizer": ADAMW}, ranks=2)
    assert (settings.micro_batch, settings.grad_accumulation) == expected


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--turns", "0"], "--turns: must be a whole number of 1 or more, not '0'"),
        (["--island", "c"], "the run has no island 'c'; it has a, b"),
        (["deepspeed.optimizer.type=Adagrad"], "compared with AdamW alone"),
        (
            ["deepspeed.bf16=null", "deepspeed.fp16={enabled: true}"],
            "in fp32 or bf16, not with deepspeed.fp16",
        ),
    ],
)
def test_what_cannot_be_measured_is_refused_at_once(arguments, says, tmp_path, capsys):
    assert main(["bench", "island", str(tiny_run_file(tmp_path)), *arguments]) == 2
    assert says in capsys.readouterr().err
