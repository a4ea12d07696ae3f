"""Arrays of Numba's simulator through every collective, in a process that has the simulator on."""

import pytest

from helpers import oracle, scripts

pytest.importorskip("numba")

SETUP = """
import numpy as np
import pynccl
from numba import cuda
from helpers import cases, data, oracle
from helpers.ranks import ThreadWorld, ProcessWorld

SIMULATED = type(cuda.device_array(1))

def host(array):
    assert type(array) is SIMULATED, type(array)
    return array.copy_to_host()
"""

COLLECTIVE = (
    SETUP
    + """
import sys

def one(comm, name, dtype, size, root, form):
    spec = oracle.COLLECTIVES[name]
    n, rank = comm.nranks, comm.rank
    content = data.inputs(name, dtype, n, size)[rank]
    shape = (n, size) if spec.send_blocks else (size,)
    wanted = data.expected(name, dtype, n, size, "sum", root)[rank]
    words = ({"op": "sum"} if spec.op else {}) | ({"root": root} if spec.root else {})
    sends = spec.at(spec.sends, rank, root)
    x = cuda.to_device(np.ascontiguousarray(content.reshape(shape)))
    out = None
    if form == "out" or name == "scatter" and not sends:
        out = cuda.to_device(np.full(size * (n if spec.recv_blocks else 1), 99, dtype))
    given = x if sends or name == "broadcast" and out is None else None
    result = getattr(comm, name)(given, out=out, **words)
    if wanted is None:
        assert result is None
        assert out is None or (host(out) == np.full(1, 99, dtype)).all()
        return
    assert out is None or result is out
    oracle.assert_same(host(result), wanted, (name, dtype, size, root, form))
    if name != "broadcast" or out is not None:
        oracle.assert_same(host(x), content, "input of " + name)

def play(comm, name):
    spec = oracle.COLLECTIVES[name]
    for dtype in ("float64", "float32", "float16", "int32", "uint8", "bool", "complex64"):
        for size in (0, 1, 7, 1000):
            for root in range(comm.nranks if spec.root else 1):
                for form in ("out", "new"):
                    one(comm, name, dtype, size, root, form)

with ThreadWorld(3) as world:
    world.run(play, sys.argv[1])
"""
)


@pytest.mark.parametrize("name", oracle.COLLECTIVES)
def test_simulated_device_arrays_go_through_every_collective(name):
    scripts.run(COLLECTIVE, name, NUMBA_ENABLE_CUDASIM="1", limit=60)


def test_kernels_work_on_what_collectives_return():
    scripts.run(
        SETUP
        + """
@cuda.jit
def double(x):
    i = cuda.grid(1)
    if i < x.size:
        x[i] *= 2

comms = pynccl.init_all(2, library="host")
stream = cuda.stream()
xs = [cuda.to_device(np.arange(5.0) + 10 * comm.rank, stream=stream) for comm in comms]
for x in xs:
    double[1, 8, stream](x)
with pynccl.group():
    sums = [comm.all_reduce(x, stream=stream) for comm, x in zip(comms, xs)]
for total in sums:
    double[1, 8, stream](total)
    assert host(total).tolist() == [4 * (2 * i + 10) for i in range(5)]
with pynccl.group():
    for comm, x in zip(comms, xs):
        comm.broadcast(x, 1)
assert host(xs[0]).tolist() == [2 * (i + 10) for i in range(5)]
for comm in comms:
    comm.close()
""",
        NUMBA_ENABLE_CUDASIM="1",
        limit=60,
    )


def test_simulated_arrays_are_checked_like_any_others():
    scripts.run(
        SETUP
        + """
import pytest
with pynccl.Communicator(1, pynccl.unique_id("host"), 0, library="host") as comm:
    grid = cuda.to_device(np.arange(12.0).reshape(3, 4))
    with pytest.raises(pynccl.LayoutError, match="all_reduce: x"):
        comm.all_reduce(grid[:, 1])
    with pytest.raises(ValueError, match="all_reduce: out has 3 elements, expected 12"):
        comm.all_reduce(grid, out=cuda.device_array(3))
    with pytest.raises(TypeError, match="float64.*float32"):
        comm.all_reduce(grid, out=cuda.device_array((3, 4), np.float32))
    with pytest.raises(ValueError, match="overlap"):
        comm.all_reduce(grid[0:2], out=grid[1:3])
    row = comm.all_reduce(grid[1])   # a row is contiguous
    assert host(row).tolist() == [4.0, 5.0, 6.0, 7.0]
    mixed = comm.all_reduce(grid, out=np.zeros((3, 4)))
    assert (mixed == np.arange(12.0).reshape(3, 4)).all()
""",
        NUMBA_ENABLE_CUDASIM="1",
        limit=60,
    )
