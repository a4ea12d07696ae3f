"""Every kind of array through every collective; Numba's simulator in a process that has it switched on."""

import array
import sys

import numpy as np
import pytest

import pynccl
from helpers import arrays, data, oracle, scripts

NAMES = list(oracle.COLLECTIVES)
SIZE = 6


def wrapped(kind, values, shape):
    """An array of a kind with these values, and a NumPy array of its memory."""
    return kind.make(np.array(values).reshape(shape if kind.axes > 1 else -1))


def exchange(comm, kind, other, name, dtype):
    """One collective from an array of one kind into an array of another, and nothing else changes."""
    spec = oracle.COLLECTIVES[name]
    n, rank, root = comm.nranks, comm.rank, comm.nranks - 1
    op = "sum" if spec.op else None
    parts = data.inputs(name, arrays.dtype(dtype), n, SIZE)
    wanted = oracle.expected(name, parts, op, root)[rank]
    sends, receives = (spec.at(where, rank, root) for where in (spec.sends, spec.receives))
    x, x_memory = wrapped(kind, parts[rank], (n, SIZE) if spec.send_blocks else (2, SIZE // 2))
    before = np.full(SIZE * (n if spec.recv_blocks else 1), 1).astype(parts[rank].dtype)
    out, out_memory = wrapped(other, before, (-1,))
    words = ({"op": op} if op else {}) | ({"root": root} if spec.root else {})
    result = getattr(comm, name)(x if sends else None, out=out if receives else None, **words)
    what = f"{name} of {dtype} from {kind} into {other} on rank {rank}"
    oracle.assert_same(x_memory, parts[rank], f"input of {what}")
    oracle.assert_same(out_memory, before if wanted is None else wanted, what)
    assert result is (out if receives else None), what


def exchange_all(comm, kind, other, name, dtypes):
    for dtype in dtypes:
        exchange(comm, kind, other, name, dtype)


def usable(name, *kinds):
    """The dtypes that a collective takes and all of these kinds can hold."""
    found = [dtype for dtype in kinds[0].dtypes if all(dtype in kind.dtypes for kind in kinds)]
    if oracle.COLLECTIVES[name].op:
        found = [dtype for dtype in found if dtype in arrays.ALL]
    return found


@pytest.mark.parametrize("kind", arrays.KINDS.values(), ids=repr)
@pytest.mark.parametrize("name", NAMES)
def test_every_kind_of_array_goes_through_every_collective(threads, name, kind):
    dtypes = usable(name, kind)
    assert dtypes
    threads(2).run(exchange_all, kind, kind, name, dtypes)


@pytest.mark.parametrize("kind", arrays.KINDS.values(), ids=repr)
def test_kinds_mix_with_numpy_on_either_side(threads, kind):
    plain = arrays.KINDS["numpy"]
    for name in ("all_reduce", "all_gather", "scatter"):
        threads(3).run(exchange_all, kind, plain, name, usable(name, kind, plain))
        threads(3).run(exchange_all, plain, kind, name, usable(name, plain, kind))


def messages(comm, kind):
    for dtype in kind.dtypes:
        values = data.values(arrays.dtype(dtype), SIZE, 1)
        array_like, memory = wrapped(kind, values if comm.rank else np.zeros_like(values), (-1,))
        if comm.rank:
            comm.send(array_like, 0)
        else:
            assert comm.recv(array_like, 1) is array_like
        oracle.assert_same(memory, values, (kind, dtype))


@pytest.mark.parametrize("kind", arrays.KINDS.values(), ids=repr)
def test_every_kind_of_array_is_sent_and_received(threads, kind):
    threads(2).run(messages, kind)


# What a call allocates for an input of each kind; the others must be given an output.
RESULTS = {
    "numpy": np.ndarray,
    "subclass": np.ndarray,
    "memoryview": memoryview,
    "bytearray": bytearray,
    "array": array.array,
    "buffer": np.ndarray,
}


# Python makes no memoryview of these.
FOREIGN = ("complex64", "complex128", *(("float16",) if sys.version_info < (3, 12) else ()))


def allocated(comm, kind):
    n = comm.nranks
    for dtype in kind.dtypes:
        if kind.name == "memoryview" and dtype in FOREIGN:
            x, _ = wrapped(kind, np.ones(6, dtype), (2, 3))
            with pytest.raises(TypeError, match="cannot allocate a memoryview of format.*out="):
                comm.all_gather(x)
            continue
        parts = [data.values(arrays.dtype(dtype), SIZE, rank) for rank in range(n)]
        x, _ = wrapped(kind, parts[comm.rank], (2, 3))
        result = comm.all_gather(x)
        assert type(result) is RESULTS[kind.name], (kind, dtype)
        got = np.frombuffer(result, parts[0].dtype) if kind.axes == 1 else np.asarray(result)
        if kind.axes > 1:
            assert got.shape == (n, 2, 3), (kind, dtype)
        oracle.assert_same(got.view(parts[0].dtype), np.concatenate(parts), (kind, dtype))


@pytest.mark.parametrize("name", RESULTS)
def test_result_is_of_the_inputs_own_library(threads, name):
    threads(2).run(allocated, arrays.KINDS[name])


@pytest.mark.parametrize("name", sorted(set(arrays.KINDS) - set(RESULTS) - {"simulator"}))
def test_array_of_an_unknown_library_needs_an_output(alone, name):
    kind = arrays.KINDS[name]
    x, _ = wrapped(kind, np.arange(6, dtype=kind.dtypes[0]), (2, 3))
    with pytest.raises(TypeError, match=f"^all_gather: cannot allocate .*{type(x).__name__}.*out="):
        alone.all_gather(x)


def test_result_for_a_buffer_of_another_dtype_is_like_the_array_behind_it(alone):
    bits = np.array([0x3F80, 0x4000], np.uint16)  # 1.0 and 2.0 in bfloat16
    total = alone.all_reduce(pynccl.Buffer(bits, "bfloat16"), op=alone.premul_sum(3, "bfloat16"))
    assert type(total) is np.ndarray
    assert total.dtype == np.uint16
    assert total.tolist() == [0x4040, 0x40C0]
    again = pynccl.Buffer(pynccl.Buffer(bits), "bfloat16")
    assert alone.send_recv(again, 0).tolist() == bits.tolist()


def test_result_for_raw_memory_must_be_given(alone):
    x = np.arange(3.0)
    raw = pynccl.Buffer(ptr=x.ctypes.data, count=3, dtype="float64")
    with pytest.raises(TypeError, match="^all_reduce: x is raw memory.*out="):
        alone.all_reduce(raw)
    assert alone.all_reduce(raw, out=np.zeros(3)).tolist() == [0, 1, 2]


def test_bytes_and_numpy_scalars_are_sent_and_what_comes_back_is_writable(alone):
    gathered = alone.all_gather(b"abc")
    assert type(gathered) is bytearray
    assert gathered == b"abc"
    total = alone.all_reduce(np.float32(2.5))
    assert (type(total), total.shape, total.dtype) == (np.ndarray, (), np.float32)
    assert total == 2.5


# --- Numba's simulator ---------------------------------------------------------------------------------

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
