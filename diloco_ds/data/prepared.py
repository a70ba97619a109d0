"""What preparation leaves on disk, and its description."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from diloco_ds.data.blocks import BlockFile, HeldOut

_DESCRIPTION = "prepared.json"


@dataclass(frozen=True)
class Prepared:
    """Prepared data: files in one directory, never changed after they are written."""

    directory: Path
    digest: str
    """Hash of the text, the tokenizer, the sequence length and the version of the format."""
    sequence_length: int
    vocab_size: int
    bos_token_id: int | None
    eos_token_id: int
    pad_token_id: int | None
    train_documents: int
    train_bytes: int
    train_blocks: int
    heldout_documents: int
    heldout_bytes: int
    heldout_blocks: int

    @property
    def train(self) -> Path:
        """Training blocks, for `BlockFile.open`."""
        return self.directory / "train.npy"

    @property
    def heldout(self) -> Path | None:
        """Held-out blocks, for `BlockFile.open`; None if no source holds anything out."""
        return self.directory / "heldout.npy" if self.heldout_blocks else None

    @property
    def tokenizer(self) -> Path:
        """The tokenizer, a directory for `AutoTokenizer.from_pretrained`."""
        return self.directory / "tokenizer"

    @property
    def train_tokens(self) -> int:
        """Tokens in the training blocks: an epoch."""
        return self.train_blocks * self.sequence_length

    @property
    def special_tokens(self) -> dict[str, int | None]:
        """`bos_token_id`, `eos_token_id` and `pad_token_id`, for the model's config."""
        return {
            "bos_token_id": self.bos_token_id,
            "eos_token_id": self.eos_token_id,
            "pad_token_id": self.pad_token_id,
        }

    def open_train(self) -> BlockFile:
        """The training blocks."""
        return BlockFile.open(self.train)

    def open_heldout(self) -> HeldOut | None:
        """The held-out blocks with their bytes; None if no source holds anything out."""
        if self.heldout is None:
            return None
        return HeldOut.open(self.heldout, self.directory / "heldout_bytes.npy")

    def as_dict(self) -> dict[str, Any]:
        """Everything as JSON's own types, for the run manifest."""
        return {**asdict(self), "directory": str(self.directory)}

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Prepared:
        """The inverse of `as_dict`; keys it does not know are left out. KeyError if one is missing."""
        values = {field.name: content[field.name] for field in fields(cls)}
        return cls(**{**values, "directory": Path(values["directory"])})

    def write_description(self) -> None:
        """Write prepared.json: what makes a directory a prepared one."""
        content = self.as_dict()
        del content["directory"]
        (self.directory / _DESCRIPTION).write_text(json.dumps(content, indent=1) + "\n")

    @classmethod
    def read(cls, directory: Path) -> Prepared | None:
        """What lies in `directory`; None if nothing prepared does."""
        description = directory / _DESCRIPTION
        if not description.is_file():
            return None
        return cls.from_dict({**json.loads(description.read_text()), "directory": directory})
