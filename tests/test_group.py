"""A group is a plan: it records checked calls and runs them when it ends, and again when called."""

import gc
import weakref

import numpy as np
import pytest

import pynccl
from helpers import cases, data, oracle, scripts
from helpers.ranks import ThreadWorld, create, new_id


def test_nothing_runs_before_the_group_ends(alone):
    x, out = np.arange(4.0), np.full(4, -1.0)
    with pynccl.group():
        assert alone.all_reduce(x, out=out) is out
        assert out.tolist() == [-1] * 4
        x[:] = [5, 6, 7, 8]  # the call reads what is there when the group ends
    assert out.tolist() == [5, 6, 7, 8]


def test_bad_argument_raises_at_its_call_and_leaves_the_group_usable(alone):
    out = np.full(4, -1.0)
    with pynccl.group():
        with pytest.raises(ValueError, match="root"):
            alone.broadcast(np.arange(4.0), 7)
        alone.all_reduce(np.arange(4.0), out=out)
    assert out.tolist() == [0, 1, 2, 3]


def test_exception_inside_the_group_comes_out_and_launches_nothing(alone):
    out = np.full(4, -1.0)
    with pytest.raises(KeyError, match="mine"), pynccl.group():
        alone.all_reduce(np.arange(4.0), out=out)
        raise KeyError("mine")
    assert out.tolist() == [-1] * 4
    assert alone.all_reduce(np.arange(3)).tolist() == [0, 1, 2]  # and no group is left open
    assert out.tolist() == [-1] * 4


def exception_after_one_call(comm):
    with pytest.raises(KeyError), pynccl.group():
        comm.all_reduce(np.arange(3))
        raise KeyError
    cases.sum_of_ranks(comm)


def test_ranks_whose_groups_were_abandoned_can_go_on(threads):
    threads(2).run(exception_after_one_call)


def replay(comm):
    x, out = np.zeros(3, int), np.zeros(3, int)
    gathered = np.zeros((2, 2))
    y = np.array([comm.rank, 0.5])
    with pynccl.group() as plan:
        comm.all_reduce(x, out=out)
        comm.all_gather(y, out=gathered)
    for i in range(1, 20):
        x[:] = [i, comm.rank, 10 * i]
        y[0] = i + comm.rank
        plan()
        assert out.tolist() == [2 * i, 1, 20 * i]
        assert gathered.tolist() == [[i, 0.5], [i + 1, 0.5]]


def test_calling_the_plan_runs_it_again_on_what_its_arrays_hold(threads):
    threads(2).run(replay)


def test_plan_built_with_run_false_runs_only_when_called(alone):
    x, out = np.arange(4), np.full(4, -1)
    with pynccl.group(run=False) as plan:
        alone.all_reduce(x, out=out)
    assert out.tolist() == [-1] * 4
    plan()
    assert out.tolist() == [0, 1, 2, 3]


def test_plan_keeps_its_arrays_alive(alone):
    class Array(np.ndarray):
        pass

    x = np.arange(100_000).view(Array)
    gone = weakref.ref(x)
    out = np.zeros(100_000, int)
    with pynccl.group() as plan:
        alone.all_reduce(x, out=out)
    del x
    gc.collect()
    np.full(100_000, 7)  # would take the memory if it were free
    out[:] = 0
    plan()
    assert gone() is not None
    assert (out == np.arange(100_000)).all()
    del plan
    gc.collect()
    assert gone() is None


def test_plan_takes_no_arguments_and_can_be_called_by_its_method(alone):
    x, out = np.ones(3, "f4"), np.zeros(3, "f4")
    with pynccl.group(run=False) as plan:
        alone.all_reduce(x, out)
    for wrong in (
        lambda: plan(1),
        lambda: plan(stream=0),
        lambda: plan(*[], **{"a": 1}),
        lambda: plan.__call__(1),
    ):
        with pytest.raises(TypeError):
            wrong()
    assert not out.any()
    assert plan() is None
    assert out.all()
    out[:] = 0
    assert plan.__call__() is None
    assert out.all()


def test_plan_says_so_when_its_communicator_is_closed():
    comm = create(1, new_id(), 0)
    with pynccl.group() as plan:
        comm.all_reduce(np.arange(3))
    comm.close()
    with pytest.raises(pynccl.CommunicatorClosedError, match="close"):
        plan()


