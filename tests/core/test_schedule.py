import math

import pytest

from diloco_ds.core.schedule import token_schedule
from diloco_ds.errors import UserError


def schedule(name, args=None, warmup=100, total=1100, lr=2.0):
    return token_schedule(name, args or {}, warmup, total, lr, "trainer.scheduler")


def test_cosine_warms_up_over_tokens_and_ends_at_zero():
    factor = schedule("cosine")
    assert factor(0) == 0
    assert factor(25) == 0.25
    assert factor(100) == 1
    assert factor(600) == pytest.approx(0.5)
    assert factor(850) == pytest.approx(0.5 * (1 + math.cos(math.pi * 0.75)))
    assert factor(1100) == pytest.approx(0)


def test_beyond_the_budget_the_rate_stays_where_it_ended():
    assert schedule("cosine")(1600) == pytest.approx(0)  # transformers' own function would rise again
    assert schedule("cosine_with_min_lr", {"min_lr_rate": 0.1})(9999) == pytest.approx(0.1)


def test_a_rate_relative_to_the_optimizers_uses_the_base_rate():
    assert schedule("cosine_with_min_lr", {"min_lr": 0.5}, lr=2.0)(1100) == pytest.approx(0.25)
    assert schedule("polynomial", {"lr_end": 0.2, "power": 1.0}, lr=2.0)(1100) == pytest.approx(0.1)


def test_the_factor_depends_on_the_tokens_alone():
    factor = schedule("linear")
    there = [factor(tokens) for tokens in range(0, 1200, 50)]
    back = [factor(tokens) for tokens in range(1150, -1, -50)]
    assert there == back[::-1]


@pytest.mark.parametrize(
    ("name", "args", "warmup", "says"),
    [
        ("cosinus", {}, 100, "cosinus"),
        ("warmup_stable_decay", {}, 100, "num_decay_steps"),
        ("linear", {"power": 2}, 100, "power"),
        ("reduce_lr_on_plateau", {}, 0, "more than the tokens"),
        ("constant", {}, 100, "no warm-up"),
    ],
)
def test_what_cannot_be_a_schedule_is_refused_in_one_line(name, args, warmup, says):
    with pytest.raises(UserError, match=says) as caught:
        schedule(name, args, warmup)
    assert str(caught.value).startswith("trainer.scheduler")
    assert "\n" not in str(caught.value)
