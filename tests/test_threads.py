"""Ranks that are threads: waiting calls let the others run, and each communicator serves one thread."""

import itertools
import time

import numpy as np
import pytest

import pynccl
from helpers import cases, scripts
from helpers.ranks import Crew, ThreadWorld, create, new_id


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
    ids = [[new_id() for _ in range(3)] for _ in range(60)]
    four = crew(4)
    outcomes, ticks, gap = ticking(four, lambda r: rounds_of_creations(r, ids, 4), 40)
    assert all(o.error is None for o in outcomes), outcomes
    assert ticks > 5
    assert gap < 2.0


def plan_of_two(comm, x):
    with pynccl.group(run=False) as plan:
        comm.all_reduce(x, out=x)
        comm.all_reduce(x, out=x)
    plan()


def group_of_two(comm, x):
    with pynccl.group():
        comm.all_reduce(x, out=x)
        comm.send_recv(x, 1 - comm.rank, out=np.empty_like(x))


# Every way in which rank 0 waits for rank 1.
WAITS = {
    "all_reduce": lambda c, x: c.all_reduce(x),
    "large all_reduce": lambda c, x: c.all_reduce(np.ones(1_000_000)),
    "reduce": lambda c, x: c.reduce(x),
    "broadcast": lambda c, x: c.broadcast(x, root=1),
    "all_gather": lambda c, x: c.all_gather(x),
    "reduce_scatter": lambda c, x: c.reduce_scatter(x),
    "all_to_all": lambda c, x: c.all_to_all(x),
    "gather": lambda c, x: c.gather(x),
    "scatter": lambda c, x: c.scatter(x, out=np.empty_like(x[0]), root=1),
    "send": lambda c, x: c.recv(x, 0) if c.rank else c.send(x, 1),
    "recv": lambda c, x: c.send(x, 0) if c.rank else c.recv(x, 1),
    "send_recv": lambda c, x: c.send_recv(x, 1 - c.rank),
    "barrier": lambda c, x: c.barrier(),
    "split": lambda c, x: c.split(0).close(),
    "group's end": group_of_two,
    "plan": plan_of_two,
}


@pytest.mark.parametrize("wait", WAITS.values(), ids=WAITS)
def test_waiting_call_lets_other_threads_run(wait, threads, crew):
    world = threads(2)
    world.run(cases.sum_of_ranks)  # it may have to create its communicators

    def job(rank):
        time.sleep(0.25 * rank)
        wait(world.comms[rank], np.arange(4.0).reshape(2, 2))

    outcomes, ticks, gap = ticking(crew(2), job, 20)
    assert all(o.error is None for o in outcomes), outcomes
    assert outcomes[0].seconds > 0.2  # it did wait
    assert ticks > 20  # in a quarter of a second, one in 5 ms
    assert gap < 0.2


def test_waiting_init_lets_other_threads_run():
    waits = """
        import threading, time
        import pynccl
        ticks, done = [], []
        def tick():
            while not done:
                ticks.append(time.monotonic())
                time.sleep(0.005)
        ticker = threading.Thread(target=tick)
        ticker.start()
        start = time.monotonic()
        try:
            pynccl.init(library="host", timeout=20).close()
        finally:
            done.append(True)
        ticker.join()
        ticks = [t for t in ticks if t > start]
        print(time.monotonic() - start, len(ticks), max(b - a for a, b in zip(ticks, ticks[1:])))
    """
    late = "import time; time.sleep(0.5); import pynccl; pynccl.init(timeout=20).close()"
    env = {"WORLD_SIZE": "2", "PYNCCL_JOB_ID": new_id()[:8].hex()}
    ranks = [scripts.start(code, RANK=str(rank), **env) for rank, code in enumerate((waits, late))]
    (status, out, err), (other, _, text) = (scripts.finish(rank) for rank in ranks)
    assert (status, other) == (0, 0), (err, text)
    seconds, ticks, gap = map(float, out.split())
    assert seconds > 0.3
    assert ticks > 30
    assert gap < 0.3


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


class Slow:
    """An array that takes its time to say where it is."""

    def __init__(self, array, look):
        self.array, self.look = array, look

    @property
    def __cuda_array_interface__(self):
        self.look()
        return {"shape": self.array.shape, "typestr": "<f8", "version": 3,
                "data": (self.array.ctypes.data, False)}  # fmt: skip


@pytest.mark.parametrize("verb", ["all_reduce", "send_recv"])
def test_thread_that_came_in_while_an_array_was_read_keeps_the_other_out(verb, crew):
    """The look at the arrays is Python code: meanwhile another thread may begin a call."""
    with ThreadWorld(2) as world:
        world.renew()
        comm, x = world.comms[0], np.zeros(3)
        inside = crew(1)

        def look():
            inside.start(lambda i: comm.barrier())
            time.sleep(0.2)

        arguments = (1,) if verb == "send_recv" else ()
        with pytest.raises(pynccl.InvalidUsageError, match=f"{verb}.*another thread is inside"):
            getattr(comm, verb)(Slow(x, look), *arguments, out=np.zeros(3))
        world.comms[1].barrier()
        assert inside.gather(10)[0].error is None
        world.run(cases.sum_of_ranks)


@pytest.mark.parametrize("verb", ["all_reduce", "send_recv"])
def test_array_that_closes_its_communicator_is_told(verb, alone):
    arguments = (0,) if verb == "send_recv" else ()
    with pytest.raises(pynccl.CommunicatorClosedError, match=f"{verb}: .*closed"):
        getattr(alone, verb)(Slow(np.zeros(3), alone.close), *arguments, out=np.zeros(3))


def test_split_that_waits_keeps_other_threads_out_of_its_parent(crew):
    with ThreadWorld(2) as world:
        world.renew()
        first = crew(1)
        first.start(lambda i: world.comms[0].split(0))
        time.sleep(0.3)
        with pytest.raises(pynccl.InvalidUsageError, match="another thread is inside"):
            world.comms[0].all_reduce(np.arange(3))
        with pytest.raises(pynccl.InvalidUsageError, match="close .*another thread is inside"):
            world.comms[0].close()
        world.comms[1].split(0).close()
        first.gather(10)[0].value.close()
        world.run(cases.sum_of_ranks)


def test_threads_close_one_communicator_at_once(crew):
    four = crew(4)
    comms = [create(1, new_id(), 0) for _ in range(30)]
    outcomes = four.run(lambda i: [(c.close, c.abort)[i % 2]() for c in comms], 20)
    assert all(o.error is None for o in outcomes), outcomes
    assert all(comm.closed for comm in comms)
