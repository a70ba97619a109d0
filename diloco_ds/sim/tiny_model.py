"""The model and the text of studies in one process: a byte-level transformer of about 120,000 parameters, or of 190,000
with eight experts a layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from diloco_ds.core.fragments import FragmentLayout, TensorSpec
from diloco_ds.errors import UserError
from diloco_ds.model.experts import ExpertLayer, RoutedTokens, expert_modules
from diloco_ds.sim.tiny_experts import TinyExpertLayer

VOCABULARY = 256
LENGTH = 64
"""Bytes of a training example."""
_WIDTH = 64
_LAYERS = 2
_HEADS = 4
_HELDOUT_SHARE = 0.1
_HELDOUT_ROWS = 256


_IMBALANCE = 0.01
"""Weight of a mixture's imbalance in the training loss."""


class TinyModel(nn.Module):
    """A causal transformer over bytes, pre-norm, with learned positions and a tied head; dense, or of `experts` a layer."""

    def __init__(self, seed: int, experts: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.embedding = nn.Embedding(VOCABULARY, _WIDTH)
            nn.init.normal_(self.embedding.weight, std=0.05)
            self.position = nn.Parameter(0.05 * torch.randn(LENGTH, _WIDTH))
            self.layers = _expert_layers(experts) if experts else _dense_layers()
            self.norm = nn.LayerNorm(_WIDTH)
        self._mask = nn.Transformer.generate_square_subsequent_mask(LENGTH)

    def loss(self, rows: Tensor) -> Tensor:
        """Mean cross entropy in nats per byte; rows: int64 [examples, LENGTH + 1]."""
        logits = self.hidden(rows[:, :-1]) @ self.embedding.weight.T
        return F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())

    def training_loss(self, rows: Tensor) -> Tensor:
        """`loss`, and of a mixture its imbalance too: else all tokens go to the same few experts."""
        loss = self.loss(rows)
        for layer in self._mixtures():
            loss = loss + _IMBALANCE * layer.imbalance
        return loss

    def hidden(self, tokens: Tensor) -> Tensor:
        """The last layer's output, normed; `tokens`: int64 [examples, LENGTH]."""
        hidden: Tensor = self.embedding(tokens) + self.position
        if isinstance(self.layers, nn.TransformerEncoder):
            hidden = self.layers(hidden, mask=self._mask, is_causal=True)
        for layer in self._mixtures():
            hidden = layer(hidden, self._mask)
        normed: Tensor = self.norm(hidden)
        return normed

    def specs(self) -> list[TensorSpec]:
        """Its tensors, as they travel."""
        layers = {
            f"{name}.{tensor}": number
            for number, (name, module) in enumerate(expert_modules(self).items())
            for tensor, _ in module.named_parameters()
        }
        return [
            TensorSpec(name, tuple(parameter.shape), name == "embedding.weight", layers.get(name))
            for name, parameter in self.named_parameters()
        ]

    def count_routed(self, layout: FragmentLayout) -> RoutedTokens | None:
        """Count the tokens of its experts from now on; None if it has none."""
        layers = [ExpertLayer(module) for module in expert_modules(self).values()]
        return RoutedTokens(layers, layout, torch.device("cpu")) if layers else None

    def _mixtures(self) -> list[TinyExpertLayer]:
        return [layer for layer in self.layers.children() if isinstance(layer, TinyExpertLayer)]


def _dense_layers() -> nn.Module:
    layer = nn.TransformerEncoderLayer(
        _WIDTH, _HEADS, 4 * _WIDTH, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
    )
    layers = nn.TransformerEncoder(layer, _LAYERS, enable_nested_tensor=False)
    for weight in layers.parameters():  # the layers begin as copies of one
        if weight.dim() > 1:
            nn.init.xavier_uniform_(weight)
    return layers


def _expert_layers(experts: int) -> nn.Module:
    return nn.ModuleList(TinyExpertLayer(_WIDTH, _HEADS, experts) for _ in range(_LAYERS))


class Text:
    """Bytes of a text, cut into a part to train on and a part held out (its end); or of several kinds of text, of each as
    much as there is of the shortest, one after the other.
    """

    def __init__(self, *kinds: bytes) -> None:
        size = min(len(data) for data in kinds)
        if int(_HELDOUT_SHARE * size) < 2 * (LENGTH + 1):
            raise UserError(f"a text of {size} bytes is too short: at least {20 * (LENGTH + 1)} are needed")
        values = [torch.frombuffer(bytearray(data[:size]), dtype=torch.uint8) for data in kinds]
        cut = size - int(_HELDOUT_SHARE * size)
        self._train = torch.cat([each[:cut] for each in values])
        self._heldout = torch.cat([each[cut:] for each in values])

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


def read_text(paths: Sequence[Path]) -> Text:
    """The text of files, a kind each. UserError if one cannot be read or is too short."""
    return Text(*(_read(path) for path in paths))


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"--text: {path} cannot be read ({error.strerror})") from error
