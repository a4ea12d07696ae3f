"""How communicators come to be and end: ids, arguments, creation, split, close, abort, exit."""

import copy
import gc
import itertools
import os
import pickle
import signal
import time
from datetime import timedelta

import numpy as np
import pytest

import pynccl
from helpers import cases, scripts
from helpers.ranks import Crew, ThreadWorld


def create(nranks, uid, rank, timeout=10.0, **words):
    return pynccl.Communicator(nranks, uid, rank, timeout=timeout, library="host", **words)


def new_id():
    return pynccl.unique_id(library="host")


@pytest.fixture
def alone():
    """A communicator of one rank."""
    with create(1, new_id(), 0) as comm:
        yield comm


@pytest.fixture
def crew():
    """``crew(n)``: n threads."""
    made = []

    def make(size):
        made.append(Crew(size))
        return made[-1]

    yield make
    for each in made:
        each.stop()


# --- unique ids ----------------------------------------------------------------------------------------


def test_unique_id_is_128_bytes_that_differ():
    ids = [new_id() for _ in range(20)]
    assert all(isinstance(uid, bytes) and len(uid) == 128 for uid in ids)
    assert len(set(ids)) == 20


def test_unique_id_survives_pickle_copy_and_file(tmp_path):
    uid = new_id()
    for other in (
        *(pickle.loads(pickle.dumps(uid, p)) for p in range(2, pickle.HIGHEST_PROTOCOL + 1)),
        copy.copy(uid),
        copy.deepcopy(uid),
    ):
        assert other == uid
        assert type(other) is pynccl.UniqueId
    (tmp_path / "id").write_bytes(uid)
    assert (tmp_path / "id").read_bytes() == uid


@pytest.mark.parametrize("byte", [0x00, 0x7F, 0x80, 0xFF])
def test_unique_id_keeps_every_byte(byte):
    raw = bytes([byte]) * 64 + bytes(range(64))
    assert bytes(pynccl.UniqueId(raw)) == raw
    assert pickle.loads(pickle.dumps(pynccl.UniqueId(raw))) == raw


@pytest.mark.parametrize("form", [bytes, bytearray, memoryview, pynccl.UniqueId])
def test_any_128_bytes_of_an_id_serve(form):
    with create(1, form(bytes(new_id())), 0) as comm:
        cases.sum_of_ranks(comm)


@pytest.mark.parametrize("length", [0, 1, 127, 129, 256])
def test_id_of_another_length_is_a_value_error_with_the_number(length):
    with pytest.raises(ValueError, match=rf"128.*\b{length}\b"):
        create(1, bytes(length), 0)


@pytest.mark.parametrize("thing", ["x" * 128, None, 5, tuple(range(128)), list(range(128))])
def test_thing_that_is_no_id_is_a_type_error(thing):
    with pytest.raises(TypeError, match=type(thing).__name__):
        create(1, thing, 0)


def test_id_of_nobody_is_refused():
    with pytest.raises((ValueError, pynccl.NCCLError), match="id"):
        create(1, bytes(range(128)), 0)


def test_forged_host_id_is_refused_or_times_out_soon():
    uid = bytearray(new_id())
    uid[:64] = os.urandom(64)
    start = time.monotonic()
    with pytest.raises(pynccl.NCCLError):
        create(2, bytes(uid), 1, timeout=1.0)
    assert time.monotonic() - start < 5


# --- arguments of the creation -------------------------------------------------------------------------


@pytest.mark.parametrize(("nranks", "rank"), [(2, 2), (2, -1), (1, 1), (4, 100), (3, 2**31)])
def test_rank_out_of_range_is_a_value_error_with_the_range(nranks, rank):
    with pytest.raises(ValueError, match=rf"{rank}") as caught:
        create(nranks, new_id(), rank)
    assert f"0 to {nranks - 1}" in str(caught.value) or "32 bits" in str(caught.value)


