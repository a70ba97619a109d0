"""What one rank of test_engine.py does: starts an Engine for every case and writes what it saw as JSON.

Started by the `deepspeed` launcher: engine_ranks.py DIRECTORY, which holds cases.json, a list of
test_engine.case(...). Values are compared with what DeepSpeed's own functions say of masters, parameters and
moments, which gather over the ranks.
"""

import json
import sys
from pathlib import Path

import deepspeed
import torch
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from torch import distributed
from transformers import Gemma4TextConfig

from diloco_ds import config
from diloco_ds.core.fragments import balance
from diloco_ds.errors import UserError
from diloco_ds.island.engine import Engine, connect
from diloco_ds.model.build import build_model, tensor_specs, travelling_parameters
from diloco_ds.model.initial import write_initial_weights

VOCABULARY, LENGTH = 101, 17


def small_model(seed=1):
    """Odd sizes that no two ranks divide evenly, a tied embedding and a frozen tensor."""
    hf_config = Gemma4TextConfig(
        vocab_size=VOCABULARY,
        hidden_size=21,
        intermediate_size=33,
        num_hidden_layers=2,
        num_attention_heads=3,
        num_key_value_heads=1,
        head_dim=10,
        global_head_dim=10,
        layer_types=["sliding_attention", "full_attention"],
        sliding_window=8,
        hidden_size_per_layer_input=0,
        pad_token_id=None,
        final_logit_softcapping=30.0,
    )
    model = build_model(hf_config, seed)
    model.model.layers[0].input_layernorm.weight.requires_grad_(False)
    return model


LAYOUT = balance(tensor_specs(small_model()), fragments=4, period=4)


def flat(tensors):
    """Every fragment of the named tensors."""
    return [
        torch.cat([tensors[placed.spec.name].detach().flatten() for placed in LAYOUT.tensors_of(index)])
        for index in range(LAYOUT.fragments)
    ]


def initial_weights(directory, seed):
    """Written by rank 0, as a run directory has them."""
    connect()
    path = directory / f"init{seed}"
    if distributed.get_rank() == 0 and not path.exists():
        write_initial_weights(small_model(seed), path)
    distributed.barrier()
    return path


class Island:
    """An Engine with the views of it that DeepSpeed offers, all as flat fragments."""

    def __init__(self, case, directory, seed=1):
        trainer = config.Trainer(loss_chunk=11, activation_checkpointing=case["activation_checkpointing"])
        self.engine = Engine.start(
            initial_weights(directory, seed), case["deepspeed"], trainer, LAYOUT, seed=0
        )
        self.model = self.engine._engine.module.model
        self.parameters = travelling_parameters(self.model)
        self.optimizer = self.engine._engine.optimizer
        self.directory = directory
        self.batches = torch.Generator().manual_seed(self.engine.rank)

    def train(self, lr=1.0, steps=1):
        self.engine.set_lr(lr)
        for _ in range(steps):
            self.engine.step(self.batch())
        return self.engine.finished_steps(wait=True)

    def batch(self):
        rows = self.engine.micro_batch * self.engine.grad_accumulation
        return torch.randint(VOCABULARY, (rows, LENGTH), generator=self.batches)

    def written(self):
        """Every fragment as the ranks write it together into shared memory."""
        paths = [self.directory / f"fragment{index}" for index in range(LAYOUT.fragments)]
        if self.engine.rank == 0:  # from_file writes into a file that it must make larger: not in a race
            for path, numel in zip(paths, LAYOUT.numels, strict=True):
                path.write_bytes(bytes(4 * numel))
        self.engine.least([0])
        fragments = [
            torch.from_file(str(path), shared=True, size=numel)
            for path, numel in zip(paths, LAYOUT.numels, strict=True)
        ]
        for index, fragment in enumerate(fragments):
            assert self.engine.write_fragment(index, fragment).done()
        self.engine.least([0])
        return [fragment.clone() for fragment in fragments]

    def masters(self):
        return self.flat(self.master)

    def copies(self):
        return self.flat(self.copy)

    def moments(self):
        first = self.flat(lambda parameter: self.moment(parameter, "exp_avg"))
        return first + self.flat(lambda parameter: self.moment(parameter, "exp_avg_sq"))

    def flat(self, view):
        return flat({name: view(parameter) for name, parameter in self.parameters.items()})

    def master(self, parameter):
        if hasattr(parameter, "ds_id") or hasattr(parameter, "_hp_mapping"):
            return safe_get_full_fp32_param(parameter).clone()
        return self.unsharded(parameter).detach().clone()

    def moment(self, parameter, key):
        if hasattr(parameter, "ds_id") or hasattr(parameter, "_hp_mapping"):
            return safe_get_full_optimizer_state(parameter, key).clone()
        base = getattr(self.optimizer, "optimizer", self.optimizer)
        return base.state[self.unsharded(parameter)][key].clone()

    def unsharded(self, parameter):
        """ZeRO-0: the tensor that the basic optimizer updates for it."""
        for group, masters in zip(
            getattr(self.optimizer, "fp16_groups", []),
            getattr(self.optimizer, "fp32_groups", []),
            strict=True,
        ):
            for low, master in zip(group, masters, strict=True):
                if low is parameter:
                    return master
        return parameter

    def copy(self, parameter):
        if hasattr(parameter, "ds_id"):
            with deepspeed.zero.GatheredParameters([parameter]):
                return parameter.detach().clone()
        return parameter.detach().clone()

    def adopt(self, sources, how, alpha=0.0, snapshots=None):
        for index, source in enumerate(sources):
            snapshot = None if snapshots is None else snapshots[index]
            assert self.engine.adopt_fragment(index, source, how, alpha, snapshot).done()


