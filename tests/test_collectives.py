"""Every collective × dtype × op × number of ranks × size × root, on ranks that are threads."""

import time

import numpy as np
import pytest

from helpers import cases, data, oracle

SIZES = (0, 1, 7, 1000, 70000)
OPAQUE = {
    "int16": "<i2",
    "uint16": "<u2",
    "datetime": "<M8[s]",
    "text": "<U3",
    "bytes of odd size": "S5",
    "structured": np.dtype([("weight", "<f8"), ("count", "<i4")]),
    "long double": np.longdouble,
}


def play(world, calls):
    """Run the cases on every rank and see to it that every rank has come to the end."""
    cases.warm(calls, world.nranks)
    assert world.run(cases.play, calls) == [len(calls)] * world.nranks


@pytest.mark.parametrize("nranks", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", [*oracle.NCCL_DTYPES, "bool", *oracle.COMPLEX])
@pytest.mark.parametrize("name", oracle.COLLECTIVES)
def test_collective_delivers_what_the_oracle_says(threads, name, dtype, nranks):
    play(threads(nranks), cases.grid([name], [dtype], nranks, SIZES[:4]))
    # The largest size with an allocated result is left out: the form has nothing to do with the size.
    play(threads(nranks), cases.grid([name], [dtype], nranks, SIZES[4:], ["out"]))


@pytest.mark.parametrize("dtype", OPAQUE.values(), ids=OPAQUE)
def test_movement_takes_any_dtype(threads, dtype):
    movers = [name for name, spec in oracle.COLLECTIVES.items() if not spec.op]
    calls = [
        cases.Case(name, dtype, size, root=1 if oracle.COLLECTIVES[name].root else 0, form=form)
        for name in movers
        for size in (0, 1, 7, 1000)
        for form in ("out", "new")
    ]
    play(threads(3), calls)


@pytest.mark.parametrize("offset", [1, 2, 3, 5, 7])
def test_buffers_may_begin_at_any_element(threads, offset):
    calls = [
        cases.Case(name, dtype, size, op=op, offset=offset, form=form)
        for name, spec in oracle.COLLECTIVES.items()
        for dtype in ("float64", "float16", "int32", "uint8")
        for op in (("sum", "max", "avg") if spec.op else (None,))
        for size in (5, 3000)
        for form in ("out", "in place")
        if not (form == "in place" and name == "all_to_all")
    ]
    play(threads(2), calls)


def many_sizes(comm, sizes):
    for size in sizes:
        for name in oracle.COLLECTIVES:
            cases.issue(comm, cases.Case(name, "uint8", size, op="sum"))()


@pytest.mark.parametrize("nranks", [2, 3])
def test_sizes_around_the_thresholds_of_the_engine_are_right(threads, nranks):
    # In bytes: where a library may change its way of moving data, one less, the same and one more.
    powers = [2**k + d for k in (3, 4, 5, 6, 9, 12, 14, 15, 16, 17, 18, 19) for d in (-1, 0, 1)]
    threads(nranks).run(many_sizes, [*range(1, 70), *powers, 3 * 2**19 + 5])


def shapes(comm):
    n, rank = comm.nranks, comm.rank
    x = np.arange(6.0).reshape(2, 3) + 100 * rank
    blocks = np.arange(n * 6.0).reshape(n, 2, 3)
    return {
        "all_reduce": comm.all_reduce(x).shape,
        "reduce": getattr(comm.reduce(x, root=0), "shape", None),
        "broadcast": comm.broadcast(x.copy()).shape,
        "all_gather": comm.all_gather(x).shape,
        "gather": getattr(comm.gather(x, root=0), "shape", None),
        "reduce_scatter": comm.reduce_scatter(blocks).shape,
        "all_to_all": comm.all_to_all(blocks).shape,
        "scatter": comm.scatter(blocks, root=0, out=None if rank == 0 else np.empty((2, 3))).shape,
        "all_gather of a scalar": comm.all_gather(np.float32(rank + 1).reshape(())).tolist(),
        "all_reduce of a scalar": comm.all_reduce(np.array(rank + 1.0)).tolist(),
        "broadcast of a scalar": comm.broadcast(np.array(rank + 5.0)).tolist(),
    }


def test_axis_0_of_an_allocated_result_is_the_rank_axis(threads):
    for rank, got in enumerate(threads(2).run(shapes)):
        assert got == {
            "all_reduce": (2, 3),
            "reduce": (2, 3) if rank == 0 else None,
            "broadcast": (2, 3),
            "all_gather": (2, 2, 3),
            "gather": (2, 2, 3) if rank == 0 else None,
            "reduce_scatter": (2, 3),
            "all_to_all": (2, 2, 3),
            "scatter": (2, 3),
            "all_gather of a scalar": [1.0, 2.0],
            "all_reduce of a scalar": 3.0,
            "broadcast of a scalar": 5.0,
        }


def fortran(comm):
    x = np.asfortranarray(np.arange(6.0).reshape(2, 3) * (comm.rank + 1))
    new = comm.all_reduce(x)
    assert new.tolist() == (np.arange(6.0).reshape(2, 3) * 3).tolist()
    out = np.empty((2, 3), order="F")
    comm.all_reduce(x, out=out)
    assert out.tolist() == new.tolist()


def test_fortran_order_on_both_sides_keeps_the_elements_in_place(threads):
    threads(2).run(fortran)


def only_sizes_count(comm):
    x = np.arange(6, dtype=np.int32).reshape(2, 3)
    out = np.empty(6, np.int32)
    assert comm.all_reduce(x, out=out) is out
    assert out.tolist() == (np.arange(6) * 2).tolist()
    flat = np.empty(12, np.int32)
    comm.all_gather(x, out=flat)
    assert flat.tolist() == [*range(6), *range(6)]
    blocks = np.arange(4.0)
    half = np.empty((1, 2))
    comm.reduce_scatter(blocks, out=half)
    assert half.tolist() == [[[0, 2], [4, 6]][comm.rank]]


def test_with_out_given_only_sizes_count(threads):
    threads(2).run(only_sizes_count)


def same_bits(comm, dtype, op, size):
    x = data.values(dtype, size, comm.rank)
    return [comm.all_reduce(x, op=op).tobytes() for _ in range(3)]


@pytest.mark.parametrize("op", ["sum", "prod", "avg"])
@pytest.mark.parametrize("dtype", ["float16", "float32", "bfloat16", "float8_e4m3fn"])
def test_every_rank_gets_the_same_bits_in_every_run(threads, dtype, op):
    for size in (7, 5000, 70000):
        results = threads(4).run(same_bits, dtype, op, size)
        assert len({bits for rank in results for bits in rank}) == 1


def zero_counts(comm):
    empty = np.empty((0, 3), np.float32)
    if comm.rank == 0:  # the partners do not take part, and need not
        for _ in range(3):
            assert comm.all_reduce(empty).shape == (0, 3)
            assert comm.all_gather(np.empty(0)).shape == (2, 0)
            assert comm.broadcast(empty, root=1) is empty
            assert comm.all_to_all(np.empty((2, 0))).shape == (2, 0)
    cases.sum_of_ranks(comm)


def test_empty_collective_needs_no_partner_and_takes_no_turn(threads):
    threads(2).run(zero_counts)


def barriers(comm, entered):
    if comm.rank == 1:
        time.sleep(0.3)
    entered[comm.rank] = True
    comm.barrier()
    assert all(entered), f"rank {comm.rank} left early: {entered}"
    comm.barrier()


def test_no_rank_leaves_a_barrier_before_the_last_has_come(threads):
    threads(4).run(barriers, [False] * 4)


def barrier_of_one(comm):
    comm.barrier()
    comm.barrier(stream=0)


def test_barrier_of_one_rank_returns(threads):
    threads(1).run(barrier_of_one)


def default_op(comm):
    x = np.array([comm.rank + 1])
    assert comm.all_reduce(x).tolist() == [3]
    assert comm.reduce_scatter(np.array([1, 10])).tolist() == [2, 20][comm.rank]
    result = comm.reduce(x)
    assert (result is None) if comm.rank else result.tolist() == [3]


def test_op_is_sum_and_root_is_0_unless_given(threads):
    threads(2).run(default_op)
