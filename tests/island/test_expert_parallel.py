"""Experts divided among the ranks of an island, and models with experts on islands that do not divide them."""

import itertools

import pytest
from island.engine_cases import OFFLOAD, assert_all_held, case, run_ranks

from diloco_ds.errors import UserError
from diloco_ds.island.deepspeed_settings import check_deepspeed

OTHERS = ("mixtral", "qwen3-moe", "deepseek-v3")
DIVIDED = {"model": "gemma4-moe", "experts_on": 2}
AS_IF_WHOLE = ("same_outer_gradients",)
CASES = [
    *(
        case(stage, precision, "-whole", "gemma4-moe", checks=["adopts"])
        for stage in (0, 1, 2, 3)
        for precision in ("fp32", "bf16")
    ),
    *(
        case(stage, "fp32", "-divided", **DIVIDED, checks=["exchange", "same_outer_gradients"])
        for stage in (1, 2, 3)
    ),
    *(
        case(stage, "bf16", "-divided", **DIVIDED, checks=["exchange", "identity", "checkpoint"])
        for stage in (1, 2, 3)
    ),
    *(
        case(2, "fp32", f"-{model}", model, experts_on=2, checks=["identity", *AS_IF_WHOLE])
        for model in OTHERS
    ),
    case(1, "bf16-summed-in-fp32", "-divided", **DIVIDED),
    case(3, "bf16", "-counted", "gemma4-moe", checks=["routed"]),
    case(2, "fp32", "-counted", "deepseek-v3", experts_on=2, checks=["routed"]),
    case(2, "bf16", "-offload", **DIVIDED, zero=OFFLOAD),
    case(1, "fp32", "-recomputed", **DIVIDED, activation_checkpointing=True, checks=AS_IF_WHOLE),
]
ON_FOUR_RANKS = [
    case(1, "fp32", "-2-of-4", **DIVIDED, checks=["exchange", "routed", *AS_IF_WHOLE]),
    case(3, "bf16", "-2-of-4", **DIVIDED, checks=["identity", "checkpoint"]),
    case(2, "fp32", "-4-of-4", "gemma4-moe", experts_on=4, checks=["identity", *AS_IF_WHOLE]),
]


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """What each of two ranks saw of each case: [rank][case][check]."""
    return run_ranks(CASES, 2, tmp_path_factory.mktemp("experts"))


@pytest.fixture(scope="module")
def seen_by_four(tmp_path_factory):
    """The same with four ranks: some hold the same experts."""
    return run_ranks(ON_FOUR_RANKS, 4, tmp_path_factory.mktemp("four"))


@pytest.mark.slow
@pytest.mark.parametrize("name", [case["name"] for case in CASES])
def test_two_ranks(seen, name):
    assert_all_held(seen, name)


@pytest.mark.slow
@pytest.mark.parametrize("name", [case["name"] for case in ON_FOUR_RANKS])
def test_four_ranks(seen_by_four, name):
    assert_all_held(seen_by_four, name)


@pytest.mark.parametrize(
    ("stage", "precision", "experts_on"), itertools.product((0, 1, 2, 3), ("fp32", "bf16"), (1, 2))
)
def test_tensor_parallelism_is_refused_at_every_stage(stage, precision, experts_on):
    settings = case(stage, precision, experts_on=experts_on)["deepspeed"]
    with pytest.raises(
        UserError, match=r"autotp_size: .* is no range of a fragment .* take zero_optimization\.stage 3"
    ):
        check_deepspeed({**settings, "tensor_parallel": {"autotp_size": 2}})


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_divided_experts_are_refused_at_stage_0(precision):
    with pytest.raises(
        UserError, match=r"stage: at stage 0 .* of divided experts none does; take stage 1 or more"
    ):
        check_deepspeed(case(0, precision, experts_on=2)["deepspeed"])
