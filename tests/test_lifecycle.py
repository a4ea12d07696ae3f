"""How communicators are used up: split, close, abort, and what the peers see of it."""

import gc
import os
import pickle
import time

import numpy as np
import pytest

import pynccl
from helpers import cases
from helpers.ranks import ThreadWorld, create, new_id

CALLS = {
    "all_reduce": lambda c: c.all_reduce(np.arange(3)),
    "reduce": lambda c: c.reduce(np.arange(3)),
    "broadcast": lambda c: c.broadcast(np.arange(3)),
    "all_gather": lambda c: c.all_gather(np.arange(3)),
    "reduce_scatter": lambda c: c.reduce_scatter(np.arange(3).reshape(1, 3)),
    "all_to_all": lambda c: c.all_to_all(np.arange(3).reshape(1, 3)),
    "gather": lambda c: c.gather(np.arange(3)),
    "scatter": lambda c: c.scatter(np.arange(3).reshape(1, 3)),
    "send": lambda c: c.send(np.arange(3), 0),
    "recv": lambda c: c.recv(np.arange(3), 0),
    "send_recv": lambda c: c.send_recv(np.arange(3), 0),
    "barrier": lambda c: c.barrier(),
    "split": lambda c: c.split(0),
    "shrink": lambda c: c.shrink([0]),
    "grow": lambda c: c.grow(2),
    "unique_id": lambda c: c.unique_id(),
    "revoke": lambda c: c.revoke(),
    "finalize": lambda c: c.finalize(),
    "wait_ready": lambda c: c.wait_ready(),
    "async_error": lambda c: c.async_error,
    "suspend": lambda c: c.suspend(),
    "resume": lambda c: c.resume(),
    "memory_stats": lambda c: c.memory_stats(),
    "premul_sum": lambda c: c.premul_sum(2, "int64"),
}


@pytest.mark.parametrize("end", ["close", "abort"])
@pytest.mark.parametrize("name", CALLS)
def test_use_after_the_end_says_so(name, end):
    comm = create(1, new_id(), 0)
    getattr(comm, end)()
    with pytest.raises(
        pynccl.CommunicatorClosedError, match=rf"^{name}: .*(closed|aborted)"
    ) as caught:
        CALLS[name](comm)
    assert isinstance(caught.value, ValueError)


QUERIES = ("rank", "nranks", "device", "timeout", "library", "closed")


def test_every_method_and_property_is_known_to_these_tests():
    """What is not in the table above, and not a query, ends it or begins another."""
    other = {"handle", "close", "abort", "from_handle", "join"}
    public = {name for name in dir(pynccl.Communicator) if not name.startswith("_")}
    assert public - other == {*CALLS, *QUERIES}


@pytest.mark.parametrize("end", ["close", "abort"])
def test_what_belongs_to_an_ended_communicator_ends_with_it(end):
    comm = create(1, new_id(), 0, device=2)
    op = comm.premul_sum(2, "int64")
    x = np.arange(3)
    with pynccl.group(run=False) as plan:
        comm.all_reduce(x, out=x, op=op)
    getattr(comm, end)()
    for use in (plan, comm.__enter__, lambda: comm.handle):
        with pytest.raises(pynccl.CommunicatorClosedError):
            use()
    with (
        create(1, new_id(), 0) as other,
        pytest.raises(ValueError, match="destroyed with its communicator"),
    ):
        other.all_reduce(x, op=op)
    assert [getattr(comm, name) for name in QUERIES[:3]] == [0, 1, 2]
    assert (comm.timeout, comm.library.kind, comm.closed) == (20.0, "host", True)
    assert x.tolist() == [0, 1, 2]


def test_ending_twice_is_fine_and_queries_still_answer():
    for first in ("close", "abort"):
        for second in ("close", "abort"):
            comm = create(1, new_id(), 0)
            getattr(comm, first)()
            getattr(comm, second)()
            assert comm.closed
            assert (comm.rank, comm.nranks) == (0, 1)
            assert "closed" in repr(comm) or "aborted" in repr(comm)


def test_communicator_is_created_by_its_class_and_once(alone):
    with pytest.raises(ValueError, match="twice"):
        alone.__init__(1, new_id(), 0, library="host")
    unborn = pynccl.Communicator.__new__(pynccl.Communicator)
    with pytest.raises(pynccl.CommunicatorClosedError, match="never created"):
        unborn.all_reduce(np.arange(3))
    unborn.close()
    assert unborn.closed
    assert "not created" in repr(unborn)


