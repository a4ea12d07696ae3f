"""The same call through other projects: an all_reduce of 1024 float32 on the null library.

Each function returns cases, or raises `Absent` with the reason. Nothing here is needed to use pynccl;
``pip install cupy-cuda12x 'nccl4py' cuda-bindings mpi4py mpich numpy`` brings all of them.
"""

from __future__ import annotations

import ctypes
import importlib
from typing import Any

from null_libraries import NullLibraries
from timing import Case

COUNT = 1024
FLOAT32, SUM = 7, 0


class Absent(Exception):
    """The peer is not installed, or does not start here."""


class ReadyCAI:
    """A device array as far as its attributes go: the interface's dict lies ready in the instance."""

    def __init__(self, pointer: int, count: int = COUNT) -> None:
        self.__cuda_array_interface__ = {
            "shape": (count,),
            "typestr": "<f4",
            "data": (pointer, False),
            "strides": None,
            "version": 3,
        }


def need(name: str) -> Any:
    """Import a peer's module."""
    try:
        return importlib.import_module(name)
    except Exception as error:
        raise Absent(f"{type(error).__name__}: {str(error).strip().splitlines()[0]}") from error


def preload(*paths: str) -> None:
    """Load libraries so that a module linked against their names finds them."""
    for path in paths:
        ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)


def with_ctypes(null: NullLibraries) -> list[Case]:
    """Call through ctypes, as the wrapper inside a well-known inference engine does."""
    library = ctypes.CDLL(null.nccl)
    function = library.ncclAllReduce
    function.restype = ctypes.c_int
    function.argtypes = [
        ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_void_p,
        ctypes.c_void_p,
    ]  # fmt: skip
    names = {
        "f": function,
        "p": ctypes.c_void_p,
        "comm": ctypes.c_void_p(64),
        "stream": ctypes.c_void_p(0),
    }
    return [Case("ctypes, integers", f"f(p(4096), p(8192), {COUNT}, 7, 0, comm, stream)", names)]


def with_cupy(null: NullLibraries) -> list[Case]:
    """Call CuPy's communicator, which takes bare integers and checks nothing."""
    preload(null.nccl)  # CuPy's module is linked against libnccl.so.2
    nccl = need("cupy_backends.cuda.libs.nccl")
    comm = nccl.NcclCommunicator(2, nccl.get_unique_id(), 0)
    return [
        Case(
            "CuPy NcclCommunicator, integers",
            f"comm.allReduce(4096, 8192, {COUNT}, {FLOAT32}, {SUM}, 0)",
            {"comm": comm},
        )
    ]


def with_nccl4py(null: NullLibraries) -> list[Case]:
    """Call nccl4py's low level (integers) and its array interface."""
    preload(null.cuda, null.nccl)
    core = need("nccl.core")
    low = need("nccl.bindings.nccl")
    try:
        comm = core.Communicator.init(2, 0, core.get_unique_id())
        a, b = ReadyCAI(1 << 20), ReadyCAI(1 << 21)
        comm.allreduce(a, b, core.SUM, stream=0)
        handle = comm._comm
        low.all_reduce(1 << 20, 1 << 21, COUNT, FLOAT32, SUM, handle, 0)
    except Exception as error:
        raise Absent(f"does not start on the null library: {error}") from error
    return [
        Case(
            "nccl4py low level, integers",
            f"low.all_reduce(1048576, 2097152, {COUNT}, {FLOAT32}, {SUM}, handle, 0)",
            {"low": low, "handle": handle},
        ),
        Case(
            "nccl4py, two ready CAI objects",
            "comm.allreduce(a, b, op, stream=0)",
            {"comm": comm, "a": a, "b": b, "op": core.SUM},
        ),
    ]


def with_mpi4py(null: NullLibraries) -> list[Case]:
    """Call mpi4py on COMM_SELF: checked arguments, and a real copy of 4 KiB."""
    del null
    numpy = need("numpy")
    mpi = need("mpi4py.MPI")
    a, b = numpy.zeros(COUNT, "f4"), numpy.zeros(COUNT, "f4")
    names = {"comm": mpi.COMM_SELF, "a": a, "b": b, "op": mpi.SUM}
    return [Case("mpi4py COMM_SELF, NumPy", "comm.Allreduce(a, b, op)", names, note="copies 4 KiB")]


PEERS = {"ctypes": with_ctypes, "cupy": with_cupy, "nccl4py": with_nccl4py, "mpi4py": with_mpi4py}
