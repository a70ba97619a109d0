"""Local files of a text source: finding them, and reading JSON that is one object of records."""

from __future__ import annotations

import glob
import hashlib
import importlib.util
import json
from pathlib import Path
from typing import Any

from diloco_ds.config import TextSource
from diloco_ds.errors import UserError

_SUFFIXES = {
    "text": (".txt", ".md", ".text"),
    "document": (".txt", ".md", ".text"),
    "json": (".json", ".jsonl", ".json.gz", ".jsonl.gz"),
    "parquet": (".parquet",),
    "arrow": (".arrow",),
}


def find_files(source: TextSource, base_dir: Path) -> list[Path]:
    """The files of `source`, sorted by path. UserError if there are none.

    A directory stands for the files in it, at any depth, with a suffix of the source's format.
    """
    root = _package_directory(source.package) if source.package is not None else base_dir
    pattern = root / str(source.files)
    if pattern.is_dir():
        suffixes = _SUFFIXES[str(source.format)]
        found = [path for path in pattern.rglob("*") if path.name.endswith(suffixes)]
        nothing = f"there is no file ending in {', '.join(suffixes)} in the directory {pattern}"
    else:
        found = [Path(path) for path in glob.glob(str(pattern), recursive=True)]
        nothing = f"there is no file {pattern}"
    files = sorted(path for path in found if path.is_file())
    if not files:
        raise UserError(f"data.sources: {nothing}")
    return files


def _package_directory(package: str) -> Path:
    """Where `package` lies: looked up, not imported, as is the outermost one of a dotted name."""
    outermost, *inner = package.split(".")
    spec = importlib.util.find_spec(outermost) if outermost.isidentifier() else None
    if spec is None or not spec.submodule_search_locations:
        raise UserError(
            f"data.sources: the package '{package}' is not installed "
            "(give the name it is imported by; text packages are listed in launch/text-packages.txt)"
        )
    return Path(next(iter(spec.submodule_search_locations)), *inner)


def content_hash(files: list[Path]) -> str:
    """A hash of the names and the content of `files`, wherever they lie."""
    total = hashlib.sha256()
    for path in files:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        total.update(f"{path.name} {digest}\n".encode())
    return total.hexdigest()


def object_of_records(path: Path) -> list[dict[str, Any]] | None:
    """The records of a JSON file that is one object {key: record, ...}; None if it is anything else.

    `datasets` reads lists of records and a record a line; this form, common for dictionaries of articles, it
    does not.
    """
    if path.suffix != ".json":
        return None
    with path.open(encoding="utf-8") as file:
        first = file.readline()
        if not first.lstrip().startswith("{") or (_is_record(first) and file.readline().strip()):
            return None
        file.seek(0)
        try:
            content = json.load(file)
        except ValueError:
            return None  # a record a line after all, or damaged: for `datasets` to say
    if not content or not all(isinstance(record, dict) for record in content.values()):
        return None
    return list(content.values())


def _is_record(line: str) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return False
