"""Streams and events of the host library: order, lifetime, waits, and that wrong code goes wrong."""

import contextlib
import gc
import threading
import time
import weakref

import numpy as np
import pytest

import pynccl
import pynccl.multi
from helpers.ranks import ThreadWorld
from pynccl.host import Event, Stream


class Named(np.ndarray):
    """An array that says its producer's stream, as the CUDA array interface does."""

    stream = None

    @property
    def __cuda_array_interface__(self):
        return {**self.__array_interface__, "version": 3, "stream": self.stream}


class Produced:
    """The same, of a library that offers nothing else."""

    def __init__(self, base, stream):
        self.base = base
        self.__cuda_array_interface__ = {
            **base.__array_interface__, "version": 3, "stream": stream,
        }  # fmt: skip


@pytest.fixture(scope="module")
def pair():
    with contextlib.closing(ThreadWorld(2)) as world:
        yield world


@pytest.fixture
def one():
    with pynccl.Communicator(1, pynccl.unique_id("host"), 0, timeout=20) as comm:
        yield comm


@pytest.fixture
def delay(monkeypatch):
    monkeypatch.setenv("PYNCCL_HOST_DELAY", "150")


class Gate:
    """A function on a stream that holds up what comes later until it is opened."""

    def __init__(self, stream):
        self.opened = threading.Event()
        stream.call(self.opened.wait, 20)

    def open(self):
        self.opened.set()


def settles(condition, seconds=5.0):
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    return condition()


# ---- order and results


def test_a_call_returns_before_it_is_done(one, delay):
    out = np.zeros(4)
    with Stream() as s:
        assert one.all_reduce(np.arange(4.0), out=out, stream=s) is out
        assert not s.query()
        assert out.tolist() == [0, 0, 0, 0]
        s.synchronize()
        assert out.tolist() == [0, 1, 2, 3]
        assert s.query()


@pytest.mark.parametrize("as_given", ["object", "handle", "protocol"])
def test_a_stream_is_taken_in_every_form(one, as_given):
    with Stream() as s:
        given = {"object": s, "handle": s.handle, "protocol": Protocol(s.handle)}[as_given]
        gate = Gate(s)
        out = one.all_reduce(np.ones(3), out=np.zeros(3), stream=given)
        assert not out.any()
        gate.open()
        s.synchronize()
        assert out.tolist() == [1, 1, 1]


class Protocol:
    def __init__(self, handle):
        self._handle = handle

    def __cuda_stream__(self):
        return 0, self._handle


CALLS = {
    "all_reduce": lambda c, x, s: c.all_reduce(x, stream=s),
    "reduce": lambda c, x, s: c.reduce(x, root=c.rank, stream=s),
    "broadcast": lambda c, x, s: c.broadcast(x, root=0, stream=s),
    "all_gather": lambda c, x, s: c.all_gather(x, stream=s)[0],
    "reduce_scatter": lambda c, x, s: c.reduce_scatter(x.reshape(1, -1), stream=s),
    "all_to_all": lambda c, x, s: c.all_to_all(x.reshape(1, -1), stream=s)[0],
    "gather": lambda c, x, s: c.gather(x, root=0, stream=s)[0],
    "scatter": lambda c, x, s: c.scatter(x.reshape(1, -1), root=0, stream=s),
    "send_recv": lambda c, x, s: c.send_recv(x, c.rank, stream=s),
}


@pytest.mark.parametrize("name", CALLS)
def test_every_call_can_be_queued(one, name):
    with Stream() as s:
        gate = Gate(s)
        x = np.arange(8.0)
        out = CALLS[name](one, x, s)
        wanted = x.copy()
        x *= 2  # before its turn: what counts is what lies there then
        gate.open()
        s.synchronize()
        assert out.tolist() == (wanted * 2).tolist()


def send_then_meet(comm, barrier):
    with Stream() as s:
        x = np.full(100_000, 7.0)
        if comm.rank == 0:
            comm.send(x, 1, stream=s)
        barrier.wait(
            20
        )  # the host's own: rank 1 has not called yet, and rank 0 is through all the same
        if comm.rank == 1:
            x[:] = 0
            comm.recv(x, 0, stream=s)
        s.synchronize(20)
        return x.sum()


def test_send_then_a_barrier_of_the_host_then_recv(pair):
    assert pair.run(send_then_meet, threading.Barrier(2)) == [700_000, 700_000]


