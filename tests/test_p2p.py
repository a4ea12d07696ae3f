"""send, recv and send_recv: pairing, order, sizes; and what happens when the pairing is wrong."""

import contextlib
import os
import threading
import time

import numpy as np
import pytest

import pynccl
from helpers import cases, data, oracle
from helpers.ranks import ThreadWorld, create, new_id


def one_way(comm, dtype, sizes, source, dest):
    for size in sizes:
        content = data.values(dtype, size, source)
        if comm.rank == source:
            x = data.Guarded.holding(content)
            assert comm.send(x.array, dest) is None
            x.check_holds(content)
        elif comm.rank == dest:
            out = data.Guarded(content.dtype, content.shape)
            assert comm.recv(out.array, source) is out.array
            out.check_holds(content, f"{dtype} × {size}, {source} to {dest}")


@pytest.mark.parametrize("dtype", [*oracle.NCCL_DTYPES, "bool", "complex64", "int16", "S5"])
def test_recv_gets_what_send_sent(threads, dtype):
    for source, dest in [(0, 1), (1, 0), (2, 1)]:
        threads(3).run(one_way, dtype, (0, 1, 7, 1000, 70000), source, dest)


def test_large_message_arrives_whole(threads):
    threads(2).run(one_way, "float64", (1_000_003,), 1, 0)


def around(comm):
    n, rank = comm.nranks, comm.rank
    for size in (0, 1, 1000, 200_000):
        x = data.values("int32", size, rank)
        wanted = data.values("int32", size, (rank - 1) % n)
        out = data.Guarded("int32", (size,))
        result = comm.send_recv(x, (rank + 1) % n, out=out.array, source=(rank - 1) % n)
        assert result is out.array
        out.check_holds(wanted)
        new = comm.send_recv(x, (rank + 1) % n, source=(rank - 1) % n)
        oracle.assert_same(new, wanted)
        assert new is not x and not np.shares_memory(new, x)


@pytest.mark.parametrize("nranks", [1, 2, 3, 4])
def test_send_recv_goes_around_a_ring(threads, nranks):
    threads(nranks).run(around)


def swap(comm):
    x = np.arange(5) + 10 * comm.rank
    assert (
        comm.send_recv(x, 1 - comm.rank).tolist() == (np.arange(5) + 10 * (1 - comm.rank)).tolist()
    )


def test_send_recv_receives_from_its_destination_unless_told_otherwise(threads):
    threads(2).run(swap)


def many_in_order(comm, count, size):
    if comm.rank == 0:
        for i in range(count):
            comm.send(np.full(size, i), 1)
    else:
        got = np.empty(size, int)
        for i in range(count):
            comm.recv(got, 0)
            assert (got == i).all(), (i, got)


@pytest.mark.parametrize("size", [1, 20_000])
def test_messages_of_a_pair_arrive_in_order(threads, size):
    threads(2).run(many_in_order, 200 if size == 1 else 20, size)


def exchange_all(comm, size, rounds):
    n, rank = comm.nranks, comm.rank
    for turn in range(rounds):
        xs = [data.values("int64", size, rank, seed=10 * peer + turn) for peer in range(n)]
        outs = [data.Guarded("int64", (size,)) for _ in range(n)]
        with pynccl.group():
            for peer in range(n):
                comm.recv(outs[peer].array, peer)
            for peer in range(n):
                comm.send(xs[peer], peer)
        for peer in range(n):
            outs[peer].check_holds(data.values("int64", size, peer, seed=10 * rank + turn))


@pytest.mark.parametrize("size", [0, 1, 1000, 150_000])
def test_grouped_exchange_of_all_with_all_completes(threads, size):
    # The last size is more than any buffer between two ranks: all must move at once.
    threads(4).run(exchange_all, size, 3)


def two_to_one_peer(comm):
    a, b = np.arange(4), np.arange(4) + 10
    if comm.rank == 0:
        with pynccl.group():
            comm.send(a, 1)
            comm.send(b, 1)
    else:
        first, second = np.empty(4, int), np.empty(4, int)
        with pynccl.group():
            comm.recv(first, 0)
            comm.recv(second, 0)
        assert first.tolist() == a.tolist()
        assert second.tolist() == b.tolist()


def test_grouped_messages_to_one_peer_keep_their_order(threads):
    threads(2).run(two_to_one_peer)


def grouped_against_ungrouped(comm):
    x, y = np.full(3, comm.rank + 1), np.zeros(3, int)
    if comm.rank == 0:
        with pynccl.group():
            comm.send(x, 1)
            comm.recv(y, 1)
    else:
        comm.recv(y, 0)
        comm.send(x, 0)
    assert y.tolist() == [2 - comm.rank] * 3