def test_nested_groups_run_at_the_outermost_end(alone):
    a, b = np.full(2, -1), np.full(2, -1)
    with pynccl.group():
        with pynccl.group():
            alone.all_reduce(np.array([1, 2]), out=a)
        assert a.tolist() == [-1, -1]
        alone.all_reduce(np.array([3, 4]), out=b)
    assert (a.tolist(), b.tolist()) == ([1, 2], [3, 4])


def test_plan_called_in_an_open_group_joins_it(alone):
    x, out = np.array([1, 2]), np.full(2, -1)
    with pynccl.group(run=False) as plan:
        alone.all_reduce(x, out=out)
    with pynccl.group():
        plan()
        assert out.tolist() == [-1, -1]
    assert out.tolist() == [1, 2]


def test_plan_built_with_run_false_inside_a_group_does_not_run_with_it(alone):
    a, b = np.full(2, -1), np.full(2, -1)
    with pynccl.group():
        alone.all_reduce(np.array([1, 2]), out=a)
        with pynccl.group(run=False) as plan:
            alone.all_reduce(np.array([3, 4]), out=b)
    assert (a.tolist(), b.tolist()) == ([1, 2], [-1, -1])
    plan()
    assert b.tolist() == [3, 4]


def test_barrier_in_a_group_is_refused(alone):
    out = np.full(2, -1)
    with pynccl.group():
        alone.all_reduce(np.array([1, 2]), out=out)
        with pytest.raises(ValueError, match="^barrier: .*group"):
            alone.barrier()
        with pytest.raises(ValueError, match="^close: .*group"):
            alone.close()
    assert out.tolist() == [1, 2]


def test_group_records_once_and_runs_only_when_it_has_ended(alone):
    plan = pynccl.group()
    with pytest.raises(ValueError, match="group: "):
        plan()
    with plan:
        alone.all_reduce(np.array([1]), out=np.zeros(1, int))
        with pytest.raises(ValueError, match="group: "):
            plan()
    with pytest.raises(ValueError, match="once"):
        plan.__enter__()
    assert len(plan) == 1
    assert "1 calls" in repr(plan)


def test_group_that_is_lost_while_open_stays_open():
    scripts.run("""
        import gc
        import numpy as np, pynccl
        comm = pynccl.Communicator(1, pynccl.unique_id("host"), 0, library="host")
        x, out = np.arange(3), np.zeros(3, int)
        pynccl.group().__enter__()
        gc.collect()
        noise = [pynccl.group() for _ in range(1000)]
        comm.all_reduce(x, out=out)
        assert out.tolist() == [0, 0, 0]
    """)


def test_groups_end_in_the_opposite_order_and_on_their_thread(alone, crew):
    outer, inner = pynccl.group(), pynccl.group()
    out = np.zeros(1, int)
    with outer:
        inner.__enter__()
        alone.all_reduce(np.array([7]), out=out)
        with pytest.raises(ValueError, match="group: .*inside"):
            outer.__exit__(None, None, None)
        (elsewhere,) = crew(1).run(lambda i: inner.__exit__(None, None, None), 10)
        assert isinstance(elsewhere.error, ValueError)
        assert "thread" in str(elsewhere.error)
        inner.__exit__(None, None, None)
    assert out.tolist() == [7]
    cases.sum_of_ranks(alone)


def test_estimate_needs_a_finished_plan_and_no_open_group(alone):
    plan = pynccl.group(run=False)
    with pytest.raises(ValueError, match="group: .*simulated"):
        plan.simulate()
    with plan:
        alone.all_reduce(np.array([1]), out=np.zeros(1, int))
    with pynccl.group(), pytest.raises(ValueError, match="group: .*open group"):
        plan.simulate()


