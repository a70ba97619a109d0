"""The tokenizer of a run: an existing Hugging Face one, or a byte-level BPE trained on the training text."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from diloco_ds.errors import UserError

PAD, EOS, BOS = "<pad>", "<eos>", "<bos>"
"""Special tokens of a trained tokenizer; ids 0, 1, 2 as in Gemma."""


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE with `vocab_size` entries: 3 special ones, 256 bytes, the rest merges.

    Any text can be encoded, and decoding gives it back exactly. Called on a text it puts BOS in front, as
    Gemma's does. It has fewer entries where the text has too few repeated pairs.
    """
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[PAD, EOS, BOS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    backend.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(
                single=f"{BOS} $A",
                pair=f"{BOS} $A {BOS} $B",
                special_tokens=[(BOS, backend.token_to_id(BOS))],
            ),
        ]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        eos_token=EOS,
        bos_token=BOS,
        clean_up_tokenization_spaces=False,
    )


def load_tokenizer(name: str, base_dir: Path) -> PreTrainedTokenizerFast:
    """An existing tokenizer by directory (relative to `base_dir`) or hub name.

    UserError if it is not there, has no fast implementation (bytes could not be counted) or no EOS (documents
    could not be separated).
    """
    directory = base_dir / name
    if not directory.is_dir() and (name.startswith((".", "/", "~")) or name.count("/") > 1):
        raise UserError(f"tokenizer.path: there is no directory {directory}")
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(directory) if directory.is_dir() else name)
    except Exception as error:  # missing, not to be had offline, damaged: transformers raises many kinds
        reason = " ".join(str(error).split())[:300]
        raise UserError(
            f"tokenizer.path: '{name}' cannot be read as a Hugging Face tokenizer: {reason}"
        ) from error
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise UserError(
            f"tokenizer.path: '{name}' has no fast implementation (tokenizer.json); convert it first"
        )
    if tokenizer.eos_token_id is None:
        raise UserError(
            f"tokenizer.path: '{name}' has no EOS token to separate documents with; "
            "set eos_token in its tokenizer_config.json"
        )
    return tokenizer


def vocabulary_size(tokenizer: PreTrainedTokenizerFast) -> int:
    """Entries a model needs: one more than the largest id, added tokens included."""
    return max(tokenizer.get_vocab().values()) + 1


def leading_bos(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """BOS, if the tokenizer puts it before a text by itself, as Gemma's does; else None."""
    bos = tokenizer.bos_token_id
    return bos if bos is not None and tokenizer("a")["input_ids"][:1] == [bos] else None


def tokenizer_hash(tokenizer: PreTrainedTokenizerFast) -> str:
    """A hash of everything that decides what a text becomes."""
    special = [tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id]
    content = json.dumps([tokenizer.backend_tokenizer.to_str(), special])
    return hashlib.sha256(content.encode()).hexdigest()


@contextmanager
def tokenizing_threads(count: int) -> Iterator[None]:
    """`tokenizers` uses `count` threads inside.

    The number is taken when its thread pool is first used in a process; later only one or as many as then can
    be chosen.
    """
    wanted = {"RAYON_NUM_THREADS": str(count), "TOKENIZERS_PARALLELISM": "true" if count > 1 else "false"}
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
