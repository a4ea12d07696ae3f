"""Print the path of the host library.

Other programs that use NCCL's C interface (CuPy, nccl4py, ctypes wrappers) can load it in place of
libnccl.so.2; --link makes a folder that lets them find it under that name.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import sys

from .. import _config
from . import UsageError

__all__ = ["add_arguments", "main"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command line."""
    parser.add_argument(
        "--link",
        metavar="DIR",
        help=f"make the link DIR/{_config.NCCL_NAME}, and say how to have it found",
    )


def main(arguments: argparse.Namespace) -> int:
    """Print the path, or make the link and print what to set."""
    path = _config.host_library()
    if arguments.link is None:
        print(path)
        return 0
    folder = os.path.abspath(arguments.link)
    link = os.path.join(folder, _config.NCCL_NAME)
    try:
        os.makedirs(folder, exist_ok=True)
        if os.path.lexists(link) and not os.path.islink(link):
            raise UsageError(f"{link} is there already and is not a link")
        _replace_link(path, link)
    except OSError as error:
        raise UsageError(f"cannot make {link}: {error.strerror}") from error
    print(f"{link} -> {path}", file=sys.stderr)
    print(f"export LD_LIBRARY_PATH={shlex.quote(folder)}${{LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}}")
    return 0


def _replace_link(target: str, link: str) -> None:
    """Make the link in one step, so that a program just starting never misses it."""
    new = f"{link}.{os.getpid()}"
    try:
        os.symlink(target, new)
        os.replace(new, link)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(new)
