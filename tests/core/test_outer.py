import pytest
import torch

from diloco_ds import config
from diloco_ds.core.fragments import TensorSpec, balance
from diloco_ds.core.merge import MergePart, merge_fragment
from diloco_ds.core.outer import OuterOptimizer
from diloco_ds.core.weights import learner_weight
from diloco_ds.errors import UserError


class Fragment:
    """A fragment with two slots, as the store of the syncer has: a step reads one and writes the other."""

    def __init__(self, theta, name="SGD", **args):
        self.outer = OuterOptimizer(config.OuterOptimizer(name=name, args=args))
        rows = 1 + len(self.outer.buffers)
        self.slots = torch.zeros(2, rows, len(theta))
        self.slots[0, 0] = torch.as_tensor(theta)
        self.newest = 0
        self.scalars = {}

    @property
    def theta(self):
        return self.slots[self.newest, 0]

    def step(self, delta, lr_scale=1.0):
        old, new = self.slots[self.newest], self.slots[1 - self.newest]
        before = old.clone()
        delta = torch.as_tensor(delta, dtype=torch.float32)
        self.scalars = self.outer.step(
            old[0], delta, list(old[1:]), self.scalars, lr_scale, new[0], list(new[1:])
        )
        assert torch.equal(old, before)
        self.newest = 1 - self.newest


# Numbers by hand


def test_plain_descent():
    fragment = Fragment([10.0], lr=1.0)
    assert fragment.outer.buffers == ()
    fragment.step([2.0])
    assert fragment.theta.tolist() == [8.0]


def test_nesterov_momentum():
    # lr 0.5, mu 0.5, Delta = 4, then 2:
    # b = 4,           Theta = 10 - 0.5*(4 + 0.5*4) = 7
    # b = 2 + 2 = 4,   Theta = 7 - 0.5*(2 + 0.5*4) = 5
    fragment = Fragment([10.0], lr=0.5, momentum=0.5, nesterov=True)
    assert fragment.outer.buffers == ("momentum_buffer",)
    fragment.step([4.0])
    assert fragment.slots[fragment.newest].tolist() == [[7.0], [4.0]]
    fragment.step([2.0])
    assert fragment.slots[fragment.newest].tolist() == [[5.0], [4.0]]


def test_the_default_is_nesterov_with_07_and_09():
    # Theta = 1 - 0.7*(0.1 + 0.9*0.1) = 0.867
    outer = OuterOptimizer(config.OuterOptimizer())
    theta, buffer = torch.empty(1), torch.empty(1)
    outer.step(torch.ones(1), torch.full((1,), 0.1), [torch.zeros(1)], {}, 1.0, theta, [buffer])
    assert theta.item() == pytest.approx(0.867)
    assert buffer.item() == pytest.approx(0.1)


def test_the_learning_rate_is_scaled_but_not_the_momentum():
    # lr 0.5 * 0.5 = 0.25: Theta = 10 - 0.25*(4 + 0.5*4) = 8.5, b = 4
    fragment = Fragment([10.0], lr=0.5, momentum=0.5, nesterov=True)
    fragment.step([4.0], lr_scale=0.5)
    assert fragment.slots[fragment.newest].tolist() == [[8.5], [4.0]]


def test_adam_goes_one_learning_rate_at_first():
    # m/(1-b1) = Delta, v/(1-b2) = Delta^2: Theta = 10 - lr*Delta/|Delta| = 10 - 0.5 and 10 + 0.5
    fragment = Fragment([10.0, 10.0], "Adam", lr=0.5)
    fragment.step([3.0, -0.01])
    assert fragment.theta.tolist() == pytest.approx([9.5, 10.5], rel=1e-5)
    assert fragment.scalars["step"] == 1


@pytest.mark.parametrize(
    ("weights", "matrices", "outer", "expected"),
    [
        # Theta = 10, learners at 8 and 13 after 3 steps over 60 and 30 tokens: v = 2 and -3.
        # Weights 0.8 and 0.2: mean 1.0, RDA 2.2. Uniform: mean -0.5; RDA: +1 and -1 cancel, so the mean.
        ("tokens", "mean", {"lr": 1.0}, 9.0),
        ("tokens", "rda", {"lr": 1.0}, 7.8),
        ("uniform", "mean", {"lr": 1.0}, 10.5),
        ("uniform", "rda", {"lr": 1.0}, 10.5),
        # Nesterov 0.5 with lr 0.5: 0.5*(1 + 0.5) = 0.75 times the above
        ("tokens", "mean", {"lr": 0.5, "momentum": 0.5, "nesterov": True}, 9.25),
        ("tokens", "rda", {"lr": 0.5, "momentum": 0.5, "nesterov": True}, 8.35),
    ],
)
def test_weights_merge_and_outer_step_together(weights, matrices, outer, expected):
    parts = [
        MergePart(learner_weight(3, tokens, weights), torch.tensor([at]))
        for tokens, at in ((60, 8.0), (30, 13.0))
    ]
    fragment, delta = Fragment([10.0], **outer), torch.empty(1)
    layout = balance([TensorSpec("a", (1,), False)], 1, 1)
    merge_fragment(layout, 0, fragment.theta, parts, config.Merge(matrices=matrices), delta)
    fragment.step(delta)
    assert fragment.theta.tolist() == pytest.approx([expected])


