"""The layer of the tiny model with experts: attention, a router, and experts as transformers' models have them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_CHOSEN = 2
"""Experts a token is sent to."""


class TinyExperts(nn.Module):
    """`num_experts` small feed-forward networks."""

    def __init__(self, num_experts: int, width: int) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.up = nn.Parameter(torch.empty(num_experts, width, width))
        self.down = nn.Parameter(torch.empty(num_experts, width, width))

    def forward(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """hidden [tokens, width], chosen int64 [tokens, k], weights [tokens, k]; the result is like `hidden`.

        Every expert computes every token: at this size that is quicker than to sort them.
        """
        share = weights.new_zeros(len(hidden), self.num_experts).scatter(1, chosen, weights)
        results = F.gelu(hidden @ self.up) @ self.down  # [experts, tokens, width]
        return torch.einsum("te,etw->tw", share, results)


class TinyExpertLayer(nn.Module):
    """A pre-norm transformer layer whose feed-forward part is a mixture of experts."""

    def __init__(self, width: int, heads: int, experts: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.router = nn.Linear(width, experts, bias=False)
        self.experts = TinyExperts(experts, width)
        for weights in (self.experts.up, self.experts.down):
            for weight in weights:
                nn.init.xavier_uniform_(weight.data)
        self.imbalance = torch.zeros(())
        """Of the last forward pass: experts * sum of share of tokens * mean probability, 1 if even (Fedus et al., 2021)."""

    def forward(self, hidden: Tensor, mask: Tensor) -> Tensor:
        """hidden [examples, length, width]; `mask` is attention's."""
        normed = self.norm1(hidden)
        hidden = hidden + self.attention(normed, normed, normed, attn_mask=mask, need_weights=False)[0]
        rows = self.norm2(hidden).flatten(0, 1)
        probabilities = self.router(rows).softmax(-1)
        weights, chosen = probabilities.topk(_CHOSEN)
        share = F.one_hot(chosen, self.experts.num_experts).float().mean((0, 1))
        self.imbalance = self.experts.num_experts * (share * probabilities.mean(0)).sum()
        mixed = self.experts(rows, chosen, weights / weights.sum(-1, keepdim=True))
        return hidden + mixed.view_as(hidden)
