"""Communicators made from others, what revokes and finishes them, and those created in the background."""

import _thread
import gc
import os
import pickle
import threading
import time

import numpy as np
import pytest

import pynccl
from helpers import cases, scripts
from helpers.ranks import ThreadWorld, create, new_id


def members(child, rank):
    """Return where a child's rank is, and its members' numbers in the parent; the child is closed."""
    found = child.rank, child.nranks, child.all_gather(np.array([rank])).ravel().tolist()
    cases.sum_of_ranks(child)
    child.close()
    return found


# --- shrink ----------------------------------------------------------------------------------------------


def shrink(comm, exclude):
    if comm.rank in exclude:
        return None
    first = members(comm.shrink(exclude), comm.rank)
    assert members(comm.shrink(iter(exclude)), comm.rank) == first  # the same set again
    return first


@pytest.mark.parametrize("exclude", [[0], [3], [2, 1], [0, 1, 3]])
def test_shrink_leaves_out_and_keeps_the_order(threads, exclude):
    stay = [rank for rank in range(4) if rank not in exclude]
    wanted = [(stay.index(rank), len(stay), stay) if rank in stay else None for rank in range(4)]
    world = threads(4)
    assert world.run(shrink, exclude) == wanted
    world.run(cases.sum_of_ranks)  # the parent still works


@pytest.mark.parametrize(
    ("exclude", "error", "text"),
    [
        ([], ValueError, "exclude is empty"),
        ([2], ValueError, "rank 2 is not in 0 to 1"),
        ([-1], ValueError, "rank -1 is not in"),
        ([1, 1], ValueError, "twice"),
        ([0, 1], ValueError, "rank 0 is to be left out itself"),
        (["1"], TypeError, "exclude must be an int"),
        ([True], TypeError, "not a bool"),
        (1, TypeError, "iterable"),
    ],
)
def test_shrink_refuses(exclude, error, text):
    comms = pynccl.init_all(2, library="host")
    with pytest.raises(error, match=text):
        comms[0].shrink(exclude)
    for comm in comms:
        comm.close()


def lose_a_rank(comm):
    if comm.rank == 1:
        comm.abort()
        return None
    with pytest.raises(pynccl.RemoteError, match="rank 1"):
        comm.all_reduce(np.arange(3))
    assert comm.async_error == pynccl.Result.REMOTE_ERROR
    with pytest.raises(pynccl.RemoteError, match="rank 1"):
        comm.shrink([1])  # the failed communicator repeats its error
    return members(comm.shrink([1], abort=True), comm.rank)


def test_shrink_goes_on_without_a_rank_that_was_lost():
    with ThreadWorld(3) as world:
        assert world.run(lose_a_rank) == [(0, 2, [0, 2]), None, (1, 2, [0, 2])]


def inside_a_call(comm):
    try:
        comm.memory_stats()
    except pynccl.InvalidUsageError:
        return True
    return False


def shrink_under_a_call(comm, over):
    if comm.rank == 1:
        over.wait(20)
        return None
    caught = []

    def call():
        try:
            comm.all_reduce(np.arange(3))
        except pynccl.InvalidUsageError as error:
            caught.append(error.detail)

    thread = threading.Thread(target=call)
    thread.start()
    scripts.wait_until(lambda: inside_a_call(comm))
    found = members(comm.shrink([1], abort=True), comm.rank)
    thread.join(5)
    assert "shrunk during the call" in caught[0]
    over.wait(20)
    return found


def test_shrink_ends_the_call_of_another_thread():
    with ThreadWorld(3) as world:
        assert world.run(shrink_under_a_call, threading.Barrier(3))[2] == (1, 2, [0, 2])


def count_on_an_idle_rank(comm):
    if comm.rank == 0:
        start = time.monotonic()
        with pytest.raises(pynccl.NCCLTimeoutError, match="rank 2"):
            comm.shrink([1], timeout=0.3)
        with pytest.raises(pynccl.NCCLTimeoutError, match="CommSplit #1.*rank 2"):
            comm.split(0, timeout=0.3)
        return time.monotonic() - start
    return None


def test_child_has_a_time_of_its_own():
    with ThreadWorld(3) as world:
        assert 0.5 < world.run(count_on_an_idle_rank)[0] < 3


# --- grow ------------------------------------------------------------------------------------------------


def test_grow_keeps_the_ranks_and_adds_new_ones(crew):
    first, ids, share = new_id(), [], threading.Event()

    def live(rank):
        if rank >= 2:
            share.wait(10)
            comm = pynccl.Communicator.join(4, ids[0], rank, timeout=10)
        else:
            old = create(2, first, rank)
            if rank == 1:
                ids.append(old.unique_id())
                share.set()
            comm = old.grow(4, ids[0] if rank == 1 else None)
            old.close()
        return members(comm, rank)

    outcomes = crew(4).run(live, 20)
    assert [o.value for o in outcomes] == [(r, 4, [0, 1, 2, 3]) for r in range(4)], outcomes


