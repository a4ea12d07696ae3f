"""Communicators for all ranks at once: of one thread, or of a launcher's processes."""

from __future__ import annotations

import operator
import os

from . import _config
from ._comm import Communicator
from ._device import make_current
from ._group import group
from ._uid import UniqueId, unique_id
from .enums import Result
from .errors import InvalidUsageError

TYPE_CHECKING = False  # typing itself is too slow to import for that
if TYPE_CHECKING:
    from collections.abc import Iterable
    from datetime import timedelta

    from ._settings import Config


def init_all(
    devices: int | Iterable[int],
    *,
    timeout: float | timedelta | None = None,
    config: Config | None = None,
    library: str | os.PathLike[str] = "auto",
) -> list[Communicator]:
    """Create one communicator per device, all of them in this thread.

    Parameters
    ----------
    devices : int or sequence of int
        CUDA devices in rank order, or how many to take; on the host library, numbers of slots.
    timeout : float or timedelta, optional
        As for `Communicator`.
    config : Config, optional
        As for `Communicator`.
    library : {"auto", "nccl", "host"} or path, default: "auto"
        Library to use.

    Returns
    -------
    list of Communicator
        In rank order.  Calls on several of them belong in one `group`.

    Raises
    ------
    InvalidUsageError
        A device is named twice, and ``NCCL_MULTI_RANK_GPU_ENABLE`` is not 1.
    ValueError
        There is no device in the list, or one is negative.
    NCCLError
        The library reported a failure.

    Notes
    -----
    C functions: ``ncclCommInitRank`` in a group, as ``ncclCommInitAll`` does, NCCL 2.0.

    Examples
    --------
    >>> import array, pynccl
    >>> comms = pynccl.init_all(2, library="host")
    >>> xs = [array.array("i", [1]), array.array("i", [2])]
    >>> with pynccl.group():
    ...     outs = [comm.all_reduce(x) for comm, x in zip(comms, xs)]
    >>> outs
    [array('i', [3]), array('i', [3])]
    >>> for comm in comms:
    ...     comm.close()
    """
    try:
        if isinstance(devices, bool):
            raise TypeError
        if isinstance(devices, int):
            devices = range(devices)
        numbers = [operator.index(device) for device in devices]
    except TypeError:
        raise TypeError(
            f"init_all: devices must be an int or a sequence of ints, not {devices!r}"
        ) from None
    if not numbers:
        raise ValueError("init_all: there must be at least one device")
    first: dict[int, int] = {}
    for rank, device in enumerate(numbers):
        if (
            first.setdefault(device, rank) != rank
            and os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") != "1"
        ):
            raise InvalidUsageError(
                Result.INVALID_USAGE,
                "init_all",
                None,
                f"ranks {first[device]} and {rank} are both on device {device}; "
                f"set NCCL_MULTI_RANK_GPU_ENABLE=1 to allow it",
            )
    uid = unique_id(library)
    with group():
        return [
            Communicator(
                len(numbers),
                uid,
                rank,
                device=device,
                timeout=timeout,
                config=config,
                library=library,
            )
            for rank, device in enumerate(numbers)
        ]


def init(
    *,
    timeout: float | timedelta | None = None,
    config: Config | None = None,
    library: str | os.PathLike[str] = "auto",
) -> Communicator:
    """Create the communicator of all ranks that a launcher has started.

    Reads what ``pynccl run``, torchrun, mpiexec and srun put into the environment; without a
    launcher it makes a communicator of one rank.  Device ``LOCAL_RANK`` becomes the current one.

    Parameters
    ----------
    timeout : float or timedelta, optional
        As for `Communicator`; it also limits the wait for the other ranks to be started.
    config : Config, optional
        As for `Communicator`.
    library : {"auto", "nccl", "host"} or path, default: "auto"
        Library to use; rank 0's choice counts for all.

    Returns
    -------
    Communicator
        This process's.

    Raises
    ------
    ValueError
        The environment is incomplete or contradicts itself.
    NCCLTimeoutError
        A rank did not come.
    NCCLError
        The library reported a failure, here or on rank 0.

    Examples
    --------
    >>> import pynccl
    >>> with pynccl.init(library="host") as comm:
    ...     comm.nranks
    1
    """
    from pynccl import _rendezvous

    rank, nranks, local_rank, _ = _rendezvous.from_environ(os.environ)
    patience = _config.timeout(timeout)
    uid = UniqueId(_rendezvous.share(rank, nranks, lambda: unique_id(library), timeout=patience))
    # A library that was only a default on this rank gives way to what rank 0 found.
    if library is None or library == "auto":
        library = uid.kind
    if uid.kind == "nccl":
        make_current(local_rank)
    return Communicator(
        nranks, uid, rank, device=local_rank, timeout=timeout, config=config, library=library
    )
