"""Sources of text: what a run file names becomes a `datasets.Dataset`, and that a sequence of documents."""

from __future__ import annotations

import difflib
import hashlib
import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import datasets

from diloco_ds.config import TextSource
from diloco_ds.data.source_files import content_hash, find_files, object_of_records
from diloco_ds.errors import UserError

_READ_AT_ONCE = 256


class Document(NamedTuple):
    """One text and whether it is held out: evaluated, never trained on."""

    text: str
    heldout: bool


@dataclass(frozen=True)
class Documents:
    """The documents of one source, in a fixed order. Empty ones are left out and not counted."""

    source: TextSource
    where: str
    """The source in words, for messages."""
    files: tuple[Path, ...]
    """Local files; none for a hub data set."""
    load: Callable[[], datasets.Dataset]

    @cached_property
    def dataset(self) -> datasets.Dataset:
        """All rows, read when first asked for. UserError if they cannot be read or a column is wrong."""
        empty = UserError(f"data.sources: {self.where} is empty")
        if self.files and not any(path.stat().st_size for path in self.files):
            raise empty
        with quiet_datasets(), _as_user_error(self.where):
            dataset = self.load()
        columns = _columns(self.source)
        for column in columns:
            _check_column(dataset, column, self.where)
        if dataset.num_rows == 0:
            raise empty
        return dataset.select_columns(columns)

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the content, of the columns taken from it and of what is held out."""
        content = content_hash(list(self.files)) if self.files else self.dataset._fingerprint
        rules = self.source.model_dump(include={"format", "text_field", "heldout_every", "heldout_files"})
        return hashlib.sha256(json.dumps([content, rules]).encode()).hexdigest()

    @property
    def has_heldout_rule(self) -> bool:
        """Whether any document is meant to be held out."""
        return self.source.heldout_every is not None or self.source.heldout_files is not None

    def __iter__(self) -> Iterator[Document]:
        number = 0
        for row, text in enumerate(self._texts()):
            if text.strip():
                yield Document(text, self._is_heldout(row, number))
                number += 1

    def training_sample(self, max_bytes: int) -> Iterator[str]:
        """Texts to train on, evenly spaced over the source, together about `max_bytes` at most."""
        texts = (document.text for document in self if not document.heldout)
        stride = max(1, round(self._estimated_bytes() / max_bytes))
        return (text for number, text in enumerate(texts) if number % stride == 0)

    def _texts(self) -> Iterator[str]:
        columns = _columns(self.source)
        for batch in self.dataset.iter(batch_size=_READ_AT_ONCE):
            for values in zip(*(batch[column] for column in columns), strict=True):
                yield "\n".join(_as_text(value) for value in values if value)

    def _is_heldout(self, row: int, number: int) -> bool:
        every, pattern = self.source.heldout_every, self.source.heldout_files
        if every is not None and number % every == 0:
            return True
        return pattern is not None and re.search(pattern, self.files[row].name) is not None

    def _estimated_bytes(self) -> float:
        """The size of all texts, from some rows spread over the source."""
        rows = self.dataset.num_rows
        step = max(1, rows // 200)
        some = self.dataset.select(range(0, rows, step))
        columns = _columns(self.source)
        size = sum(len(_as_text(row[column]).encode()) for row in some for column in columns if row[column])
        return size * rows / some.num_rows


def open_source(source: TextSource, base_dir: Path, cache_dir: Path | None = None) -> Documents:
    """The documents of `source`; relative `files` are taken from `base_dir`.

    `datasets` keeps what it converts from local files under `cache_dir` (none: where it always does). Nothing
    is read yet but the list of files. UserError for a missing file or package and for a regular expression
    that is none.
    """
    if source.heldout_files is not None:
        try:
            re.compile(source.heldout_files)
        except re.error as error:
            raise UserError(
                f"data.sources: heldout_files '{source.heldout_files}' is not a regular expression: {error}"
            ) from error
    if source.hub is not None:
        return Documents(source, f"the data set '{source.hub}'", (), lambda: _load_hub(source))
    files = find_files(source, base_dir)
    where = str(files[0] if source.package is None else Path(source.package, str(source.files)))
    if len(files) > 1:
        where += f" and {len(files) - 1} more" if source.package is None else f" ({len(files)} files)"
    return Documents(source, where, tuple(files), lambda: _load_files(source, files, cache_dir))


def _load_hub(source: TextSource) -> datasets.Dataset:
    return datasets.load_dataset(str(source.hub), source.hub_config, split=source.split)


def _load_files(source: TextSource, files: list[Path], cache_dir: Path | None) -> datasets.Dataset:
    builder, options = str(source.format), {}
    if source.format == "document":
        builder, options = "text", {"sample_by": "document"}
    if source.format == "json" and (records := _records(files)) is not None:
        names = list(dict.fromkeys(name for record in records for name in record))
        wanted = [name for name in names if name in _columns(source)] or names
        return datasets.Dataset.from_dict({name: [record.get(name) for record in records] for name in wanted})
    if cache_dir is not None:
        options["cache_dir"] = str(cache_dir)
    return datasets.load_dataset(builder, data_files=[str(path) for path in files], split="train", **options)


def _records(files: list[Path]) -> list[dict[str, Any]] | None:
    """All records of files that are one JSON object of records each; None if any is not."""
    records: list[dict[str, Any]] = []
    for path in files:
        found = object_of_records(path)
        if found is None:
            return None
        records += found
    return records


def _columns(source: TextSource) -> list[str]:
    return [source.text_field] if isinstance(source.text_field, str) else list(source.text_field)


def _as_text(value: str | list[str]) -> str:
    return value if isinstance(value, str) else "\n".join(item for item in value if item)


def _check_column(dataset: datasets.Dataset, column: str, where: str) -> None:
    if column not in dataset.column_names:
        near = difflib.get_close_matches(column, dataset.column_names, n=1, cutoff=0.0)
        hint = f"; did you mean '{near[0]}'?" if near else ""
        raise UserError(
            f"data.sources: {where} has no column '{column}'{hint} "
            f"(it has {', '.join(dataset.column_names)}; set text_field)"
        )
    feature = dataset.features[column]
    item = getattr(feature, "feature", feature)  # of a list of strings, its strings
    if getattr(item, "dtype", None) not in ("string", "large_string", "string_view"):
        raise UserError(f"data.sources: column '{column}' of {where} holds {feature}, not text")


@contextmanager
def quiet_datasets() -> Iterator[None]:
    """No progress bars of `datasets`."""
    shown = datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if not shown:
            datasets.enable_progress_bars()


@contextmanager
def _as_user_error(where: str) -> Iterator[None]:
    """Whatever `datasets` finds wrong with a source, in one line."""
    try:
        yield
    except Exception as error:  # its builders raise anything from OSError to pyarrow's errors
        cause = error.__cause__ or error
        reason = " ".join(str(cause).split())[:300] or type(cause).__name__
        raise UserError(f"data.sources: {where} cannot be read: {reason}") from error