@pytest.mark.parametrize("nranks", [0, -1, -(2**40)])
def test_number_of_ranks_below_one_is_a_value_error(nranks):
    with pytest.raises(ValueError, match=f"{nranks}"):
        create(nranks, new_id(), 0)


@pytest.mark.parametrize(
    "words", [{"nranks": "2"}, {"rank": 0.0}, {"nranks": True}, {"rank": None}]
)
def test_number_that_is_no_int_is_a_type_error(words):
    arguments = {"nranks": 1, "uid": new_id(), "rank": 0} | words
    with pytest.raises(TypeError, match=next(iter(words))):
        pynccl.Communicator(**arguments, library="host")


@pytest.mark.parametrize("timeout", [-1, float("nan"), -0.5, timedelta(seconds=-1)])
def test_timeout_that_is_no_duration_is_a_value_error(timeout):
    with pytest.raises(ValueError, match="timeout"):
        create(1, new_id(), 0, timeout=timeout)


def test_timeout_is_seconds_or_timedelta():
    for timeout, seconds in ((3, 3.0), (2.5, 2.5), (timedelta(minutes=1), 60.0)):
        with create(1, new_id(), 0, timeout=timeout) as comm:
            assert comm.timeout == seconds


def test_properties_say_what_was_asked_for():
    with create(1, new_id(), 0, device=3) as comm:
        assert (comm.rank, comm.nranks, comm.device, comm.closed) == (0, 1, 3, False)
        assert comm.library.kind == "host"
        assert comm.library.version == pynccl.version_code("host") >= 21800
        assert os.path.basename(comm.library.path) == "libpynccl_host.so"
        assert "rank 0 of 1" in repr(comm)


def test_failed_creation_does_not_spoil_the_next(crew):
    uid = new_id()
    with pytest.raises(ValueError):
        create(2, uid, 5)
    comms = [o.value for o in crew(2).run(lambda rank: create(2, uid, rank), 20)]
    for comm in comms:
        assert comm.nranks == 2
        comm.close()


# --- creations that cannot come about ------------------------------------------------------------------


def test_missing_rank_times_out_and_is_named():
    start = time.monotonic()
    with pytest.raises(pynccl.NCCLTimeoutError, match="1") as caught:
        create(2, new_id(), 0, timeout=1.0)
    assert 0.9 < time.monotonic() - start < 4
    assert isinstance(caught.value, TimeoutError)


def test_several_missing_ranks_are_all_named(crew):
    uid = new_id()
    ranks = [0, 3]
    for outcome in crew(2).run(lambda i: create(5, uid, ranks[i], timeout=1.0), 20):
        assert isinstance(outcome.error, pynccl.NCCLTimeoutError), outcome
        for missing in "124":
            assert missing in str(outcome.error).split("ncclCommInitRank")[1], outcome


def test_id_of_a_creation_that_timed_out_is_not_reusable(crew):
    uid = new_id()
    with pytest.raises(pynccl.NCCLTimeoutError):
        create(2, uid, 0, timeout=0.5)
    start = time.monotonic()
    for outcome in crew(2).run(lambda rank: create(2, uid, rank, timeout=3.0), 20):
        assert isinstance(outcome.error, pynccl.NCCLError), outcome
    assert time.monotonic() - start < 6


def test_number_of_ranks_on_which_ranks_disagree(crew):
    uid = new_id()
    start = time.monotonic()
    outcomes = crew(2).run(lambda rank: create(2 + rank, uid, rank, timeout=3.0), 20)
    assert time.monotonic() - start < 5
    for outcome in outcomes:
        assert isinstance(outcome.error, pynccl.NCCLError), outcome
    assert any(
        isinstance(o.error, pynccl.InvalidUsageError) and "2" in str(o) and "3" in str(o)
        for o in outcomes
    ), outcomes


