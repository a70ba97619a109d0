"""What is refused before a run: too little of the machine, or things that do not fit together."""

import os
import socket
import sys
from pathlib import Path

import pytest
from tiny_run import tiny_config

from diloco_ds.conductor import preflight
from diloco_ds.errors import UserError
from diloco_ds.island import launch


@pytest.fixture
def config(tmp_path):
    return tiny_config(tmp_path)


def refusal(check, *arguments, **named) -> str:
    with pytest.raises(UserError) as caught:
        check(*arguments, **named)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_a_sound_run_passes_without_warnings_where_cores_suffice(config, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(2)))
    assert preflight.check_host(config, islands=True) == []


def test_more_ranks_than_cores_is_a_warning(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2})
    warnings = preflight.check_host(tiny_config(tmp_path, ranks=2), islands=True)
    assert warnings == ["4 ranks on the CPU share 3 cores: they train, but slow each other down"]


def test_more_ranks_than_gpus_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(launch, "_visible", lambda listed, island: [0, 1, 2])
    message = refusal(preflight.check_host, tiny_config(tmp_path, ranks=2), islands=True)
    assert "islands.b: 2 ranks from GPU 2 on, but only 3 GPUs are visible" in message


def test_no_mpirun(config, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    assert "no mpirun" in refusal(preflight.check_host, config, islands=True)


def test_no_shared_memory(config, monkeypatch, tmp_path):
    monkeypatch.setattr(preflight, "SHARED", tmp_path / "shm")
    assert "shared memory is needed" in refusal(preflight.check_host, config, islands=True)


def test_a_port_in_use_and_a_port_twice(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        one = tiny_config(tmp_path, islands=1).model_dump()
        one["islands"][0]["master_port"] = port
        busy = tiny_config(tmp_path).model_validate(one)
        assert f"islands.a.master_port: {port} is in use" in refusal(preflight.check_ports, busy)
    two = tiny_config(tmp_path).model_dump()
    for island in two["islands"]:
        island["master_port"] = port
    both = tiny_config(tmp_path).model_validate(two)
    assert f"{port} is the port of island 'a' already" in refusal(preflight.check_ports, both)


def test_a_run_directory_must_be_new_or_empty(tmp_path):
    preflight.check_run_dir(tmp_path / "new")
    (tmp_path / "empty").mkdir()
    preflight.check_run_dir(tmp_path / "empty")
    used = tmp_path / "used"
    used.mkdir()
    (used / "notes.txt").write_text("mine")
    assert refusal(preflight.check_run_dir, used).endswith("is not empty; name another directory")
    (used / "manifest.json").write_text("{}")
    assert f"diloco-ds train --resume {used}" in refusal(preflight.check_run_dir, used)
    assert "is a file" in refusal(preflight.check_run_dir, used / "notes.txt")
    below = refusal(preflight.check_run_dir, used / "notes.txt" / "runs" / "big")
    assert below.endswith(f"{used / 'notes.txt'} is no directory; name another directory")


def test_shared_memory_must_hold_the_store_and_every_mailbox(config, monkeypatch):
    layout = preflight.planned_layout(config, Path.cwd())
    preflight.check_shared_memory(config, layout, islands=True)
    weights = 4 * sum(layout.numels)
    needed = sum(preflight._shared_sizes(config, layout, True))
    # Two slots of weights and momentum; two outboxes and an inbox of two slots for each of two islands, and beside each
    # of these two slots of a portion of two moments.
    portion = 2 / layout.fragments
    assert needed == pytest.approx((2 * 2 + 2 * 3 * 2 * (1 + portion)) * weights, rel=0.25)
    monkeypatch.setattr(
        os, "statvfs", lambda _: os.statvfs_result((4096, 4096, 10, 2, 2, 10, 10, 10, 0, 255))
    )
    message = refusal(preflight.check_shared_memory, config, layout, islands=True)
    assert "of shared memory are needed" in message


def test_wandb_online_needs_a_login(tmp_path, monkeypatch):
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("WANDB_MODE", "offline")
    config = tiny_config(tmp_path, observe={"wandb": {"mode": "online"}})
    assert "nobody is logged in" in refusal(preflight.check_wandb, config)


@pytest.mark.parametrize(
    ("size", "ranks", "experts", "message"),
    [
        (2, 3, 4, "2 does not divide the island's 3 ranks"),
        (3, 3, 4, "3 does not divide the 4 experts of model.layers.0.experts"),
        (2, 2, None, "Gemma4ForCausalLM has no experts in tensors [experts, ...]: leave expert_parallel out"),
    ],
)
def test_experts_that_cannot_be_divided_are_refused(tmp_path, size, ranks, experts, message):
    fields = {
        "enable_moe_block": True,
        "num_experts": experts,
        "top_k_experts": 2,
        "moe_intermediate_size": 8,
    }
    island = {
        "name": "b",
        "ranks": ranks,
        "deepspeed": {"expert_parallel": {"enabled": True, "autoep_size": size}},
    }
    config = tiny_config(
        tmp_path,
        islands=[{"name": "a"}, island],
        model={"overrides": fields if experts else {}},
    )
    said = refusal(preflight.planned_layout, config, tmp_path)
    assert said == f"islands.b.deepspeed.expert_parallel.autoep_size: {message}"


def test_weights_by_the_tokens_of_experts_need_experts(tmp_path):
    config = tiny_config(tmp_path, exchange={"merge": {"weights": "expert_tokens"}})
    said = refusal(preflight.planned_layout, config, tmp_path)
    assert said == (
        "exchange.merge.weights: expert_tokens, but Gemma4ForCausalLM trains no experts in tensors [experts, ...]; "
        "take tokens"
    )