def test_estimate_grows_with_the_plan_and_runs_nothing(threads):
    def job(comm):
        out = np.full(1 << 16, -1.0)
        estimates = []
        for count in (1, 1000, 1 << 16):
            with pynccl.group(run=False) as plan:
                comm.all_reduce(np.ones(count), out=out[:count])
            estimates.append(plan.simulate())
        with pynccl.group(run=False) as twice:
            for _ in range(2):
                comm.all_reduce(np.ones(count), out=out)
        estimates.append(twice.simulate())
        assert (out == -1).all()
        twice()
        assert (out == comm.nranks).all()
        return estimates

    for estimates in threads(2).run(job):
        assert 0 < estimates[0] <= estimates[1] < estimates[2] < estimates[3] < 1


def test_exception_in_a_nested_group_abandons_the_whole(alone):
    a, b = np.full(2, -1), np.full(2, -1)
    with pytest.raises(KeyError), pynccl.group():
        alone.all_reduce(np.array([1, 2]), out=a)
        with pynccl.group():
            alone.all_reduce(np.array([3, 4]), out=b)
            raise KeyError
    assert a.tolist() == b.tolist() == [-1, -1]
    cases.sum_of_ranks(alone)


def test_empty_group_does_nothing(alone):
    with pynccl.group() as plan:
        pass
    plan()
    cases.sum_of_ranks(alone)


def test_group_is_of_its_thread_alone(threads):
    # Rank 1's thread calls outside of any group while rank 0's thread has one open.
    threads(2).run(one_grouped_one_not)


def one_grouped_one_not(comm):
    x, out = np.array([comm.rank + 1]), np.zeros(1, int)
    if comm.rank == 0:
        with pynccl.group():
            comm.all_reduce(x, out=out)
    else:
        comm.all_reduce(x, out=out)
    assert out.tolist() == [3]


def several_collectives(comm, calls):
    with pynccl.group():
        check = cases.issue_all(comm, calls)
    assert check() == len(calls)


@pytest.mark.parametrize("nranks", [1, 2, 4])
def test_group_of_every_collective_gives_what_single_calls_give(threads, nranks):
    calls = cases.grid(oracle.COLLECTIVES, ["int32", "bfloat16"], nranks, (0, 5, 3000), ["out"])
    cases.warm(calls, nranks)
    threads(nranks).run(several_collectives, calls)


def two_reduces(comm):
    x, y = np.array([1.5, comm.rank]), np.array([comm.rank + 1, 7], np.int32)
    a, b = np.full(2, -1.0), np.full(2, -1, np.int32)
    with pynccl.group():
        first = comm.reduce(x, out=a, root=0)
        second = comm.reduce(y, out=b, op="max", root=1)
    if comm.rank == 0:
        assert (first is a, second) == (True, None)
        assert a.tolist() == [3.0, 1.0]
        assert b.tolist() == [-1, -1]
    else:
        assert (first, second is b) == (None, True)
        assert a.tolist() == [-1, -1]
        assert b.tolist() == [2, 7]


def test_grouped_reduces_keep_their_own_root_dtype_and_op(threads):
    threads(2).run(two_reduces)


def test_group_drives_several_ranks_from_one_thread(one_thread):
    for nranks in (2, 4):
        calls = cases.grid(oracle.COLLECTIVES, ["int32"], nranks, (0, 7), ["out", "new"])
        calls += cases.grid(oracle.COLLECTIVES, ["float32"], nranks, (70000,), ["out"])
        cases.warm(calls, nranks)
        for start in range(0, len(calls), 20):
            part = calls[start : start + 20]
            assert one_thread(nranks).run(cases.issue_all, part) == [len(part)] * nranks


def pair(comm):
    x, out = np.full(5, comm.rank + 1), np.zeros(5, int)
    comm.send(x, 1 - comm.rank)
    comm.recv(out, 1 - comm.rank)
    return lambda: out.tolist() == [2 - comm.rank] * 5


def test_group_exchanges_between_ranks_of_one_thread(one_thread):
    assert one_thread(2).run(pair) == [True, True]


def test_two_communicators_share_a_group(threads):
    threads(2).run(on_two_communicators)


def on_two_communicators(comm):
    other = comm.split(0, key=-comm.rank)  # the same ranks in the opposite order
    a, b = np.zeros(1, int), np.zeros(2, int)
    with pynccl.group() as plan:
        comm.all_reduce(np.array([comm.rank + 1]), out=a)
        other.all_gather(np.array([other.rank + 5]), out=b)
    assert (a.tolist(), b.tolist()) == ([3], [5, 6])
    b[:] = 0
    plan()
    assert b.tolist() == [5, 6]
    other.close()


