"""Communicators that the list API keeps: shared by threads, replaced when broken, really destroyed."""

import gc
import os
import threading

import numpy as np
import pytest

import pynccl
import pynccl.multi as nccl
from helpers import scripts
from helpers.stubs import NcclStub, build_nccl_stub


def lists(n, value=1.0, size=4):
    return [np.full(size, value * (i + 1)) for i in range(n)]


def right(xs, value=1.0):
    n = len(xs)
    return all((x == value * n * (n + 1) / 2).all() for x in xs)


@pytest.fixture
def stub():
    """The recording host library, whose calls can be counted; as (path, stub)."""
    path = str(build_nccl_stub(host=True))
    recorder = NcclStub(path)
    nccl.clear_cache()
    recorder.reset()
    yield path, recorder
    recorder.reset()
    nccl.clear_cache()


def test_communicators_are_created_once_and_destroyed_by_clear_cache(stub):
    path, recorder = stub
    for _ in range(3):
        nccl.all_reduce(lists(2), library=path)
        nccl.broadcast(lists(3), library=path)
    assert len(recorder.of("ncclCommInitRank")) == 5
    assert len(recorder.of("ncclAllReduce")) == 6
    nccl.clear_cache()
    assert len(recorder.of("ncclCommDestroy")) == 5 and recorder.live == 0
    assert recorder.of("ncclCommAbort") == []
    nccl.clear_cache()
    nccl.all_reduce(lists(2), library=path)
    assert len(recorder.of("ncclCommInitRank")) == 7


def test_failed_creation_is_not_kept(stub):
    path, recorder = stub
    recorder.fail("ncclCommInitRank", 2, skip=1)
    for _ in range(2):
        with pytest.raises(pynccl.NCCLError, match="ncclCommInitRank"):
            nccl.all_reduce(lists(2), library=path)
    recorder.reset()
    nccl.all_reduce(lists(2), library=path)
    assert len(recorder.of("ncclCommInitRank")) == 2


def test_failed_call_is_raised_once_and_the_next_gets_new_communicators(stub):
    path, recorder = stub
    nccl.all_reduce(lists(2), library=path)
    recorder.reset()
    recorder.fail("ncclAllReduce", 6)
    with pytest.raises(pynccl.RemoteError, match="ncclAllReduce"):
        nccl.all_reduce(lists(2), library=path)
    assert recorder.names.count("ncclGroupEnd") == 1, "the library's group was closed all the same"
    recorder.reset()
    nccl.all_reduce(lists(2), library=path)
    assert [name for name in recorder.names if name.startswith("ncclComm")][:2] == [
        "ncclCommAbort"
    ] * 2
    assert len(recorder.of("ncclCommInitRank")) == 2 and len(recorder.of("ncclAllReduce")) == 2


def test_failure_in_a_group_replaces_the_communicators_too(stub):
    path, recorder = stub
    nccl.all_reduce(lists(2), library=path)
    recorder.reset()
    recorder.fail("ncclGroupEnd", 6)
    with pytest.raises(pynccl.RemoteError), pynccl.group():
        nccl.all_reduce(lists(2), library=path)
    recorder.reset()
    nccl.all_reduce(lists(2), library=path)
    assert len(recorder.of("ncclCommAbort")) == 2 and len(recorder.of("ncclCommInitRank")) == 2


def test_calls_of_one_list_are_one_group_of_the_library(stub):
    path, recorder = stub
    nccl.all_reduce(lists(3), library=path)
    recorder.reset()
    nccl.all_reduce(lists(3), library=path)
    assert recorder.names == ["ncclGroupStart", *["ncclAllReduce"] * 3, "ncclGroupEnd"]
    recorder.reset()
    with pynccl.group():
        nccl.all_reduce(lists(3), library=path)
        nccl.broadcast(lists(3), root=2, library=path)
        assert recorder.names == []
    assert recorder.names == [
        "ncclGroupStart", *["ncclAllReduce"] * 3, *["ncclBroadcast"] * 3, "ncclGroupEnd",
    ]  # fmt: skip
    assert [call.root for call in recorder.of("ncclBroadcast")] == [2, 2, 2]


# --- groups ---------------------------------------------------------------------------------------


