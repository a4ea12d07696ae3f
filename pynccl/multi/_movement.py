"""What torch.cuda.nccl has in C++ only: gather, scatter, all_to_all, sends and receives."""

from __future__ import annotations

from .._lists import KINDS, call, exchange

TYPE_CHECKING = False  # typing itself is too slow to import for that
if TYPE_CHECKING:
    import os
    from collections.abc import Sequence
    from typing import Any, TypeAlias, TypeVar

    from .._comm import Communicator

    L = TypeVar("L", bound=Sequence[Any])
    Library: TypeAlias = str | os.PathLike[str]
    Streams: TypeAlias = Sequence[Any] | None
    Comms: TypeAlias = Sequence[Any] | Communicator | None

_GATHER = KINDS["gather"]
_SCATTER = KINDS["scatter"]
_ALL_TO_ALL = KINDS["all_to_all"]


def gather(
    inputs: Sequence[Any],
    output: Any = None,
    root: int = 0,
    streams: Streams = None,
    comms: Comms = None,
    *,
    library: Library = "auto",
) -> Any:
    """Collect all entries in one array, in list order.

    Parameters
    ----------
    inputs : list of array_like, each of shape (...)
        One block per rank; any dtype, it is moved as bytes.
    output : array_like with n times the elements of an input, optional
        Receives the blocks, on the root's device; allocated with shape (n, ...) in the library of
        ``inputs[root]`` when omitted.
    root : int, default: 0
        Place in the lists whose device receives.
    streams, comms, library
        As in the module's description.

    Returns
    -------
    array
        The root's; None where the root is not among `comms`.

    Raises
    ------
    TypeError, ValueError, BufferError, InvalidUsageError, NCCLError
        As for `all_reduce`; ``ValueError`` also when `root` is no place in the lists.

    Notes
    -----
    C function: ``ncclGather`` in a group, NCCL 2.28; sends and receives before.  In place where
    ``inputs[root]`` is ``output[root]``.  torch.cuda.nccl has it in C++ only.

    Examples
    --------
    >>> import array
    >>> import pynccl.multi as nccl
    >>> nccl.gather([array.array("i", [1]), array.array("i", [2])], root=1, library="host")
    array('i', [1, 2])
    """
    return call(_GATHER, inputs, output, None, root, streams, comms, library)


def scatter(
    input: Any,
    outputs: L,
    root: int = 0,
    streams: Streams = None,
    comms: Comms = None,
    *,
    library: Library = "auto",
) -> L:
    """Send block i of one array to output i.

    Parameters
    ----------
    input : array_like of shape (n, ...) or flat with n times the elements of an output
        The blocks, on the root's device; ignored where the root is not among `comms`.
    outputs : list of array_like, each of shape (...)
        One array per rank; any dtype, it is moved as bytes.
    root : int, default: 0
        Place in the lists whose device holds `input`.
    streams, comms, library
        As in the module's description.

    Returns
    -------
    list of array
        `outputs`.

    Raises
    ------
    TypeError, ValueError, BufferError, InvalidUsageError, NCCLError
        As for `all_reduce`; ``ValueError`` also when `root` is no place in the lists.

    Notes
    -----
    C function: ``ncclScatter`` in a group, NCCL 2.28; sends and receives before.  In place where
    ``outputs[root]`` is ``input[root]``.  torch.cuda.nccl has it in C++ only.

    Examples
    --------
    >>> import array
    >>> import pynccl.multi as nccl
    >>> nccl.scatter(array.array("i", [1, 2]), [array.array("i", [0]) for _ in range(2)], library="host")
    [array('i', [1]), array('i', [2])]
    """
    return call(_SCATTER, input, outputs, None, root, streams, comms, library)  # type: ignore[no-any-return]


def all_to_all(
    inputs: Sequence[Any],
    outputs: Sequence[Any] | None = None,
    streams: Streams = None,
    comms: Comms = None,
    *,
    library: Library = "auto",
) -> Any:
    """Send block j of input i to block i of output j.

    Parameters
    ----------
    inputs : list of array_like, each of shape (n, ...) or flat with a multiple of n elements
        One array of n blocks per rank; any dtype, it is moved as bytes.
    outputs : list of array_like, each with the elements of an input, optional
        Receive the blocks; allocated in the library of each input when omitted.
    streams, comms, library
        As in the module's description.

    Returns
    -------
    list of array
        `outputs`, or the allocated ones.

    Raises
    ------
    TypeError, ValueError, BufferError, InvalidUsageError, NCCLError
        As for `all_reduce`; ``ValueError`` also when an input is not n blocks.

    Notes
    -----
    C function: ``ncclAlltoAll`` in a group, NCCL 2.28; sends and receives before.  Never in place.
    torch.cuda.nccl has it in C++ only.

    Examples
    --------
    >>> import array
    >>> import pynccl.multi as nccl
    >>> xs = [array.array("i", [1, 2]), array.array("i", [10, 20])]
    >>> nccl.all_to_all(xs, [array.array("i", [0, 0]) for _ in xs], library="host")
    [array('i', [1, 10]), array('i', [2, 20])]
    """
    return call(_ALL_TO_ALL, inputs, outputs, None, 0, streams, comms, library)


def send_recv(
    inputs: Sequence[Any],
    outputs: L,
    peers: Sequence[int | None],
    streams: Streams = None,
    comms: Comms = None,
    *,
    library: Library = "auto",
) -> L:
    """Send input i to output ``peers[i]``, all at once.

    Parameters
    ----------
    inputs : list of (array_like or None)
        What each rank sends; counts and dtypes may differ from pair to pair.
    outputs : list of (array_like or None)
        What each rank receives into; as many elements as are sent to it.
    peers : list of (int or None)
        For each input the place in the lists that it goes to; None, with None in `inputs`, sends nothing.
    streams, comms, library
        As in the module's description; `comms` must be all ranks.

    Returns
    -------
    list of (array or None)
        `outputs`.

    Raises
    ------
    TypeError, ValueError, BufferError, InvalidUsageError, NCCLError
        As for `all_reduce`; ``ValueError`` also when the pairs do not match.

    Notes
    -----
    C functions: ``ncclSend`` and ``ncclRecv`` in a group, NCCL 2.7.  Never in place.  An entry sends to one
    and receives from one; several exchanges run at once in a `pynccl.group`.

    Examples
    --------
    A shift to the right, without wrapping around:

    >>> import array
    >>> import pynccl.multi as nccl
    >>> xs = [array.array("i", [i]) for i in range(3)]
    >>> ghosts = [None, array.array("i", [9]), array.array("i", [9])]
    >>> nccl.send_recv([*xs[:2], None], ghosts, [1, 2, None], library="host")
    [None, array('i', [0]), array('i', [1])]
    """
    return exchange(inputs, outputs, peers, streams, comms, library)  # type: ignore[no-any-return]
