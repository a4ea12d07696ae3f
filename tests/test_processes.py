"""The same calls on ranks that are processes, and on mixtures of processes and threads."""

import os
import time

import numpy as np
import pytest

import pynccl
from helpers import cases, data, oracle
from helpers.ranks import create, new_id

# (processes, ranks in each, driven by one thread in groups)
FORMS = {
    "2 processes": (2, 1, False),
    "4 processes": (4, 1, False),
    "2 processes × 2 threads": (2, 2, False),
    "2 processes × 2 ranks of one thread": (2, 2, True),
    "1 process × 3 threads": (1, 3, False),
}
DTYPES = ("int8", "float16", "float32", "float8_e5m2", "bool")


@pytest.fixture(params=FORMS.values(), ids=FORMS)
def world(request, processes):
    """A world of processes, in every form."""
    return processes(*request.param)


def play(world, calls):
    function = cases.issue_all if world.grouped else play_each
    for start in range(0, len(calls), 100):
        part = calls[start : start + 100]
        assert world.run(function, part) == [len(part)] * world.nranks


def play_each(comm, calls):
    return cases.play(comm, calls)


@pytest.mark.parametrize("name", oracle.COLLECTIVES)
def test_collective_delivers_what_the_oracle_says(world, name):
    n = world.nranks
    play(world, cases.grid([name], DTYPES, n, (0, 1, 1000), ["out"]))
    play(world, cases.grid([name], ["int32"], n, (70000,), ["out"]))
    play(world, cases.grid([name], ["uint64"], n, (7,), ["new", "in place"]))


@pytest.mark.parametrize("name", oracle.COLLECTIVES)
def test_megabytes_arrive_whole(world, name):
    op = "sum" if oracle.COLLECTIVES[name].op else None
    play(world, [cases.Case(name, "float32", 300_001, op, form="out")])


def where_am_i(comm):
    return os.getpid(), comm.rank, comm.nranks, bytes(pynccl.__file__, "utf8")


def test_ranks_are_processes_that_import_the_installed_package(processes):
    found = processes(4).run(where_am_i)
    assert len({pid for pid, *_ in found} | {os.getpid()}) == 5
    assert [rank for _, rank, _, _ in found] == [0, 1, 2, 3]
    assert {path for *_, path in found} == {bytes(pynccl.__file__, "utf8")}


def ring(comm, size):
    n, rank = comm.nranks, comm.rank
    x = data.values("int64", size, rank)
    out = data.Guarded("int64", (size,))
    comm.send_recv(x, (rank + 1) % n, out=out.array, source=(rank - 1) % n)

    def check():
        out.check_holds(data.values("int64", size, (rank - 1) % n))
        return True

    return check


def ring_of_single_calls(comm, size):
    return ring(comm, size)()


def test_messages_go_around_a_ring(world):
    for size in (0, 1, 1000, 200_000):
        world.run(ring if world.grouped else ring_of_single_calls, size)


def chain(comm, size):
    # Ungrouped: each rank waits for the one before it.
    x = data.values("uint8", size, 0)
    out = data.Guarded("uint8", (size,))
    if comm.rank:
        comm.recv(out.array, comm.rank - 1)
        out.check_holds(x)
    if comm.rank + 1 < comm.nranks:
        comm.send(x, comm.rank + 1)


def test_message_is_passed_along_a_chain_of_processes(processes):
    for size in (1, 70000, 3_000_001):
        processes(4).run(chain, size)


def all_with_all(comm, size):
    n, rank = comm.nranks, comm.rank
    outs = [data.Guarded("int32", (size,)) for _ in range(n)]
    with pynccl.group():
        for peer in range(n):
            comm.send(data.values("int32", size, rank, seed=peer), peer)
            comm.recv(outs[peer].array, peer)
    for peer in range(n):
        outs[peer].check_holds(data.values("int32", size, peer, seed=rank))


def test_processes_exchange_all_with_all_in_a_group(processes):
    for size in (0, 3, 300_000):
        processes(4).run(all_with_all, size)


def mismatch(comm):
    with pytest.raises(pynccl.InvalidUsageError, match="(?s)4.*6|6.*4"):
        comm.all_reduce(np.arange(4 if comm.rank else 6))
    with pytest.raises(pynccl.NCCLError):
        comm.barrier()


def test_mismatch_raises_in_every_process(processes):
    world = processes(4)
    world.run(mismatch)
    world.renew()
    world.run(cases.sum_of_ranks)


def wrong_dtype(comm):
    comm.all_reduce(np.arange(4, dtype="f4" if comm.rank else "i4"))


def test_error_travels_from_the_rank_to_the_test_with_its_facts(processes):
    outcomes = processes(2).outcomes(wrong_dtype)
    for outcome in outcomes:
        error = outcome.error
        assert isinstance(error, pynccl.InvalidUsageError)
        assert (error.result, error.function, error.rank) == (5, "ncclAllReduce", outcome.rank)
        assert "float32" in error.detail and "int32" in error.detail


def split_by_parity(comm):
    child = comm.split(comm.rank % 2, key=-comm.rank)
    ranks = child.all_gather(np.array([comm.rank])).ravel().tolist()
    child.close()
    cases.sum_of_ranks(comm)
    return ranks


def test_processes_split(processes):
    assert processes(4).run(split_by_parity) == [[2, 0], [3, 1], [2, 0], [3, 1]]


def others_take_the_id(comm):
    uid = np.frombuffer(bytes(new_id()), np.uint8).copy()
    uid = bytes(comm.broadcast(uid))
    if comm.rank < 2:
        with create(2, uid, comm.rank) as pair:
            cases.sum_of_ranks(pair)
            comm.barrier()
            comm.barrier()
            cases.sum_of_ranks(pair)
    else:
        comm.barrier()
        start = time.monotonic()
        with pytest.raises(pynccl.NCCLError, match="id"):
            create(2, uid, comm.rank - 2, timeout=3.0)
        assert time.monotonic() - start < 1
        comm.barrier()
    cases.sum_of_ranks(comm)


def test_id_that_two_processes_use_serves_no_others(processes):
    processes(4).run(others_take_the_id)


def ranks_leave_one_by_one(comm):
    time.sleep(0.1 * comm.rank)
    total = comm.all_reduce(np.array([1]))
    comm.close()
    return total.tolist()


def test_early_ranks_may_close_while_others_still_read(processes):
    world = processes(4)
    assert world.run(ranks_leave_one_by_one) == [[4]] * 4
    world.renew()


def many_rounds(comm, rounds):
    x, out = np.zeros(2, int), np.zeros(2, int)
    for i in range(rounds):
        x[:] = [i, comm.rank]
        comm.all_reduce(x, out=out)
        assert out.tolist() == [i * comm.nranks, sum(range(comm.nranks))]
        comm.broadcast(x, i % comm.nranks)
        assert x.tolist() == [i, i % comm.nranks]


@pytest.mark.parametrize("form", [(2, 1, False), (4, 1, False), (2, 2, False)])
def test_thousands_of_small_calls_stay_in_step(processes, form):
    processes(*form).run(many_rounds, 1500)