def many(comm, rounds):
    streams = [Stream() for _ in range(4)]
    outs = []
    for i in range(rounds):
        x = np.full(16, float(i + comm.rank))
        outs.append(comm.all_reduce(x, stream=streams[i % 4]))
    for s in streams:
        s.synchronize(60)
        s.close()
    return [i for i, out in enumerate(outs) if (out != 2 * i + 1).any()]


def test_10000_operations_on_4_streams(pair):
    assert pair.run(many, 10_000) == [[], []]


def test_events_order_streams(one):
    first, second = Stream(), Stream()
    gate = Gate(first)
    x, mid, out = np.ones(4), np.zeros(4), np.zeros(4)
    one.all_reduce(x, out=mid, stream=first)
    done = first.record()
    second.wait(done)
    second.call(np.copyto, out, mid)
    assert not done.query()
    gate.open()
    second.synchronize()
    assert out.tolist() == [1, 1, 1, 1]
    assert done.query()
    first.close()
    second.close()


def test_a_stream_waits_for_a_stream():
    first, second = Stream(), Stream()
    gate, seen = Gate(first), []
    first.call(seen.append, 1)
    second.wait(first)
    second.call(seen.append, 2)
    first.call(seen.append, 3)  # later than the wait
    gate.open()
    second.synchronize()
    first.synchronize()
    assert [n for n in seen if n < 3] == [1, 2]


def test_elapsed_time(one):
    start, end, never = Event(), Event(), Event()
    with Stream() as s:
        s.record(start)
        s.call(time.sleep, 0.05)
        s.record(end)
        with pytest.raises(pynccl.InProgressError):
            start.elapsed_time(end)
        s.synchronize()
        assert 45 < start.elapsed_time(end) < 5000
        with pytest.raises(pynccl.InvalidArgumentError, match="not been recorded"):
            start.elapsed_time(never)
        with pytest.raises(TypeError):
            start.elapsed_time(None)
    assert never.query()


def test_an_event_of_the_default_stream_is_done_at_once():
    event = Event()
    event.record()
    assert event.query()
    event.synchronize(0)
    event.wait()


def test_the_default_stream_waits_in_the_caller():
    s = Stream()
    gate = Gate(s)
    event = s.record()
    threading.Timer(0.1, gate.open).start()
    event.wait()
    assert s.query()


def test_the_launch_completion_event_of_a_call(one):
    event = Event()
    with Stream() as s:
        gate = Gate(s)
        config = pynccl.CollConfig(launch_completion_event=event.handle)
        one.all_reduce(np.ones(2), stream=s, config=config)
        assert not event.query()
        gate.open()
        event.synchronize(10)


# ---- the producers' streams


@pytest.mark.parametrize("explicit", [True, False])
def test_a_call_waits_for_the_producer(one, explicit):
    producer = Stream()
    base = np.zeros(5)
    gate = Gate(producer)
    producer.call(base.fill, 7.0)
    x, out = Produced(base, producer.handle), np.zeros(5)
    threading.Timer(0.1, gate.open).start()
    if explicit:
        one.all_reduce(x, out=out, stream=0)  # waits here: the call is complete when it returns
    else:
        one.all_reduce(x, out=out)  # on the producer's stream
        producer.synchronize()
    assert out.tolist() == [7.0] * 5


def test_a_call_on_another_stream_waits_for_the_producer(one):
    producer, s = Stream(), Stream()
    base, out = np.zeros(5), np.zeros(5)
    gate = Gate(producer)
    producer.call(base.fill, 7.0)
    one.all_reduce(Produced(base, producer.handle), out=out, stream=s)
    with pynccl.group():
        one.all_reduce(Produced(base, producer.handle), out=base, stream=s)
    assert not s.query()
    gate.open()
    s.synchronize()
    assert out.tolist() == [7.0] * 5


@pytest.mark.parametrize("stream", [None, 1, 2])
def test_default_producers_need_no_wait(one, stream):
    out = np.zeros(2)
    one.all_reduce(Produced(np.ones(2), stream), out=out)
    assert out.tolist() == [1, 1]