def test_handle_is_an_address_while_the_communicator_is_open():
    comm = create(1, new_id(), 0)
    assert isinstance(comm.handle, int)
    assert comm.handle > 4096
    comm.close()
    with pytest.raises(pynccl.CommunicatorClosedError, match="handle"):
        _ = comm.handle


def test_library_says_what_it_is(alone):
    library = alone.library
    assert library is pynccl.library("host")
    assert library.kind == "host"
    assert library.path in repr(library)
    with pytest.raises(TypeError, match=r"pynccl\.library"):
        pynccl.Library()


def test_context_manager_closes_and_cannot_be_entered_again():
    with create(1, new_id(), 0) as comm:
        assert not comm.closed
    assert comm.closed
    with pytest.raises(pynccl.CommunicatorClosedError):
        comm.__enter__()


def failing_body(comm):
    start = time.monotonic()
    if comm.rank == 0:
        with pytest.raises(KeyError), comm:
            raise KeyError
        assert comm.closed
    else:
        with pytest.raises(pynccl.RemoteError, match="rank 0") as caught:
            comm.all_reduce(np.arange(3))
        assert isinstance(caught.value, ConnectionError)
    return time.monotonic() - start


def test_exception_in_the_with_block_releases_the_peers():
    with ThreadWorld(2) as world:
        assert max(world.run(failing_body)) < 2


def peer_ends(comm, end):
    if comm.rank == 0:
        getattr(comm, end)()
        return 0.0
    start = time.monotonic()
    for _ in range(2):  # and every later call repeats it
        with pytest.raises(pynccl.RemoteError, match="rank 0"):
            comm.all_reduce(np.arange(3))
    with pytest.raises(pynccl.RemoteError, match="rank 0"):
        comm.recv(np.arange(3), 0)
    comm.close()
    return time.monotonic() - start


@pytest.mark.parametrize("end", ["close", "abort"])
@pytest.mark.parametrize("nranks", [2, 3])
def test_peer_that_has_left_is_an_error_at_once(end, nranks):
    with ThreadWorld(nranks) as world:
        assert max(world.run(peer_ends, end)) < 2


def last_call_then_leave(comm):
    total = comm.all_reduce(np.array([comm.rank + 1]))
    if comm.rank == 1:
        time.sleep(0.3)
    comm.close()
    return total.tolist()


def test_rank_that_leaves_after_its_last_call_hurts_nobody():
    for _ in range(3):
        with ThreadWorld(3) as world:
            assert world.run(last_call_then_leave) == [[6]] * 3


def test_rank_that_never_comes_times_out_and_is_named():
    def one_comes(comm):
        if comm.rank == 1:
            comm.all_reduce(np.arange(3))

    with ThreadWorld(3, timeout=1.0) as world:
        outcome = world.outcomes(one_comes, limit=20)[1]
        assert isinstance(outcome.error, pynccl.NCCLTimeoutError), outcome
        assert 0.9 < outcome.seconds < 4
        assert "0" in outcome.error.detail and "2" in outcome.error.detail, outcome
        assert outcome.error.function == "ncclAllReduce"
        assert outcome.error.rank == 1


def test_communicator_that_timed_out_repeats_it_and_closes():
    def come_alone(comm):
        if comm.rank:
            return
        for _ in range(2):
            start = time.monotonic()
            with pytest.raises(pynccl.NCCLTimeoutError):
                comm.all_reduce(np.arange(3))
        assert time.monotonic() - start < 0.4  # the second did not wait again
        comm.close()

    with ThreadWorld(2, timeout=0.5) as world:
        world.run(come_alone)
        world.renew()


def open_files():
    return len(os.listdir("/proc/self/fd"))


def mappings():
    with open("/proc/self/maps") as file:
        return sum("memfd" in line or "pynccl" in line for line in file)


@pytest.mark.parametrize("end", ["close", "abort"])
def test_nothing_is_left_of_ended_communicators(crew, end):
    two = crew(2)

    def live(rank, uid):
        comm = create(2, uid, rank)
        comm.all_reduce(np.arange(100_000))
        comm.send_recv(np.arange(100_000), 1 - rank)
        comm.barrier()
        getattr(comm, end)()

    def once():
        uid = new_id()
        outcomes = two.run(lambda rank: live(rank, uid), 20)
        assert all(o.error is None for o in outcomes), outcomes

    once()
    before = open_files(), mappings(), len(os.listdir("/dev/shm"))
    for _ in range(20):
        once()
    gc.collect()
    assert (open_files(), mappings(), len(os.listdir("/dev/shm"))) == before