def equal(ours, theirs):
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def rounded(fragments, like):
    return [fragment.to(copy.dtype) for fragment, copy in zip(fragments, like, strict=True)]


def noise(seed):
    """Fragments that bf16 cannot hold exactly, the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    return [0.1 * torch.randn(numel, generator=generator) for numel in LAYOUT.numels]


def in_place(island, sources):
    """Whether masters and the copies of all ranks hold `sources`."""
    copies = island.copies()
    return equal(island.masters(), sources) and equal(copies, rounded(sources, copies))


def first_loss(island):
    """The loss of the first step, and what plain transformers says of the same weights and batches."""
    plain = small_model()
    batch = island.batch()
    island.batches.manual_seed(island.engine.rank)
    expected = plain(input_ids=batch, labels=batch, use_cache=False).loss.detach()
    distributed.all_reduce(expected)
    (result,) = island.train()
    return result.loss, expected.item() / island.engine.world_size


def exchange(case, directory):
    """Everything that is expected of one kind of island; a dict of what held."""
    island = Island(case, directory)
    initial = travelling_parameters(small_model())
    seen = {"begins with the fp32 weights": in_place(island, flat(initial))}
    loss, expected = first_loss(island)
    seen["loss is the plain loss"] = abs(loss - expected) < case["loss_tolerance"]
    island.train(steps=2)

    snapshot = island.written()
    seen["written fragments are the masters"] = equal(snapshot, island.masters())
    moments = island.moments()

    island.adopt(noise(1), "overwrite")
    seen["overwrite is in place"] = in_place(island, noise(1))
    seen["overwrite leaves the moments"] = equal(island.moments(), moments)
    island.train(lr=0.0)
    seen["overwrite survives a step"] = in_place(island, noise(1))

    island.train()
    own = island.masters()
    seen["training goes on"] = not equal(own, noise(1))
    moments = island.moments()
    island.adopt(noise(2), "mix", alpha=0.25)
    mixed = [torch.lerp(a, b, 0.75) for a, b in zip(own, noise(2), strict=True)]
    seen["mix is in place"] = in_place(island, mixed)
    island.adopt(noise(3), "rebase", snapshots=snapshot)
    rebased = [m - s + n for m, s, n in zip(mixed, snapshot, noise(3), strict=True)]
    seen["rebase is in place"] = in_place(island, rebased)
    seen["mix and rebase leave the moments"] = equal(island.moments(), moments)
    island.train(lr=0.0)
    seen["rebase survives a step"] = in_place(island, rebased)

    before = island.moments()
    results = island.train()
    seen["moments go on"] = not equal(island.moments(), before)
    seen["results are numbered and timed"] = [r.step for r in results] == [7] and all(
        seconds > 0 for seconds in (results[0].forward, results[0].backward, results[0].optimizer)
    )
    frozen = island.model.model.layers[0].input_layernorm.weight
    seen["frozen tensor is untouched"] = bool((island.copy(frozen) == 1).all())
    island.engine.close(disconnect=False)
    return seen


def checkpoint(case, directory):
    """Save, go on, load into a fresh island, go on: the same bits."""
    island = Island(case, directory)
    island.train(steps=2)
    island.engine.save(directory / "saved", "two", {"position": [3, 4]})
    folders = [path.name for path in (directory / "saved").iterdir() if path.is_dir()]
    batches = island.batches.get_state()
    island.train(steps=2)
    expected = island.masters() + island.moments()
    island.engine.close(disconnect=False)

    again = Island(case, directory, seed=2)
    state, other_shape, missing = again.engine.load(directory / "saved", "two")
    again.batches.set_state(batches)
    again.train(steps=2)
    seen = {
        "one whole checkpoint": folders == ["two"],
        "client state comes back": state["position"] == [3, 4],
        "nothing is missing": other_shape is None and not missing,
        "goes on exactly": equal(expected, again.masters() + again.moments()),
        "slices are those of the loaded weights": equal(again.written(), again.masters()),
    }
    again.engine.close(disconnect=False)
    third = Island(case, directory)
    seen["no checkpoint is refused"] = refused(
        lambda: third.engine.load(directory / "saved", "one"), "no checkpoint"
    )
    if third.engine.rank == 0:
        facts = directory / "saved" / "two" / "island.json"
        facts.write_text(facts.read_text().replace(LAYOUT.digest, "0" * 64))
    third.engine.least([0])
    seen["another model is refused"] = refused(
        lambda: third.engine.load(directory / "saved", "two"), "another model"
    )
    third.engine.close(disconnect=False)
    return seen


def refused(call, reason):
    try:
        call()
    except UserError as error:
        return reason in str(error)
    return False


def agreement(case, directory):
    """The decisions of rank 0 reach all ranks, while the device's group is at work too."""
    island = Island(case, directory)
    engine = island.engine
    engine.broadcast_start([5, -6, 7] if engine.rank == 0 else [0, 0, 0])
    island.train()
    seen = {
        "broadcast arrives": engine.broadcast_wait() == [5, -6, 7],
        "least of all ranks": engine.least([engine.rank, -engine.rank]) == [0, 1 - engine.world_size],
    }
    engine.close(disconnect=False)
    return seen


CHECKS = {check.__name__: check for check in (exchange, checkpoint, agreement)}


def main():
    directory = Path(sys.argv[1])
    seen = {}
    for case in json.loads((directory / "cases.json").read_text()):
        own = directory / case["name"]
        own.mkdir(exist_ok=True)
        checks = [CHECKS[name] for name in case["checks"]]
        seen[case["name"]] = {name: held for check in checks for name, held in check(case, own).items()}
    (directory / f"rank{distributed.get_rank()}.json").write_text(json.dumps(seen))
    distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
