"""JAX arrays on the CPU: they are read, and never written to; results are JAX arrays."""

import numpy as np
import pytest

import pynccl
from helpers import oracle, scripts
from helpers.elsewhere import elsewhere, needs
from pynccl import Buffer

pytestmark = needs("jax")
here = elsewhere("library_process")

REDUCED = (
    "int8", "uint8", "int32", "uint32", "float16", "bfloat16", "float32", "float8_e4m3fn", "float8_e5m2",
    "bool", "complex64",
)  # fmt: skip
MOVED = ("int16", "uint16", "float8_e4m3fnuz", "float8_e8m0fnu")


def alone():
    return pynccl.Communicator(1, pynccl.unique_id("host"), 0, library="host")


def pair():
    return pynccl.init_all(2, library="host")


def on_threads(comms, call):
    """What ``call(comm)`` gives on each rank, each in a thread of its own."""
    import concurrent.futures

    with concurrent.futures.ThreadPoolExecutor(len(comms)) as pool:
        return list(pool.map(call, comms, timeout=30))


@pytest.mark.parametrize("dtype", REDUCED + MOVED)
@here
def test_every_dtype_is_read_and_comes_back(dtype):
    import jax
    import jax.numpy as jnp

    x = jnp.ones((2, 3), dtype)
    buffer = Buffer(x)
    assert (buffer.dtype, buffer.count, buffer.readonly) == (dtype, 6, True)
    assert buffer.ptr == x.unsafe_buffer_pointer()
    with alone() as comm:
        blocks = comm.all_gather(x)
        assert isinstance(blocks, jax.Array)
        assert (blocks.dtype, blocks.shape) == (x.dtype, (1, 2, 3))
        assert np.asarray(blocks).tobytes() == np.asarray(x).tobytes()
        if dtype in REDUCED:
            total = comm.all_reduce(x)
            assert isinstance(total, jax.Array)
            assert (total.dtype, total.shape) == (x.dtype, x.shape)
        else:
            with pytest.raises(TypeError, match=f"^all_reduce: {dtype} cannot be reduced"):
                comm.all_reduce(x)


@here
def test_every_collective_gives_jax_arrays():
    import jax
    import jax.numpy as jnp

    comms = pair()
    for name, spec in oracle.COLLECTIVES.items():
        parts = [np.arange(4, dtype="f4").reshape(2, 2) + 10 * comm.rank for comm in comms]
        wanted = oracle.expected(name, [p.ravel().copy() for p in parts], "sum", 0)

        def one(comm, name=name, spec=spec, parts=parts):
            words = {"root": 0} if spec.root else {}
            x = jnp.asarray(parts[comm.rank])
            if name == "scatter" and comm.rank:
                x, words["out"] = None, np.zeros(2, "f4")
            return getattr(comm, name)(x, **words)

        for result, want in zip(on_threads(comms, one), wanted):
            assert (result is None) == (want is None), name
            if want is not None:
                assert isinstance(result, jax.Array) or name == "scatter"
                oracle.assert_same(np.asarray(result).ravel(), want.ravel(), name)
    for comm in comms:
        comm.close()


@here
def test_broadcast_and_send_recv_give_new_arrays():
    import jax
    import jax.numpy as jnp

    comms = pair()
    xs = [jnp.full(3, 1.0 + comm.rank) for comm in comms]
    first = on_threads(comms, lambda comm: comm.broadcast(xs[comm.rank], root=1))
    second = on_threads(comms, lambda c: c.send_recv(xs[c.rank], 1 - c.rank))
    assert [y.tolist() for y in first] == [[2.0] * 3] * 2
    assert [y.tolist() for y in second] == [[2.0] * 3, [1.0] * 3]
    assert all(isinstance(y, jax.Array) for y in (*first, *second))
    assert [x.tolist() for x in xs] == [[1.0] * 3, [2.0] * 3]
    for comm in comms:
        comm.close()


@here
def test_the_result_is_taken_over_without_a_copy_and_nobody_else_has_its_memory():
    import jax.numpy as jnp

    from pynccl import _alloc

    seen = []
    real = _alloc._into_jax
    _alloc._into_jax = lambda x, out: seen.append(out.ctypes.data) or real(x, out)
    try:
        with alone() as comm:
            for count in (1, 1000, 100_000):
                y = comm.all_reduce(jnp.ones(count))
                assert y.unsafe_buffer_pointer() == seen.pop()
                assert y.committed is False
                assert float(jnp.sum(y * 2)) == 2 * count
    finally:
        _alloc._into_jax = real