def test_one_side_may_be_grouped_and_the_other_not(threads):
    threads(2).run(grouped_against_ungrouped)


def to_self(comm):
    x, y = np.arange(7.0) + comm.rank, np.zeros(7)
    with pynccl.group():
        comm.send(x, comm.rank)
        comm.recv(y, comm.rank)
    assert y.tolist() == x.tolist()
    z = np.zeros(7)
    with pynccl.group():  # the order of the two does not matter
        comm.recv(z, comm.rank)
        comm.send(x, comm.rank)
    assert z.tolist() == x.tolist()
    oracle.assert_same(comm.send_recv(x, comm.rank), x)


def test_grouped_message_to_oneself_is_delivered(threads):
    threads(2).run(to_self)


def self_ungrouped(comm):
    with pytest.raises(pynccl.InvalidUsageError, match="self"):
        comm.send(np.arange(3), comm.rank)
    with pytest.raises(pynccl.InvalidUsageError, match="self"):
        comm.recv(np.empty(3), comm.rank)
    with pytest.raises(pynccl.InvalidUsageError, match="self"), pynccl.group():
        comm.send(np.arange(3), comm.rank)
        comm.send(np.arange(3), comm.rank)
        comm.recv(np.empty(3, int), comm.rank)


def test_unpaired_message_to_oneself_is_refused_at_once(threads):
    threads(1).run(self_ungrouped)


def mixed_with_collectives(comm):
    peer = 1 - comm.rank
    for _ in range(5):
        comm.all_reduce(np.arange(3))
        assert comm.send_recv(np.array([comm.rank]), peer).tolist() == [peer]
        comm.barrier()
        if comm.rank == 0:
            comm.send(np.array([5]), 1)
        else:
            assert comm.recv(np.zeros(1, int), 0).tolist() == [5]
        cases.sum_of_ranks(comm)


def test_messages_and_collectives_alternate_freely(threads):
    threads(2).run(mixed_with_collectives)


def only_some_pairs(comm):
    # Ranks 2 and 3 do far more than 0 and 1; messages are no turn of the whole communicator.
    if comm.rank >= 2:
        for i in range(50):
            other = 5 - comm.rank
            assert comm.send_recv(np.array([i + comm.rank]), other).tolist() == [i + other]
    elif comm.rank == 0:
        comm.send(np.arange(3), 1)
    else:
        comm.recv(np.empty(3, int), 0)
    cases.sum_of_ranks(comm)


def test_messages_take_no_turn_of_ranks_that_are_not_concerned(threads):
    threads(4).run(only_some_pairs)


# --- wrong pairings ------------------------------------------------------------------------------------


def wrong_sizes(comm, sent, expected):
    if comm.rank == 0:
        comm.send(np.zeros(sent, np.float32), 1)
    else:
        out = data.Guarded("float32", (expected,))
        try:
            comm.recv(out.array, 0)
        finally:
            out.check_poisoned()


@pytest.mark.parametrize(
    "sizes", [(1, 2), (1, 3), (3, 1), (0, 1), (1, 0), (70000, 70001), (70001, 7)]
)
def test_message_and_receive_of_different_sizes_raise_on_both_ranks(sizes):
    with ThreadWorld(2) as world:
        for outcome in world.outcomes(wrong_sizes, *sizes, limit=10):
            assert isinstance(outcome.error, pynccl.InvalidUsageError), outcome
            assert outcome.seconds < 2
            assert all(str(4 * size) in str(outcome) for size in sizes), outcome


def grouped_wrong_sizes(comm):
    peer = 1 - comm.rank
    with pynccl.group():
        comm.send(np.zeros(4 + comm.rank, np.uint8), peer)
        comm.recv(np.zeros(4, np.uint8), peer)


def test_grouped_message_of_another_size_raises_on_both_ranks():
    with ThreadWorld(2) as world:
        for outcome in world.outcomes(grouped_wrong_sizes, limit=10):
            assert isinstance(outcome.error, pynccl.InvalidUsageError), outcome


def both_send_first(comm, size):
    peer = 1 - comm.rank
    comm.send(np.arange(size), peer)
    comm.recv(np.empty(size, int), peer)


