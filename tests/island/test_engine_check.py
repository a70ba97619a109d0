"""What DeepSpeed would refuse when the learners start is one line before anything starts."""

import pytest

from diloco_ds.errors import UserError
from diloco_ds.island.deepspeed_settings import ask_deepspeed

pytestmark = pytest.mark.slow

SOUND = {
    "train_micro_batch_size_per_gpu": 2,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 1},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.95], "weight_decay": 0.1}},
}


def test_sound_settings_of_several_islands_pass():
    sgd = {
        **SOUND,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}},
        "train_batch_size": 8,
        "zero_allow_untested_optimizer": True,
    }
    ask_deepspeed([("a", SOUND, 1), ("b", sgd, 2)])


@pytest.mark.parametrize(
    ("wrong", "ranks", "words"),
    [
        ({"zero_optimization": {"stage": 5}}, 1, ["DeepSpeedZeroConfig", "stage", "not 5"]),
        ({"zero_optimization": {"stagee": 1}}, 1, ["no key 'stagee'", "did you mean stage?"]),
        ({"train_batch_size": 7}, 2, ["train_batch_size: 7 cannot be divided among 2 ranks"]),
        ({"fp16": {"enabled": True}}, 1, ["bfloat16 and fp16 modes cannot be simultaneously enabled"]),
        (
            {"optimizer": {"type": "AdamV", "params": {"lr": 1e-3}}},
            1,
            ["no optimizer 'AdamV'", "did you mean Adam"],
        ),
        (
            {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}},
            1,
            ["optimizer.type: DeepSpeed has not tested SGD with ZeRO", "zero_allow_untested_optimizer: true"],
        ),
        (
            {"optimizer": {"type": "SGD", "params": {"lr": 1, "momentun": 0.9}}},
            1,
            ["optimizer.params", "momentun"],
        ),
    ],
)
def test_what_deepspeed_refuses(wrong, ranks, words):
    with pytest.raises(UserError) as caught:
        ask_deepspeed([("a", SOUND, 1), ("b", {**SOUND, **wrong}, ranks)])
    message = str(caught.value)
    assert message.startswith("islands.b: deepspeed")
    assert "\n" not in message
    for word in words:
        assert word in message
