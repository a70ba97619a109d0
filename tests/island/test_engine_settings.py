"""What of a DeepSpeed config is refused before anything starts, and what is set for the CPU."""

import pytest

from diloco_ds.errors import UserError
from diloco_ds.island.deepspeed_settings import check_deepspeed, prepared


def settings(**over):
    return {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 1},
        **over,
    }


@pytest.mark.parametrize(
    ("over", "message"),
    [
        ({"scheduler": {"type": "WarmupLR"}}, r"deepspeed\.scheduler: .*trainer\.scheduler"),
        (
            {"zero_optimization": {"offload_optimizer": {"device": "nvme"}}},
            r"offload_optimizer\.device: .*use cpu",
        ),
        ({"zero_optimization": {"offload_optimizer": {"device": "cpu", "ratio": 0.5}}}, r"ratio: .*use 1\.0"),
        ({"zero_optimization": {"round_robin_gradients": True}}, "round_robin_gradients: .*leave it out"),
        ({"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}}, "master weights must be fp32"),
        (
            {"expert_parallel": {"enabled": True, "top_k": 2}},
            r"expert_parallel\.top_k: routing is the model's",
        ),
        ({"expert_parallel": {"enabled": True, "autoep_size": 0}}, "autoep_size: 0 is no number of ranks"),
        ({"expert_parallel": 2}, r"expert_parallel: give a block, for example \{enabled: true"),
        ({"sequence_parallel_size": 2}, "sequence_parallel_size: a rank trains on whole sequences"),
        ({"optimizer": {"params": {"lr": 1e-3}}}, r"deepspeed\.optimizer: give the inner optimizer"),
        ({"optimizer": {"type": "AdamW"}}, r"deepspeed\.optimizer\.params\.lr: give the peak learning rate"),
    ],
)
def test_what_would_break_the_exchange_is_refused_with_the_remedy(over, message):
    with pytest.raises(UserError, match=message):
        check_deepspeed(settings(**over))


def test_a_config_without_a_batch_size_is_refused():
    incomplete = settings()
    del incomplete["train_micro_batch_size_per_gpu"]
    with pytest.raises(UserError, match="train_micro_batch_size_per_gpu: give"):
        check_deepspeed(incomplete)


def test_values_that_change_nothing_and_everything_else_pass():
    check_deepspeed(
        settings(
            scheduler=None,
            sequence_parallel_size=1,
            tensor_parallel={"autotp_size": 1},
            expert_parallel={"enabled": False},
            hybrid_engine={"enabled": False},
            gradient_clipping=1.0,
            zero_optimization={"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 1}},
        )
    )


def test_adam_is_torchs_own_on_a_cpu_unless_the_user_or_offload_says_otherwise():
    given = settings()
    assert prepared(given, cpu=True)["optimizer"]["params"]["torch_adam"] is True
    assert "torch_adam" not in given["optimizer"]["params"]
    assert prepared(given, cpu=False) == given
    own = settings(optimizer={"type": "Adam", "params": {"lr": 1e-3, "torch_adam": False}})
    assert prepared(own, cpu=True) == own
    offloaded = settings(zero_optimization={"stage": 2, "offload_optimizer": {"device": "cpu"}})
    assert prepared(offloaded, cpu=True) == offloaded
    lion = settings(optimizer={"type": "Lion", "params": {"lr": 1e-3}})
    assert prepared(lion, cpu=True) == lion
