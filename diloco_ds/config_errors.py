"""What is wrong with a configuration, in one line."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from diloco_ds.config import Block, RunConfig

KeyPath = tuple[str | int, ...]

COMMAND_LINE = "command line"


def explain(
    error: ValidationError, path: Path, lines: dict[KeyPath, str], overridden: Sequence[KeyPath]
) -> str:
    """The most telling of the errors, in one line: where, key path, what is wrong, what would be right.

    `lines`: the place, FILE:LINE, of every key of the run file `path`; `overridden`: keys set on the command line.
    An unknown key comes first: it is often why another one is missing.
    """
    found = error.errors(include_url=False)
    first = next((each for each in found if each["type"] == "extra_forbidden"), found[0])
    key = tuple(first["loc"])
    if any(key[: len(set_path)] == set_path for set_path in overridden):
        where = COMMAND_LINE
    else:
        known = next((key[:end] for end in range(len(key), 0, -1) if key[:end] in lines), None)
        where = lines[known] if known else str(path)
    return ": ".join(part for part in (where, dotted(_own_keys(key)), _what(first)) if part)


def _own_keys(key: KeyPath) -> KeyPath:
    """`key` without what pydantic adds for the branches of a union, such as 'list[str]'."""
    block: type[Block] | None = RunConfig
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


def _what(error: ErrorDetails) -> str:
    """What is wrong, and what would be right."""
    kind, key, given = error["type"], tuple(error["loc"]), error["input"]
    if kind == "extra_forbidden":
        return f"unknown key; {_instead(key)}"
    if kind == "missing":
        block = _block_at(key[:-1])
        description = block.model_fields[str(key[-1])].description if block else None
        return "is missing" + (f": {description}" if description else "")
    if kind == "value_error":
        return str(error["ctx"]["error"])
    wanted = next((text for prefix, text in _WANTED.items() if kind.startswith(prefix)), None)
    if wanted is None:
        message = re.sub(r"^(Input|String|List) should ", "must ", error["msg"])
        wanted = message.replace("must match pattern '^[a-z0-9][a-z0-9_-]{0,31}$'", _NAME_RULE)
    return f"{wanted}, not {shown(given)}"


_NAME_RULE = "must be 1 to 32 small letters, digits, - and _, the first a letter or digit"


def shown(value: Any) -> str:
    """`value` for a message, cut where it is long."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _instead(key: KeyPath) -> str:
    """What may have been meant by the unknown last part of `key`."""
    unknown, block = str(key[-1]), _block_at(key[:-1])
    here = list(block.model_fields) if block else []
    if near := difflib.get_close_matches(unknown, here, n=1):
        return f"did you mean '{near[0]}'?"
    everywhere = list(_all_keys(RunConfig, ""))
    near = difflib.get_close_matches(unknown, [each.rpartition(".")[2] for each in everywhere], n=1)
    if near:
        return f"did you mean {' or '.join(each for each in everywhere if each.endswith('.' + near[0]))}?"
    return f"the keys here are {', '.join(here)}"


def _all_keys(block: type[Block], prefix: str) -> Iterator[str]:
    for name, field in block.model_fields.items():
        yield prefix + name
        inner = _block_in(field.annotation)
        if inner is not None:
            yield from _all_keys(inner, f"{prefix}{name}.")


def _block_at(key: KeyPath) -> type[Block] | None:
    """The class of the block at `key`; None where there is none."""
    block: type[Block] | None = RunConfig
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
