"""What is wrong with a configuration, in one line."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from diloco_ds.config import Block, Island, RunConfig

KeyPath = tuple[str | int, ...]

COMMAND_LINE = "command line"


def explain(
    error: ValidationError, path: Path, lines: dict[KeyPath, str], overridden: Sequence[KeyPath]
) -> str:
    """The most telling of the errors, in one line: where, key path, what is wrong, what would be right.

    `lines`: the place, FILE:LINE, of every key of the run file `path`; `overridden`: keys set on the command line.
    """
    key = tuple(_first(error)["loc"])
    if any(key[: len(set_path)] == set_path for set_path in overridden):
        where = COMMAND_LINE
    else:
        known = next((key[:end] for end in range(len(key), 0, -1) if key[:end] in lines), None)
        where = lines[known] if known else str(path)
    return f"{where}: {in_words(error, RunConfig)}"


def in_words(error: ValidationError, root: type[Block]) -> str:
    """The most telling of the errors of a block `root`, in one line: key path, what is wrong, what would be right."""
    first = _first(error)
    return ": ".join(
        part for part in (dotted(_own_keys(tuple(first["loc"]), root)), _what(first, root)) if part
    )


def _first(error: ValidationError) -> ErrorDetails:
    """The most telling: an unknown key is often why another one is missing."""
    found = error.errors(include_url=False)
    return next((each for each in found if each["type"] == "extra_forbidden"), found[0])


def _own_keys(key: KeyPath, root: type[Block]) -> KeyPath:
    """`key` without what pydantic adds for the branches of a union, such as 'list[str]'."""
    block: type[Block] | None = root
    for end, part in enumerate(key):
        if isinstance(part, int):
            continue
        if block is None:
            return key[:end] if end and isinstance(key[end - 1], str) else key
        block = _block_in(block.model_fields[part].annotation) if part in block.model_fields else None
    return key


_WANTED = {
    "int": "must be a whole number",
    "float": "must be a number",
    "string_type": "must be text; put it in quotes",
    "bool": "must be true or false",
    "list_type": "must be a list",
    "dict_type": "must be a block of keys",
    "model_type": "must be a block of keys",
}


def _what(error: ErrorDetails, root: type[Block]) -> str:
    """What is wrong, and what would be right."""
    kind, key, given = error["type"], tuple(error["loc"]), error["input"]
    if kind == "extra_forbidden":
        return f"unknown key; {_instead(key, root)}"
    if kind == "missing":
        block = _block_at(key[:-1], root)
        description = block.model_fields[str(key[-1])].description if block else None
        return "is missing" + (f": {description}" if description else "")
    if kind == "value_error":
        return str(error["ctx"]["error"])
    wanted = next((text for prefix, text in _WANTED.items() if kind.startswith(prefix)), None)
    if wanted is None:
        message = re.sub(r"^(Input|String|List) should ", "must ", error["msg"])
        message = re.sub(r" after validation, not \d+$", "", message)
        wanted = message.replace("must match pattern '^[a-z0-9][a-z0-9_-]{0,31}$'", _NAME_RULE)
    return f"{wanted}, not {shown(given)}"


_NAME_RULE = "must be 1 to 32 small letters, digits, - and _, the first a letter or digit"


def shown(value: Any) -> str:
    """`value` for a message, cut where it is long."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _instead(key: KeyPath, root: type[Block]) -> str:
    """What may have been meant by the unknown last part of `key`."""
    unknown, block = str(key[-1]), _block_at(key[:-1], root)
    here = list(block.model_fields) if block else []
    if near := difflib.get_close_matches(unknown, here, n=1):
        return f"did you mean '{near[0]}'?"
    if block is Island and unknown in RunConfig.model_fields:
        return f"all islands share the run's {unknown}; an island's keys are {', '.join(here)}"
    everywhere = list(_all_keys(root, ""))
    near = difflib.get_close_matches(
        unknown, [each.rpartition(".")[2] for each in everywhere], n=1, cutoff=0.75
    )
    if near:
        return (
            f"did you mean {' or '.join(each for each in everywhere if f'.{each}'.endswith(f'.{near[0]}'))}?"
        )
    return f"the keys here are {', '.join(here)}"


def _all_keys(block: type[Block], prefix: str) -> Iterator[str]:
    for name, field in block.model_fields.items():
        yield prefix + name
        inner = _block_in(field.annotation)
        if inner is not None:
            yield from _all_keys(inner, f"{prefix}{name}.")


def _block_at(key: KeyPath, root: type[Block]) -> type[Block] | None:
    """The class of the block at `key` below `root`; None where there is none."""
    block: type[Block] | None = root
    for part in key:
        if block is None:
            return None
        if isinstance(part, str):
            field = block.model_fields.get(part)
            block = _block_in(field.annotation) if field else None
    return block


def _block_in(annotation: Any) -> type[Block] | None:
    """The block class an annotation names, alone or inside list[...] or a union."""
    if isinstance(annotation, type) and issubclass(annotation, Block):
        return annotation
    return next((block for part in get_args(annotation) if (block := _block_in(part))), None)


def dotted(key: KeyPath) -> str:
    """`key` as it is written on the command line."""
    return ".".join(str(part) for part in key)
