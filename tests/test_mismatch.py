"""Calls that do not match raise on every rank, say who called what, and write nothing."""

import re

import numpy as np
import pytest

import pynccl
from helpers import cases, data, oracle
from helpers.ranks import ThreadWorld

NAMES = list(oracle.COLLECTIVES)
REDUCERS = [name for name in NAMES if oracle.COLLECTIVES[name].op]
ROOTED = [name for name in NAMES if oracle.COLLECTIVES[name].root]


@pytest.fixture(scope="module")
def worlds():
    """``worlds(n)``: a world of n threads with new communicators; the tests break them."""
    made = {}

    def world(nranks):
        if nranks not in made:
            made[nranks] = ThreadWorld(nranks)
        made[nranks].renew()
        return made[nranks]

    yield world
    for each in made.values():
        each.close()


def normal(text):
    """Lower case without underscores and prefix: ``ncclAllReduce`` and ``all_reduce`` read the same."""
    return re.sub(r"nccl(?=[a-z])|_", "", str(text).lower())


def deviate(comm, calls):
    """Make this rank's own call; return the errors of it and of the call after it."""
    name, dtype, size, op, root = calls[comm.rank]
    spec = oracle.COLLECTIVES.get(name)
    n = comm.nranks
    x = data.Guarded.holding(data.values(dtype, size * (n if spec.send_blocks else 1), comm.rank))
    content = x.array.copy()
    out = data.Guarded(dtype, (size * (n if spec.recv_blocks else 1),))
    words = ({"op": op} if spec.op else {}) | ({"root": root} if spec.root else {})
    errors = []
    try:
        getattr(comm, name)(x.array, out=out.array, **words)
        comm.barrier()  # a rank that was free to leave early learns of it here
    except pynccl.NCCLError as error:
        errors.append(error)
    x.check_holds(content, "input")
    out.check_poisoned("output")
    with pytest.raises(pynccl.NCCLError) as caught:
        comm.all_reduce(np.arange(3))
    errors.append(caught.value)
    assert comm.rank in range(comm.nranks)  # queries still work
    comm.close()
    assert comm.closed
    return errors


def check(world, calls, *words):
    """All ranks raise at once, naming the deviating rank and what differs."""
    for outcome in world.outcomes(deviate, calls, limit=15):
        if outcome.error is not None:
            raise outcome.error
        assert outcome.seconds < 1.0, f"{outcome.seconds:.2f} s, {outcome}"
        assert len(outcome.value) == 2, f"{calls}: rank {outcome.rank} noticed nothing"
        for error in outcome.value:
            assert isinstance(error, pynccl.InvalidUsageError), (calls, error)
            for word in words:
                assert normal(word) in normal(error), f"{word!r} is not in {error}"
    world.renew()
    world.run(cases.sum_of_ranks)


def call(name, dtype="float32", size=6, op="sum", root=0):
    return (name, dtype, size, op, root)


def each_deviator(nranks, usual, other):
    """The calls of all ranks, for each rank that is the one to deviate."""
    for odd in range(nranks):
        yield [other if rank == odd else usual for rank in range(nranks)]


@pytest.mark.parametrize("nranks", [2, 3])
@pytest.mark.parametrize("name", NAMES)
def test_different_counts(worlds, name, nranks):
    for calls in each_deviator(nranks, call(name, size=4), call(name, size=6)):
        check(worlds(nranks), calls, "4", "6", name, "rank")


@pytest.mark.parametrize("sizes", [(70000, 70001), (1, 70000), (12, 13)])
@pytest.mark.parametrize("name", NAMES)
def test_different_counts_of_any_size(worlds, name, sizes):
    small, large = (call(name, size=size) for size in sizes)
    check(worlds(2), [small, large], str(sizes[0]), str(sizes[1]))
    check(worlds(2), [large, small], str(sizes[0]), str(sizes[1]))


@pytest.mark.parametrize("nranks", [2, 3])
@pytest.mark.parametrize("name", NAMES)
def test_different_dtypes_of_the_same_size(worlds, name, nranks):
    for calls in each_deviator(nranks, call(name, "float32"), call(name, "int32")):
        check(worlds(nranks), calls, "float32", "int32")


@pytest.mark.parametrize(
    "dtypes", [("float32", "bfloat16"), ("float32", "int8"), ("float8_e5m2", "uint8")]
)
@pytest.mark.parametrize("name", NAMES)
def test_different_dtypes(worlds, name, dtypes):
    first, second = (call(name, dtype) for dtype in dtypes)
    check(worlds(2), [first, second], *dtypes)
    check(worlds(2), [second, first], *dtypes)


@pytest.mark.parametrize("nranks", [2, 3])
@pytest.mark.parametrize("name", REDUCERS)
def test_different_ops(worlds, name, nranks):
    for calls in each_deviator(nranks, call(name, op="sum"), call(name, op="max")):
        check(worlds(nranks), calls, "sum", "max")
    check(
        worlds(nranks),
        [call(name, op="avg"), *[call(name, op="prod")] * (nranks - 1)],
        "avg",
        "prod",
    )


@pytest.mark.parametrize("nranks", [2, 3])
@pytest.mark.parametrize("name", ROOTED)
def test_different_roots(worlds, name, nranks):
    for calls in each_deviator(nranks, call(name, root=0), call(name, root=1)):
        check(worlds(nranks), calls, "root=0", "root=1")


@pytest.mark.parametrize("other", NAMES)
@pytest.mark.parametrize("name", NAMES)
def test_different_collectives(worlds, name, other):
    if name != other:
        check(worlds(2), [call(name), call(other)], name, other)