# Equal to torch.optim, bit for bit


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("SGD", {"lr": 0.7}),
        ("SGD", {"lr": 0.7, "momentum": 0.9, "nesterov": True}),
        ("SGD", {"lr": 0.7, "momentum": 0.9, "dampening": 0.5, "weight_decay": 0.01}),
        ("SGD", {"lr": 0.7, "momentum": 0.9, "foreach": True}),
        ("SGD", {"lr": 0.7, "momentum": 0.9, "fused": True}),
        ("Adam", {"lr": 0.1, "betas": [0.9, 0.95]}),
        ("Adam", {"lr": 0.1, "amsgrad": True}),
        ("Adam", {"lr": 0.1, "fused": True}),
        ("AdamW", {"lr": 0.1, "weight_decay": 0.1}),
        ("Adagrad", {"lr": 0.1, "initial_accumulator_value": 0.1}),
        ("RMSprop", {"lr": 0.1, "momentum": 0.9, "centered": True}),
        ("NAdam", {"lr": 0.1}),
        ("RAdam", {"lr": 0.1}),
        ("Adamax", {"lr": 0.1}),
        ("Adadelta", {}),
        ("Adafactor", {}),
        ("ASGD", {"lr": 0.1}),
        ("Rprop", {"lr": 0.1}),
    ],
)
def test_equal_to_torch_optim(name, args):
    generator = torch.Generator().manual_seed(11)
    theta, *deltas = torch.randn(9, 37, generator=generator)
    fragment = Fragment(theta, name, **args)
    plain = theta.clone().requires_grad_(True)
    optimizer = getattr(torch.optim, name)([plain], **args)
    base_lr = optimizer.param_groups[0]["lr"]
    for number, delta in enumerate(deltas):
        scale = 1.0 - number / 10
        optimizer.param_groups[0]["lr"] = base_lr * scale
        plain.grad = delta.clone()
        optimizer.step()
        fragment.step(delta, scale)
        assert torch.equal(fragment.theta, plain)
        for index, buffer in enumerate(fragment.outer.buffers):
            assert torch.equal(fragment.slots[fragment.newest, 1 + index], optimizer.state[plain][buffer])


def test_a_restart_between_two_steps_changes_nothing():
    deltas = torch.randn(4, 5, generator=torch.Generator().manual_seed(2))
    one = Fragment(torch.ones(5), "Adam", lr=0.1)
    other = Fragment(torch.ones(5), "Adam", lr=0.1)
    for delta in deltas:
        one.step(delta)
        other.step(delta)
        other.outer = OuterOptimizer(config.OuterOptimizer(name="Adam", args={"lr": 0.1}))
    assert torch.equal(one.slots, other.slots)


def test_a_first_step_does_not_read_the_state():
    one = Fragment([1.0], lr=0.5, momentum=0.5)
    other = Fragment([1.0], lr=0.5, momentum=0.5)
    other.slots[0, 1] = 7.0
    one.step([1.0])
    other.step([1.0])
    assert torch.equal(one.theta, other.theta)


def test_another_number_of_buffers_is_refused():
    outer = OuterOptimizer(config.OuterOptimizer())
    with pytest.raises(ValueError, match="SGD has 1 state buffers"):
        outer.step(torch.ones(1), torch.ones(1), [], {}, 1.0, torch.ones(1), [])


# The learning rate's schedule


def test_the_schedule_runs_over_merged_tokens():
    settings = config.OuterOptimizer(scheduler="linear", warmup_tokens=100)
    scale = OuterOptimizer(settings).schedule(1100)
    assert [scale(tokens) for tokens in (0, 50, 100, 600, 1100, 9999)] == [0, 0.5, 1, 0.5, 0, 0]


def test_a_floor_is_relative_to_the_outer_learning_rate():
    args = {"lr": 0.8, "momentum": 0.9}
    settings = config.OuterOptimizer(
        args=args, scheduler="cosine_with_min_lr", scheduler_args={"min_lr": 0.2}
    )
    assert OuterOptimizer(settings).schedule(100)(100) == pytest.approx(0.25)


def test_an_unknown_schedule_is_named():
    with pytest.raises(UserError, match=r"^exchange\.outer\.scheduler 'cosinus'"):
        OuterOptimizer(config.OuterOptimizer(scheduler="cosinus")).schedule(100)


# What cannot be the outer optimizer


@pytest.mark.parametrize(
    ("name", "args", "says"),
    [
        ("sgd", {}, "did you mean SGD"),
        ("AdamWW", {}, "did you mean AdamW"),
        ("Optimizer", {}, "has no 'Optimizer'"),
        ("lr_scheduler", {}, "has no 'lr_scheduler'"),
        ("LBFGS", {}, "closure"),
        ("SparseAdam", {}, "dense gradients"),
        ("Muon", {}, "2D"),
        ("SGD", {"lr": -1.0}, "Invalid learning rate"),
        ("SGD", {"lr": "fast"}, "fast"),
        ("SGD", {"speed": 1}, "speed"),
        ("SGD", {"lr": 0.1, "nesterov": True}, "Nesterov momentum requires"),
        ("SGD", {"lr": 0.1, "differentiable": True}, "leaf Variable"),
        ("Adam", {"lr": 0.1, "params": []}, "params"),
    ],
)
def test_what_cannot_be_the_outer_optimizer_is_refused_in_one_line(name, args, says):
    with pytest.raises(UserError, match=says) as caught:
        OuterOptimizer(config.OuterOptimizer(name=name, args=args))
    assert str(caught.value).startswith("exchange.outer")
    assert "\n" not in str(caught.value)
