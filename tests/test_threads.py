"""Ranks that are threads: waiting calls let the others run, and each communicator serves one thread."""

import itertools
import time

import numpy as np
import pytest

import pynccl
from helpers import cases
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
