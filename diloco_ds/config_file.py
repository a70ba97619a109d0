"""Run files: YAML to a `RunConfig` and back, `key=value` overrides, absolute paths, errors of one line that say where.

Relative paths in a run file are looked for beside the run file first, then in the working directory; `data.cache_dir`
always belongs to the working directory. A resolved config holds absolute paths alone. A run file may build on
another one of its directory: `base: quickstart.yaml` takes all settings from there, and its own are laid over them.
"""

from __future__ import annotations

import glob
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from diloco_ds.config import Island, RunConfig, merged
from diloco_ds.config_errors import COMMAND_LINE, KeyPath, dotted, explain, shown
from diloco_ds.errors import UserError
from diloco_ds.rundir import write_atomically


class _Loader(yaml.SafeLoader):
    """YAML as people write it: 3e-4 is a number (YAML 1.1 takes it for text)."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d[\d_]*\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)


def load_config(path: Path, overrides: Sequence[str] = (), joined: Sequence[Island] = ()) -> RunConfig:
    """The run described by the YAML file `path`, after `overrides` such as `exchange.quorum=2` or `islands.a.ranks=2`.

    `joined`: islands behind the file's own, which overrides can name too.

    UserError, one line: file and line, key path, what is wrong and what would be right.
    """
    tree, lines = _read(path)
    if joined:
        tree["islands"] = [*tree["islands"], *(island.model_dump(mode="json") for island in joined)]
    overridden = [_override(tree, override) for override in overrides]
    try:
        config = RunConfig.model_validate(tree)
    except ValidationError as error:
        raise UserError(explain(error, path, lines, overridden)) from None
    return _with_absolute_paths(config, path.resolve().parent)


def settings_tree(overrides: Sequence[str]) -> dict[str, Any]:
    """What `overrides` such as `ranks=2` or `deepspeed.gradient_clipping=1.0` say, as a tree. UserError, one line."""
    tree: dict[str, Any] = {}
    for override in overrides:
        _override(tree, override)
    return tree


def save_config(config: RunConfig, path: Path) -> None:
    """Write `config` to `path` as YAML that `load_config` reads back equal."""
    write_atomically(path, yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, width=120))


def _read(path: Path, above: tuple[Path, ...] = ()) -> tuple[dict[str, Any], dict[KeyPath, str]]:
    """The file's content over that of its base, and the place, FILE:LINE, of every key in it. `above`: files built on it."""
    tree, lines = _read_alone(path)
    name = tree.pop("base", None)
    if name is None:
        return tree, lines
    base = path.parent / str(name)
    if not isinstance(name, str) or base.parent != path.parent or not base.is_file():
        raise UserError(
            f"{lines['base',]}: base: must be the name of a run file in the same directory, not {shown(name)}"
        )
    if base in (path, *above):
        raise UserError(f"{lines['base',]}: base: {name} is built on this file itself")
    base_tree, base_lines = _read(base, (path, *above))
    return merged(base_tree, tree), {**base_lines, **lines}