def test_several_lists_run_in_one_group():
    nccl.clear_cache()
    xs, ys, zs = lists(2), lists(3, 2.0), lists(2, 5.0)
    with pynccl.group():
        nccl.all_reduce(xs, library="host")
        nccl.all_reduce(ys, library="host")
        nccl.broadcast(zs, root=1, library="host")
        assert not right(xs)
    assert right(xs) and right(ys, 2.0) and all((z == 10).all() for z in zs)


def test_lists_make_a_plan():
    xs = lists(3)
    with pynccl.group(run=False) as plan:
        nccl.all_reduce(xs, library="host")
    assert len(plan) == 3 and xs[0][0] == 1
    plan()
    assert right(xs)
    plan()
    assert (xs[0] == 18).all()
    nccl.clear_cache()
    with pytest.raises(pynccl.CommunicatorClosedError, match="group"):
        plan()


def test_plan_keeps_the_arrays_of_a_list():
    xs = lists(2)
    with pynccl.group(run=False) as plan:
        nccl.all_reduce(xs, library="host")
    seen = [x.view() for x in xs]
    del xs
    gc.collect()
    plan()
    assert right(seen)


def test_bad_entry_records_nothing_in_a_group():
    good = lists(2)
    with pynccl.group() as group:
        with pytest.raises(ValueError, match=r"inputs\[1\]"):
            nccl.all_reduce([np.zeros(3), np.zeros(4)], library="host")
        assert len(group) == 0
        nccl.all_reduce(good, library="host")
    assert right(good)


def test_exception_in_the_group_launches_no_list():
    xs = lists(2)
    with pytest.raises(KeyError), pynccl.group():
        nccl.all_reduce(xs, library="host")
        raise KeyError("mine")
    assert xs[0][0] == 1
    nccl.all_reduce(xs, library="host")
    assert right(xs)


def test_cache_is_not_cleared_inside_a_group():
    nccl.all_reduce(lists(2), library="host")
    with pytest.raises(ValueError, match="clear_cache: the group"), pynccl.group():
        nccl.clear_cache()
    nccl.clear_cache()
    xs = lists(2)
    nccl.all_reduce(xs, library="host")
    assert right(xs)


# --- threads --------------------------------------------------------------------------------------


def test_threads_share_the_kept_communicators_in_turn(crew):
    nccl.clear_cache()

    def work(thread):
        for turn in range(60):
            n = 2 + (thread + turn) % 2
            xs = lists(n, thread + turn + 1.0, size=257)
            if turn % 3 == 0:
                with pynccl.group():
                    nccl.all_reduce(xs, library="host")
                    ys = lists(5 - n, 3.0)
                    nccl.all_reduce(ys, library="host")
                assert right(ys, 3.0)
            else:
                nccl.all_reduce(xs, library="host")
            assert right(xs, thread + turn + 1.0)
        return True

    outcomes = crew(6).run(work, 40)
    assert [o.value for o in outcomes] == [True] * 6, [str(o) for o in outcomes]


def test_plans_of_several_threads_take_turns(crew):
    def work(thread):
        xs = [np.ones(64), np.ones(64)]
        with pynccl.group(run=False) as plan:
            nccl.all_reduce(xs, library="host")
        for _ in range(20):
            plan()
        return float(xs[0][0]), float(xs[1][63])

    assert [o.value for o in crew(4).run(work, 40)] == [(2.0**20, 2.0**20)] * 4


def test_cache_may_be_cleared_while_threads_call(crew):
    def work(thread):
        for turn in range(40):
            if thread == 0 and turn % 4 == 0:
                nccl.clear_cache()
            xs = lists(2, turn + 1.0)
            nccl.all_reduce(xs, library="host")
            assert right(xs, turn + 1.0)
        return True

    outcomes = crew(4).run(work, 40)
    assert [o.value for o in outcomes] == [True] * 4, [str(o) for o in outcomes]


def test_other_threads_run_while_a_list_call_waits(stub):
    path, recorder = stub
    nccl.all_reduce(lists(2), library=path)
    recorder.hold("ncclGroupEnd")
    thread = threading.Thread(target=nccl.all_reduce, args=(lists(2),), kwargs={"library": path})
    thread.start()
    try:
        scripts.wait_until(lambda: recorder.held == 1, 10)
        ticks = sum(1 for _ in range(1000))
        assert ticks == 1000 and thread.is_alive()
    finally:
        recorder.release()
        thread.join(10)
    assert not thread.is_alive()


