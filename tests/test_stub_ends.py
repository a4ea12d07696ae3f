"""How communicators of NCCL begin and end, seen by a recording library: what it is told when."""

import itertools
import threading
import time

import pytest

import pynccl
from helpers.device import NRANKS, OUT, RANK, DeviceArray, communicator, cuda, on_device
from helpers.stubs import NcclStub, build_nccl_stub


def creation(**words):
    """A function that creates a communicator of the stub, and the stub with an empty log."""
    path = build_nccl_stub()
    nccl = NcclStub(path)
    nccl.share(cuda())
    cuda().make_current(cuda().primary(0))
    uid = pynccl.unique_id(library=str(path))
    nccl.reset()

    def create():
        return pynccl.Communicator(NRANKS, uid, RANK, device=0, library=str(path), **words)

    return create, nccl


@on_device
def test_creation_that_does_not_end_in_time_is_aborted():
    create, nccl = creation(timeout=0.3)
    before = nccl.live
    nccl.asynchronous(7, polls=1 << 30)
    with pytest.raises(pynccl.NCCLTimeoutError, match="ncclCommInitRank.*in progress after 0.3 s"):
        create()
    assert nccl.names[-1] == "ncclCommAbort"
    assert nccl.live == before
    nccl.reset()
    create().abort()  # and the next one works


@on_device
def test_creation_that_fails_later_is_aborted():
    create, nccl = creation(timeout=5)
    before = nccl.live
    nccl.asynchronous(7, polls=1)
    nccl.fail("ncclCommGetAsyncError", 3)
    with pytest.raises(pynccl.NCCLError):
        create()
    assert nccl.names[-1] == "ncclCommAbort"
    assert nccl.live == before
    nccl.reset()


@pytest.mark.parametrize("question", ["ncclCommCount", "ncclCommUserRank", "ncclCommCuDevice"])
@on_device
def test_creation_whose_result_cannot_be_asked_is_aborted(question):
    create, nccl = creation()
    before = nccl.live
    nccl.fail(question, 3)
    with pytest.raises(pynccl.NCCLError):
        create()
    assert nccl.names[-1] == "ncclCommAbort"
    assert nccl.live == before
    nccl.reset()


@on_device
def test_creation_that_fails_at_once_leaves_nothing_to_abort():
    create, nccl = creation()
    before = nccl.live
    nccl.fail("ncclCommInitRank", 1)
    with pytest.raises(pynccl.NCCLError):
        create()
    assert "ncclCommAbort" not in nccl.names
    assert nccl.live == before
    nccl.reset()


@on_device
def test_call_that_a_nonblocking_communicator_waits_for_keeps_other_threads_out():
    with communicator(timeout=5) as (comm, nccl):
        nccl.fail("ncclAllReduce", 7)
        nccl.asynchronous(7, polls=1 << 30)
        x = DeviceArray(OUT, 4)
        errors = []

        def call():
            try:
                comm.all_reduce(x, out=x)
            except pynccl.PyncclError as error:
                errors.append(error)

        thread = threading.Thread(target=call)
        thread.start()
        deadline = time.monotonic() + 5
        while "ncclCommGetAsyncError" not in nccl.names and time.monotonic() < deadline:
            time.sleep(0.001)
        with pytest.raises(pynccl.InvalidUsageError, match="another thread is inside"):
            comm.broadcast(x)
        with pytest.raises(pynccl.InvalidUsageError, match="another thread is inside"):
            comm.close()
        comm.abort()  # ends the wait of the other thread
        thread.join(5)
        assert not thread.is_alive()
        assert isinstance(errors[0], pynccl.CommunicatorClosedError), errors
        assert "ncclAllReduce: this communicator was aborted" in str(errors[0])


@pytest.mark.parametrize(
    "function", ["ncclCommInitRank", "ncclCommSplit", "ncclCommDestroy", "ncclCommAbort"]
)
@on_device
def test_waiting_for_nccl_lets_other_threads_run(function):
    create, nccl = creation()
    comm = create() if function != "ncclCommInitRank" else None
    wait = {
        "ncclCommInitRank": create,
        "ncclCommSplit": lambda: comm.split(0),
        "ncclCommDestroy": lambda: comm.close(),
        "ncclCommAbort": lambda: comm.abort(),
    }[function]
    nccl.hold(function)
    ticks = []

    def tick():
        while not nccl.held:
            time.sleep(0.001)
        end = time.monotonic() + 0.3
        while time.monotonic() < end:
            ticks.append(time.monotonic())
            time.sleep(0.005)
        nccl.release()

    ticker = threading.Thread(target=tick, daemon=True)
    ticker.start()
    made = wait()
    ticker.join(5)
    assert len(ticks) > 20
    assert max(b - a for a, b in itertools.pairwise(ticks)) < 0.15
    for left in (made, comm):
        if left is not None:
            left.abort()
    nccl.reset()


@on_device
def test_split_in_a_group_needs_its_parent_at_the_end():
    with communicator() as (comm, nccl):
        with pytest.raises(pynccl.CommunicatorClosedError, match="aborted"), pynccl.group():
            comm.split(0)
            comm.abort()
        assert "ncclCommSplit" not in nccl.names
