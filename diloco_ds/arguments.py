"""What the command line takes: numbers within limits and directories that can be made, refused in words that name the
flag and what is allowed; and the parts of a command that has several.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from diloco_ds.rundir import obstacle

INFINITE = float("inf")


def whole(least: int) -> Callable[[str], int]:
    """A whole number, `least` or more."""

    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if value < least:
            raise argparse.ArgumentTypeError(f"must be a whole number of {least} or more, not '{text}'")
        return value

    return read


def number(
    *, least: float = -INFINITE, above: float = -INFINITE, below: float = INFINITE, infinite: bool = False
) -> Callable[[str], float]:
    """A number of at least `least`, above `above` and below `below`; `infinite`: inf too."""
    limits = [
        *([f"of {least:g} or more"] if least > -INFINITE else []),
        *([f"above {above:g}"] if above > -INFINITE else []),
        *([f"below {below:g}"] if below < INFINITE else []),
    ]
    wanted = " ".join(["must be a number", " and ".join(limits), *(["(or inf)"] if infinite else [])])

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = float("nan")
        is_within = value >= least and value > above and (value < below or (infinite and value == INFINITE))
        if not is_within:  # nor is what is no number at all
            raise argparse.ArgumentTypeError(f"{wanted}, not '{text}'")
        return value

    return read


def share(text: str) -> float:
    """A number, 0 or more and below 1."""
    return number(least=0, below=1)(text)


def folder(text: str) -> Path:
    """A directory to write in: it is there, or can be made."""
    if why := obstacle(Path(text)):
        raise argparse.ArgumentTypeError(f"{text} cannot be written: {why}; name another directory")
    return Path(text)


def add_part(parts: Any, command: str, name: str, text: str, examples: str) -> argparse.ArgumentParser:
    """The parser of the part `name` of `command`, one of the subparsers `parts`; `text` is its help.

    `examples`: those of the whole command, a line each; the part's own are at the end of its help.
    """
    own = [line for line in examples.splitlines() if line.startswith(f"  diloco-ds {command} {name}")]
    part: argparse.ArgumentParser = parts.add_parser(
        name,
        help=text,
        description=text,
        epilog="\n".join(["examples:", *own]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    return part
