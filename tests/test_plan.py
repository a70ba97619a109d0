"""The plan of a run: worked out by hand, against files of shared memory, and refusals."""

from __future__ import annotations

import json
import os

import pytest
import torch
from tiny_run import tiny_config, tiny_run_file

from diloco_ds.cli import main
from diloco_ds.exchange.mailbox import Mailbox
from diloco_ds.exchange.store import Mark, Store
from diloco_ds.plan import make_plan, moments_of, rank_memory

ADAMW = {"type": "AdamW", "params": {"lr": 1e-3}}


def on_disk(folder):
    return sum(
        os.stat(os.path.join(root, name)).st_size for root, _, names in os.walk(folder) for name in names
    )


def test_the_tiny_run(tmp_path):
    config = tiny_config(tmp_path)
    plan = make_plan(config, tmp_path, step_s=0.5)
    value = plan.to_json()
    numels = value["fragments"]["numels"]
    assert value["parameters"]["travelling"] == sum(numels) == value["parameters"]["total"]
    assert value["fragments"]["count"] == len(numels) == 4
    assert value["fragments"]["embeddings"] == [0]
    assert value["fragments"]["balance"] == pytest.approx(max(numels[1:]) / (sum(numels[1:]) / 3))
    assert value["islands"]["a"]["tokens_per_step"] == 4 * 64
    assert value["global_steps"] == 16_384 / (2 * 4 * 64)
    assert value["wire"]["bytes_per_step"] == 4 * sum(numels) / 4
    assert value["wire"]["needed_gbit"] == pytest.approx(4 * 8 * max(numels) / 0.5 / 1e9)
    assert value["goodput"] is None


def test_shared_memory_is_that_of_the_files(tmp_path):
    overrides = {"hidden_size": 128, "intermediate_size": 512}  # large enough for headers not to matter
    plan = make_plan(tiny_config(tmp_path, model={"overrides": overrides}), tmp_path)

    def fill(store):
        for p in range(plan.layout.fragments):
            theta, buffers = store.begin(p)
            theta.zero_()
            for buffer in buffers.values():
                buffer.zero_()
            store.commit(p, Mark(0, 0, 0, 0), 0)

    Store.create(tmp_path / "store", plan.layout, ["momentum_buffer"], "run", fill)
    assert on_disk(tmp_path / "store") == pytest.approx(plan.syncer.store_bytes, rel=0.05)
    for inbox, expected in ((False, plan.syncer.mailbox_bytes), (True, plan.islands["a"].mailbox_bytes)):
        folder = tmp_path / f"mailbox{inbox}"
        Mailbox.create(folder, plan.layout.numels, inbox=inbox)
        assert on_disk(folder) == pytest.approx(expected, rel=0.05)
    assert plan.shared_memory == plan.syncer.store_bytes + 2 * (
        plan.syncer.mailbox_bytes + plan.islands["a"].mailbox_bytes
    )


@pytest.mark.parametrize(
    ("stage", "ranks", "expected"),
    [(0, 4, 16), (1, 4, 2 + 2 + 12 / 4), (2, 4, 2 + (2 + 12) / 4), (3, 4, 16 / 4)],
)
def test_memory_of_a_rank_is_that_of_the_zero_paper(stage, ranks, expected):
    settings = {"optimizer": ADAMW, "bf16": {"enabled": True}, "zero_optimization": {"stage": stage}}
    assert rank_memory(settings, 1_000_000, ranks).total == expected * 1_000_000


def test_what_is_offloaded_is_not_on_the_device():
    zero = {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
    settings = {"optimizer": ADAMW, "bf16": {"enabled": True}, "zero_optimization": zero}
    memory = rank_memory(settings, 1_000, 1)
    assert memory.offloaded == 14_000
    assert memory.total == 2_000


def test_divided_experts_are_held_once_by_the_ranks_that_share_them():
    divided = {"expert_parallel": {"enabled": True, "autoep_size": 2}, "zero_optimization": {"stage": 1}}
    settings = {"optimizer": ADAMW, "bf16": {"enabled": True}, **divided}
    memory = rank_memory(settings, 1_000, 2, experts=600)
    assert (memory.weights, memory.gradients) == (1_400, 1_400)  # 400 and half of 600, in bf16
    assert (memory.master, memory.moments) == (2_000, 4_000)  # of half of the model, in fp32


def test_fp32_without_zero_has_no_second_copy():
    assert rank_memory({"optimizer": ADAMW}, 1_000, 1).master == 0
    assert rank_memory({"optimizer": ADAMW}, 1_000, 1).total == 16_000


@pytest.mark.parametrize(
    "optimizer",
    [
        {"type": "SGD", "params": {"lr": 0.1}},
        {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}},
        {"type": "Adagrad", "params": {"lr": 0.1}},
        {"type": "AdamW", "params": {"lr": 0.1}},
        {"type": "Adam", "params": {"lr": 0.1}},
    ],
)
def test_moments_are_those_of_torch(optimizer):
    parameter = torch.zeros(7, requires_grad=True)
    real = getattr(torch.optim, optimizer["type"])([parameter], **optimizer["params"])
    parameter.grad = torch.ones(7)
    real.step()
    state = [v for v in real.state[parameter].values() if isinstance(v, torch.Tensor) and v.numel() == 7]
    assert moments_of(optimizer) == len(state)


def test_the_command_line(tmp_path, capsys):
    run_file = tiny_run_file(tmp_path)
    assert main(["plan", str(run_file)]) == 0
    assert "parameters, total" in capsys.readouterr().out
    assert main(["plan", str(run_file), "exchange.period=8", "--chips", "150000", "--json"]) == 0
    value = json.loads(capsys.readouterr().out)
    assert value["fragments"]["period"] == 8
    assert 85 < value["goodput"]["goodput"] < 100


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["exchange.quorum=3"], "must not exceed the number of islands"),
        (["--step-s", "0"], "--step-s: must be a number above 0, not '0'"),
        (["--step-s", "inf"], "--step-s: must be a number above 0, not 'inf'"),
        (["--chips", "-1"], "--chips: must be a whole number of 1 or more, not '-1'"),
        (["--chips", "1"], "1 chips cannot make 2 learners"),
        (["budget.tokens=10"], "is less than one step"),
        (["deepspeed.scheduler={type: WarmupLR}"], "trainer.scheduler"),
    ],
)
def test_bad_input_is_one_line(tmp_path, capsys, arguments, message):
    assert main(["plan", str(tiny_run_file(tmp_path)), *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
