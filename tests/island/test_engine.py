"""The seam to DeepSpeed, on real ranks under the `deepspeed` launcher.

The ranks run through all cases in one start (engine_ranks.py), since starting takes most of the time; each
case is a test here. Experts: test_expert_parallel.py.
"""

import pytest
from island.engine_cases import OFFLOAD, assert_all_held, case, run_ranks

pytestmark = pytest.mark.slow

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


COMPILED = case(1, "bf16", "-compiled", compiled=True)


@pytest.fixture(scope="module", params=[1, 2], ids=["1rank", "2ranks"])
def seen(request, tmp_path_factory):
    """What each rank saw of each case: [rank][case][check]."""
    return run_ranks(CASES, request.param, tmp_path_factory.mktemp("engine"))


@pytest.mark.parametrize("name", [case["name"] for case in CASES])
def test_what_every_rank_expects_of_the_engine_holds(seen, name):
    assert_all_held(seen, name)


def test_a_compiled_model_is_no_other(tmp_path):
    """Compiling takes longer than all the rest: one case, one rank."""
    assert_all_held(run_ranks([COMPILED], 1, tmp_path), COMPILED["name"])