def _read_alone(path: Path) -> tuple[dict[str, Any], dict[KeyPath, str]]:
    try:
        loader = _Loader(path.read_text())
        root = loader.get_single_node()
        if not isinstance(root, yaml.MappingNode):
            raise UserError(
                f"{path}: a run file is a YAML mapping with keys such as name, budget, model, islands"
            )
        lines = dict(_lines(root, (), path))
        tree: dict[str, Any] = loader.construct_document(root)  # type: ignore[no-untyped-call]
    except OSError as error:
        raise UserError(f"{path}: the run file cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UserError(f"{path}: not a text file; a run file is YAML in UTF-8") from None
    except yaml.YAMLError as error:
        raise UserError(_explain_syntax(error, path)) from None
    return tree, lines


def _lines(node: yaml.Node, at: KeyPath, path: Path) -> Iterator[tuple[KeyPath, str]]:
    """Key path and place of everything below `node`. UserError for a key that stands twice in one mapping."""
    if isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            yield (*at, index), f"{path}:{item.start_mark.line + 1}"
            yield from _lines(item, (*at, index), path)
    if not isinstance(node, yaml.MappingNode):
        return
    seen: dict[str, int] = {}
    for key, value in node.value:
        name, line = str(key.value), key.start_mark.line + 1
        if name in seen and name != "<<":
            raise UserError(
                f"{path}:{line}: {dotted((*at, name))}: stands twice, in line {seen[name]} already; remove one"
            )
        seen[name] = line
        yield (*at, name), f"{path}:{line}"
        yield from _lines(value, (*at, name), path)


def _explain_syntax(error: yaml.YAMLError, path: Path) -> str:
    where, problem = str(path), " ".join(str(error).split())
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        where = f"{path}:{error.problem_mark.line + 1}"
        problem = ", ".join(part for part in (error.context, error.problem) if part)
    return f"{where}: not valid YAML: {problem}"


def _override(tree: dict[str, Any], override: str) -> KeyPath:
    """Set in `tree` what `key.path=value` says; the path that was set. Mappings that are not there yet are made."""
    key_path, equals, text = override.partition("=")
    keys = key_path.strip().split(".")
    if not equals or not all(keys):
        raise UserError(f"{COMMAND_LINE}: '{override}' is not key=value, for example budget.tokens=1000000")
    value = _value(key_path, text)
    at: KeyPath = ()
    here: Any = tree
    for key in keys[:-1]:
        step = _step(here, key, at)
        if isinstance(here, dict) and here.get(step) is None:
            here[step] = {}
        here = here[step]
        at = (*at, step)
    last = _step(here, keys[-1], at)
    here[last] = value
    return (*at, last)


def _value(key_path: str, text: str) -> Any:
    """`text` as a YAML value; what begins like an alias, tag or directive of YAML (*.txt) is plain text."""
    if text[:1] in tuple("*&!%@`"):
        return text
    try:
        return yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        problem = getattr(error, "problem", None) or error
        raise UserError(f"{COMMAND_LINE}: {key_path}: '{text}' is not a YAML value: {problem}") from None


def _step(here: Any, key: str, at: KeyPath) -> str | int:
    """`key` as the key of a mapping, the index into a list, or the name of an item of a list."""
    if isinstance(here, dict):
        return key
    where = f"{COMMAND_LINE}: {dotted(at)}"
    if not isinstance(here, list):
        raise UserError(f"{where}: is the value {here!r} and has no '{key}' in it")
    if key.isdecimal():
        if int(key) < len(here):
            return int(key)
        raise UserError(f"{where}: has no item {key}; they are numbered 0 to {len(here) - 1}")
    names = [item.get("name") if isinstance(item, dict) else None for item in here]
    if key in names:
        return names.index(key)
    known = ", ".join(str(name) for name in names if name is not None)
    raise UserError(
        f"{where}: has no item '{key}'; " + (f"there are {known}" if known else f"use 0 to {len(here) - 1}")
    )


def _with_absolute_paths(config: RunConfig, base: Path) -> RunConfig:
    tree = config.model_dump(mode="json")
    model, tokenizer, data, evaluation = (tree[key] for key in ("model", "tokenizer", "data", "evaluation"))
    if model["config_file"] is not None:
        model["config_file"] = _found(model["config_file"], base)
    model["checkpoint"] = _found_or_hub(model["checkpoint"], base)
    tokenizer["path"] = _found_or_hub(tokenizer["path"], base)
    data["cache_dir"] = str(Path.cwd() / Path(data["cache_dir"]).expanduser())
    for source in data["sources"]:
        if source["files"] is not None and source["package"] is None:
            source["files"] = _found(source["files"], base)
    evaluation["task_dirs"] = [_found(directory, base) for directory in evaluation["task_dirs"]]
    return RunConfig.model_validate(tree)


def _found(name: str, base: Path) -> str:
    """The absolute path (or glob) that `name` means; beside the run file where there is nothing of that name at all."""
    beside, here = (_absolute(name, directory) for directory in (base, Path.cwd()))
    return here if not _exists(beside) and _exists(here) else beside


def _found_or_hub(name: str | None, base: Path) -> str | None:
    """The absolute path of the local directory `name`; `name` itself, a hub name, where there is no such directory."""
    if name is None:
        return None
    path = _found(name, base)
    return path if _exists(path) else name


def _absolute(name: str, directory: Path) -> str:
    path = directory / Path(name).expanduser()
    return str(path) if glob.has_magic(name) else str(path.resolve())


def _exists(pattern: str) -> bool:
    return Path(pattern).exists() or any(glob.iglob(pattern, recursive=True))