def test_communicator_that_is_dropped_warns_and_does_not_hang(alone):
    comms = [create(1, new_id(), 0)]
    with pytest.warns(ResourceWarning, match="never closed"):
        comms.clear()
    cases.sum_of_ranks(alone)


def test_communicator_does_not_pickle(alone):
    with pytest.raises(TypeError, match="pickle"):
        pickle.dumps(alone)


# --- split and init_all --------------------------------------------------------------------------------


def split(comm, colors, keys):
    child = comm.split(colors[comm.rank], keys[comm.rank])
    if child is None:
        cases.sum_of_ranks(comm)
        return None
    members = child.all_gather(np.array([comm.rank])).ravel().tolist()
    found = child.rank, child.nranks, members
    cases.sum_of_ranks(comm)  # the parent still works, beside the child
    cases.sum_of_ranks(child)
    child.close()
    return found


SPLITS = {
    "one color": ([0] * 4, [0] * 4, [[0, 1, 2, 3]]),
    "two colors": ([0, 7, 0, 7], [0] * 4, [[0, 2], [1, 3]]),
    "keys turn the order": ([1] * 4, [3, 2, 1, 0], [[3, 2, 1, 0]]),
    "equal keys keep the order": ([1] * 4, [5, 5, 0, 5], [[2, 0, 1, 3]]),
    "negative keys": ([0] * 4, [0, -1, -(2**31), 2**31 - 1], [[2, 1, 0, 3]]),
    "each alone": ([0, 1, 2, 3], [0] * 4, [[0], [1], [2], [3]]),
    "some join none": ([None, 1, None, 1], [0] * 4, [[1, 3]]),
    "large colors": ([2**31 - 1, 0, 2**31 - 1, 0], [0] * 4, [[0, 2], [1, 3]]),
}


@pytest.mark.parametrize(("colors", "keys", "groups"), SPLITS.values(), ids=SPLITS)
def test_split_groups_by_color_and_orders_by_key(threads, colors, keys, groups):
    wanted = [None] * 4
    for members in groups:
        for place, rank in enumerate(members):
            wanted[rank] = (place, len(members), members)
    assert threads(4).run(split, colors, keys) == wanted


def test_nobody_needs_to_join_a_split(threads):
    assert threads(2).run(split, [None] * 2, [0] * 2) == [None, None]


@pytest.mark.parametrize("color", [-1, -2, -(2**31), 2**31, 2**70])
def test_color_out_of_range_is_a_value_error(alone, color):
    with pytest.raises(ValueError, match=f"color {color}"):
        alone.split(color)


@pytest.mark.parametrize("words", [{"color": "red"}, {"color": 1.0}, {"color": 0, "key": "a"}])
def test_color_and_key_are_ints(alone, words):
    with pytest.raises(TypeError, match="color|key"):
        alone.split(**words)


def split_of_a_split(comm):
    first = comm.split(comm.rank // 2)
    second = first.split(0, key=-first.rank)
    members = second.all_gather(np.array([comm.rank])).ravel().tolist()
    first.close()  # a child lives on without its parent
    cases.sum_of_ranks(second)
    second.close()
    return members


def test_split_of_a_split_outlives_it(threads):
    assert threads(4).run(split_of_a_split) == [[1, 0], [1, 0], [3, 2], [3, 2]]


def split_missing(comm):
    if comm.rank != 1:
        comm.split(0)


def test_split_that_a_rank_does_not_call_times_out():
    with ThreadWorld(3, timeout=1.0) as world:
        for outcome in world.outcomes(split_missing, limit=20)[::2]:
            assert isinstance(outcome.error, pynccl.NCCLTimeoutError), outcome


def split_against_call(comm):
    if comm.rank:
        comm.split(0).close()
    else:
        comm.all_reduce(np.arange(3))


def test_split_against_a_collective_is_a_mismatch():
    with ThreadWorld(2, timeout=3.0) as world:
        for outcome in world.outcomes(split_against_call, limit=20):
            assert isinstance(outcome.error, pynccl.NCCLError), outcome


def test_communicator_that_an_argument_closes_is_told_as_closed(alone):
    class Closer:
        @property
        def __cuda_array_interface__(self):
            alone.close()
            return memory

    x = np.arange(3.0)
    memory = {"shape": (3,), "typestr": "<f8", "data": (x.ctypes.data, False), "version": 3}
    with pytest.raises(
        pynccl.CommunicatorClosedError, match="all_reduce: this communicator is closed"
    ):
        alone.all_reduce(Closer(), out=np.zeros(3))
