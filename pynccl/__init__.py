"""NCCL for any Python array: checked, nearly free per call, and usable without a GPU."""

from __future__ import annotations

import os as _os

try:
    from ._buffer import Buffer
    from ._comm import Communicator
    from ._configured import CollConfig
    from ._group import Group, group
    from ._init import init, init_all
    from ._nccl import Library
    from ._params import parameters, set_encryption
    from ._settings import Config
    from ._uid import UniqueId, library, unique_id, version_code
except ImportError as error:
    # An uncompiled source tree on sys.path hides an installed package; nobody guesses that.
    if _os.path.exists(_os.path.join(_os.path.dirname(__file__), "_nccl.pyx")) and (
        "pynccl._" in str(error)
    ):
        raise ImportError(
            f"pynccl was imported from {_os.path.dirname(__file__)}, a source tree that is not "
            f"compiled. Run from another folder, use the console scripts (`pynccl`, `pytest`) or "
            f"`python -P` (3.11), or make an editable install (see CONTRIBUTING.md)."
        ) from error
    raise

from .enums import DataType, ReduceOp, Result
from .errors import (
    CommunicatorClosedError,
    CudaError,
    HostFallbackWarning,
    InProgressError,
    InvalidArgumentError,
    InvalidUsageError,
    LayoutError,
    LibraryNotFoundError,
    NCCLError,
    NCCLInternalError,
    NCCLSystemError,
    NCCLTimeoutError,
    PyncclError,
    RemoteError,
    StoreError,
    StoreTimeoutError,
    UnsupportedError,
)

__version__ = "1.0.0.dev0"

__all__ = [
    "Buffer",
    "CollConfig",
    "Communicator",
    "CommunicatorClosedError",
    "Config",
    "CudaError",
    "DataType",
    "Group",
    "HostFallbackWarning",
    "InProgressError",
    "InvalidArgumentError",
    "InvalidUsageError",
    "LayoutError",
    "Library",
    "LibraryNotFoundError",
    "NCCLError",
    "NCCLInternalError",
    "NCCLSystemError",
    "NCCLTimeoutError",
    "PyncclError",
    "ReduceOp",
    "RemoteError",
    "Result",
    "StoreError",
    "StoreTimeoutError",
    "UniqueId",
    "UnsupportedError",
    "get_include",
    "group",
    "init",
    "init_all",
    "library",
    "parameters",
    "set_encryption",
    "unique_id",
    "version_code",
]


def get_include() -> str:
    """Return the folder of ``nccl_abi.h``, for code that is compiled against pynccl's ``.pxd`` files.

    Returns
    -------
    str
        To be given to the C compiler as an include path.

    Examples
    --------
    >>> import os, pynccl
    >>> os.path.exists(os.path.join(pynccl.get_include(), "nccl_abi.h"))
    True
    """
    return _os.path.dirname(_os.path.abspath(__file__))
