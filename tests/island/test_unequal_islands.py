"""Islands of unequal shape in one run: ranks, ZeRO stage and division of the experts differ. The fragments are the model's,
whatever the sharding of the island that holds them.
"""

from __future__ import annotations

import json
from collections import defaultdict

import pytest
import torch
from live_run import live_run
from safetensors import safe_open
from safetensors.torch import load_file

from diloco_ds.conductor.closing import newest_checkpoint
from diloco_ds.core.events import Merge
from diloco_ds.core.fragments import FragmentLayout
from diloco_ds.core.tape import Entry, decode_all

pytestmark = pytest.mark.slow

DIVIDED = {"expert_parallel": {"enabled": True, "autoep_size": 2}}
SMALL_STEPS = {"train_micro_batch_size_per_gpu": 1}
"""Of the island that starts sooner: it must not use up the budget alone."""
SHAPES = [
    {"name": "a", "ranks": 2, "deepspeed": {"zero_optimization": {"stage": 3}, **DIVIDED}},
    {"name": "b", "ranks": 1, "deepspeed": {"zero_optimization": {"stage": 1}, **SMALL_STEPS}},
]
BUDGET = 80_000
EXPERTS = {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run of two islands that always merge together. Towards its end the inner learning rate is 0: from then on an
    island answers with exactly what it adopted.
    """
    settings = {
        "budget": {"tokens": BUDGET},
        "islands": SHAPES,
        "model": {"overrides": EXPERTS},
        "deepspeed": {"train_micro_batch_size_per_gpu": 16},
        "exchange": {"quorum": 2, "merge": {"matrices": "mean", "weights": "expert_tokens"}},
        "trainer": {
            "scheduler": "warmup_stable_decay",
            "scheduler_args": {"num_stable_steps": 40_000, "num_decay_steps": 0},
            "least_step_s": 0.3,  # b leaves the processors to a
        },
        "syncer": {"keep_updates": True},
    }
    with live_run(tmp_path_factory.mktemp("unequal"), **settings) as run:
        run.train()
        assert run.end(within_s=600) == 0, run.story()
        run.layout = FragmentLayout.from_json(run.dir.layout.read_text())
        yield run


@pytest.fixture(scope="module")
def merges(finished):
    """The merge records of each fragment, oldest first, with what was merged: `payloads` by island, and those that are outer
    gradients instead of weights in `gradients`.
    """
    with finished.dir.tape.open("rb") as lines:
        decided = {
            (entry.value.fragment, entry.value.version): entry.value
            for entry in decode_all(lines)
            if isinstance(entry, Entry) and isinstance(entry.value, Merge)
        }
    merges = defaultdict(list)
    for record in finished.records("merge"):
        for part in decided[record["fragment"], record["version"]].parts:
            (written,) = (each for each in record["parts"] if each["island"] == part.island)
            written["expert_tokens"] = part.expert_tokens
        path = finished.dir.root / "updates" / f"{record['fragment']:04d}-{record['version']:08d}.safetensors"
        with safe_open(path, framework="pt") as file:
            kinds = file.metadata()
            record["payloads"] = {name.partition(".")[0]: file.get_tensor(name) for name in kinds}
        record["gradients"] = {name.partition(".")[0] for name, kind in kinds.items() if kind == "gradient"}
        record["parts"] = {part["island"]: part for part in record["parts"]}
        assert set(record["parts"]) == set(record["payloads"])
        merges[record["fragment"]].append(record)
    return merges


def test_both_islands_are_in_every_fragment(finished, merges):
    assert set(merges) == set(range(finished.layout.fragments))
    for records in merges.values():
        assert sum(set(record["parts"]) == {"a", "b"} for record in records) >= 3


def test_the_global_weights_are_what_the_updates_say(finished, merges):
    """Recomputed with torch's own SGD from the initial weights; and by replay, bit for bit."""
    initial = load_file(finished.dir.initial_weights)
    weights = load_file(newest_checkpoint(finished.dir) / "theta.safetensors")
    for fragment, records in merges.items():
        theta = torch.nn.Parameter(flat(finished.layout, fragment, initial))
        outer = torch.optim.SGD([theta], lr=0.7, momentum=0.9, nesterov=True)
        for record in records:
            theta.grad = torch.zeros_like(theta)
            shares = weights_of(finished.layout, fragment, record["parts"])
            for name, payload in record["payloads"].items():
                gradient = payload if name in record["gradients"] else theta.detach() - payload
                theta.grad += shares[name] * gradient
            outer.step()
        torch.testing.assert_close(theta.detach(), flat(finished.layout, fragment, weights))
    assert any(
        part["expert_load"] >= 1 for records in merges.values() for part in records[0]["parts"].values()
    )
    verdict = json.loads(finished.command("replay", str(finished.dir.root), "--json").stdout)
    assert verdict["identical"] is True


def test_islands_tell_of_the_tokens_that_each_expert_got(finished, merges):
    for fragment, records in merges.items():
        experts = finished.layout.experts[fragment]
        for part in (part for record in records for part in record["parts"].values()):
            assert len(part["expert_tokens"]) == experts
            for layer in torch.tensor(part["expert_tokens"]).split(4) if experts else ():
                assert (
                    abs(layer.sum().item() - 2 * part["tokens"]) <= 2
                )  # every token goes to two, but for rounding


def test_both_islands_hold_the_same_adopted_fragments_bit_for_bit(merges):
    for records in merges.values():
        together = [record for record in records if set(record["parts"]) == {"a", "b"}]
        from_one_base = [
            record["payloads"]
            for record in together
            if record["parts"]["a"]["base"] == record["parts"]["b"]["base"] and not record["gradients"]
        ]
        assert torch.equal(from_one_base[-1]["a"], from_one_base[-1]["b"])  # adopted, and no longer trained
        assert not torch.equal(together[0]["payloads"]["a"], together[0]["payloads"]["b"])


def weights_of(layout, fragment, parts):
    """By island the weight of each element of a fragment: tokens^2 / steps, of an expert's by the tokens it got."""
    raw = {}
    for name, part in parts.items():
        told = torch.tensor(part["expert_tokens"]).view(len(layout.expert_layers(fragment)), 4)
        tokens = {
            None: torch.tensor([part["tokens"]]),
            **dict(zip(layout.expert_layers(fragment), told, strict=True)),
        }
        of_tensors = [
            tokens[placed.spec.expert_layer]
            .double()
            .repeat_interleave(placed.spec.numel // (placed.spec.experts or 1))
            for placed in layout.tensors_of(fragment)
        ]
        raw[name] = torch.cat(of_tensors) ** 2 / part["steps"]
    return {name: (weight / sum(raw.values())).float() for name, weight in raw.items()}


def flat(layout, fragment, tensors):
    return torch.cat([tensors[placed.spec.name].flatten() for placed in layout.tensors_of(fragment)])
