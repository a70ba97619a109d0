"""What is expected of an island whose experts are divided: each expert is itself wherever it goes, and training is as if
the experts were whole.
"""

import torch
from island.engine_island import EXPERTS, Island, equal, flat, layout_of, small_model
from safetensors.torch import save_file
from torch import distributed
from transformers import AutoModelForCausalLM

from diloco_ds.exchange.fragment_box import FragmentBox
from diloco_ds.island.routing import Routing, RoutingBoard
from diloco_ds.model.build import travelling_parameters
from diloco_ds.model.experts import expert_modules
from diloco_ds.model.export import export
from diloco_ds.model.initial import write_initial_weights


def marked(model, first):
    """Every travelling tensor of `model`; those of experts hold a constant of their own for each expert, which bf16 holds
    exactly.
    """
    tensors = {name: parameter.detach() for name, parameter in travelling_parameters(model).items()}
    constant = first
    for name, module in expert_modules(model).items():
        for tensor, parameter in module.named_parameters():
            constants = constant + torch.arange(float(parameter.shape[0]))
            constant += parameter.shape[0]
            tensors[f"{name}.{tensor}"] = constants.view(-1, *[1] * (parameter.ndim - 1)).expand_as(parameter)
    return tensors


def held_by_rank(island, tensors):
    """Whether the experts that this rank computes with are its own: the rank-th part of all."""
    rank = island.engine.rank % island.divided
    held = [
        torch.equal(island.copy(island.parameters[name]).float(), tensors[name].chunk(island.divided)[rank])
        for name in island.expert_tensors
    ]  # all of them before a verdict: looking at one may be a collective
    return all(held)


def identity(case, directory):
    """A constant for each expert through the mailbox, a checkpoint and the export to Hugging Face; router and buffers."""
    island = Island(case, directory)
    model = small_model(case["model"])
    buffers = {name: buffer.clone() for name, buffer in island.model.named_buffers()}
    dtypes = {parameter.dtype for parameter in island.parameters.values()}
    theta = marked(model, first=3.0)
    island.adopt(flat(theta, island.layout), "overwrite")
    seen = {"each rank computes with its own experts": held_by_rank(island, theta)}
    seen["all parameters keep their dtype"] = {p.dtype for p in island.parameters.values()} == dtypes
    seen["what is sent is what was adopted"] = equal(through_mailbox(island), flat(theta, island.layout))

    island.engine.save(directory / "marked", "one", {}, background=True).wait()
    island.adopt(flat(marked(model, first=99.0), island.layout), "overwrite")
    island.engine.close(disconnect=False)
    again = Island(case, directory, seed=2)
    again.engine.load(directory / "marked", "one")
    seen["a checkpoint brings back each rank's own"] = held_by_rank(again, theta)
    sent = again.written()
    seen["and they are sent on"] = equal(sent, flat(theta, again.layout))
    again.train(steps=2)
    seen["buffers are each island's own, unchanged"] = all(
        torch.equal(buffer, buffers[name].to(buffer.dtype)) for name, buffer in again.model.named_buffers()
    )
    again.engine.close(disconnect=False)
    if again.engine.rank == 0:
        seen["the export has each expert in its place"] = exported(model, sent, directory, theta)
    return seen


def through_mailbox(island):
    """Every fragment as the ranks write it into an outbox, and as the island's agent reads it there."""
    path, engine = island.directory / "outbox", island.engine
    if engine.rank == 0:
        FragmentBox.create(path, island.layout.numels, meta_capacity=0)
    engine.least([0])
    box, received = FragmentBox.open(path), []
    for fragment in range(island.layout.fragments):
        if engine.rank == 0:
            assert box.begin(fragment) is not None
        engine.least([0])
        assert engine.write_fragment(fragment, box.begun(fragment)).done()
        engine.least([0])
        if engine.rank == 0:
            box.commit(fragment, 1, b"")
        engine.least([0])
        received.append(box.payload(fragment, 1).clone())
    return received