@here
def test_buffers_of_jax_arrays_give_jax_arrays():
    import jax
    import jax.numpy as jnp

    with alone() as comm:
        total = comm.all_reduce(Buffer(jnp.arange(3.0)))
        assert isinstance(total, jax.Array)
        assert total.tolist() == [0, 1, 2]
        committed = jax.device_put(jnp.arange(3.0), jax.devices()[0])
        assert comm.all_reduce(committed).sharding == committed.sharding


@here
def test_jax_arrays_are_read_only():
    import jax.numpy as jnp

    x = jnp.ones(3)
    with alone() as comm:
        for dtype in ("float32", "bfloat16"):
            y = jnp.ones(3, dtype)
            with pytest.raises(BufferError, match="^all_reduce: x is read-only"):
                comm.all_reduce(y, out=y)
            with pytest.raises(BufferError, match="^all_reduce: out is read-only"):
                comm.all_reduce(jnp.zeros(3, dtype), out=y)
            with pytest.raises(BufferError, match="^recv: out is read-only"):
                comm.recv(y, 0)
        out = np.zeros(3, "f4")
        assert comm.all_reduce(x, out=out) is out
        assert out.tolist() == [1, 1, 1]


@here
def test_a_group_needs_an_output():
    import jax
    import jax.numpy as jnp

    x, out = jnp.ones(3), np.zeros(3, "f4")
    with alone() as comm:
        for call in (comm.all_reduce, comm.broadcast, lambda x: comm.send_recv(x, 0)):
            refused = pytest.raises(TypeError, match="x is a JAX array.*in a group.*pass out=")
            with refused, pynccl.group():
                call(x)
        with pynccl.group():
            comm.all_reduce(x, out=out)
        assert jax.device_put(out).tolist() == [1, 1, 1]


@here
def test_what_is_computed_later_is_waited_for():
    import jax
    import jax.numpy as jnp

    for dtype in ("float32", "bfloat16"):
        work = jax.jit(lambda a, dtype=dtype: (a @ a @ a).astype(dtype))
        a = jnp.full((400, 400), 1 / 400)
        with alone() as comm:
            assert np.asarray(comm.all_reduce(work(a))).astype("f4") == pytest.approx(
                1 / 400, rel=0.01
            )


@here
def test_deleted_traced_and_keyed_arrays_are_refused():
    import jax
    import jax.numpy as jnp

    x = jnp.ones(3)
    x.delete()
    with pytest.raises(ValueError, match="^Buffer: x is a JAX array that was deleted"):
        Buffer(x)
    with pytest.raises(TypeError, match="[Tt]race"):  # JAX's own words
        jax.jit(lambda y: (Buffer(y), y)[1])(jnp.ones(3))
    with pytest.raises(TypeError, match="^Buffer: x is a 'PRNGKeyArray', which offers none of"):
        Buffer(jax.random.key(0))


def test_64_bits_and_several_devices():
    scripts.run(
        """
        import jax, jax.numpy as jnp, pytest, pynccl
        with jax.enable_x64(True):
            x = jnp.ones(3, "float64")
        halves = jax.sharding.PartitionSpec("i")
        mesh = jax.make_mesh((2,), ("i",))
        spread = jax.device_put(jnp.arange(4.0), jax.sharding.NamedSharding(mesh, halves))
        second = jax.device_put(jnp.arange(3.0), jax.devices()[1])
        with jax.default_device(jax.devices()[1]):
            loose = jnp.arange(3.0)
        one = jax.make_mesh((1,), ("i",), devices=jax.devices()[1:])
        columns = jax.sharding.NamedSharding(one, jax.sharding.PartitionSpec(None, "i"))
        placed = jax.device_put(jnp.arange(4.0).reshape(1, 4), columns)
        with pynccl.Communicator(1, pynccl.unique_id("host"), 0, library="host") as comm:
            y = comm.all_reduce(x)              # after the block in which 64 bits were on
            assert (y.dtype, y.tolist()) == ("float64", [1, 1, 1])
            assert comm.all_reduce(second).devices() == {jax.devices()[1]}
            assert comm.all_reduce(loose).devices() == {jax.devices()[1]}
            assert comm.all_reduce(loose).committed is False
            assert comm.all_reduce(placed).sharding == columns
            part = comm.reduce_scatter(placed)  # has not the axis that the sharding names
            assert (part.devices(), part.tolist()) == ({jax.devices()[1]}, [0, 1, 2, 3])
            for dtype in ("float32", "bfloat16"):
                with pytest.raises(ValueError, match="^all_reduce: x is a JAX array on 2 devices.*shards"):
                    comm.all_reduce(spread.astype(dtype))
        """,
        XLA_FLAGS="--xla_force_host_platform_device_count=2",
        limit=60,
    )
