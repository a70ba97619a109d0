"""The model and the text of studies in one process: a byte-level transformer of about 120,000 parameters."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from diloco_ds.core.fragments import TensorSpec
from diloco_ds.errors import UserError

VOCABULARY = 256
LENGTH = 64
"""Bytes of a training example."""
_WIDTH = 64
_LAYERS = 2
_HEADS = 4
_HELDOUT_SHARE = 0.1
_HELDOUT_ROWS = 256


class TinyModel(nn.Module):
    """A causal transformer over bytes, pre-norm, with learned positions and a tied head."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.embedding = nn.Embedding(VOCABULARY, _WIDTH)
            nn.init.normal_(self.embedding.weight, std=0.05)
            self.position = nn.Parameter(0.05 * torch.randn(LENGTH, _WIDTH))
            layer = nn.TransformerEncoderLayer(
                _WIDTH, _HEADS, 4 * _WIDTH, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
            )
            self.layers = nn.TransformerEncoder(layer, _LAYERS, enable_nested_tensor=False)
            self.norm = nn.LayerNorm(_WIDTH)
            for weight in self.layers.parameters():  # the layers begin as copies of one
                if weight.dim() > 1:
                    nn.init.xavier_uniform_(weight)
        self._mask = nn.Transformer.generate_square_subsequent_mask(LENGTH)

    def loss(self, rows: Tensor) -> Tensor:
        """Mean cross entropy in nats per byte; rows: int64 [examples, LENGTH + 1]."""
        hidden = self.embedding(rows[:, :-1]) + self.position
        hidden = self.norm(self.layers(hidden, mask=self._mask, is_causal=True))
        logits = hidden @ self.embedding.weight.T
        return F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())

    def specs(self) -> list[TensorSpec]:
        """Its tensors, as they travel."""
        return [
            TensorSpec(name, tuple(parameter.shape), name == "embedding.weight")
            for name, parameter in self.named_parameters()
        ]


class Text:
    """Bytes of a text, cut into a part to train on and a part held out (its end)."""

    def __init__(self, data: bytes) -> None:
        values = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        cut = len(values) - int(_HELDOUT_SHARE * len(values))
        self._train, self._heldout = values[:cut], values[cut:]
        if len(self._heldout) < 2 * (LENGTH + 1):
            raise UserError(
                f"a text of {len(data)} bytes is too short: at least {20 * (LENGTH + 1)} are needed"
            )

    def batch(self, shard: int, shards: int, rows: int, generator: torch.Generator) -> Tensor:
        """`rows` examples from anywhere in a learner's shard; int64 [rows, LENGTH + 1]."""
        size = len(self._train) // shards
        if size <= LENGTH + 1:
            raise UserError(f"the text is too short for {shards} shards")
        starts = torch.randint(shard * size, (shard + 1) * size - LENGTH - 1, (rows,), generator=generator)
        return self._rows(self._train, starts)

    def heldout(self) -> Tensor:
        """The held-out examples, always the same; int64 [rows, LENGTH + 1]."""
        count = min(_HELDOUT_ROWS, (len(self._heldout) - 1) // LENGTH)
        starts = torch.linspace(0, len(self._heldout) - LENGTH - 1, count).long()
        return self._rows(self._heldout, starts)

    @staticmethod
    def _rows(values: Tensor, starts: Tensor) -> Tensor:
        return values[starts[:, None] + torch.arange(LENGTH + 1)].long()


def read_text(path: Path) -> Text:
    """The text of a file. UserError if it cannot be read or is too short."""
    try:
        return Text(path.read_bytes())
    except OSError as error:
        raise UserError(f"--text: {path} cannot be read ({error.strerror})") from error
