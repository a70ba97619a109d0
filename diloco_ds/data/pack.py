"""Packing: documents become one stream of tokens, and that becomes blocks of one length.

The stream is, for every document, BOS (if the tokenizer puts it there by itself), its tokens, EOS. Every
block starts with BOS too, in the middle of a document as well: models that know BOS, Gemma above all, go
astray without it. What is left at the end of the stream and does not fill a block is dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerFast

from diloco_ds.data.blocks import BlockWriter
from diloco_ds.data.tokenizer import leading_bos, vocabulary_size

_CHARACTERS_AT_ONCE = 1_000_000

Tokens = NDArray[np.generic]
Item = TypeVar("Item")


@dataclass
class Counts:
    """What went into a block file."""

    documents: int = 0
    text_bytes: int = 0
    blocks: int = 0
    stream_tokens: int = 0


class Packer:
    """Writes the blocks of a stream of documents, and on request the bytes every token stands for."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        sequence_length: int,
        path: Path,
        bytes_path: Path | None = None,
    ) -> None:
        """`path` gets tokens (see `token_dtype`); `bytes_path` uint32 of the same shape."""
        self.counts = Counts()
        self._tokenizer = tokenizer
        self._bos = leading_bos(tokenizer)
        self._dtype = token_dtype(tokenizer)
        self._blocks = BlockWriter(path, sequence_length, self._dtype)
        self._bytes = BlockWriter(bytes_path, sequence_length, np.uint32) if bytes_path is not None else None
        self._tokens_left: Tokens = np.empty(0, self._dtype)
        self._bytes_left: Tokens = np.empty(0, np.uint32)

    def add(self, texts: list[str]) -> None:
        """Append documents."""
        if not texts:
            return
        encoded = self._tokenizer(
            texts,
            add_special_tokens=False,
            return_attention_mask=False,
            return_token_type_ids=False,
            return_offsets_mapping=self._bytes is not None,
            verbose=False,
        )
        start = [] if self._bos is None else [self._bos]
        end = [self._tokenizer.eos_token_id]
        tokens = [np.asarray(start + ids + end, self._dtype) for ids in encoded["input_ids"]]
        self.counts.documents += len(texts)
        self.counts.text_bytes += sum(len(text.encode()) for text in texts)
        self.counts.stream_tokens += sum(map(len, tokens))
        self._tokens_left = np.concatenate([self._tokens_left, *tokens])
        if self._bytes is not None:
            spans = [
                token_bytes(text, offsets)
                for text, offsets in zip(texts, encoded["offset_mapping"], strict=True)
            ]
            padded = [np.pad(span, (len(start), 1)) for span in spans]
            self._bytes_left = np.concatenate([self._bytes_left, *padded])
        self._write_full_blocks()

    def close(self) -> Counts:
        """Finish the files."""
        self._blocks.close()
        if self._bytes is not None:
            self._bytes.close()
        self.counts.blocks = self._blocks.rows
        return self.counts

    def _write_full_blocks(self) -> None:
        """Cut the stream into blocks and keep the rest for later."""
        cuts = [0]
        while (end := self._block_end(cuts[-1])) <= len(self._tokens_left):
            cuts.append(end)
        spans = list(pairwise(cuts))
        if not spans:
            return
        length = self._blocks.length
        self._blocks.write(_rows(self._tokens_left, spans, length, fill=self._bos or 0))
        self._tokens_left = self._tokens_left[cuts[-1] :]
        if self._bytes is not None:
            self._bytes.write(_rows(self._bytes_left, spans, length, fill=0))
            self._bytes_left = self._bytes_left[cuts[-1] :]

    def _block_end(self, start: int) -> int:
        """Where the block that starts there ends; one earlier where BOS has to be put in front."""
        begins_right = self._bos is None or self._tokens_left[start : start + 1].tolist() == [self._bos]
        return start + self._blocks.length - (0 if begins_right else 1)


def token_dtype(tokenizer: PreTrainedTokenizerFast) -> np.dtype[np.generic]:
    """uint16 where every token fits into it, else uint32."""
    return np.dtype(np.uint16 if vocabulary_size(tokenizer) <= 2**16 else np.uint32)


def token_bytes(text: str, offsets: list[tuple[int, int]]) -> Tokens:
    """How many UTF-8 bytes of `text` each token stands for; [tokens] uint32, adding up to all of them.

    `offsets` are the tokens' spans in characters. Text between two tokens counts for the second, text after
    the last one for the last; of tokens that share a character the first counts it.
    """
    if not offsets:
        return np.empty(0, np.uint32)
    characters = np.frombuffer(text.encode("utf-32-le"), np.uint32)
    sizes = 1 + (characters > 0x7F) + (characters > 0x7FF) + (characters > 0xFFFF)
    bytes_before = np.concatenate([[0], np.cumsum(sizes)])
    ends = np.maximum.accumulate(np.asarray([end for _, end in offsets]))
    ends[-1] = len(text)
    return np.diff(bytes_before[ends], prepend=0).astype(np.uint32)


def batches(items: Iterable[Item], size_of: Callable[[Item], int]) -> Iterator[list[Item]]:
    """Items in lists of about a million characters, counted by `size_of`."""
    batch: list[Item] = []
    size = 0
    for item in items:
        batch.append(item)
        size += size_of(item)
        if size >= _CHARACTERS_AT_ONCE:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _rows(stream: Tokens, spans: list[tuple[int, int]], length: int, fill: int) -> Tokens:
    """[spans, length]: each span of `stream`, with `fill` before it where it is one too short."""
    rows = np.full((len(spans), length), fill, stream.dtype)
    for row, (start, end) in zip(rows, spans, strict=True):
        row[length - (end - start) :] = stream[start:end]
    return rows