def test_rank_that_comes_twice(crew):
    uid = new_id()
    start = time.monotonic()
    outcomes = crew(3).run(lambda i: create(3, uid, (0, 1, 1)[i], timeout=3.0), 20)
    assert time.monotonic() - start < 5
    for outcome in outcomes:
        assert isinstance(outcome.error, pynccl.NCCLError), outcome
    assert any(
        isinstance(o.error, pynccl.InvalidUsageError) and "rank 1" in str(o.error) for o in outcomes
    ), outcomes


def test_id_serves_once(crew):
    uid = new_id()
    first = [o.value for o in crew(2).run(lambda rank: create(2, uid, rank), 20)]
    start = time.monotonic()
    for outcome in crew(2).run(lambda rank: create(2, uid, rank, timeout=3.0), 20):
        assert isinstance(outcome.error, pynccl.NCCLError), outcome
        assert "id" in str(outcome.error)
    assert time.monotonic() - start < 2
    both = crew(2).run(lambda rank: cases.sum_of_ranks(first[rank]), 20)
    assert all(o.error is None for o in both), both
    for comm in first:
        comm.close()


def test_id_of_a_closed_communicator_does_not_serve_again():
    uid = new_id()
    create(1, uid, 0).close()
    with pytest.raises(pynccl.NCCLError, match="id"):
        create(1, uid, 0, timeout=2.0)


# --- many ----------------------------------------------------------------------------------------------


def test_many_communicators_live_side_by_side():
    comms = [create(1, new_id(), 0) for _ in range(40)]
    for i, comm in enumerate(comms):
        assert comm.all_reduce(np.array([i])).tolist() == [i]
    for comm in reversed(comms):
        comm.close()


def rounds_of_creations(rank, ids, size):
    for three in ids:
        comms = [create(size, uid, rank) for uid in three]
        for comm in comms:
            cases.sum_of_ranks(comm)
        for comm in comms:
            comm.close()


def ticking(crew, job, limit):
    """Run a job in the crew's threads while this one counts how often it gets to run."""
    ticker = Crew(1)
    ticks = []
    stop = []

    def tick(index):
        while not stop:
            ticks.append(time.monotonic())
            time.sleep(0.005)

    ticker.start(tick)
    outcomes = crew.run(job, limit)
    stop.append(True)
    ticker.stop()
    gaps = [b - a for a, b in itertools.pairwise(ticks)]
    return outcomes, len(ticks), max(gaps, default=limit)


def test_threads_create_communicators_without_a_group(crew):
    ids = [[new_id() for _ in range(3)] for _ in range(20)]
    four = crew(4)
    outcomes, ticks, gap = ticking(four, lambda r: rounds_of_creations(r, ids, 4), 40)
    assert all(o.error is None for o in outcomes), outcomes
    assert ticks > 5
    assert gap < 2.0


def blocked_calls(comm):
    """Ways of waiting for rank 1, who comes half a second late."""
    if comm.rank:
        time.sleep(0.5)
    x = np.arange(4) + comm.rank
    comm.all_reduce(x)
    if comm.rank:
        time.sleep(0.5)
    comm.barrier()
    if comm.rank:
        time.sleep(0.5)
        comm.send(x, 0)
    else:
        comm.recv(x, 1)
    if comm.rank:
        time.sleep(0.5)
    with pynccl.group():
        comm.send_recv(x, 1 - comm.rank, out=np.empty_like(x))


def test_waiting_calls_let_other_threads_run(crew):
    with ThreadWorld(2) as world:
        world.renew()
        outcomes, ticks, gap = ticking(crew(2), lambda rank: blocked_calls(world.comms[rank]), 20)
    assert all(o.error is None for o in outcomes), outcomes
    assert ticks > 100  # in two seconds, one in 5 ms
    assert gap < 0.4


