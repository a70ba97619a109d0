"""Starts a program of this package that loads much: python -m diloco_ds.program MODULE [argument ...]

Loading torch, transformers and DeepSpeed makes half a million objects that stay for good. Python's garbage collector
looks through them again and again while they are made, and once more at the end: a quarter of the time that starting
and ending takes. So it is off while MODULE is loaded, and what was loaded is left out of all later collections, also of
those between two steps (docs/numbers.md, "The start of a learner").
"""

from __future__ import annotations

import gc
import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager

OBJECTS = 50_000
"""A command that loads as it goes makes so many objects between two collections; Python's own number is 700."""


def command(module: str, *arguments: str) -> list[str]:
    """The command line that starts `module`, whose `main(arguments)` returns its exit code."""
    return [sys.executable, "-m", "diloco_ds.program", module, *arguments]


@contextmanager
def loading_as_it_goes() -> Iterator[None]:
    """For a command, which loads what it needs when it needs it and may live for long: collections are rarer, and there is
    none at the end, where everything goes anyway.
    """
    gc.set_threshold(OBJECTS)
    try:
        yield
    finally:
        gc.freeze()


def main(arguments: list[str]) -> int:
    """Load the module that comes first, and run its `main` with the rest; its exit code."""
    name, *rest = arguments
    gc.disable()
    try:
        module = importlib.import_module(name)
    finally:
        gc.enable()
    gc.freeze()
    return int(module.main(rest))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