def test_grow_refuses(alone):
    with pytest.raises(ValueError, match="nranks is 1, and there are 1 already"):
        alone.grow(1)
    with pytest.raises(ValueError, match="128 bytes"):
        alone.grow(2, b"x")
    with pytest.raises(ValueError, match="made by the nccl library"):
        alone.grow(2, bytes(128))
    with pytest.raises(ValueError, match="rank 2 is not in 0 to 1"):
        pynccl.Communicator.join(2, new_id(), 2)
    assert alone.unique_id().kind == "host"


def test_growth_that_nobody_brings_an_id_to_fails(crew):
    uid = new_id()

    def live(rank):
        comm = create(2, uid, rank)
        with pytest.raises(pynccl.InvalidUsageError, match="no rank brings a unique id"):
            comm.grow(3)
        comm.close()

    assert all(o.error is None for o in crew(2).run(live, 20))


# --- revoke and finalize ---------------------------------------------------------------------------------


def revoke(comm):
    cases.sum_of_ranks(comm)
    if comm.rank:  # these stop at one collective more than rank 0
        with pytest.raises(pynccl.RemoteError, match="revoked|gave up"):
            comm.all_reduce(np.arange(3))
    else:
        time.sleep(0.1)
    comm.revoke()
    with pytest.raises(pynccl.InvalidUsageError, match="AllReduce: communicator was revoked"):
        comm.all_reduce(np.arange(3))
    with pytest.raises(pynccl.InvalidArgumentError, match="revoked already"):
        comm.revoke()
    with pytest.raises(pynccl.InvalidArgumentError, match="was revoked"):
        comm.finalize()
    found = members(comm.split(comm.rank % 2), comm.rank)
    if comm.rank != 1:
        members(comm.shrink([1]), comm.rank)
    comm.close()
    return found


def test_revoked_communicator_can_only_be_divided():
    with ThreadWorld(4) as world:
        assert world.run(revoke) == [
            (0, 2, [0, 2]),
            (0, 2, [1, 3]),
            (1, 2, [0, 2]),
            (1, 2, [1, 3]),
        ]


def test_finalized_communicator_says_so_and_closes(alone):
    alone.finalize()
    for use in (lambda: alone.all_reduce(np.arange(3)), alone.finalize):
        with pytest.raises(pynccl.CommunicatorClosedError, match="was finalized"):
            use()
    assert "finalized" in repr(alone)
    assert not alone.closed
    assert alone.async_error == pynccl.Result.SUCCESS
    alone.close()
    assert alone.closed


@pytest.mark.parametrize("verb", ["revoke", "finalize"])
def test_what_acts_at_once_is_refused_in_a_group(alone, verb):
    with pynccl.group(), pytest.raises(ValueError, match=f"{verb}: a group is open"):
        getattr(alone, verb)()


# --- in the background -----------------------------------------------------------------------------------

BACKGROUND = pynccl.Config(blocking=False)


def holdings():
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/dev/shm"))


def background_threads():
    return len(os.listdir("/proc/self/task"))


def nothing_left(before, threads_before):
    gc.collect()
    assert holdings() == before
    deadline = time.monotonic() + 5  # a thread that has done its work needs a moment to end
    while background_threads() > threads_before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert background_threads() <= threads_before


def test_creation_in_the_background_answers_at_once_and_gets_ready(crew):
    uid = new_id()

    def live(rank):
        start = time.monotonic()
        if rank:
            time.sleep(0.3)
        comm = pynccl.Communicator(3, uid, rank, config=BACKGROUND, timeout=10)
        took = time.monotonic() - start - 0.3 * (rank > 0)
        if not rank:
            assert comm.async_error == pynccl.Result.IN_PROGRESS
            with pytest.raises(pynccl.InProgressError, match="still being created; wait_ready"):
                comm.all_reduce(np.arange(3))
            with pytest.raises(pynccl.NCCLTimeoutError, match="still in progress after 0.01 s"):
                comm.wait_ready(0.01)
            assert "being created" in repr(comm)
        with comm:
            comm.wait_ready()
            cases.sum_of_ranks(comm)
            assert comm.all_reduce(np.ones(100_000))[-1] == 3
            found = members(comm.split(0, -rank), rank)
        return took < 0.25, found

    outcomes = crew(3).run(live, 20)
    assert [o.value for o in outcomes] == [(True, (2 - r, 3, [2, 1, 0])) for r in range(3)], (
        outcomes
    )