def test_no_wait_where_it_is_switched_off(one, monkeypatch):
    monkeypatch.setenv("PYNCCL_CAI_SYNC", "0")
    producer = Stream()
    base, out = np.zeros(5), np.ones(5)
    gate = Gate(producer)
    producer.call(base.fill, 7.0)
    one.all_reduce(Produced(base, producer.handle), out=out, stream=0)
    assert out.tolist() == [0.0] * 5
    gate.open()
    producer.synchronize()


def test_stream_0_and_unknown_streams_of_an_array_are_refused(one):
    with pytest.raises(ValueError, match="stream"):
        one.all_reduce(Produced(np.ones(2), 0), out=np.zeros(2))
    for stream in (None, 0):
        with pytest.raises(pynccl.InvalidArgumentError, match=r"unknown stream 0x7f0000001230"):
            one.all_reduce(Produced(np.ones(2), 0x7F00_0000_1230), out=np.zeros(2), stream=stream)


# ---- groups and lists


def test_a_group_on_streams(one):
    with Stream() as a, Stream() as b:
        gate = Gate(b)
        outs = np.zeros((2, 3))
        with pynccl.group() as plan:
            one.all_reduce(np.ones(3), out=outs[0], stream=a)
            one.all_reduce(np.full(3, 2.0), out=outs[1], stream=b)
        assert not outs.any()
        gate.open()
        a.synchronize()
        b.synchronize()
        assert outs.tolist() == [[1] * 3, [2] * 3]
        outs[:] = 0
        plan()
        a.synchronize()
        b.synchronize()
        assert outs.tolist() == [[1] * 3, [2] * 3]


def test_lists_on_streams():
    comms = pynccl.init_all(2, library="host")
    streams = [Stream(), Stream()]
    gates = [Gate(s) for s in streams]
    xs = [np.ones(3), np.full(3, 2.0)]
    pynccl.multi.all_reduce(xs, streams=streams, comms=comms)
    assert xs[0].tolist() == [1, 1, 1]
    refs = [weakref.ref(x) for x in xs]
    del xs
    gc.collect()
    assert all(ref() is not None for ref in refs)
    for gate in gates:
        gate.open()
    for s in streams:
        s.synchronize()
    assert settles(lambda: all(ref() is None for ref in refs))
    for comm in comms:
        comm.close()


# ---- lifetime


def test_arrays_live_until_the_call_is_done(one):
    s = Stream()
    gate = Gate(s)
    x = np.full(1000, 3.0).view(Named)
    out = one.all_reduce(x, out=np.zeros(1000).view(Named), stream=s)
    refs = [weakref.ref(x), weakref.ref(out)]
    result = out.view(np.ndarray)
    del x, out
    gc.collect()
    assert all(ref() is not None for ref in refs)
    gate.open()
    s.synchronize()
    assert refs[0]() is None
    assert (result == 3).all()


def test_arrays_die_also_when_nobody_waits(one):
    s = Stream()
    x = np.ones(10).view(Named)
    one.all_reduce(x, out=x, stream=s)
    ref = weakref.ref(x)
    del x
    assert settles(lambda: ref() is None)


def test_a_queued_buffer_cannot_be_resized(one):
    data = bytearray(8)
    s = Stream()
    gate = Gate(s)
    one.all_reduce(data, out=data, stream=s)
    with pytest.raises(BufferError):
        data.extend(b"more")
    gate.open()
    s.synchronize()
    data.extend(b"more")


def test_what_fails_keeps_nothing(one):
    s = Stream()
    x = np.ones(10).view(Named)
    with pytest.raises(ValueError, match="elements"):
        one.all_reduce(x, out=np.zeros(3), stream=s)
    with pytest.raises(pynccl.InvalidArgumentError, match="unknown stream"):
        one.all_reduce(x, out=np.zeros(10), stream=0x1234)
    one.all_reduce(x[:0], out=np.zeros(0), stream=s)
    ref = weakref.ref(x)
    del x
    gc.collect()
    assert ref() is None


def test_closing_a_communicator_waits_and_abort_does_not(delay):
    s = Stream()
    out = np.zeros(3)
    comm = pynccl.Communicator(1, pynccl.unique_id("host"), 0)
    comm.all_reduce(np.ones(3), out=out, stream=s)
    comm.close()
    assert out.tolist() == [1, 1, 1]
    s.synchronize()

    comm = pynccl.Communicator(1, pynccl.unique_id("host"), 0)
    comm.all_reduce(np.zeros(3), out=out, stream=s)
    comm.abort()
    with pytest.raises(pynccl.InvalidUsageError, match="aborted before the call had its turn"):
        s.synchronize()
    s.synchronize()  # told once


