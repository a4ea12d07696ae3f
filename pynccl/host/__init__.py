"""The host library: NCCL's ABI over host memory, on one machine.

Communicators reach it by ``library="host"``; this module is for those who need the file itself.
"""

from .._config import host_library

__all__ = ["path"]


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
