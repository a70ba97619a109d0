"""What one rank of test_engine.py and test_expert_parallel.py does: starts an Engine for every case and writes what it saw
as JSON.

Started by engine_cases.launch_ranks with DIRECTORY, which holds cases.json, a list of
engine_cases.case(...). Values are compared with what DeepSpeed's own functions say of masters, parameters and
moments, which gather over the ranks.
"""

import json
from pathlib import Path

import torch
from island.engine_island import Island, equal, flat, in_place, noise, small_model
from island.expert_checks import identity, routed, same_outer_gradients
from torch import distributed

from diloco_ds.errors import UserError
from diloco_ds.model.build import travelling_parameters


def first_loss(island, case):
    """The loss of the first step, and what plain transformers says of the same weights and batches."""
    plain = small_model(case["model"])
    batch = island.batch()
    island.batches.manual_seed(island.engine.rank)
    expected = plain(input_ids=batch, labels=batch, use_cache=False).loss.detach()
    distributed.all_reduce(expected)
    (result,) = island.train()
    return result.loss, expected.item() / island.engine.world_size


def exchange(case, directory):
    """Everything that is expected of one kind of island; a dict of what held."""
    island = Island(case, directory)
    initial = travelling_parameters(small_model(case["model"]))
    seen = {"begins with the fp32 weights": in_place(island, flat(initial, island.layout))}
    loss, expected = first_loss(island, case)
    seen["loss is the plain loss"] = abs(loss - expected) < case["loss_tolerance"]
    island.train(steps=2)

    snapshot = island.written()
    seen["written fragments are the masters"] = equal(snapshot, island.masters())
    moments = island.moments()
    seen["given portions are the moments"] = equal(island.given_moments(), moments)

    island.adopt(noise(1, island.layout), "overwrite")
    seen["overwrite is in place"] = in_place(island, noise(1, island.layout))
    seen["overwrite leaves the moments"] = equal(island.moments(), moments)
    island.train(lr=0.0)
    seen["overwrite survives a step"] = in_place(island, noise(1, island.layout))

    island.train()
    own = island.masters()
    seen["training goes on"] = not equal(own, noise(1, island.layout))
    moments = island.moments()
    island.adopt(noise(2, island.layout), "mix", alpha=0.25)
    mixed = [torch.lerp(a, b, 0.75) for a, b in zip(own, noise(2, island.layout), strict=True)]
    seen["mix is in place"] = in_place(island, mixed)
    island.adopt(noise(3, island.layout), "rebase", snapshots=snapshot)
    rebased = [m - s + n for m, s, n in zip(mixed, snapshot, noise(3, island.layout), strict=True)]
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


def adopts(case, directory):
    """The least that is expected of an island: it begins right, trains, and takes over what it is given."""
    island = Island(case, directory)
    initial = travelling_parameters(small_model(case["model"]))
    seen = {"begins with the fp32 weights": in_place(island, flat(initial, island.layout))}
    loss, expected = first_loss(island, case)
    seen["loss is the plain loss"] = abs(loss - expected) < case["loss_tolerance"]
    island.adopt(noise(1, island.layout), "overwrite")
    seen["overwrite is in place"] = in_place(island, noise(1, island.layout))
    island.train(lr=0.0)
    seen["overwrite survives a step"] = in_place(island, noise(1, island.layout))
    island.engine.close(disconnect=False)
    return seen


def checkpoint(case, directory):
    """Save, go on, load into a fresh island, go on: the same bits."""
    island = Island(case, directory)
    island.train(steps=2)
    writing = island.engine.save(directory / "saved", "two", {"position": [3, 4]}, background=True)
    batches = island.batches.get_state()
    island.train(steps=2)  # what is written is what was there before
    writing.wait()
    folders = [path.name for path in (directory / "saved").iterdir() if path.is_dir()]
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
        facts.write_text(facts.read_text().replace(third.layout.digest, "0" * 64))
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


CHECKS = {
    check.__name__: check
    for check in (adopts, exchange, checkpoint, agreement, identity, routed, same_outer_gradients)
}


def main(arguments):
    directory = Path(arguments[0])
    seen = {}
    for case in json.loads((directory / "cases.json").read_text()):
        own = directory / case["name"]
        own.mkdir(exist_ok=True)
        checks = [CHECKS[name] for name in case["checks"]]
        seen[case["name"]] = {name: held for check in checks for name, held in check(case, own).items()}
    (directory / f"rank{distributed.get_rank()}.json").write_text(json.dumps(seen))
    distributed.barrier()
    distributed.destroy_process_group()
    return 0