def exported(model, fragments, directory, theta):
    weights = {
        placed.spec.name: fragments[placed.fragment][placed.offset :][: placed.spec.numel].view(
            placed.spec.shape
        )
        for placed in layout_of(model).tensors
    }
    save_file(weights, directory / "theta.safetensors")
    write_initial_weights(model, directory / "init")
    (directory / "tokenizer").mkdir()
    export(directory / "theta.safetensors", directory / "init", directory / "tokenizer", directory / "hf")
    loaded = AutoModelForCausalLM.from_pretrained(directory / "hf").state_dict()
    return all(torch.equal(loaded[name], tensor) for name, tensor in theta.items())


def routed(case, directory):
    """The tokens of each expert, as rank 0 tells of them, are what the routers of all ranks chose since the adoption."""
    island = Island(case, directory)
    engine, layout = island.engine, island.layout
    choices = choices_of(island)
    path = directory / "routed"
    if engine.rank == 0:
        RoutingBoard.renew(path, engine.world_size, layout.experts)
    engine.least([0])
    board = RoutingBoard(path, layout.experts)
    engine.pin(board.address, board.nbytes)
    routing = Routing(engine.routed, board, engine.host, engine.rank)
    holding = [fragment for fragment, experts in enumerate(layout.experts) if experts]
    seen = {}
    for what, steps in (("since the start", 2), ("since the adoption", 1)):
        for chosen in choices:
            chosen.clear()
        island.train(steps=steps)
        expected = [choices_of_all_ranks(chosen) for chosen in choices]
        assert all(transfer.done() for fragment in holding for transfer in routing.answer(fragment))
        engine.least([0])
        told = []
        for fragment in holding:
            layers = [expected[layer] for layer in layout.expert_layers(fragment)]
            tokens = layers[0].sum().item() // 2  # each goes to two experts
            told.append(list(routing.told(fragment, tokens)) == torch.cat(layers).tolist())
            routing.adopted(fragment, keeps=False)
        seen[f"tokens of each expert {what}"] = all(told)
        engine.least([0])
    others = [fragment for fragment in range(layout.fragments) if fragment not in holding]
    seen["nothing is told of other fragments"] = not any(routing.answer(fragment) for fragment in others)
    engine.close(disconnect=False)
    return seen


def choices_of(island):
    """For each layer of experts a list that fills with what this rank's router chooses, numbered over the whole layer."""
    choices = []
    for name in dict.fromkeys(name.rpartition(".")[0] for name in island.expert_tensors):
        choices.append([])
        island.model.get_submodule(name).register_forward_pre_hook(
            lambda _, inputs, chosen=choices[-1]: chosen.append(inputs[1].detach().flatten().clone())
        )
    return choices


def choices_of_all_ranks(chosen):
    """How often each expert was chosen, int64 [experts]."""
    counts = torch.cat(chosen).bincount(minlength=EXPERTS)
    distributed.all_reduce(counts)
    return counts


def same_outer_gradients(case, directory):
    """Loss, gradient and outer gradient with divided and with whole experts agree to rounding."""
    whole = {
        **case,
        "deepspeed": {key: value for key, value in case["deepspeed"].items() if key != "expert_parallel"},
    }
    divided_losses, divided = outer_gradient(case, directory)
    whole_losses, expected = outer_gradient(whole, directory)
    close = [
        torch.allclose(ours, theirs, rtol=1e-3, atol=1e-5 * theirs.abs().max().item())
        for ours, theirs in zip(divided, expected, strict=True)
    ]
    return {
        "outer gradients agree": all(close),
        "losses agree": torch.allclose(torch.tensor(divided_losses), torch.tensor(whole_losses), rtol=1e-5),
    }


def outer_gradient(case, directory):
    """Losses, and what three steps of SGD on the same batches did to every fragment. Gradients are clipped to less than
    their norm: it must count each expert once.
    """
    sgd = {"type": "SGD", "params": {"lr": 0.1}}
    settings = {
        **case["deepspeed"],
        "optimizer": sgd,
        "gradient_clipping": 0.3,
        "zero_allow_untested_optimizer": True,
    }
    island = Island({**case, "deepspeed": settings}, directory)
    initial, losses = island.written(), []
    for _ in range(3):
        (result,) = island.train()
        losses.append(result.loss)
    after = island.written()
    island.engine.close(disconnect=False)
    return losses, [before - now for before, now in zip(initial, after, strict=True)]