def against_barrier(comm):
    if comm.rank:
        comm.barrier()
    else:
        comm.all_reduce(np.arange(1))


def test_collective_against_a_barrier(worlds):
    for outcome in worlds(2).outcomes(against_barrier, limit=15):
        assert isinstance(outcome.error, pynccl.InvalidUsageError), outcome


def fortran_and_c(comm):
    x = np.arange(6.0).reshape(2, 3)
    out = data.Guarded("float64", (2, 3), order="F" if comm.rank else "C")
    try:
        comm.all_reduce(np.asfortranarray(x) if comm.rank else x, out=out.array)
    finally:
        out.check_poisoned()


def test_different_orders_of_memory(worlds):
    for outcome in worlds(2).outcomes(fortran_and_c, limit=15):
        assert isinstance(outcome.error, pynccl.InvalidUsageError), outcome
        assert "fortran" in str(outcome).lower(), outcome
        assert outcome.seconds < 1


def in_place(comm, name):
    n = comm.nranks
    spec = oracle.COLLECTIVES[name]
    size = 5 + comm.rank
    memory = data.Guarded.holding(data.values("int64", size * n, comm.rank))
    before = memory.array.copy()
    own = memory.array[comm.rank * size :][:size]
    words = {"root": 0} if spec.root else {}
    try:
        if spec.recv_blocks:
            getattr(comm, name)(own, out=memory.array, **words)
        elif spec.send_blocks:
            getattr(comm, name)(memory.array, out=own, **words)
        else:
            getattr(comm, name)(memory.array, out=memory.array, **words)
        comm.barrier()
    finally:
        memory.check_holds(before)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "all_to_all"])
def test_in_place_buffers_keep_their_values_too(worlds, name):
    for outcome in worlds(3).outcomes(in_place, name, limit=15):
        assert isinstance(outcome.error, pynccl.InvalidUsageError), outcome


def later(comm):
    for _ in range(7):
        comm.all_reduce(np.arange(4))
    comm.all_reduce(np.arange(4 + comm.rank))


def test_error_tells_which_call_it_was(worlds):
    texts = set()
    for outcome in worlds(2).outcomes(later, limit=15):
        assert isinstance(outcome.error, pynccl.InvalidUsageError), outcome
        assert outcome.error.rank == outcome.rank
        assert outcome.error.result == pynccl.Result.INVALID_USAGE
        assert outcome.error.function == "ncclAllReduce"
        texts.add(re.search(r"#?\b(7|8)\b", outcome.error.detail).group(1))
    assert len(texts) == 1, "the ranks must name the same call"


def free_to_leave(comm):
    # The root of a broadcast needs nobody; it is told at its next call, of the call that was wrong.
    comm.barrier()
    errors = []
    for turn in range(2):
        try:
            if turn == 0:
                comm.broadcast(np.arange(3 + comm.rank), 0)
            else:
                comm.all_reduce(np.arange(8))
        except pynccl.InvalidUsageError as error:
            errors.append(str(error))
    return errors


def test_rank_that_left_early_hears_of_the_call_that_was_wrong(worlds):
    first, second = (o.value for o in worlds(2).outcomes(free_to_leave, limit=15))
    assert first and second
    for text in (first[-1], second[-1]):
        assert "broadcast" in normal(text) and "3" in text and "4" in text, text


def grouped(comm, deviate_at):
    outs = [data.Guarded("int64", (4,)) for _ in range(3)]
    try:
        with pynccl.group():
            for i, out in enumerate(outs):
                op = "max" if comm.rank == 1 and i == deviate_at else "sum"
                comm.all_reduce(np.arange(4), out=out.array, op=op)
    finally:
        outs[deviate_at].check_poisoned()


@pytest.mark.parametrize("deviate_at", [0, 1, 2])
def test_mismatch_inside_a_group(worlds, deviate_at):
    for outcome in worlds(2).outcomes(grouped, deviate_at, limit=15):
        assert isinstance(outcome.error, pynccl.InvalidUsageError), outcome
        assert "sum" in normal(outcome) and "max" in normal(outcome), outcome


def differing_scalars(comm):
    one = comm.all_reduce(np.ones(2), op=comm.premul_sum(comm.rank + 1.0, "float64"))
    assert one.tolist() == [3.0, 3.0]
    # Grouping, place and stream may differ as well.
    x, out = np.array([comm.rank + 1]), np.zeros(1, int)
    if comm.rank:
        with pynccl.group():
            comm.all_reduce(x, out=x)
    else:
        comm.all_reduce(x, out=out, stream=2)
        x = out
    assert x.tolist() == [3]


def test_scalars_grouping_place_and_stream_may_differ(worlds):
    worlds(2).run(differing_scalars)


def scaled_against_sum(comm):
    op = comm.premul_sum(2.0, "float64") if comm.rank else "sum"
    comm.all_reduce(np.ones(2), op=op)


def test_premul_sum_against_sum(worlds):
    for outcome in worlds(2).outcomes(scaled_against_sum, limit=15):
        assert isinstance(outcome.error, pynccl.InvalidUsageError), outcome


def empty_against_full(comm):
    size = 0 if comm.rank else 3
    out = data.Guarded("int64", (size,))
    try:
        comm.all_reduce(np.arange(size), out=out.array)
        comm.all_gather(np.arange(2))  # the empty call takes no turn: this one meets the all_reduce
    finally:
        out.check_poisoned()


def test_empty_call_against_a_full_one_is_told_at_the_next_call(worlds):
    for outcome in worlds(2).outcomes(empty_against_full, limit=15):
        assert isinstance(outcome.error, pynccl.InvalidUsageError), outcome
        assert "allreduce" in normal(outcome) and "allgather" in normal(outcome)
