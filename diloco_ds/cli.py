"""The command line, `diloco-ds COMMAND ...`. Each command is a module of `diloco_ds.commands`; a new file is a new command.

A command module has a docstring (its first line is the help), `EXAMPLES` (for the end of its help), `add_arguments(parser)`
and `run(arguments) -> int`, the exit code. It imports what is heavy inside `run`, so that help comes at once. One with
subcommands of its own says `SUBCOMMANDS = True`.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import os
import pkgutil
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import NoReturn

import diloco_ds
from diloco_ds import commands, program
from diloco_ds.errors import UserError

USER_ERROR = 2
INTERRUPTED = 130
READER_GONE = 141
"""As a shell says it of a program that a closed pipe has ended: 128 + SIGPIPE."""


class _Parser(argparse.ArgumentParser):
    """Errors of the command line look like all others: one line."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} ({self.prog} --help shows how)")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; its exit code. A UserError is one line on standard error and exit code 2.

    When whoever read the output is gone (`| head`), the command ends without a word.
    """
    if arguments is None:
        with program.loading_as_it_goes():
            return main(sys.argv[1:])
    try:
        code = _run(list(arguments))
        sys.stdout.flush()  # here, where a closed pipe is expected, not at exit
        return code
    except UserError as error:
        print(f"diloco-ds: error: {error}", file=sys.stderr)
        return USER_ERROR
    except KeyboardInterrupt:
        print("diloco-ds: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is still buffered goes nowhere
        return READER_GONE


def command_names() -> list[str]:
    """All commands, in alphabetical order."""
    return sorted(module.name for module in pkgutil.iter_modules(commands.__path__))


def _run(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_overview())
        return 0
    name, *rest = arguments
    if name == "--version":
        print(f"diloco-ds {diloco_ds.__version__}")
        return 0
    if name not in command_names():
        near = difflib.get_close_matches(name, command_names(), n=1)
        hint = f"did you mean '{near[0]}'?" if near else f"there are {', '.join(command_names())}"
        raise UserError(f"no command '{name}'; {hint}")
    command = _command(name)
    parser = _parser(name, command)
    has_subcommands = getattr(command, "SUBCOMMANDS", False)  # argparse can intermix positionals only without
    given = parser.parse_args(rest) if has_subcommands else parser.parse_intermixed_args(rest)
    return int(command.run(given))


def _command(name: str) -> ModuleType:
    return importlib.import_module(f"{commands.__name__}.{name}")


def _parser(name: str, command: ModuleType) -> argparse.ArgumentParser:
    parser = _Parser(
        prog=f"diloco-ds {name}",
        description=command.__doc__,
        epilog=f"examples:\n{command.EXAMPLES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_arguments(parser)
    return parser


def _overview() -> str:
    summaries = {name: (_command(name).__doc__ or "").partition("\n")[0] for name in command_names()}
    width = max(len(name) for name in summaries)
    lines = [f"  {name:{width}}  {summary}" for name, summary in summaries.items()]
    return "\n".join(
        [
            "usage: diloco-ds COMMAND ...",
            "",
            "Pre-training that never stops: DeepSpeed islands, merged over MPI links.",
            "",
            "commands:",
            *lines,
            "",
            "diloco-ds COMMAND --help tells more of each; diloco-ds --version.",
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
