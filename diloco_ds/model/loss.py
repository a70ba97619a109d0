"""Next-token loss without the logits of a whole batch: chunks of tokens, gradients made in the forward pass.

The full logits of a batch are its largest tensor by far (tokens x vocabulary, in fp32). Here they exist for
`chunk` tokens at a time. The gradient of the loss with respect to the logits is known as soon as the logits
are, so both products with it are taken at once and nothing of the size of the vocabulary times the tokens is
kept for the backward pass: three matrix products in all, as many as the plain loss has.
`torch.nn.functional.linear_cross_entropy` works the same way but knows no soft cap of the logits, which Gemma
has.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.integrations.accelerate import load_offloaded_parameter

from diloco_ds.errors import UserError


def chunked_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    chunk: int,
    softcap: float | None = None,
) -> Tensor:
    """Mean cross entropy of `softcap(hidden @ weight.T + bias)` against `targets`.

    `hidden` is [tokens, width], `weight` [vocabulary, width], `bias` [vocabulary], `targets` [tokens]
    (int64); `softcap` c means c * tanh(logits / c). Returns a scalar in fp32. It can be differentiated once
    with respect to the first three.
    """
    wanted = [torch.is_grad_enabled() and t is not None and t.requires_grad for t in (hidden, weight, bias)]
    loss: Tensor = _ChunkedCrossEntropy.apply(hidden, weight, bias, targets, chunk, softcap, wanted)
    return loss


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        chunk: int,
        softcap: float | None,
        wanted: list[bool],
    ) -> Tensor:
        grad_hidden = torch.empty_like(hidden) if wanted[0] else None
        grad_weight = grad_bias = None
        total = hidden.new_zeros((), dtype=torch.float32)
        for start in range(0, hidden.shape[0], chunk):
            part = slice(start, start + chunk)
            states, goal = hidden[part], targets[part].unsqueeze(1)
            logits = nn.functional.linear(states, weight, bias).float()
            if softcap is not None:
                logits = logits.div_(softcap).tanh_().mul_(softcap)
            normalizer = logits.logsumexp(dim=1, keepdim=True)
            total += (normalizer - logits.gather(1, goal)).sum()
            if not any(wanted):
                continue
            grad = _grad_logits(logits, normalizer, goal, softcap).to(states.dtype)
            if grad_hidden is not None:
                grad_hidden[part] = grad @ weight
            if wanted[1]:
                grad_weight = _accumulate(grad_weight, grad.T @ states)
            if wanted[2]:
                grad_bias = _accumulate(grad_bias, grad.sum(dim=0))
        ctx.grads = grad_hidden, grad_weight, grad_bias
        ctx.tokens = hidden.shape[0]
        return total / hidden.shape[0]

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor) -> tuple[Tensor | None, ...]:
        # Divided by the number of tokens only here, together with the loss scale: fp16 would underflow
        # before.
        scale = outputs[0] / ctx.tokens
        grads, ctx.grads = ctx.grads, None  # scaled in place, so good for one backward pass
        if grads is None:
            raise RuntimeError("chunked_cross_entropy can be differentiated only once")
        return (*(None if grad is None else grad.mul_(scale) for grad in grads), None, None, None, None)


def _grad_logits(logits: Tensor, normalizer: Tensor, goal: Tensor, softcap: float | None) -> Tensor:
    """Gradient of the summed loss with respect to the logits before the cap; [tokens, vocabulary], fp32."""
    slope = None if softcap is None else 1 - (logits / softcap).square_()
    grad = logits.sub_(normalizer).exp_()
    grad.scatter_add_(1, goal, grad.new_full((), -1.0).expand_as(goal))
    return grad if slope is None else grad.mul_(slope)


def _accumulate(total: Tensor | None, part: Tensor) -> Tensor:
    """Sum over chunks, in fp32 from the second on: low precision would lose small parts."""
    return part if total is None else total.float().add_(part)


class _Head(nn.Module):
    """Owns the output embedding for the loss, so that ZeRO-3 gathers it once for all chunks."""

    def __init__(self, head: nn.Linear, chunk: int, softcap: float | None) -> None:
        super().__init__()
        self.weight: Tensor = head.weight
        self.bias: Tensor | None = head.bias
        self.chunk, self.softcap = chunk, softcap

    def forward(self, hidden: Tensor, targets: Tensor) -> Tensor:
        return chunked_cross_entropy(hidden, self.weight, self.bias, targets, self.chunk, self.softcap)


class LossModel(nn.Module):
    """A causal language model whose forward pass is its training loss.

    `forward(ids)` takes int64 [sequences, length] and returns the mean loss of predicting every token from
    those before it (fp32 scalar), with the router's balancing loss added where the model's config asks for it
    (`output_router_logits`).
    """

    def __init__(self, model: PreTrainedModel, chunk: int) -> None:
        super().__init__()
        self.model = model
        config = model.config.get_text_config()
        head = model.get_output_embeddings()
        if not isinstance(head, nn.Linear) or model.base_model is model:
            raise UserError(
                f"{type(model).__name__} has no linear output embedding over a base model: "
                "it cannot be trained here"
            )
        self.head = _Head(head, chunk, getattr(config, "final_logit_softcapping", None))
        self._router_loss = _router_loss_of(model) if getattr(config, "output_router_logits", False) else None

    def forward(self, ids: Tensor) -> Tensor:
        outputs = self.model.base_model(
            input_ids=ids, use_cache=False, **({"output_router_logits": True} if self._router_loss else {})
        )
        hidden = outputs.last_hidden_state[:, :-1]
        loss = self.head(hidden.flatten(0, 1), ids[:, 1:].flatten())
        if self._router_loss is not None:
            loss = loss + self._router_loss(outputs.router_logits)
        return loss


def _router_loss_of(model: PreTrainedModel) -> Any:
    """The model's own balancing loss, times its coefficient, as a function of the router logits."""
    balancing = getattr(sys.modules[type(model).__module__], "load_balancing_loss_func", None)
    if balancing is None:
        raise UserError(
            f"output_router_logits is set, but {type(model).__name__} has no router balancing loss"
        )
    return lambda logits: (
        model.router_aux_loss_coef * balancing(logits, model.num_experts, model.num_experts_per_tok)
    )


@torch.no_grad()
def check_loss(model: PreTrainedModel) -> None:
    """UserError if `LossModel` of `model` is not the loss the model itself computes (a scale of its logits,
    another head). Weights that were left on disk are read a layer at a time.
    """
    vocab = model.config.get_text_config().vocab_size
    device = "cpu" if model.device.type == "meta" else model.device
    ids = torch.arange(2 * 16, device=device).mul(7919).remainder(vocab).view(2, 16)
    was_training = model.training
    model.eval()
    loss_model = LossModel(model, chunk=16)
    if loss_model.head.weight.is_meta:
        loss_model.head.weight = nn.Parameter(_left_on_disk(model), requires_grad=False)
    own, ours = model(input_ids=ids, labels=ids, use_cache=False).loss, loss_model(ids)
    model.train(was_training)
    if not torch.allclose(own.float(), ours, rtol=1e-3, atol=1e-4):
        raise UserError(
            f"{type(model).__name__} computes its loss in a way that is not supported: {own.item():.4f}, "
            f"where cross entropy of its output embedding gives {ours.item():.4f}"
        )


def _left_on_disk(model: PreTrainedModel) -> Tensor:
    """The weight of the output embedding."""
    head = model.get_output_embeddings()
    name = next(name for name, parameter in model.named_parameters() if parameter is head.weight)
    values: Tensor = load_offloaded_parameter(model, name)
    return values