def test_waiting_creation_lets_other_threads_run(crew):
    uid = new_id()

    def late(rank):
        time.sleep(0.7 * rank)
        return create(2, uid, rank)

    outcomes, ticks, gap = ticking(crew(2), late, 20)
    assert ticks > 30
    assert gap < 0.5
    for outcome in outcomes:
        outcome.value.close()


def test_second_thread_in_one_communicator_is_refused_by_name(crew):
    with ThreadWorld(2) as world:
        world.renew()
        first = crew(1)
        first.start(lambda i: world.comms[0].barrier())
        time.sleep(0.3)
        with pytest.raises(pynccl.InvalidUsageError, match="thread"):
            world.comms[0].all_reduce(np.arange(3))
        with pytest.raises(pynccl.InvalidUsageError, match="abort"):
            world.comms[0].close()
        world.comms[1].barrier()
        assert first.gather(10)[0].error is None
        world.run(cases.sum_of_ranks)


# --- the end -------------------------------------------------------------------------------------------

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


def test_ending_twice_is_fine_and_queries_still_answer():
    for first in ("close", "abort"):
        for second in ("close", "abort"):
            comm = create(1, new_id(), 0)
            getattr(comm, first)()
            getattr(comm, second)()
            assert comm.closed
            assert (comm.rank, comm.nranks) == (0, 1)
            assert "closed" in repr(comm) or "aborted" in repr(comm)


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


def test_abort_from_another_thread_ends_a_waiting_call(crew):
    with ThreadWorld(2) as world:
        world.renew()
        comm = world.comms[0]
        waiting = crew(1)
        waiting.start(lambda i: comm.all_reduce(np.arange(3)))
        time.sleep(0.3)
        start = time.monotonic()
        comm.abort()
        (outcome,) = waiting.gather(10)
        assert time.monotonic() - start < 2
        assert isinstance(outcome.error, pynccl.PyncclError), outcome
        assert "abort" in str(outcome.error)


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
    comm = create(1, new_id(), 0)
    with pytest.warns(ResourceWarning, match="never closed"):
        comm = None
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


@pytest.mark.parametrize("devices", [3, [0, 1, 2], (5, 2, 9), range(3), np.arange(3)])
def test_init_all_creates_one_communicator_per_device(devices):
    comms = pynccl.init_all(devices, library="host")
    numbers = list(range(3)) if isinstance(devices, int) else [int(d) for d in devices]
    assert [(c.rank, c.nranks, c.device) for c in comms] == [
        (i, 3, d) for i, d in enumerate(numbers)
    ]
    with pynccl.group():
        outs = [comm.all_reduce(np.array([comm.rank + 1])) for comm in comms]
    assert [out.tolist() for out in outs] == [[6]] * 3
    for comm in comms:
        comm.close()


@pytest.mark.parametrize("devices", [0, [], -1, [-1], [0, -3]])
def test_init_all_needs_devices(devices):
    with pytest.raises(ValueError, match="device"):
        pynccl.init_all(devices, library="host")


def test_init_all_refuses_a_device_named_twice(monkeypatch):
    monkeypatch.delenv("NCCL_MULTI_RANK_GPU_ENABLE", raising=False)
    with pytest.raises(pynccl.InvalidUsageError, match="ranks 0 and 2 .*device 4"):
        pynccl.init_all([4, 5, 4], library="host")
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    for comm in pynccl.init_all([4, 4], library="host"):
        comm.close()


# --- processes -----------------------------------------------------------------------------------------

PAIR = """
import os, signal, sys, threading, time
import numpy as np, pynccl
uid = pynccl.unique_id(library="host")
def create(rank):
    return pynccl.Communicator(2, uid, rank, timeout=20, library="host")
"""


@pytest.mark.parametrize("status", [0, 3])
def test_live_communicators_do_not_keep_the_process_or_change_its_status(status):
    code = f"""
        import sys, pynccl
        alone = pynccl.Communicator(1, pynccl.unique_id("host"), 0, library="host")
        several = pynccl.init_all(3, library="host")
        sys.exit({status})
    """
    start = time.monotonic()
    got, out, err = scripts.finish(scripts.start(code))
    assert (got, out, err) == (status, "", "")
    assert time.monotonic() - start < 5


