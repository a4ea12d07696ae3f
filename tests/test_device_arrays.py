"""Device arrays of Numba, CuPy and Torch on pretended devices: pointers, streams, places of results."""

import importlib.util

import numpy as np
import pytest

import pynccl
from helpers import scripts
from helpers.device import NRANKS, OUT, X, communicator, cuda, on_device
from helpers.standins import (
    FRESH,
    address,
    cupy_module,
    current,
    numba_allocates,
    numba_array,
    numba_over,
)
from helpers.stubs import build_cuda_stub, build_nccl_stub
from pynccl import Buffer, LayoutError

# ---- Numba ------------------------------------------------------------------------------------------


def test_numbas_own_class_is_read_on_the_host_library(alone):
    memory, out = np.arange(6, dtype="f4"), np.zeros(6, "f4")
    x = numba_over(memory.ctypes.data, (2, 3), "f4")
    y = numba_over(out.ctypes.data, (2, 3), "f4")
    assert alone.all_reduce(x, out=y) is y
    assert out.tolist() == memory.tolist()
    assert Buffer(x).dtype == "float32"
    assert Buffer(numba_over(memory.ctypes.data, (2, 3), "f4", order="F")).order == "F"
    assert Buffer(x.bind(7)).stream == 7


@on_device
def test_numba_arrays_reach_nccl():
    with communicator() as (comm, nccl):
        x, out = numba_array((2, 3), "i8", X), numba_array(6, "i8", OUT)
        comm.all_reduce(x, out=out)
        (call,) = nccl.calls
        assert (call.sendbuff, call.recvbuff) == (address(X), address(OUT))
        assert (call.count, call.datatype, call.stream) == (6, pynccl.DataType.INT64, 0)


def test_numbas_interface_is_asked_once_and_for_what_is_unusual():
    scripts.run(
        """
        import numpy as np, pynccl
        from helpers.standins import numba_over
        from numba.cuda.cudadrv import devicearray, driver

        memory, out = np.arange(12, dtype="f4"), np.zeros(12, "f4")
        asked = []
        base = devicearray.DeviceNDArrayBase
        real = base.__cuda_array_interface__
        base.__cuda_array_interface__ = property(lambda self: asked.append(self) or real.__get__(self))

        class Stream:
            def __int__(self):
                return 99

        def look(*shape, dtype="f4", **words):
            x = numba_over(memory.ctypes.data, shape, dtype, **words)
            quick = pynccl.Buffer(x)
            count = len(asked)
            slow = pynccl.Buffer(Other(x))
            for name in ("ptr", "count", "dtype", "order", "device", "stream", "readonly"):
                assert getattr(quick, name) == getattr(slow, name), (shape, dtype, words, name)
            del asked[:]
            return count

        class Other:
            def __init__(self, x):
                self.__cuda_array_interface__ = real.__get__(x)

        assert look(12) == 1, "the first is compared"
        for shape in ((12,), (3, 4), (1, 12), (12, 1), (), (1,), (2, 1, 3)):
            for dtype in ("f4", "i1", "u1", "i4", "?", "f2"):
                for order in "CF":
                    assert look(*shape, dtype=dtype, order=order) == 0
        assert look(4, stream=7) == look(4, stream=Stream()) == look(3, dtype="i2") == 0
        assert look(3, dtype="M8[s]") == 1
        assert look(2, dtype=np.dtype([("a", "i4"), ("b", "f4")])) == 1

        x = numba_over(memory.ctypes.data, 4, "f4")
        class Pointer:                                  # NVIDIA's bindings have pointers of their own
            def __int__(self): return memory.ctypes.data
        x.gpu_data.device_pointer = Pointer()
        driver.USE_NV_BINDING = True
        assert pynccl.Buffer(x).ptr == memory.ctypes.data
        assert len(asked) == 1
        """,
        limit=60,
    )


def test_an_array_that_says_other_than_its_attributes_is_believed_by_its_interface():
    scripts.run(
        """
        import numpy as np, pynccl
        from helpers.standins import numba_over
        from numba.cuda.cudadrv import devicearray

        memory = np.arange(12, dtype="f4")
        base = devicearray.DeviceNDArrayBase
        real = base.__cuda_array_interface__
        base.__cuda_array_interface__ = property(lambda self: {**real.__get__(self), "shape": (2,)})
        for _ in range(3):
            assert pynccl.Buffer(numba_over(memory.ctypes.data, 12, "f4")).count == 2
        """,
        limit=60,
    )


