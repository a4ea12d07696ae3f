"""The exceptions: which class a result code becomes, what it is besides, and that it travels."""

import copy
import pickle

import pytest

import pynccl
from pynccl.errors import error_for

# Result code, class, and the standard exception of the same meaning.
CODES = {
    1: (pynccl.CudaError, RuntimeError),
    2: (pynccl.NCCLSystemError, OSError),
    3: (pynccl.NCCLInternalError, RuntimeError),
    4: (pynccl.InvalidArgumentError, ValueError),
    5: (pynccl.InvalidUsageError, RuntimeError),
    6: (pynccl.RemoteError, ConnectionError),
    7: (pynccl.InProgressError, RuntimeError),
    8: (pynccl.NCCLTimeoutError, TimeoutError),
}


@pytest.mark.parametrize("code", CODES)
def test_code_becomes_its_class_which_is_the_builtin_too(code):
    kind, builtin = CODES[code]
    error = error_for(code, "ncclReduce", 3, "what happened")
    assert type(error) is kind
    for base in (builtin, pynccl.NCCLError, pynccl.PyncclError, RuntimeError):
        assert isinstance(error, base)
    assert error.result is pynccl.Result(code)
    assert (error.function, error.rank, error.detail) == ("ncclReduce", 3, "what happened")


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("travel", [copy.copy, lambda error: pickle.loads(pickle.dumps(error))])
def test_error_travels_with_its_facts(travel, code):
    error = error_for(code, "ncclSend", None, "détail")
    other = travel(error)
    assert type(other) is type(error)
    assert str(other) == str(error)
    assert (other.result, other.function, other.rank, other.detail) == (
        code,
        "ncclSend",
        None,
        "détail",
    )


def test_message_says_function_rank_code_and_detail():
    error = error_for(5, "ncclAllReduce", 2, "rank 1 called Broadcast")
    assert str(error) == ("ncclAllReduce on rank 2: ncclInvalidUsage (5): rank 1 called Broadcast")
    assert str(error_for(8, "ncclCommInitRank")).startswith("ncclCommInitRank: ncclTimeout (8)")


@pytest.mark.parametrize("code", CODES)
def test_message_without_detail_says_what_the_code_means(code):
    text = str(error_for(code, "ncclRecv", 0))
    assert len(text.split(f"({code}): ")[1]) > 10


@pytest.mark.parametrize("code", [9, 77, -1])
def test_code_that_nobody_knows_is_still_an_error_with_its_number(code):
    error = error_for(code, "ncclRecv", 0, "")
    assert type(error) is pynccl.NCCLError
    assert error.result == code
    assert f"unknown result ({code})" in str(error)


@pytest.mark.parametrize(
    ("kind", "builtins"),
    [
        (pynccl.LibraryNotFoundError, [pynccl.PyncclError, ImportError]),
        (pynccl.UnsupportedError, [pynccl.PyncclError, NotImplementedError]),
        (pynccl.CommunicatorClosedError, [pynccl.PyncclError, ValueError]),
        (pynccl.LayoutError, [BufferError, ValueError]),
        (pynccl.StoreError, [pynccl.PyncclError]),
        (pynccl.StoreTimeoutError, [pynccl.StoreError, TimeoutError]),
        (pynccl.HostFallbackWarning, [UserWarning]),
    ],
)
def test_other_errors_are_builtins_too(kind, builtins):
    for base in builtins:
        assert issubclass(kind, base)