# ---- waits


def lonely(comm):
    if comm.rank == 1:
        return None
    with pytest.raises(
        pynccl.NCCLTimeoutError, match=r"timed out after 0\.\d+ s; AllReduce of rank 0 of 2"
    ):
        stuck = Stream()
        comm.all_reduce(np.ones(3), stream=stuck)
        stuck.synchronize(timeout=0.3)
    with pytest.raises(pynccl.NCCLTimeoutError):
        stuck.record().synchronize(0.1)
    comm.abort()
    with pytest.raises(pynccl.InvalidUsageError):
        stuck.synchronize(10)
    return True


def test_a_wait_has_a_deadline():
    with contextlib.closing(ThreadWorld(2)) as world:
        assert world.run(lonely) == [True, None]


def test_a_barrier_on_a_stream_waits_for_it(one):
    with Stream() as s:
        seen = []
        s.call(time.sleep, 0.1)
        s.call(seen.append, 1)
        one.barrier(stream=s)
        assert seen == [1]


# ---- functions


def test_functions_run_in_order_on_the_streams_thread():
    seen = []
    with Stream() as s:
        for i in range(100):
            s.call(seen.append, i)
        s.call(lambda: seen.append(threading.get_ident()))
    assert seen[:100] == list(range(100))
    assert seen[100] != threading.get_ident()


def test_what_a_function_raises_is_raised_by_the_wait():
    s = Stream()
    s.call(int, "x")
    s.call(int, base=2)
    s.record().synchronize()
    with pytest.raises(ValueError, match="invalid literal"):
        s.synchronize()
    with pytest.raises(TypeError):
        s.synchronize()
    s.synchronize()
    with pytest.raises(TypeError, match="callable"):
        s.call(3)


def test_what_nobody_waited_for_is_not_lost(monkeypatch):
    heard = []
    monkeypatch.setattr("sys.unraisablehook", lambda it: heard.append((it.exc_type, it.err_msg)))
    s = Stream()
    s.call(int, "x")
    s.close()
    del s
    assert settles(lambda: bool(heard))
    assert heard == [
        (ValueError, "Exception ignored in a function of a stream that nobody waited for")
    ]


def test_a_function_cannot_wait_for_its_own_stream():
    s = Stream()
    s.call(s.synchronize)
    with pytest.raises(pynccl.InvalidUsageError, match="would wait for itself"):
        s.synchronize()


# ---- the objects


def test_a_closed_stream_says_so(one):
    s = Stream()
    handle = s.handle
    s.close()
    s.close()
    assert s.closed
    assert repr(s) == "<pynccl.host.Stream, closed>"
    for use in (
        s.synchronize,
        s.query,
        s.record,
        lambda: s.call(int),
        lambda: s.wait(0),
        lambda: s.handle,
    ):
        with pytest.raises(ValueError, match="closed"):
            use()
    with pytest.raises(ValueError, match="closed"), s:
        pass
    with pytest.raises(pynccl.InvalidArgumentError, match="unknown stream"):
        one.all_reduce(np.ones(2), stream=handle)


@pytest.mark.parametrize("junk", [3, 2**40, 2**64 - 1])
def test_unknown_handles_are_answered(one, junk):
    event = Event()
    with Stream() as s:
        for use in (lambda: event.record(junk), lambda: event.wait(junk), lambda: s.wait(junk)):
            with pytest.raises(pynccl.InvalidArgumentError, match="unknown stream"):
                use()
    with pytest.raises(TypeError):
        event.record("x")


def test_after_an_error_in_the_block_nothing_is_waited_for():
    never = threading.Event()
    with pytest.raises(ZeroDivisionError), Stream() as s:
        s.call(never.wait, 20)
        1 // 0  # noqa: B018
    never.set()


@pytest.mark.parametrize("text", ["x", "-1", "5-", "9-3"])
def test_a_delay_that_is_not_understood(monkeypatch, text):
    monkeypatch.setenv("PYNCCL_HOST_DELAY", text)
    with pytest.raises(pynccl.InvalidArgumentError, match="PYNCCL_HOST_DELAY"):
        Stream()