@on_device
def test_numba_gaps_are_refused():
    with communicator() as (comm, _):
        for cut in (numba_array(4, place=X, strides=(16,)), numba_array((4, 4), strides=(16, 8))):
            with pytest.raises(LayoutError, match="^broadcast: x is not contiguous"):
                comm.broadcast(cut)


@pytest.mark.parametrize("call", ["all_reduce", "all_gather", "reduce_scatter"])
@on_device
def test_numba_results_are_on_the_arrays_device_and_stream(call):
    shapes = {"all_reduce": (4, 2), "all_gather": (NRANKS, 4, 2), "reduce_scatter": (2,)}
    with communicator(device=1) as (comm, nccl), numba_allocates() as log, current(0):
        stream = cuda().stream(1)
        out = getattr(comm, call)(numba_array((4, 2), "f8", X, device=1, stream=stream))
        (made,) = log.made
        assert (made["shape"], made["dtype"], made["current"]) == (shapes[call], "float64", 1)
        assert made["stream"] == stream
        assert cuda().current_device == 0, "as it was before"
        assert Buffer(out).device == 1
        (done,) = nccl.calls
        assert (done.recvbuff, done.stream) == (address(FRESH, 1), stream)
        assert "cuEventRecord" not in cuda().names


@on_device
def test_numba_results_have_the_arrays_order():
    with communicator() as (comm, _), numba_allocates() as log:
        comm.all_reduce(numba_array((2, 3), "f4", X, order="F"))
        assert log.made[0]["order"] == "F"


# ---- CuPy -------------------------------------------------------------------------------------------


@on_device
def test_cupys_current_stream_is_the_calls_stream():
    with communicator() as (comm, nccl), cupy_module() as cupy:
        x, out = cupy.ndarray(5, "f2", X), cupy.ndarray(5, "f2", OUT)
        comm.all_reduce(x, out=out)
        assert nccl.calls[-1].stream == 1, "the legacy default stream"
        cupy.stream = cuda().stream(0)
        comm.all_reduce(x, out=out)
        assert nccl.calls[-1].stream == cupy.stream
        assert "cuEventRecord" not in cuda().names


@on_device
def test_another_stream_waits_for_cupys():
    with communicator() as (comm, nccl), cupy_module(cuda().stream(0)) as cupy:
        mine = cuda().stream(0)
        comm.all_reduce(cupy.ndarray(5, "f2", X), out=cupy.ndarray(5, "f2", OUT), stream=mine)
        records, waits = cuda().of("cuEventRecord"), cuda().of("cuStreamWaitEvent")
        assert {r.args["stream"] for r in records} == {cupy.stream}
        assert {w.args["stream"] for w in waits} == {mine}
        assert waits[-1].tick < nccl.calls[-1].tick


@on_device
def test_cupy_results_are_on_the_arrays_device():
    with communicator(device=1) as (comm, _), cupy_module() as cupy, current(0):
        x = cupy.ndarray((4, 2), "f8", X, device=1)
        for call, shape in (
            ("all_reduce", (4, 2)),
            ("all_gather", (4, 4, 2)),
            ("all_to_all", (4, 2)),
        ):
            out = getattr(comm, call)(x)
            assert type(out) is cupy.ndarray
            assert (out.device.id, out.shape) == (1, shape)
            assert cupy.log.made[-1]["current"] == 1
            assert cuda().current_device == 0
        fortran = comm.all_reduce(cupy.ndarray((2, 3), "f8", X, device=1, order="F"))
        assert fortran.order == "F"


# ---- Torch ------------------------------------------------------------------------------------------

TORCH = """
import os
from pathlib import Path
import pytest
import pynccl
from helpers import standins
from helpers.device import OUT, X, communicator, cuda
from helpers.standins import FRESH, address, install_torch

cuda()
STREAM = cuda().stream(0)
torch = install_torch(STREAM)
"""


def with_torch(body):
    build_nccl_stub()  # for all of them at once
    scripts.run(
        TORCH + body,
        PYNCCL_LIBCUDA=str(build_cuda_stub()),
        PYNCCL_LIBRARY=None,
        limit=60,
    )


