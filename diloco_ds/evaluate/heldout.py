"""Loss and bits per byte on held-out text."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from diloco_ds.data.blocks import HeldOut
from diloco_ds.model.loss import check_loss, chunked_cross_entropy

_LOGITS_AT_ONCE = 4096


def heldout_loss(
    model: PreTrainedModel, heldout: HeldOut, batch_size: int, max_tokens: int, device: torch.device | str
) -> dict[str, float | int | None]:
    """The loss of `model`, moved to `device`, on at most `max_tokens` held-out tokens (one block at least).

    Always the same blocks for the same `max_tokens`: evenly spaced over the held-out text. In a block every
    token but the first is predicted, from those before it in the block. Returns `loss` (mean, nats per
    predicted token), `stderr` (its standard error, taking blocks and not tokens as independent; None for a
    single block), `bits_per_byte` (of the text those tokens stand for, so that models with different
    tokenizers can be compared), `tokens` (predicted), `bytes` and `blocks`.
    """
    indices = evaluated_blocks(len(heldout), heldout.blocks.sequence_length, max_tokens)
    nn.Module.to(model, device)
    check_loss(model)
    losses = []
    with evaluating(model):
        for start in range(0, len(indices), batch_size):
            ids = heldout.blocks.batch(indices[start : start + batch_size]).to(device)
            losses.append(_block_losses(model, ids).cpu())
    block_losses = torch.cat(losses).double()
    predicted = heldout.blocks.sequence_length - 1
    tokens = predicted * len(indices)
    text_bytes = heldout.predicted_bytes(indices)
    loss = block_losses.mean().item() / predicted
    return {
        "loss": loss,
        "stderr": _standard_error(block_losses / predicted),
        "bits_per_byte": loss * tokens / (math.log(2) * text_bytes),
        "tokens": tokens,
        "bytes": text_bytes,
        "blocks": len(indices),
    }


def evaluated_blocks(blocks: int, sequence_length: int, max_tokens: int) -> list[int]:
    """Ids of the blocks to evaluate: at least one, else at most `max_tokens` tokens, evenly spaced."""
    count = min(blocks, max(1, max_tokens // sequence_length))
    return [i * blocks // count for i in range(count)]


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """`model` in evaluation mode and without gradients; afterwards its modules are as they were."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.inference_mode():
            yield
    finally:
        for module, training in modes.items():
            module.training = training


def _block_losses(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """The summed loss of each block of `ids` [blocks, length]; fp32 [blocks]."""
    hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state[:, :-1]
    head = model.get_output_embeddings()
    softcap = getattr(model.config.get_text_config(), "final_logit_softcapping", None)
    means = [
        chunked_cross_entropy(states, head.weight, head.bias, goal, _LOGITS_AT_ONCE, softcap)
        for states, goal in zip(hidden, ids[:, 1:], strict=True)
    ]
    return torch.stack(means) * (ids.shape[1] - 1)


def _standard_error(values: Tensor) -> float | None:
    if len(values) < 2:
        return None
    return (values.std(unbiased=True) / math.sqrt(len(values))).item()
