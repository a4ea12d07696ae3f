"""Every exception that pynccl raises on its own account, and the table from result codes to classes.

Wrong arguments raise the builtins (``TypeError``, ``ValueError``, ``BufferError``) before any C call;
the classes here say that a library, a communicator or a peer failed.  Each doubles as the standard
exception of the same meaning, so that code which knows nothing of pynccl can still catch it.
"""

from __future__ import annotations

from .enums import Result

__all__ = [
    "CommunicatorClosedError",
    "CudaError",
    "HostFallbackWarning",
    "InProgressError",
    "InvalidArgumentError",
    "InvalidUsageError",
    "LayoutError",
    "LibraryNotFoundError",
    "NCCLError",
    "NCCLInternalError",
    "NCCLSystemError",
    "NCCLTimeoutError",
    "PyncclError",
    "RemoteError",
    "StoreError",
    "StoreTimeoutError",
    "UnsupportedError",
]


class PyncclError(Exception):
    """Base of everything that pynccl raises on its own account."""


class NCCLError(PyncclError, RuntimeError):
    """A C function of NCCL (or of the host library) reported a failure.

    Parameters
    ----------
    result : int
        The code that the function returned.
    function : str
        The C function, e.g. ``"ncclAllReduce"``.
    rank : int or None
        This process's rank in the communicator, where there is one.
    detail : str
        The library's own account of the last error; may be empty.

    Attributes
    ----------
    result : Result or int
        As the parameter, as a `Result` where the code is known.
    function, rank, detail
        As the parameters.
    """

    def __init__(
        self, result: int, function: str, rank: int | None = None, detail: str = ""
    ) -> None:
        try:
            result = Result(result)
            name = "nccl" + "".join(part.capitalize() for part in result.name.split("_"))
        except ValueError:
            name = "unknown result"
        self.result = result
        self.function = function
        self.rank = rank
        self.detail = detail
        where = function if rank is None else f"{function} on rank {rank}"
        hint = detail or _HINTS.get(int(result), "")
        super().__init__(f"{where}: {name} ({int(result)}){': ' + hint if hint else ''}")

    def __reduce__(self) -> tuple[type, tuple[int, str, int | None, str]]:
        return type(self), (int(self.result), self.function, self.rank, self.detail)


class CudaError(NCCLError):
    """A CUDA call inside NCCL failed (code 1)."""


class NCCLSystemError(NCCLError, OSError):
    """A call of the operating system failed (code 2)."""


class NCCLInternalError(NCCLError):
    """The library found itself in an impossible state (code 3)."""


class InvalidArgumentError(NCCLError, ValueError):
    """The library refused an argument (code 4)."""


class InvalidUsageError(NCCLError):
    """The calls of the ranks, or their order, make no sense together (code 5)."""


class RemoteError(NCCLError, ConnectionError):
    """A peer died or left, or the network failed (code 6)."""


class InProgressError(NCCLError):
    """A nonblocking communicator was used before its last operation was done (code 7)."""


class NCCLTimeoutError(NCCLError, TimeoutError):
    """A wait reached its deadline (code 8)."""


class LibraryNotFoundError(PyncclError, ImportError):
    """No library of the wanted kind could be loaded; the text lists the places searched."""


class UnsupportedError(PyncclError, NotImplementedError):
    """The loaded library is too old for this call; the text says what is needed and what was found."""


class CommunicatorClosedError(PyncclError, ValueError):
    """A communicator was used after it was closed or aborted, or in a forked child."""


class LayoutError(BufferError, ValueError):
    """An array's memory is not one contiguous block, or input and output differ in order."""


class StoreError(PyncclError):
    """A rendezvous store failed."""


class StoreTimeoutError(StoreError, TimeoutError):
    """A rendezvous store did not answer in time; the text names the keys still missing."""


class HostFallbackWarning(UserWarning):
    """No GPU was found, so that the host library was chosen by ``library="auto"``."""


_CLASSES: dict[int, type[NCCLError]] = {
    Result.UNHANDLED_CUDA_ERROR: CudaError,
    Result.SYSTEM_ERROR: NCCLSystemError,
    Result.INTERNAL_ERROR: NCCLInternalError,
    Result.INVALID_ARGUMENT: InvalidArgumentError,
    Result.INVALID_USAGE: InvalidUsageError,
    Result.REMOTE_ERROR: RemoteError,
    Result.IN_PROGRESS: InProgressError,
    Result.TIMEOUT: NCCLTimeoutError,
}

# Used where the library left no text of its own.
_HINTS: dict[int, str] = {
    Result.UNHANDLED_CUDA_ERROR: "run with NCCL_DEBUG=INFO for details",
    Result.SYSTEM_ERROR: "run with NCCL_DEBUG=INFO for details",
    Result.INTERNAL_ERROR: "run with NCCL_DEBUG=INFO and report it to the library's developers",
    Result.INVALID_ARGUMENT: "run with NCCL_DEBUG=WARN for details",
    Result.INVALID_USAGE: "run with NCCL_DEBUG=WARN for details",
    Result.REMOTE_ERROR: "a peer exited or the network failed",
    Result.IN_PROGRESS: "the communicator is still busy with its last operation",
    Result.TIMEOUT: "the deadline passed",
}


def error_for(result: int, function: str, rank: int | None = None, detail: str = "") -> NCCLError:
    """Build the exception for a result code; the caller raises it."""
    return _CLASSES.get(int(result), NCCLError)(result, function, rank, detail)
