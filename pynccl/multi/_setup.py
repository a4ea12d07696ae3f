"""Libraries and communicators for the list API."""

from __future__ import annotations

from .._buffer import Buffer
from .._cliques import clear
from .._comm import Communicator
from .._uid import UniqueId
from .._uid import library as _library
from .._uid import unique_id as _unique_id

TYPE_CHECKING = False  # typing itself is too slow to import for that
if TYPE_CHECKING:
    import os
    from collections.abc import Iterable
    from typing import Any, TypeAlias

    Library: TypeAlias = str | os.PathLike[str]


def version(library: Library = "auto") -> tuple[int, int, int]:
    """Return the library's version, as ``torch.cuda.nccl.version`` does.

    Parameters
    ----------
    library : {"auto", "nccl", "host"} or path, default: "auto"
        Library to ask.

    Returns
    -------
    tuple of int
        Major, minor and patch; `pynccl.version_code` gives NCCL's single number.

    Raises
    ------
    LibraryNotFoundError
        No such library could be loaded.

    Notes
    -----
    C function: ``ncclGetVersion``, NCCL 2.0.

    Examples
    --------
    >>> import pynccl.multi as nccl
    >>> nccl.version("host") >= (2, 32, 0)
    True
    """
    code = _library(library).version
    return code // 10000, code // 100 % 100, code % 100


def unique_id(library: Library = "auto") -> UniqueId:
    """Make the id of one new communicator, for `init_rank`; as `pynccl.unique_id`.

    Parameters
    ----------
    library : {"auto", "nccl", "host"} or path, default: "auto"
        Library that the communicator will use.

    Returns
    -------
    UniqueId
        128 bytes.

    Raises
    ------
    LibraryNotFoundError, NCCLError
        As `pynccl.unique_id`.

    Notes
    -----
    C function: ``ncclGetUniqueId``, NCCL 2.0.

    Examples
    --------
    >>> import pynccl.multi as nccl
    >>> len(nccl.unique_id("host"))
    128
    """
    return _unique_id(library)


def init_rank(num_ranks: int, uid: bytes, rank: int, *, library: Library = "auto") -> Communicator:
    """Create one rank of a communicator, for `comms`; as `pynccl.Communicator`.

    Parameters
    ----------
    num_ranks : int
        How many ranks there are.
    uid : bytes
        The id that one of them got from `unique_id`.
    rank : int
        This rank.
    library : {"auto", "nccl", "host"} or path, default: "auto"
        Library to use; "auto" follows the id.

    Returns
    -------
    Communicator
        On the current device; close it in the end.

    Raises
    ------
    TypeError, ValueError, NCCLError
        As `pynccl.Communicator`.

    Notes
    -----
    C function: ``ncclCommInitRank``, NCCL 2.0.  It waits for the other ranks: those of one thread are
    created in a `pynccl.group`.

    Examples
    --------
    >>> import array
    >>> import pynccl.multi as nccl
    >>> with nccl.init_rank(1, nccl.unique_id("host"), 0) as comm:
    ...     nccl.all_reduce([array.array("i", [3])], comms=[comm])
    [array('i', [3])]
    """
    return Communicator(num_ranks, uid, rank, library=library)


def is_available(tensors: Iterable[Any], *, library: Library = "auto") -> bool:
    """Tell whether a call on these arrays would find them usable.

    Parameters
    ----------
    tensors : iterable of array_like
        One per device.
    library : {"auto", "nccl", "host"} or path, default: "auto"
        Library to use.

    Returns
    -------
    bool
        Whether each is a contiguous array in memory that the library works on, each on another device.

    Raises
    ------
    LibraryNotFoundError
        No such library could be loaded.

    Examples
    --------
    >>> import array
    >>> import pynccl.multi as nccl
    >>> nccl.is_available([array.array("f", [1])], library="host"), nccl.is_available([[1.0]], library="host")
    (True, False)
    """
    on_device = _library(library).kind == "nccl"
    devices: set[int] = set()
    for tensor in tensors:
        try:
            device = Buffer(tensor).device
        except (TypeError, ValueError, BufferError):
            return False
        if (device >= 0) != on_device or device in devices:
            return False
        if on_device:
            devices.add(device)
    return True


def clear_cache() -> None:
    """Destroy all communicators that calls without `comms` have created and kept.

    A call on another thread is waited for. Plans that were recorded with them cannot run again; the next
    call creates new ones.

    Raises
    ------
    NCCLError
        The library reported a failure; the cache is empty all the same.
    ValueError
        Called inside a group.

    Notes
    -----
    C function: ``ncclCommDestroy``, NCCL 2.0.

    Examples
    --------
    >>> import pynccl.multi as nccl
    >>> nccl.clear_cache()
    """
    clear()
