"""The ``pynccl`` command: one module per subcommand, imported when it is called.

A subcommand's module has ``add_arguments(parser)`` and ``main(arguments) -> exit code``.  Exit codes: 0
all is well, 1 something went wrong, 2 the command line is wrong; `run` passes on its ranks' code.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import NoReturn

from .. import __version__
from ..errors import PyncclError

__all__ = ["COMMANDS", "UsageError", "main"]

COMMANDS = {
    "info": "what pynccl finds on this machine: libraries, GPUs, environment",
    "run": "start a script as several ranks on this machine",
    "perf": "time the collectives, and verify every element of their results",
    "host-path": "where the host library is, for other users of NCCL's interface",
}


class UsageError(Exception):
    """The command line asks for something that cannot be; the text is one sentence."""


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (try {self.prog} --help)\n")


class _Formatter(argparse.RawDescriptionHelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=26)


def module_of(command: str) -> ModuleType:
    """Import the module of a subcommand."""
    return importlib.import_module("." + command.replace("-", "_"), __name__)


def parser_of(command: str) -> argparse.ArgumentParser:
    """Build the parser of a subcommand."""
    module = module_of(command)
    parser = _Parser(
        prog=f"pynccl {command}",
        description=module.__doc__,
        formatter_class=_Formatter,
        allow_abbrev=False,
    )
    module.add_arguments(parser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the ``pynccl`` command.

    Parameters
    ----------
    argv : sequence of str, optional
        The arguments; those of this process by default.

    Returns
    -------
    int
        The exit code.
    """
    _open_standard_descriptors()
    table = "\n".join(f"  {name:11}{text}" for name, text in COMMANDS.items())
    parser = _Parser(
        prog="pynccl",
        usage="pynccl [-h] [--version] COMMAND ...",
        description="NCCL for any Python array, with or without a GPU.",
        epilog=f"commands:\n{table}\n\n`pynccl COMMAND --help` explains each.",
        formatter_class=_Formatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"pynccl {__version__}")
    parser.add_argument("command", metavar="COMMAND", choices=COMMANDS, help=argparse.SUPPRESS)
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    if not (sys.argv[1:] if argv is None else argv):
        parser.print_help(sys.stderr)
        return 2
    chosen = parser.parse_args(argv)
    command: str = chosen.command
    arguments = parser_of(command).parse_args(chosen.arguments)
    try:
        code = int(module_of(command).main(arguments))
        if sys.stdout is not None:
            sys.stdout.flush()  # here, where a broken pipe is caught, and not while the interpreter ends
        return code
    except UsageError as error:
        print(f"pynccl {command}: {error}", file=sys.stderr)
        return 2
    except PyncclError as error:
        print(f"pynccl {command}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # Nobody reads the output any more, which is no fault: `pynccl info | head`.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def _open_standard_descriptors() -> None:
    """See to it that none of 0, 1 and 2 is closed, or else a pipe of ours would get its number."""
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