def test_torchs_current_stream_is_the_calls_stream():
    with_torch(
        """
with communicator() as (comm, nccl):
    x, out = torch.Tensor((2, 3), place=X), torch.Tensor((2, 3), place=OUT)
    comm.all_reduce(x, out=out)
    (call,) = nccl.calls
    assert (call.sendbuff, call.recvbuff, call.count) == (address(X), address(OUT), 6)
    assert call.stream == STREAM
    assert "cuEventRecord" not in cuda().names
    mine = cuda().stream(0)
    comm.all_reduce(x, out=out, stream=mine)
    assert nccl.calls[-1].stream == mine
    assert {w.args["stream"] for w in cuda().of("cuStreamWaitEvent")} == {mine}
    assert {r.args["stream"] for r in cuda().of("cuEventRecord")} == {STREAM}
"""
    )


def test_torch_dtypes_that_its_interface_does_not_say():
    with_torch(
        """
wanted = {"bfloat16": 9, "float8_e4m3fn": 10, "float8_e5m2": 11, "complex64": 7}
with communicator() as (comm, nccl):
    for dtype, code in wanted.items():
        x = torch.Tensor(4, dtype, X, requires_grad=True)
        out = torch.nn.Parameter(4, dtype, OUT, requires_grad=True)
        assert comm.all_reduce(x, out=out) is out
        assert nccl.calls[-1].datatype == code
    for dtype, words, how in (("complex64", {"conj": True}, "conj"), ("float32", {"neg": True}, "neg")):
        with pytest.raises(ValueError, match=f"pass x.resolve_{how}"):
            comm.all_reduce(torch.Tensor(4, dtype, X, **words), out=torch.Tensor(4, dtype, OUT))
    with pytest.raises(pynccl.LayoutError):
        comm.broadcast(torch.Tensor(4, strides=(2,)))
"""
    )


def test_torch_results_are_on_the_tensors_device():
    with_torch(
        """
with communicator(device=1) as (comm, nccl):
    x = torch.Tensor((4, 2), "bfloat16", X, device=1, requires_grad=True)
    for call, shape in (("all_reduce", (4, 2)), ("all_gather", (4, 4, 2)), ("reduce_scatter", (2,))):
        out = getattr(comm, call)(x)
        assert torch.made[-1] == (shape, "torch.bfloat16", "cuda:1")
        assert not out.requires_grad
        assert nccl.calls[-1].recvbuff == address(FRESH, 1)
        assert nccl.calls[-1].stream == STREAM
"""
    )


# ---- no imports -------------------------------------------------------------------------------------

LIBRARIES = ("numpy", "torch", "cupy", "numba", "jax", "ml_dtypes")
GIVEN = {
    "nothing": ("", "array.array('f', [1, 2])"),
    "numpy": ("import numpy", "numpy.ones(3, 'f4')"),
    "torch": ("import torch", "torch.ones(3)"),
    "jax": ("import jax.numpy", "jax.numpy.ones(3)"),
    "jax, bfloat16": ("import jax.numpy", "jax.numpy.ones(3, 'bfloat16')"),
}


@pytest.mark.parametrize("given", GIVEN)
def test_reading_an_array_imports_no_library(given):
    first, expression = GIVEN[given]
    library = given.partition(",")[0]
    if library != "nothing" and importlib.util.find_spec(library) is None:
        pytest.skip(f"needs {library}, which is in no extra")
    scripts.run(
        f"""
        import array, sys
        {first}
        import pynccl
        x = {expression}
        with pynccl.Communicator(1, pynccl.unique_id("host"), 0, library="host") as comm:
            before = set(sys.modules)
            comm.all_reduce(x)
            comm.all_gather(x)
            pynccl.Buffer(x)
            with pynccl.group():
                comm.send(x, 0)
                comm.recv(array.array("B", bytes(pynccl.Buffer(x).nbytes)), 0, dtype=pynccl.Buffer(x).dtype)
        new = {{name.partition(".")[0] for name in set(sys.modules) - before}}
        assert not new & {set(LIBRARIES) - {library}}, new   # a library may go on loading itself
        """,
        limit=60,
    )
