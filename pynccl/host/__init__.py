"""The host library: NCCL's ABI over host memory, on one machine.

Communicators reach it by ``library="host"``; this module has what a program otherwise takes from CUDA,
streams and events, and the place of the file itself.
"""

from .._config import host_library
from .._queue import Event, Stream

__all__ = ["Event", "Stream", "path"]


def path() -> str:
    """Return the path of ``libpynccl_host.so``.

    Returns
    -------
    str
        Absolute path of the library of this installation.

    Raises
    ------
    LibraryNotFoundError
        The file is missing.
    """
    return host_library()