def created_in_group():
    uid = new_id()
    with pynccl.group():
        return [create(3, uid, rank) for rank in range(3)]


def test_one_thread_creates_all_ranks_in_a_group():
    comms = created_in_group()
    assert [comm.rank for comm in comms] == [0, 1, 2]
    outs = [np.zeros(1, int) for _ in comms]
    with pynccl.group():
        for comm, out in zip(comms, outs):
            comm.all_reduce(np.array([comm.rank + 1]), out=out)
    assert [out.tolist() for out in outs] == [[6]] * 3
    for comm in comms:
        comm.close()


def test_communicator_created_in_a_group_is_unusable_there():
    uid = new_id()
    with pynccl.group():
        comm = create(1, uid, 0)
        with pytest.raises((pynccl.PyncclError, ValueError), match="group"):
            comm.all_reduce(np.arange(3))
    assert comm.all_reduce(np.arange(3)).tolist() == [0, 1, 2]
    comm.close()


def test_plan_that_creates_a_communicator_cannot_be_replayed():
    uid = new_id()
    with pynccl.group() as plan:
        comm = create(1, uid, 0)
    with pytest.raises((pynccl.PyncclError, ValueError, RuntimeError), match="creat"):
        plan()
    comm.close()


def test_exception_abandons_the_creation_too():
    uid = new_id()
    with pytest.raises(KeyError), pynccl.group():
        create(2, uid, 0)
        raise KeyError
    with create(1, new_id(), 0) as comm:  # no group is left open in this thread
        cases.sum_of_ranks(comm)


def fails_when_run(comm):
    out = np.full(3, -1)
    with pytest.raises(pynccl.NCCLError), pynccl.group():
        comm.all_reduce(np.arange(3 + comm.rank), out=None if comm.rank else out)
    assert out.tolist() == [-1] * 3
    with pytest.raises(pynccl.NCCLError):
        comm.all_reduce(np.arange(3))
    with create(
        1, new_id(), 0
    ) as fresh:  # the thread's group is closed although a call in it failed
        cases.sum_of_ranks(fresh)


def test_error_of_a_grouped_call_is_raised_at_the_end_of_the_group():
    with ThreadWorld(2) as world:
        world.run(fails_when_run)


def large_exchange(comm):
    n, rank, size = comm.nranks, comm.rank, 120_000
    x = data.values("float32", n * size, rank)
    out = np.zeros(n * size, np.float32)
    total = np.zeros(size, np.float32)
    with pynccl.group():
        comm.all_to_all(x, out=out)
        comm.send(x[:size], (rank + 1) % n)
        comm.all_reduce(x[:size], out=total)
        got = comm.recv(np.zeros(size, np.float32), (rank - 1) % n)
    parts = [data.values("float32", n * size, r) for r in range(n)]
    oracle.assert_same(out, oracle.expected("all_to_all", parts)[rank])
    oracle.assert_same(got, parts[(rank - 1) % n][:size])
    oracle.assert_same(total, oracle.reduced([p[:size] for p in parts], "sum"))


def test_large_messages_and_collectives_mix_in_one_group(threads):
    threads(3).run(large_exchange)


def test_ranks_of_one_thread_without_a_group_are_diagnosed():
    # In a process of its own: the proof rests on there being no other thread that could help.
    told = scripts.run("""
        import time
        import numpy as np, pynccl
        comms = pynccl.init_all(2, library="host")
        start = time.monotonic()
        try:
            comms[0].all_reduce(np.arange(3))
        except pynccl.NCCLError as error:
            assert time.monotonic() - start < 5, "not at once"
            print(type(error).__name__, error)
    """)
    assert "InvalidUsageError" in told
    assert "rank 1" in told
    assert "group" in told.lower()


@pytest.mark.parametrize(("verb", "other"), [("send", "recv"), ("recv", "send")])
def test_half_an_exchange_with_oneself_in_a_group_is_told(alone, verb, other):
    told = pytest.raises(pynccl.InvalidUsageError, match=f"self without a matching {other}")
    with told, pynccl.group():
        getattr(alone, verb)(np.arange(3.0), 0)
