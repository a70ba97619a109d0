"""The seam to DeepSpeed, on real ranks under the `deepspeed` launcher.

The ranks run through all cases in one start (engine_ranks.py), since starting takes most of the time; each
case is a test here.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from diloco_ds.island.launch import free_port

pytestmark = pytest.mark.slow

LAUNCHER = Path(sys.executable).with_name("deepspeed")
SCRIPT = Path(__file__).with_name("engine_ranks.py")
PRECISIONS = {  # DeepSpeed's settings, and how far the loss may be from transformers' own in fp32
    "fp32": ({}, 1e-4),
    "bf16": ({"bf16": {"enabled": True}}, 0.05),
    "autocast": ({"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}, 0.05),
    "bf16-summed-in-fp32": ({"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}, 0.05),
}
OFFLOAD = {"offload_optimizer": {"device": "cpu", "pin_memory": False}}


def case(stage, precision, name="", zero=None, activation_checkpointing=False, checks=("exchange",)):
    """One kind of island and what is checked of it: functions of engine_ranks.py."""
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
    return {
        "name": f"zero{stage}-{precision}{name}",
        "loss_tolerance": tolerance,
        "activation_checkpointing": activation_checkpointing,
        "checks": list(checks),
        "deepspeed": deepspeed,
    }


CASES = [
    *(case(stage, "fp32") for stage in (0, 1, 2, 3)),
    *(case(stage, "bf16", checks=("exchange", "checkpoint")) for stage in (0, 1, 2, 3)),
    case(1, "autocast"),
    case(1, "bf16-summed-in-fp32"),
    case(2, "bf16", "-offload", zero=OFFLOAD),
    case(3, "bf16", "-offload", zero=OFFLOAD),
    case(1, "fp32", "-agreement", checks=("agreement",)),
    case(1, "fp32", "-recomputed-activations", activation_checkpointing=True),
]


@pytest.fixture(scope="module", params=[1, 2], ids=["1rank", "2ranks"])
def seen(request, tmp_path_factory):
    """What each rank saw of each case: [rank][case][check]."""
    directory = tmp_path_factory.mktemp("engine")
    (directory / "cases.json").write_text(json.dumps(CASES))
    command = [LAUNCHER, "--num_gpus", str(request.param), "--master_port", str(free_port())]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    done = subprocess.run(
        [*command, "--no_local_rank", SCRIPT, directory],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads((directory / f"rank{rank}.json").read_text()) for rank in range(request.param)]


@pytest.mark.parametrize("name", [case["name"] for case in CASES])
def test_what_every_rank_expects_of_the_engine_holds(seen, name):
    for rank, cases in enumerate(seen):
        assert cases[name], name
        failed = [check for check, held in cases[name].items() if not held]
        assert not failed, f"rank {rank}: {failed}"
