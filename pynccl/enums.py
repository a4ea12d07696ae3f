"""The three enumerations of NCCL that appear in the public API."""

from __future__ import annotations

from enum import IntEnum


class Result(IntEnum):
    """What a C function of NCCL returned (``ncclResult_t``)."""

    SUCCESS = 0
    UNHANDLED_CUDA_ERROR = 1
    SYSTEM_ERROR = 2
    INTERNAL_ERROR = 3
    INVALID_ARGUMENT = 4
    INVALID_USAGE = 5
    REMOTE_ERROR = 6
    IN_PROGRESS = 7
    TIMEOUT = 8


class DataType(IntEnum):
    """Element types that NCCL reduces (``ncclDataType_t``)."""

    INT8 = 0
    UINT8 = 1
    INT32 = 2
    UINT32 = 3
    INT64 = 4
    UINT64 = 5
    FLOAT16 = 6
    FLOAT32 = 7
    FLOAT64 = 8
    BFLOAT16 = 9
    FLOAT8_E4M3FN = 10
    FLOAT8_E5M2 = 11

    @property
    def itemsize(self) -> int:
        """Size of one element in bytes."""
        return _ITEMSIZE[self]


_ITEMSIZE = (1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1)


class ReduceOp(IntEnum):
    """Built-in reductions (``ncclRedOp_t``); note that NCCL numbers MAX before MIN."""

    SUM = 0
    PROD = 1
    MAX = 2
    MIN = 3
    AVG = 4
