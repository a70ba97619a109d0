"""Counting the tokens of each expert: against the choices themselves, and against the learner's own account of tokens."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco_ds.core.events import Orders
from diloco_ds.core.fragments import TensorSpec, balance
from diloco_ds.core.learner import LearnerClock
from diloco_ds.model.experts import ExpertLayer, RoutedTokens
from diloco_ds.sim.tiny_experts import TinyExperts

EXPERTS, CHOSEN, WIDTH = (3, 4), 2, 8


def counting(fragments=2):
    """Two layers of experts and their counts; with two fragments each holds tensors of both."""
    layers = [TinyExperts(experts, WIDTH) for experts in EXPERTS]
    specs = [
        TensorSpec(f"{number}.{name}", tuple(tensor.shape), False, number)
        for number, layer in enumerate(layers)
        for name, tensor in layer.named_parameters()
    ]
    layout = balance(specs, fragments, fragments)
    return layers, RoutedTokens([ExpertLayer(layer) for layer in layers], layout, torch.device("cpu")), layout


def send(layers, tokens, generator):
    """A forward pass of both layers; the choices of each, int64 [tokens, CHOSEN]."""
    choices = []
    for layer in layers:
        scores = torch.rand(tokens, layer.num_experts, generator=generator)
        choices.append(scores.topk(CHOSEN).indices)
        layer(torch.zeros(tokens, WIDTH), choices[-1], torch.ones(tokens, CHOSEN))
    return choices


def test_counts_are_the_choices():
    layers, routed, _ = counting()
    generator = torch.Generator().manual_seed(1)
    rounds = [send(layers, tokens, generator) for tokens in (5, 1, 9)]
    expected = [
        torch.cat([choices[n].flatten() for choices in rounds]).bincount(minlength=experts).tolist()
        for n, experts in enumerate(EXPERTS)
    ]
    assert routed.counted() == expected
    counts = routed.answered(0).tolist()
    assert counts == [*expected[0], *expected[1]]
    assert routed.tokens(0, counts, 15) == tuple(counts)
    twice = [2 * count for count in counts]  # as activations that are computed twice are counted
    assert routed.tokens(0, twice, 15) == tuple(counts)


def test_nothing_is_told_of_what_was_not_counted():
    layers, routed, _ = counting()
    counts = routed.answered(0).tolist()
    assert routed.tokens(0, counts, 15) == ()
    send(layers, 4, torch.Generator().manual_seed(1))
    assert routed.tokens(0, counts, 15) == ()  # since the base none yet


def test_a_fragment_without_experts_has_none():
    layer = TinyExperts(2, WIDTH)
    specs = [TensorSpec("experts", (2, 5), False, 0), TensorSpec("other", (9,), False)]
    layout = balance(specs, 2, 2)
    routed = RoutedTokens([ExpertLayer(layer)], layout, torch.device("cpu"))
    held = [routed.answered(p) is not None for p in range(2)]
    assert held == [count > 0 for count in layout.experts]


@pytest.mark.parametrize("how", ["overwrite", "mix", "rebase"])
@settings(max_examples=20)
@given(st.lists(st.tuples(st.sampled_from(["step", "answer", "adopt"]), st.integers(0, 1)), max_size=30))
def test_they_start_anew_when_the_clock_s_tokens_do(how, events):
    layers, routed, layout = counting()
    clock = LearnerClock(layout.fragments, how, "merge_next")
    clock.holds([0, 0])
    generator = torch.Generator().manual_seed(2)
    for round_, (event, p) in enumerate(events, start=1):
        if event == "step":
            send(layers, 3, generator)
            clock.stepped(3)
        elif event == "answer":
            told = clock.answered(p, round_)
            counts = routed.answered(p)
            assert counts[: EXPERTS[0]].sum() == counts[EXPERTS[0] :].sum() == CHOSEN * told.tokens
        else:
            clock.adopted(p, round_, Orders("run", 0, 0, (0, 0)))
            routed.adopted(p, keeps=how == "rebase")
