"""The chunked loss against the plain one."""

import pytest
import torch
from torch import nn
from transformers import GraniteConfig, GraniteForCausalLM, MixtralConfig, MixtralForCausalLM

from diloco_ds.errors import UserError
from diloco_ds.model.loss import LossModel, check_loss, chunked_cross_entropy

TOKENS, WIDTH, VOCABULARY = 23, 8, 31


def plain_loss(hidden, weight, bias, targets, softcap):
    logits = nn.functional.linear(hidden, weight, bias).float()
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    return nn.functional.cross_entropy(logits, targets)


def inputs(dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    hidden, weight, bias = (
        torch.randn(*shape, generator=generator).to(dtype).requires_grad_()
        for shape in ((TOKENS, WIDTH), (VOCABULARY, WIDTH), (VOCABULARY,))
    )
    return hidden, weight, bias, torch.randint(VOCABULARY, (TOKENS,), generator=generator)


@pytest.mark.parametrize("chunk", [1, 5, TOKENS, 100])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("with_bias", [False, True])
def test_loss_and_gradients_equal_the_plain_loss(chunk, softcap, with_bias):
    hidden, weight, bias, targets = inputs()
    leaves = [hidden, weight, bias] if with_bias else [hidden, weight]
    used_bias = bias if with_bias else None
    plain = plain_loss(hidden, weight, used_bias, targets, softcap)
    expected = torch.autograd.grad(3 * plain, leaves)
    loss = chunked_cross_entropy(hidden, weight, used_bias, targets, chunk, softcap)
    gradients = torch.autograd.grad(3 * loss, leaves)
    torch.testing.assert_close(loss, plain)
    for ours, theirs in zip(gradients, expected, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_loss_in_bf16_stays_close_and_gradients_keep_the_dtype():
    hidden, weight, bias, targets = inputs(torch.bfloat16)
    loss = chunked_cross_entropy(hidden, weight, bias, targets, 4, 2.0)
    loss.backward()
    assert loss.dtype == torch.float32
    assert [t.grad.dtype for t in (hidden, weight, bias)] == [torch.bfloat16] * 3
    reference = [t.detach().float().requires_grad_() for t in (hidden, weight, bias)]
    plain_loss(*reference, targets, 2.0).backward()
    for ours, theirs in zip((hidden, weight, bias), reference, strict=True):
        torch.testing.assert_close(ours.grad.float(), theirs.grad, rtol=0.05, atol=2e-3)


def test_frozen_inputs_get_no_gradient_and_no_grad_computes_none():
    hidden, weight, _, targets = inputs()
    weight.requires_grad_(False)
    chunked_cross_entropy(hidden, weight, None, targets, 5).backward()
    assert weight.grad is None
    with torch.no_grad():
        assert not chunked_cross_entropy(hidden, weight, None, targets, 5).requires_grad


def test_a_second_backward_pass_is_refused():
    hidden, weight, _, targets = inputs()
    loss = chunked_cross_entropy(hidden, weight, None, targets, 5)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="only once"):
        loss.backward()


def tiny_mixtral(**fields):
    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=50,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_local_experts=4,
        pad_token_id=None,
        **fields,
    )
    return MixtralForCausalLM(config)


def test_router_loss_is_added_where_the_config_asks_for_it():
    model = tiny_mixtral(output_router_logits=True, router_aux_loss_coef=0.5)
    ids = torch.arange(24).view(2, 12)
    own = model(input_ids=ids, labels=ids, use_cache=False)
    assert own.aux_loss > 0.1
    torch.testing.assert_close(LossModel(model, 7)(ids), own.loss)


def test_a_model_that_scales_its_logits_is_refused():
    torch.manual_seed(0)
    config = GraniteConfig(
        vocab_size=50,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        logits_scaling=0.01,
    )
    check_loss(tiny_mixtral())
    with pytest.raises(UserError, match="GraniteForCausalLM computes its loss in a way"):
        check_loss(GraniteForCausalLM(config))
