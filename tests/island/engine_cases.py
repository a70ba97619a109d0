"""Kinds of islands, and starting all ranks of many of them at once: starting takes most of the time."""

import json
import os
import subprocess
import sys
from pathlib import Path

from diloco_ds import program
from diloco_ds.island.launch import free_port

TESTS = Path(__file__).parents[1]
PRECISIONS = {  # DeepSpeed's settings, and how far the loss may be from transformers' own in fp32
    "fp32": ({}, 1e-4),
    "bf16": ({"bf16": {"enabled": True}}, 0.05),
    "autocast": ({"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}, 0.05),
    "bf16-summed-in-fp32": ({"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}, 0.05),
}
OFFLOAD = {"offload_optimizer": {"device": "cpu", "pin_memory": False}}


def case(
    stage,
    precision,
    name="",
    model="gemma4",
    experts_on=1,
    zero=None,
    activation_checkpointing=False,
    compiled=False,
    checks=("exchange",),
):
    """One kind of island and what is checked of it: functions of engine_ranks.py. `model`: of engine_island.MODELS."""
    settings, tolerance = PRECISIONS[precision]
    deepspeed = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1, "torch_adam": True}},
        "zero_optimization": {"stage": stage, **(zero or {})},
        "zero_force_ds_cpu_optimizer": False,
        **settings,
    }
    if stage == 3:  # norms stay gathered on every rank, matrices do not
        deepspeed["zero_optimization"]["stage3_param_persistence_threshold"] = 100
    if experts_on > 1:
        deepspeed["expert_parallel"] = {"enabled": True, "autoep_size": experts_on}
    return {
        "model": model,
        "name": f"zero{stage}-{precision}{name}",
        "loss_tolerance": tolerance,
        "activation_checkpointing": activation_checkpointing,
        "compiled": compiled,
        "checks": list(checks),
        "deepspeed": deepspeed,
    }


def launch_ranks(module, ranks, *arguments):
    """Run `module` (of tests/) on `ranks` ranks under the `deepspeed` launcher to its end, loaded as a learner is."""
    launcher = Path(sys.executable).with_name("deepspeed")
    done = subprocess.run(
        [
            launcher,
            *("--num_gpus", str(ranks), "--master_port", str(free_port()), "--no_local_rank"),
            *("--module", program.__name__, module, *arguments),
        ],
        env={**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "PYTHONPATH": str(TESTS)},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-3000:]


def run_ranks(cases, ranks, directory):
    """What each of `ranks` ranks saw of each case (engine_ranks.py): [rank][case][check]."""
    (directory / "cases.json").write_text(json.dumps(cases))
    launch_ranks("island.engine_ranks", ranks, directory)
    return [json.loads((directory / f"rank{rank}.json").read_text()) for rank in range(ranks)]


def assert_all_held(seen, name):
    """Every rank saw the case, and everything it expected of it held."""
    for rank, cases in enumerate(seen):
        assert cases[name], name
        failed = [check for check, held in cases[name].items() if not held]
        assert not failed, f"rank {rank}: {failed}"
