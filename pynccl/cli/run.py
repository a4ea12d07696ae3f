"""Start a script as several ranks on this machine.

Each rank finds its place in the variables that torchrun sets, too: RANK, WORLD_SIZE, LOCAL_RANK,
LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT; `pynccl.init()` reads them. The first rank that
fails is named, the others are stopped, and its exit code is passed on (128 and the number for a signal).
Rank 0 gets the standard input. Output is passed on in whole lines.
"""

from __future__ import annotations

import argparse
import importlib.util
import os

from . import UsageError
from ._launch import Job, bootstrap, environments

__all__ = ["add_arguments", "main"]


# What the host library serves in one communicator; more on one machine is a slip.
MAX_RANKS = 1024


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command line."""
    parser.usage = (
        "pynccl run -n N [options] [--] script.py [arguments]\n"
        "       pynccl run -n N [options] -m module [arguments]"
    )
    parser.add_argument(
        "-n", "--nranks", type=int, required=True, metavar="N", help="how many ranks"
    )
    add_library_argument(parser)
    parser.add_argument(
        "--prefix", action="store_true", help="begin each line of output with its rank"
    )
    parser.add_argument(
        "--timeout", type=float, metavar="SECONDS", help="stop the job after this time (code 124)"
    )
    parser.add_argument(
        "--grace",
        type=float,
        default=5.0,
        metavar="SECONDS",
        help="time between asking a rank to stop and killing it (default: 5)",
    )
    parser.add_argument(
        "-m", "--module", action="store_true", help="run a module, as python -m does"
    )
    parser.add_argument("command", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)


def add_library_argument(parser: argparse.ArgumentParser) -> None:
    """Declare ``--library``."""
    parser.add_argument(
        "--library",
        metavar="CHOICE",
        help='what library="auto" means: auto, nccl, host, or a path (default: as PYNCCL_LIBRARY says)',
    )


def library_choice(text: str | None) -> str | None:
    """Check ``--library`` and make it independent of the working folder."""
    if text is None or text in ("auto", "nccl", "host"):
        return text
    if os.sep in text:
        if not os.path.exists(text):
            raise UsageError(f"--library: there is no {text}")
        return os.path.abspath(text)
    if ".so" not in text:
        raise UsageError(f"--library: {text!r} is neither auto, nccl, host nor a path")
    return text


def check_nranks(nranks: int) -> int:
    """Check ``-n``."""
    if not 1 <= nranks <= MAX_RANKS:
        raise UsageError(f"-n: {nranks} ranks; expected 1 to {MAX_RANKS}")
    return nranks


def main(arguments: argparse.Namespace) -> int:
    """Run the job; return its exit code."""
    nranks = check_nranks(arguments.nranks)
    for name in ("timeout", "grace"):
        value = getattr(arguments, name)
        if value is not None and not value >= 0:
            raise UsageError(f"--{name}: {value:g} is not a number of seconds")
    command = arguments.command
    if command[:1] == ["--"]:
        del command[0]
    what = "module" if arguments.module else "script"
    if not command:
        raise UsageError(f"no {what} given; usage: pynccl run -n N [options] script.py [arguments]")
    if arguments.module:
        command = ["-m", *command]
    elif os.path.isdir(command[0]):
        raise UsageError(f"{command[0]} is a folder, not a script")
    elif not os.path.exists(command[0]):
        hint = (
            "; for a module, give -m" if importlib.util.find_spec(command[0].split(".")[0]) else ""
        )
        raise UsageError(f"there is no script {command[0]}{hint}")
    commands = [bootstrap() + command] * nranks
    ranks = environments(nranks, library_choice(arguments.library))
    with Job(
        commands, ranks, name="pynccl run", prefix=arguments.prefix, grace=arguments.grace
    ) as job:
        return job.run(timeout=arguments.timeout) or 0