@pytest.mark.parametrize("size", [1, 1_000_000])
def test_both_ranks_sending_first_is_an_error_whatever_the_size(size):
    # Nothing is buffered: a program that only works for small messages must fail for those too.
    with ThreadWorld(2, timeout=1.5) as world:
        start = time.monotonic()
        outcomes = world.outcomes(both_send_first, size, limit=20)
        assert time.monotonic() - start < 8
        assert any(
            isinstance(o.error, (pynccl.NCCLTimeoutError, pynccl.InvalidUsageError))
            for o in outcomes
        )
        for outcome in outcomes:
            assert isinstance(outcome.error, pynccl.NCCLError), outcome
            assert "send" in str(outcome.error).lower(), outcome


def nobody_sends(comm):
    if comm.rank == 1:
        comm.recv(np.empty(3), 0)


def test_receive_without_a_send_times_out_and_names_the_peer():
    with ThreadWorld(2, timeout=1.0) as world:
        idle, waiting = world.outcomes(nobody_sends, limit=20)
        assert idle.error is None
        assert isinstance(waiting.error, pynccl.NCCLTimeoutError)
        assert 0.9 < waiting.seconds < 5
        assert "0" in str(waiting.error) and "recv" in str(waiting.error).lower()


def nobody_sends_zero(comm):
    if comm.rank == 1:
        comm.recv(np.empty(0), 0)


def test_empty_message_must_be_paired_too():
    with ThreadWorld(2, timeout=1.0) as world:
        _, waiting = world.outcomes(nobody_sends_zero, limit=20)
        assert isinstance(waiting.error, pynccl.NCCLTimeoutError)


def send_against_collective(comm):
    if comm.rank == 0:
        comm.all_reduce(np.zeros(2))
    else:
        with pynccl.group():
            comm.recv(np.zeros(2), 0)


def test_receive_against_a_collective_ends_in_an_error_on_both():
    with ThreadWorld(2, timeout=1.0) as world:
        for outcome in world.outcomes(send_against_collective, limit=20):
            assert isinstance(outcome.error, pynccl.NCCLError), outcome
            assert outcome.seconds < 5


def test_timeout_names_whom_the_missing_rank_waits_for(crew):
    """Rank 0 waits for rank 1, which waits for rank 2, which does nothing: rank 2 is the one to look at."""
    uid, over = new_id(), threading.Event()

    def job(rank):
        comm = create(3, uid, rank, timeout=1.5 if rank == 0 else 20.0)
        try:
            if rank == 2:
                over.wait(20)
            else:
                comm.recv(np.zeros(3), rank + 1)
        finally:
            over.set()
            comm.abort()

    first, second, third = crew(3).run(job, 30)
    assert isinstance(first.error, pynccl.NCCLTimeoutError)
    assert "waiting for rank 1 (pid" in str(first.error)
    assert "rank 1 waits for rank 2 (pid" in str(first.error)
    assert isinstance(second.error, pynccl.RemoteError)
    assert third.error is None


def test_timeout_names_the_process_that_the_missing_rank_waits_for_elsewhere(crew):
    """The same chain over two communicators, where no table of ranks leads on: the process is named."""
    first_uid, second_uid, over = new_id(), new_id(), threading.Event()

    def job(rank):
        comms = [create(2, first_uid, rank, timeout=1.5)] if rank < 2 else []
        if rank > 0:
            comms.append(create(2, second_uid, rank - 1, timeout=20.0))
        try:
            if rank == 2:
                over.wait(20)
            else:
                comms[-1].recv(np.zeros(3), 1)
        finally:
            over.set()
            for comm in comms:
                comm.abort()

    first, second, third = crew(3).run(job, 30)
    assert isinstance(first.error, pynccl.NCCLTimeoutError)
    assert "waiting for rank 1 (pid" in str(first.error)
    assert f"rank 1 waits for process {os.getpid()} in another communicator" in str(first.error)
    assert isinstance(second.error, pynccl.RemoteError)
    assert third.error is None


def test_a_wait_elsewhere_is_told_no_more_when_it_is_over(crew):
    first_uid, second_uid, over = new_id(), new_id(), threading.Event()

    def job(rank):
        with (
            contextlib.closing(create(2, first_uid, rank, timeout=1.2)) as kept,
            contextlib.closing(create(2, second_uid, rank, timeout=0.4)) as other,
        ):
            if rank == 0:
                try:
                    kept.recv(np.zeros(3), 1)
                finally:
                    over.set()
            else:
                with pytest.raises(pynccl.NCCLTimeoutError):
                    other.recv(np.zeros(3), 0)
                over.wait(20)

    first, second = crew(2).run(job, 30)
    assert isinstance(first.error, pynccl.NCCLTimeoutError)
    assert "in another communicator" not in str(first.error)
    assert second.error is None