def test_process_may_end_while_a_thread_waits_in_a_call():
    code = (
        PAIR
        + """
comms = [None, None]
def work():
    comms[1] = create(1)
    comms[1].all_reduce(np.arange(3))
threading.Thread(target=work, daemon=True).start()
comms[0] = create(0)
time.sleep(0.3)
"""
    )
    start = time.monotonic()
    got, out, err = scripts.finish(scripts.start(code))
    assert (got, out, err) == (0, "", "")
    assert time.monotonic() - start < 8


def test_forked_child_may_not_use_the_communicator_and_the_parent_may():
    scripts.run("""
        import os, sys, warnings
        import numpy as np, pynccl
        warnings.simplefilter("ignore", DeprecationWarning)
        comm = pynccl.Communicator(1, pynccl.unique_id("host"), 0, library="host")
        x = np.arange(3)
        with pynccl.group() as plan:
            comm.all_reduce(x, out=x)
        child = os.fork()
        if child == 0:
            status = 1
            try:
                for call in (lambda: comm.all_reduce(x), comm.barrier, plan):
                    try:
                        call()
                    except pynccl.CommunicatorClosedError as error:
                        assert "fork" in str(error), error
                    else:
                        os._exit(2)
                assert comm.closed
                repr(comm), comm.close(), comm.abort()
                # The child may make its own.
                mine = pynccl.Communicator(1, pynccl.unique_id("host"), 0, library="host")
                assert mine.all_reduce(x).tolist() == [0, 1, 2]
            except BaseException as error:
                print(repr(error), file=sys.stderr, flush=True)
                os._exit(3)
            sys.exit(0)   # through the exit hook, which must leave the parent's alone
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0, status
        assert comm.all_reduce(x).tolist() == [0, 1, 2]
        comm.close()
    """)


BLOCKED = {
    "all_reduce": "comm.all_reduce(np.arange(3))",
    "large all_reduce": "comm.all_reduce(np.arange(1000000))",
    "recv": "comm.recv(np.arange(3), 1)",
    "send": "comm.send(np.arange(3), 1)",
    "barrier": "comm.barrier()",
}


@pytest.mark.parametrize("call", BLOCKED.values(), ids=BLOCKED)
def test_ctrl_c_ends_a_waiting_call(call):
    code = (
        PAIR
        + f"""
other = []
threading.Thread(target=lambda: other.append(create(1)), daemon=True).start()
comm = create(0)
print("waiting", flush=True)
try:
    {call}
except KeyboardInterrupt:
    print("interrupted", flush=True)
else:
    print("it came back", flush=True)
try:
    comm.all_reduce(np.arange(3))
except pynccl.NCCLError as error:
    print("broken:", error)
comm.close()
"""
    )
    process = scripts.start(code)
    scripts.wait_for_line(process, "waiting")
    time.sleep(0.4)
    start = time.monotonic()
    process.send_signal(signal.SIGINT)
    status, out, err = scripts.finish(process)
    assert time.monotonic() - start < 3
    assert out.startswith("interrupted\nbroken:"), (out, err)
    assert "interrupt" in out.splitlines()[1]
    assert status == 0


def test_ctrl_c_ends_a_waiting_creation():
    process = scripts.start(
        PAIR
        + """
print("waiting", flush=True)
try:
    create(0)
except KeyboardInterrupt:
    print("interrupted")
"""
    )
    scripts.wait_for_line(process, "waiting")
    time.sleep(0.4)
    start = time.monotonic()
    process.send_signal(signal.SIGINT)
    status, out, err = scripts.finish(process)
    assert (status, out) == (0, "interrupted\n"), err
    assert time.monotonic() - start < 3