# --- processes ------------------------------------------------------------------------------------


def test_forked_child_gets_communicators_of_its_own():
    xs = lists(2)
    nccl.all_reduce(xs, library="host")
    child = os.fork()
    if child == 0:
        status = 1
        try:
            ys = lists(2)
            nccl.all_reduce(ys, library="host")
            status = 0 if right(ys) else 2
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    ys = lists(2)
    nccl.all_reduce(ys, library="host")
    assert right(ys)


def test_fork_while_a_thread_is_in_a_call_leaves_the_child_free():
    scripts.run("""
import os, threading, time
import numpy as np
import pynccl.multi as nccl

def work():
    while not done:
        nccl.all_reduce([np.ones(100_000), np.ones(100_000)], library="host")

done = False
thread = threading.Thread(target=work)
thread.start()
for _ in range(5):
    time.sleep(0.01)
    child = os.fork()
    if child == 0:
        xs = [np.ones(3), np.ones(3)]
        nccl.all_reduce(xs, library="host")
        os._exit(0 if (xs[0] == 2).all() else 1)
    assert os.waitpid(child, 0)[1] == 0
done = True
thread.join()
""")


def test_plan_is_refused_in_a_child_forked_while_a_thread_is_in_a_call():
    scripts.run("""
import os, signal, threading, time
import numpy as np
import pynccl
import pynccl.multi as nccl

with pynccl.group() as plan:
    nccl.all_reduce([np.ones(3), np.ones(3)], library="host")

def work():
    xs = [np.ones(3_000_000), np.ones(3_000_000)]
    while not done:
        nccl.all_reduce(xs, op="avg", library="host")

done = False
thread = threading.Thread(target=work)
thread.start()
try:
    for _ in range(20):
        time.sleep(0.01)
        child = os.fork()
        if child == 0:
            signal.alarm(5)         # a child that waits for a thread it does not have dies of this
            status = 1
            try:
                plan()
            except pynccl.CommunicatorClosedError as error:
                status = 0 if "fork" in str(error) else 2
            finally:
                os._exit(status)
        assert os.waitpid(child, 0)[1] == 0
finally:
    done = True
    thread.join()
""")


def test_process_ends_well_with_kept_communicators():
    scripts.run("""
import numpy as np
import pynccl.multi as nccl
nccl.all_reduce([np.ones(3), np.ones(3)], library="host")
""")


def test_clearing_leaves_nothing_behind():
    def used():
        return len(os.listdir("/proc/self/fd")), threading.active_count()

    nccl.all_reduce(lists(4), library="host")
    nccl.clear_cache()
    gc.collect()
    before = used()
    for _ in range(10):
        for n in (2, 3, 4):
            nccl.all_reduce(lists(n), library="host")
        nccl.clear_cache()
    gc.collect()
    assert used() == before


def test_default_library_follows_the_environment(monkeypatch, stub):
    path, recorder = stub
    monkeypatch.setenv("PYNCCL_LIBRARY", path)
    nccl.all_reduce(lists(2))
    assert len(recorder.of("ncclAllReduce")) == 2
    monkeypatch.setenv("PYNCCL_LIBRARY", "host")
    xs = lists(2)
    nccl.all_reduce(xs)
    assert right(xs) and len(recorder.of("ncclAllReduce")) == 2


def test_plan_that_cannot_begin_leaves_the_kept_communicators_whole():
    xs = [np.array([1.0]) for _ in range(2)]
    alone = pynccl.Communicator(1, pynccl.unique_id("host"), 0)
    with pynccl.group(run=False) as both:
        nccl.all_reduce(xs, library="host")
        alone.all_reduce(np.ones(1))
    with pynccl.group(run=False) as other:
        nccl.all_reduce(xs, library="host")
    alone.close()
    with pytest.raises(pynccl.CommunicatorClosedError):
        both()
    nccl.all_reduce([np.ones(1), np.ones(1)], library="host")  # would replace them
    other()
    assert xs == [2, 2]