def test_one_thread_creates_all_ranks_in_the_background_without_a_group():
    uid = new_id()
    comms = [pynccl.Communicator(3, uid, rank, config=BACKGROUND, timeout=10) for rank in range(3)]
    scripts.wait_until(lambda: all(comm.async_error == pynccl.Result.SUCCESS for comm in comms))
    xs = [np.array([rank]) for rank in range(3)]
    with pynccl.group():  # its calls are polled, and done when the block ends
        for comm, x in zip(comms, xs, strict=True):
            comm.all_reduce(x, out=x)
    assert [x.tolist() for x in xs] == [[3]] * 3
    for comm in comms:
        comm.close()


def test_missing_rank_is_a_timeout_and_nothing_is_left():
    create(1, new_id(), 0).close()
    before, threads_before = holdings(), background_threads()
    start = time.monotonic()
    comm = pynccl.Communicator(2, new_id(), 0, config=BACKGROUND, timeout=2)
    assert time.monotonic() - start < 0.5
    with pytest.raises(pynccl.NCCLTimeoutError, match="missing rank 1"):
        comm.wait_ready()
    assert 1.9 < time.monotonic() - start < 4
    assert comm.closed
    nothing_left(before, threads_before)
    with create(1, new_id(), 0) as other:
        cases.sum_of_ranks(other)


@pytest.mark.parametrize("end", ["close", "abort", "with", "drop"])
def test_creation_that_is_given_up_leaves_nothing(end):
    before, threads_before = holdings(), background_threads()
    start = time.monotonic()
    comm = pynccl.Communicator(2, new_id(), 0, config=BACKGROUND, timeout=60)
    if end == "with":
        with comm:
            pass
    elif end == "drop":
        with pytest.warns(ResourceWarning, match="never closed"):
            del comm
    else:
        getattr(comm, end)()
    assert time.monotonic() - start < 2
    nothing_left(before, threads_before)


def test_failed_call_of_a_nonblocking_communicator_names_the_peer(crew):
    uid = new_id()

    def live(rank):
        comm = pynccl.Communicator(2, uid, rank, config=BACKGROUND, timeout=10)
        comm.wait_ready()
        if rank:
            comm.close()
            return
        with pytest.raises(pynccl.RemoteError, match="rank 1"):
            comm.all_reduce(np.arange(3))
        assert comm.async_error == pynccl.Result.REMOTE_ERROR
        with pytest.raises(pynccl.RemoteError, match="rank 1"):
            comm.wait_ready()
        comm.close()

    outcomes = crew(2).run(live, 20)
    assert all(o.error is None for o in outcomes), outcomes


def test_ctrl_c_in_a_nonblocking_call_ends_it(crew):
    uid = new_id()
    comms = [None, None]

    def create_one(rank):
        comms[rank] = pynccl.Communicator(2, uid, rank, config=BACKGROUND, timeout=30)
        comms[rank].wait_ready()

    assert all(o.error is None for o in crew(2).run(create_one, 20))
    before = background_threads()
    timer = threading.Timer(0.3, _thread.interrupt_main)
    timer.start()
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        comms[0].all_reduce(np.arange(100_000))
    assert time.monotonic() - start < 2
    with pytest.raises(pynccl.InvalidUsageError, match="revoked"):
        comms[0].all_reduce(np.arange(3))
    with pytest.raises(pynccl.RemoteError, match="rank 0 .*revoked"):
        for _ in range(2):  # the first may still be answered by what was published
            comms[1].all_reduce(np.arange(100_000))
    timer.join()
    for comm in comms:
        comm.close()
    nothing_left(holdings(), before)


BY_ENVIRONMENT = """
import array
import pynccl

comms = [pynccl.Communicator(1, pynccl.unique_id("host"), 0, config=config, timeout=10)
         for config in (None, pynccl.Config(blocking=False), pynccl.Config(blocking=True))]
for comm in comms:
    comm.wait_ready()
    part = comm.split(0)
    x = array.array("i", [4])
    with pynccl.group():
        part.all_reduce(x, out=x)
        comm.broadcast(x)
    part.close()
    comm.close()
    print(x[0])
"""


@pytest.mark.parametrize("blocking", ["0", "1", "2"])
def test_environment_decides_whether_calls_block(blocking):
    assert scripts.run(BY_ENVIRONMENT, NCCL_COMM_BLOCKING=blocking).split() == ["4"] * 3


# --- several ids, and settings ---------------------------------------------------------------------------


