"""The worlds of ranks themselves: a rank that fails or hangs must fail the test, and soon."""

import os
import time

import numpy as np
import pytest

from helpers import cases
from helpers.ranks import (
    Crew,
    GroupWorld,
    ProcessWorld,
    RankDied,
    RankFailed,
    RanksStuck,
    ThreadWorld,
)


def rank_and_size(comm, factor):
    return comm.rank * factor, comm.nranks


def one_fails(comm, odd):
    if comm.rank == odd:
        raise KeyError("on purpose")
    comm.all_reduce(np.arange(3))


def sleep_long(comm, seconds):
    if comm.rank:
        time.sleep(seconds)


def dies(comm):
    if comm.rank:
        print("last words", flush=True)
        os._exit(3)
    comm.all_reduce(np.arange(3))


@pytest.mark.parametrize("kind", [ThreadWorld, GroupWorld, ProcessWorld])
def test_values_come_in_rank_order(kind):
    with kind(3) as world:
        assert world.run(rank_and_size, 5) == [(0, 3), (5, 3), (10, 3)]


@pytest.mark.parametrize("kind", [ThreadWorld, ProcessWorld])
def test_first_failure_is_raised_and_the_others_are_released(kind):
    with kind(3) as world:
        start = time.monotonic()
        with pytest.raises(RankFailed, match="rank 1: KeyError: 'on purpose'") as caught:
            world.run(one_fails, 1)
        assert isinstance(caught.value.__cause__, KeyError)
        assert time.monotonic() - start < 10
        world.run(cases.sum_of_ranks)  # with new communicators


def test_stuck_thread_is_reported_with_its_stack():
    world = ThreadWorld(2)
    with pytest.raises(RanksStuck, match=r"(?s)ranks \[1\].*sleep_long"):
        world.run(sleep_long, 4, limit=0.5)
    world.run(cases.sum_of_ranks)
    world.close()


def test_stuck_process_is_killed_and_reported_with_its_stack():
    with ProcessWorld(2) as world:
        world.run(rank_and_size, 1)  # imports this module there, which takes its time
        with pytest.raises(RanksStuck, match="(?s)rank 1: .*sleep_long"):
            world.run(sleep_long, 60, limit=1.0)
        world.run(cases.sum_of_ranks)


def test_dead_process_is_reported_with_its_status_and_last_words():
    with ProcessWorld(2) as world:
        outcomes = world.outcomes(dies, limit=20, rescue=5)
        assert isinstance(outcomes[1].error, RankDied)
        assert "exit status 3" in str(outcomes[1]) and "last words" in str(outcomes[1])
        assert outcomes[0].error is not None
        world.run(cases.sum_of_ranks)


def test_function_that_other_processes_cannot_find_is_refused():
    with ProcessWorld(1) as world, pytest.raises(TypeError, match="lambda"):
        world.run(lambda comm: None)


def test_crew_keeps_no_reference_to_what_it_ran():
    import gc
    import weakref

    class Thing:
        pass

    crew, thing = Crew(1), Thing()
    gone = weakref.ref(thing)
    crew.run(lambda index, thing=thing: None, limit=5)
    del thing
    gc.collect()
    assert gone() is None
    crew.stop()
