"""The five collectives that torch.cuda.nccl has, with its signatures."""

from __future__ import annotations

import warnings

from .._lists import KINDS, call
from ..enums import ReduceOp

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

SUM = ReduceOp.SUM

_ALL_REDUCE = KINDS["all_reduce"]
_REDUCE = KINDS["reduce"]
_BROADCAST = KINDS["broadcast"]
_ALL_GATHER = KINDS["all_gather"]
_REDUCE_SCATTER = KINDS["reduce_scatter"]


def all_reduce(
    inputs: L,
    outputs: L | None = None,
    op: Any = SUM,
    streams: Streams = None,
    comms: Comms = None,
    *,
    library: Library = "auto",
) -> L:
    """Reduce all entries and leave the result in each.

    Parameters
    ----------
    inputs : list of array_like, each of shape (...)
        One array per rank, all of one count and dtype.
    outputs : list of array_like, optional
        Receive the result; `inputs` when omitted.
    op : ReduceOp or str or int or ufunc, or a list of ops, default: SUM
        The reduction; an int is NCCL's number. A list holds one `Communicator.premul_sum` per entry.
    streams, comms, library
        As in the module's description.

    Returns
    -------
    list of array
        `outputs`, or `inputs`.

    Raises
    ------
    TypeError, ValueError, BufferError
        An entry is unusable, or does not go with the others; nothing was changed.
    InvalidUsageError
        Two entries are on one device.
    NCCLError
        The library reported a failure.

    Notes
    -----
    C function: ``ncclAllReduce`` in a group, NCCL 2.0.  In place by default.

    Examples
    --------
    >>> import array
    >>> import pynccl.multi as nccl
    >>> nccl.all_reduce([array.array("i", [1]), array.array("i", [2])], library="host")
    [array('i', [3]), array('i', [3])]
    """
    return call(_ALL_REDUCE, inputs, outputs, op, 0, streams, comms, library)  # type: ignore[no-any-return]


def reduce(
    inputs: Sequence[Any],
    output: Any = None,
    root: int = 0,
    op: Any = SUM,
    streams: Streams = None,
    comms: Comms = None,
    *,
    outputs: Sequence[Any] | None = None,
    library: Library = "auto",
) -> Any:
    """Reduce all entries and leave the result at the root's place.

    Parameters
    ----------
    inputs : list of array_like, each of shape (...)
        One array per rank, all of one count and dtype.
    output : array_like, optional
        Receives the result, on the root's device; ``inputs[root]`` when omitted.
    root : int, default: 0
        Place in the lists that receives.
    op
        As for `all_reduce`.
    streams, comms, library
        As in the module's description.
    outputs : list of array_like, optional
        torch's older form: only ``outputs[root]`` is used, and a warning given. A list as `output` means
        the same.

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
    C function: ``ncclReduce`` in a group, NCCL 2.0.  In place at the root by default; all other entries
    stay as they are.

    Examples
    --------
    >>> import array
    >>> import pynccl.multi as nccl
    >>> xs = [array.array("i", [1]), array.array("i", [2])]
    >>> nccl.reduce(xs, root=1, library="host")
    array('i', [3])
    >>> xs
    [array('i', [1]), array('i', [3])]
    """
    if outputs is not None or type(output) is list or type(output) is tuple:
        if outputs is not None and output is not None:
            raise ValueError("reduce: pass output or outputs, not both; output is the newer form")
        warnings.warn(
            "reduce: a list of outputs is torch's deprecated form; pass one output, on the root's device",
            FutureWarning,
            stacklevel=2,
        )
        them = output if outputs is None else outputs
        if not 0 <= root < len(them):
            raise ValueError(
                f"reduce: root {root} is no place in outputs, which has {len(them)} entries"
            )
        output = them[root]
    return call(_REDUCE, inputs, output, op, root, streams, comms, library)


def broadcast(
    inputs: L,
    root: int = 0,
    streams: Streams = None,
    comms: Comms = None,
    *,
    library: Library = "auto",
) -> L:
    """Copy the root's array into all entries.

    Parameters
    ----------
    inputs : list of array_like, each of shape (...)
        One array per rank, all of one count and dtype; any dtype, it is moved as bytes.
    root : int, default: 0
        Place in the lists whose array is sent.
    streams, comms, library
        As in the module's description.

    Returns
    -------
    list of array
        `inputs`.

    Raises
    ------
    TypeError, ValueError, BufferError, InvalidUsageError, NCCLError
        As for `all_reduce`; ``ValueError`` also when `root` is no place in the lists.

    Notes
    -----
    C function: ``ncclBroadcast`` in a group, NCCL 2.0.  Always in place.

    Examples
    --------
    >>> import array
    >>> import pynccl.multi as nccl
    >>> nccl.broadcast([array.array("i", [1]), array.array("i", [2])], root=1, library="host")
    [array('i', [2]), array('i', [2])]
    """
    return call(_BROADCAST, inputs, None, None, root, streams, comms, library)  # type: ignore[no-any-return]


def all_gather(
    inputs: Sequence[Any],
    outputs: Sequence[Any] | None = None,
    streams: Streams = None,
    comms: Comms = None,
    *,
    library: Library = "auto",
) -> Any:
    """Collect all entries in each output, in list order.

    Parameters
    ----------
    inputs : list of array_like, each of shape (...)
        One block per rank; any dtype, it is moved as bytes.
    outputs : list of array_like, each with n times the elements of an input, optional
        Receive the blocks; allocated with shape (n, ...) in the library of each input when omitted.
    streams, comms, library
        As in the module's description.

    Returns
    -------
    list of array
        `outputs`, or the allocated ones.

    Raises
    ------
    TypeError, ValueError, BufferError, InvalidUsageError, NCCLError
        As for `all_reduce`.

    Notes
    -----
    C function: ``ncclAllGather`` in a group, NCCL 2.0.  In place where ``inputs[i]`` is ``outputs[i][i]``.

    Examples
    --------
    >>> import array
    >>> import pynccl.multi as nccl
    >>> nccl.all_gather([array.array("i", [1]), array.array("i", [2])], library="host")
    [array('i', [1, 2]), array('i', [1, 2])]
    """
    return call(_ALL_GATHER, inputs, outputs, None, 0, streams, comms, library)


def reduce_scatter(
    inputs: Sequence[Any],
    outputs: Sequence[Any] | None = None,
    op: Any = SUM,
    streams: Streams = None,
    comms: Comms = None,
    *,
    library: Library = "auto",
) -> Any:
    """Reduce all entries, and leave block i in output i.

    Parameters
    ----------
    inputs : list of array_like, each of shape (n, ...) or flat with a multiple of n elements
        One array of n blocks per rank.
    outputs : list of array_like, each with the elements of a block, optional
        Receive the blocks; allocated in the library of each input when omitted.
    op
        As for `all_reduce`.
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
    C function: ``ncclReduceScatter`` in a group, NCCL 2.0.  In place where ``outputs[i]`` is
    ``inputs[i][i]``.

    Examples
    --------
    >>> import array
    >>> import pynccl.multi as nccl
    >>> xs = [array.array("i", [1, 2]), array.array("i", [10, 20])]
    >>> nccl.reduce_scatter(xs, [array.array("i", [0]), array.array("i", [0])], library="host")
    [array('i', [11]), array('i', [22])]
    """
    return call(_REDUCE_SCATTER, inputs, outputs, op, 0, streams, comms, library)