def test_several_ids_make_one_communicator(crew):
    ids = [new_id() for _ in range(3)]
    outcomes = crew(3).run(lambda rank: members(pynccl.Communicator(3, ids, rank), rank), 20)
    assert [o.value for o in outcomes] == [(r, 3, [0, 1, 2]) for r in range(3)], outcomes


@pytest.mark.parametrize("count", [0, 3])
def test_number_of_ids_is_between_one_and_the_ranks(count):
    with pytest.raises(ValueError, match=f"{count} unique ids for nranks=2"):
        pynccl.Communicator(2, [new_id() for _ in range(count)], 0)


FIELDS = {
    "blocking": True,
    "cga_cluster_size": 2,
    "min_ctas": 1,
    "max_ctas": 8,
    "net_name": "Socket",
    "split_share": True,
    "traffic_class": 3,
    "comm_name": "träin",
    "collnet_enable": False,
    "cta_policy": 1,
    "shrink_share": True,
    "nvls_ctas": 4,
    "n_channels_per_net_peer": 2,
    "nvlink_centric_sched": True,
    "graph_usage_mode": 2,
    "num_rma_ctx": 1,
    "max_p2p_peers": 5,
    "graph_stream_ordering": False,
    "launch_order_implicit": 1,
    "num_rma_sig": 2,
    "rma_eager_init": 1,
    "host_cft_mode": 0,
    "nvls_host_mode": 0,
}


def test_config_keeps_what_it_is_given():
    config = pynccl.Config(**FIELDS)
    assert config.values == FIELDS
    assert list(config.values) == list(FIELDS)
    assert config.nvls_ctas == 4
    assert pynccl.Config().nvls_ctas is None
    again = pickle.loads(pickle.dumps(config))
    assert again == config and hash(again) == hash(config) and again != pynccl.Config()
    assert repr(pynccl.Config(comm_name="a", blocking=False)) == (
        "Config(blocking=False, comm_name='a')"
    )
    with create(1, new_id(), 0, config=config) as comm:
        cases.sum_of_ranks(comm)
        with pytest.raises(AttributeError, match="no field 'rank'"):
            config.rank  # noqa: B018


@pytest.mark.parametrize(
    ("words", "error", "text"),
    [
        ({"nope": 1}, TypeError, "nope"),
        ({"blocking": 1}, TypeError, "blocking must be True or False"),
        ({"nvls_ctas": True}, TypeError, "nvls_ctas must be an int, not a bool"),
        ({"nvls_ctas": 2.0}, TypeError, "nvls_ctas must be an int"),
        ({"nvls_ctas": 2**31}, ValueError, "does not fit in 32 bits"),
        ({"nvls_ctas": -(2**31)}, ValueError, "does not fit in 32 bits"),  # NCCL's "undefined"
        ({"comm_name": b"a"}, TypeError, "comm_name must be a str"),
        ({"comm_name": "a\0"}, ValueError, "null character"),
        ({"min_ctas": 2}, ValueError, "min_ctas is given without max_ctas"),
    ],
)
def test_config_refuses(words, error, text):
    with pytest.raises(error, match=text):
        pynccl.Config(**words)


def test_all_ranks_of_a_thread_take_one_config():
    comms = pynccl.init_all(2, library="host", config=BACKGROUND, timeout=10)
    for comm in comms:
        comm.wait_ready()
    xs = [np.array([1]), np.array([2])]
    with pynccl.group():
        outs = [comm.all_reduce(x) for comm, x in zip(comms, xs, strict=True)]
    assert [out.tolist() for out in outs] == [[3], [3]]
    for comm in comms:
        comm.close()


def test_value_that_the_library_refuses_is_named():
    with pytest.raises(
        pynccl.InvalidArgumentError, match="Invalid config policy attribute value 9"
    ):
        create(1, new_id(), 0, config=pynccl.Config(cta_policy=9))
    with pytest.raises(TypeError, match=r"config must be a pynccl\.Config"):
        create(1, new_id(), 0, config={"cta_policy": 1})


# --- many ------------------------------------------------------------------------------------------------


def test_many_communicators_leave_nothing():
    """More in the C tests, which need no Python to look at them."""

    def once():
        comms = pynccl.init_all(2, library="host")
        xs = [np.array([1]), np.array([2])]
        with pynccl.group():
            parts = [comm.split(0) for comm in comms]
        with pynccl.group():
            for comm, x in zip(parts, xs, strict=True):
                comm.all_reduce(x, out=x)
        assert xs[0][0] == xs[1][0] == 3
        with comms[0].shrink([1]) as less:
            cases.sum_of_ranks(less)
        for comm in (*comms, *parts):
            comm.close()

    once()
    before, threads_before = holdings(), background_threads()
    for _ in range(100):
        once()
    nothing_left(before, threads_before)
