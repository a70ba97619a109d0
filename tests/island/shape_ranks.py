"""The ranks of test_checkpoint_shapes.py, under the `deepspeed` launcher: argv is DIRECTORY RESULTS. DIRECTORY
holds tasks.json, a list of `Task` as dicts; what each saw goes to DIRECTORY/RESULTS.json.
"""

import json
from pathlib import Path

import torch
from island.engine_island import LENGTH, VOCABULARY, Island, equal, rounded
from torch import distributed

BATCH = 4  # sequences of a step, over all ranks


class Carried(Island):
    """An island whose steps see the same batches whatever its shape."""

    def __init__(self, directory, model, settings, steps_made):
        case = {"deepspeed": settings, "activation_checkpointing": False, "compiled": False, "model": model}
        super().__init__(case, directory, seed=1 if steps_made == 0 else 2)
        self.steps_made = steps_made
        self.is_adam = settings["optimizer"]["type"] == "AdamW"

    def batch(self):
        generator = torch.Generator().manual_seed(self.steps_made)
        self.steps_made += 1
        rows = torch.randint(VOCABULARY, (BATCH, LENGTH), generator=generator)
        return rows[self.engine.rank :: self.engine.world_size]

    def held(self):
        """Masters and Adam's moments, whole, as DeepSpeed gathers them; of another optimizer the masters alone."""
        if not self.is_adam:
            return self.masters()
        if hasattr(self.optimizer, "_lazy_init_hp_params_optimizer_state"):
            self.optimizer._lazy_init_hp_params_optimizer_state()  # it does so after the first step
        return self.masters() + self.moments()


def takes(island, directory, since):
    """The fresh island takes the moments that the one which wrote `since` gave, and forgets them again."""
    optimizer, steps, given = torch.load(directory / f"{since}-given.pt")
    engine = island.engine
    if not engine.can_take_moments(optimizer):
        return {"cannot take": True, "own": engine.own_moments()}
    fresh = engine.own_moments()
    for portion, source in enumerate(given):
        engine.take_moments(portion, source, steps)
    saved = torch.load(directory / f"{since}.pt")[island.layout.fragments :]
    moments = island.held()[island.layout.fragments :]
    seen = {
        "moments taken are those given": equal(moments, saved),
        "steps": [steps, engine.own_moments().steps],
        "given again": equal(given, island.given()),
    }
    engine.forget_moments()
    return {**seen, "forgotten": engine.own_moments() == fresh}


def carry_out(task, directory):
    """Go on from a checkpoint (or begin), train, save, train on; what was seen on the way."""
    island = Carried(directory, task["model"], task["deepspeed"], task["steps_made"])
    seen = {}
    if task["since"]:
        taken = takes(island, directory, task["since"])
        loaded = island.engine.load(directory, task["since"])
        seen = {"written_by": loaded.written_by, "missing": loaded.missing, "kept": loaded.client_state}
        saved = torch.load(directory / f"{task['since']}.pt")
        masters = saved[: island.layout.fragments]
        copies = island.copies()
        seen |= taken
        seen["copies are the masters, rounded"] = equal(copies, rounded(masters, copies))
        held = island.held() if not loaded.missing else island.masters()
        seen["what is held is what was saved"] = equal(held, saved[: len(held)])
    island.train(steps=task["steps"])
    if task["save"]:
        island.engine.save(
            directory, task["save"], {"steps_made": island.steps_made}, background=False
        ).wait()
        given = island.given()
        if island.engine.rank == 0:
            torch.save((*island.engine.own_moments(), given), directory / f"{task['save']}-given.pt")
    held = island.held()
    if island.engine.rank == 0:
        torch.save(held, directory / f"{task['save'] or task['name']}.pt")
    if task["then"]:
        island.train(steps=task["then"])
        held = island.masters()
        if island.engine.rank == 0:
            torch.save(held, directory / f"{task['name']}-uninterrupted.pt")
    island.engine.close(disconnect=False)
    return seen


def main(arguments):
    directory, results = Path(arguments[0]), arguments[1]
    seen = {}
    for task in json.loads((directory / "tasks.json").read_text()):
        seen[task["name"]] = carry_out(task, directory)
    if distributed.get_rank() == 0:
        (directory / f"{results}.json").write_text(json.dumps(seen))
    distributed.barrier()
    distributed.destroy_process_group()
    return 0
