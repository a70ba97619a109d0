"""Minimal pairs made from held-out prose: a sentence as it was written, and the same with one word wrong.

A model that gives the written sentence the higher probability is right; chance is one half. Even models of a
million parameters learn some of these, long before benchmarks of knowledge move. The rows are made when they
are needed, always the same ones from the same text.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import datasets
from lm_eval.api.task import ConfigurableTask

from diloco_ds.config import TextSource
from diloco_ds.data.sources import open_source
from diloco_ds.errors import UserError

MAX_PAIRS = 300
"""Most pairs of one task."""

_SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[A-Z])")
_PLAIN_SENTENCE = re.compile(r"[A-Z][A-Za-z0-9 ,;:'’$%\-]+[.!?]")
_PLAIN_WORD = re.compile(r"[a-z]{2,}")

_OWN_KEYS = ("class", "sources", "words", "swap")

_PUNCTUATION = ",;:.!?"

Pair = dict[str, str]


class MinimalPairs(ConfigurableTask):
    """A task whose YAML says `sources` (text sources, of which the held-out part is used) and `words` or
    `swap`.

    `words: [is, are]` makes pairs that differ in that word; `swap: true` pairs in which two adjacent words
    are swapped.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        """Makes the pairs. UserError if the text cannot be read or gives none."""
        self._sources, self._words = config["sources"], config.get("words")
        own = {key: value for key, value in config.items() if key not in _OWN_KEYS}
        super().__init__(config=own)

    def download(self, dataset_kwargs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """Make the pairs from the held-out text."""
        sentences = heldout_sentences(json.dumps(self._sources))
        pairs = word_pairs(sentences, *self._words) if self._words else swapped_pairs(sentences)
        if not pairs:
            raise UserError(f"{self.config.task}: the held-out text gives no pair of this kind")
        self.dataset = {"validation": datasets.Dataset.from_list(pairs)}


@functools.cache
def heldout_sentences(sources: str) -> tuple[str, ...]:
    """Plain sentences of 6 to 30 words in the held-out part of `sources` (JSON list of text sources), in
    shuffled order.

    The order is that of their hashes: the same everywhere, and independent of where in the text they stand.
    """
    found: set[str] = set()
    for source in json.loads(sources):
        for document in open_source(TextSource(**source), Path()):
            if document.heldout:
                found.update(_sentences(document.text))
    return tuple(sorted(found, key=_shuffling))


def word_pairs(sentences: tuple[str, ...], one: str, other: str) -> list[Pair]:
    """Pairs from sentences that hold one of two words; where it stands first, the other is put.

    As many sentences with the one as with the other, in turn, so that no preference for either word helps.
    """
    ones = [pair for sentence in sentences if (pair := _replaced(sentence, one, other))]
    others = [pair for sentence in sentences if (pair := _replaced(sentence, other, one))]
    count = min(len(ones), len(others), MAX_PAIRS // 2)
    return list(chain.from_iterable(zip(ones[:count], others[:count], strict=True)))


def swapped_pairs(sentences: tuple[str, ...]) -> list[Pair]:
    """Pairs that differ in the order of two adjacent lower-case words somewhere in the sentence."""
    return [pair for sentence in sentences[:MAX_PAIRS] if (pair := _swapped(sentence))]


def _sentences(text: str) -> Iterator[str]:
    for line in text.splitlines():
        for sentence in _SENTENCE_END.split(line):
            if 6 <= sentence.count(" ") + 1 <= 30 and _PLAIN_SENTENCE.fullmatch(sentence):
                yield sentence


def _replaced(sentence: str, word: str, other: str) -> Pair | None:
    words = sentence.split(" ")
    for i, each in enumerate(words):
        if each.rstrip(_PUNCTUATION) == word:
            bad = [*words[:i], other + each[len(word) :], *words[i + 1 :]]
            return {"good": sentence, "bad": " ".join(bad)}
    return None


def _swapped(sentence: str) -> Pair | None:
    words = sentence.split(" ")
    places = [i for i in range(1, len(words) - 2) if _can_swap(words[i], words[i + 1])]
    if not places:
        return None
    i = places[int(_shuffling(sentence), 16) % len(places)]
    return {"good": sentence, "bad": " ".join([*words[:i], words[i + 1], words[i], *words[i + 2 :]])}


def _can_swap(first: str, second: str) -> bool:
    both_plain = _PLAIN_WORD.fullmatch(first) and _PLAIN_WORD.fullmatch(second)
    return bool(both_plain) and first != second


def _shuffling(sentence: str) -> str:
    return hashlib.sha256(sentence.encode()).hexdigest()
