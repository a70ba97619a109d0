"""Preparation: the text of a run becomes blocks of tokens on disk, once.

    .cache/diloco_ds/prepared/DIGEST/   train.npy  heldout.npy  heldout_bytes.npy  tokenizer/  prepared.json
    .cache/diloco_ds/tokenizers/DIGEST/ a trained tokenizer
    .cache/diloco_ds/datasets/          what `datasets` converts from local files

A directory is named by the hash of all that decides its content, so it is never changed and never stale. It
is built under another name and renamed when whole; a lock lets one process build while others wait for it.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock
from rich.console import Console
from transformers import PreTrainedTokenizerFast

from diloco_ds.config import RunConfig
from diloco_ds.data.meter import meter
from diloco_ds.data.pack import Counts, Packer, batches
from diloco_ds.data.prepared import Prepared
from diloco_ds.data.sources import Documents, open_source
from diloco_ds.data.tokenizer import (
    load_tokenizer,
    tokenizer_hash,
    tokenizing_threads,
    train_tokenizer,
    vocabulary_size,
)
from diloco_ds.errors import UserError

FORMAT_VERSION = 1
"""Part of every digest: raise it when the same text and settings give other blocks or another tokenizer."""

TOKENIZER_TEXT_BYTES = 64_000_000
"""A tokenizer is trained on about this much text, evenly spaced over the sources: more hardly changes it."""


def prepare(config: RunConfig, base_dir: Path, console: Console) -> Prepared:
    """The prepared data of `config`, made if it is not there yet; paths in `config` are relative to
    `base_dir`.

    UserError for a source or tokenizer that cannot be used, for fewer blocks than islands, and for held-out
    text that does not fill a block.
    """
    cache = Path(config.data.cache_dir).expanduser().absolute()
    sources = [open_source(source, base_dir, cache / "datasets") for source in config.data.sources]
    tokenizer = _Tokenizer.of(config, base_dir, sources)
    digest = _digest(
        "blocks", tokenizer.digest, config.data.sequence_length, [source.fingerprint for source in sources]
    )
    directory = cache / "prepared" / digest
    with tokenizing_threads(config.data.prepare_workers), _building(directory) as building:
        if building is not None:
            prepared = _build(building, digest, sources, tokenizer.get(cache, console), config, console)
            prepared.write_description()
    ready = Prepared.read(directory)
    if ready is None:
        raise RuntimeError(f"{directory} has just been prepared and is gone")
    _check_enough(ready, config)
    console.out(_summary(ready), highlight=False)
    return ready


@dataclass(frozen=True)
class _Tokenizer:
    """A tokenizer known by its digest, and how to get it when it is needed."""

    digest: str
    get: Callable[[Path, Console], PreTrainedTokenizerFast]

    @classmethod
    def of(cls, config: RunConfig, base_dir: Path, sources: list[Documents]) -> _Tokenizer:
        if config.tokenizer.path is not None:
            existing = load_tokenizer(config.tokenizer.path, base_dir)
            return cls(tokenizer_hash(existing), lambda cache, console: existing)
        vocab_size = int(config.tokenizer.train_vocab or 0)
        digest = _digest("tokenizer", vocab_size, [source.fingerprint for source in sources])
        return cls(digest, lambda cache, console: _trained(digest, vocab_size, sources, cache, console))


def _trained(
    digest: str, vocab_size: int, sources: list[Documents], cache: Path, console: Console
) -> PreTrainedTokenizerFast:
    directory = cache / "tokenizers" / digest
    with _building(directory) as building:
        if building is not None:
            _train(vocab_size, sources, console).save_pretrained(building)
    return PreTrainedTokenizerFast.from_pretrained(directory)


def _train(vocab_size: int, sources: list[Documents], console: Console) -> PreTrainedTokenizerFast:
    share = TOKENIZER_TEXT_BYTES // len(sources)
    rows = sum(source.dataset.num_rows for source in sources)
    with meter(console, f"data: training a tokenizer of {vocab_size} entries", rows) as advance:

        def texts() -> Iterator[str]:
            for source in sources:
                for text in source.training_sample(share):
                    advance(1)
                    yield text

        tokenizer = train_tokenizer(texts(), vocab_size)
    if len(tokenizer) < vocab_size:
        console.out(
            f"data: the text gives a tokenizer of {len(tokenizer)} entries only, not {vocab_size}",
            highlight=False,
        )
    return tokenizer


def _build(
    directory: Path,
    digest: str,
    sources: list[Documents],
    tokenizer: PreTrainedTokenizerFast,
    config: RunConfig,
    console: Console,
) -> Prepared:
    length = config.data.sequence_length
    tokenizer.save_pretrained(directory / "tokenizer")
    train = Packer(tokenizer, length, directory / "train.npy")
    heldout = Packer(tokenizer, length, directory / "heldout.npy", directory / "heldout_bytes.npy")
    for source in sources:
        _pack(source, train, heldout, console)
    trained, held = train.close(), heldout.close()
    _check_heldout(held, sources, length)
    return Prepared(
        directory=directory,
        digest=digest,
        sequence_length=length,
        vocab_size=vocabulary_size(tokenizer),
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        train_documents=trained.documents,
        train_bytes=trained.text_bytes,
        train_blocks=trained.blocks,
        heldout_documents=held.documents,
        heldout_bytes=held.text_bytes,
        heldout_blocks=held.blocks,
    )


def _pack(source: Documents, train: Packer, heldout: Packer, console: Console) -> None:
    with meter(console, f"data: tokenizing {source.where}", source.dataset.num_rows) as advance:
        for batch in batches(source, lambda document: len(document.text)):
            train.add([document.text for document in batch if not document.heldout])
            heldout.add([document.text for document in batch if document.heldout])
            advance(len(batch))


def _check_heldout(held: Counts, sources: list[Documents], length: int) -> None:
    if any(source.has_heldout_rule for source in sources) and held.blocks == 0:
        raise UserError(
            f"data.sources: the held-out text has {held.documents} documents and {held.stream_tokens} tokens "
            f"and does not fill a block of {length}; hold out more (heldout_every, heldout_files) "
            "or shorten sequence_length"
        )


def _check_enough(prepared: Prepared, config: RunConfig) -> None:
    if prepared.train_blocks < len(config.islands):
        raise UserError(
            f"data: the training text fills {prepared.train_blocks} blocks of {prepared.sequence_length} "
            f"tokens, fewer than there are islands ({len(config.islands)}); give more text or shorten sequence_length"
        )


@contextmanager
def _building(directory: Path) -> Iterator[Path | None]:
    """A directory to fill that becomes `directory` when the block ends well; None if that exists already.

    One process at a time builds; the others wait and then find it there. What a killed one left is removed.
    """
    if directory.is_dir():
        yield None
        return
    directory.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(directory.with_name(f".{directory.name}.lock")):
        if directory.is_dir():
            yield None
            return
        for leftover in directory.parent.glob(f".{directory.name}.*.partial"):
            shutil.rmtree(leftover)
        partial = directory.with_name(f".{directory.name}.{os.getpid()}.partial")
        partial.mkdir()
        try:
            yield partial
            os.replace(partial, directory)
        finally:
            shutil.rmtree(partial, ignore_errors=True)


def _digest(*content: object) -> str:
    return hashlib.sha256(json.dumps([FORMAT_VERSION, *content]).encode()).hexdigest()[:24]


def _summary(prepared: Prepared) -> str:
    heldout = "nothing held out"
    if prepared.heldout_blocks:
        heldout = f"{prepared.heldout_blocks * prepared.sequence_length:,} tokens held out"
    return (
        f"data: {prepared.train_tokens:,} training tokens in {prepared.train_blocks:,} blocks of "
        f"{prepared.sequence_length}, {heldout} ({prepared.digest})"
    )
