"""Ctrl-C reaches whatever waits: KeyboardInterrupt in a second or two, and nothing in an unknown state."""

import json
import signal
import time

import pytest

from helpers import scripts
from helpers.ranks import new_id
from helpers.stubs import build_cuda_stub

# One process goes through all waits. Rank 1 is another communicator of the same process, whose thread is
# there and does not come: with nobody left who could make its call, waiting would be an error at once.
WAITS = """
import json, os, signal, sys, threading, time
import numpy as np, pynccl
from pynccl import _rendezvous

def pair():
    uid = pynccl.unique_id("host")
    with pynccl.group():
        return [pynccl.Communicator(2, uid, rank, timeout=8, library="host") for rank in range(2)]

x, y = np.arange(3), np.zeros((2, 3))

def group(comm, *calls):
    with pynccl.group():
        for call in calls:
            call()

def plan(comm, count):
    with pynccl.group(run=False) as plan:
        for i in range(count):
            comm.all_reduce(x, out=x)
    plan()

def create(comm):
    pynccl.Communicator(2, pynccl.unique_id("host"), 0, timeout=8, library="host")

made = []
def create_two_of_three(comm):
    uid = pynccl.unique_id("host")
    with pynccl.group():
        for rank in range(2):
            made.append(pynccl.Communicator(3, uid, rank, timeout=8, library="host"))

def init(rank):
    os.environ.update(RANK=str(rank), WORLD_SIZE="2")
    pynccl.init(timeout=8, library="host")

WAYS = {
    "all_reduce": lambda c: c.all_reduce(x),
    "large all_reduce": lambda c: c.all_reduce(np.arange(1000000)),
    "reduce": lambda c: c.reduce(x),
    "broadcast": lambda c: c.broadcast(x, root=1),
    "all_gather": lambda c: c.all_gather(x),
    "reduce_scatter": lambda c: c.reduce_scatter(y),
    "all_to_all": lambda c: c.all_to_all(y),
    "gather": lambda c: c.gather(x),
    "scatter": lambda c: c.scatter(y, out=np.zeros(3), root=1),
    "send": lambda c: c.send(x, 1),
    "recv": lambda c: c.recv(x, 1),
    "send_recv": lambda c: c.send_recv(x, 1),
    "barrier": lambda c: c.barrier(),
    "split": lambda c: c.split(0),
    "group's end": lambda c: group(c, lambda: c.all_reduce(x), lambda: c.recv(x, 1)),
    "plan of one": lambda c: plan(c, 1),
    "plan of three": lambda c: plan(c, 3),
    "creation": create,
    "creation of two": create_two_of_three,
    "init of rank 0": lambda c: init(0),
    "init of rank 1": lambda c: init(1),
}

def main():
    found = {}
    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
    for name, way in WAYS.items():
        comms = pair()
        timer = threading.Timer(0.25, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        start = time.monotonic()
        try:
            outcome = repr(way(comms[0]))
        except BaseException as error:
            outcome = type(error).__name__
        seconds = time.monotonic() - start
        timer.join()
        again = ""
        if not name.startswith(("creation", "init")):
            try:
                again = repr(comms[0].all_reduce(x))
            except pynccl.NCCLError as error:
                again = str(error)
        for comm in comms:
            comm.close()
        # The thread has no open group, and a new communicator works.
        with pynccl.Communicator(1, pynccl.unique_id("host"), 0, library="host") as alone:
            fine = alone.all_reduce(np.arange(3)).tolist() == [0, 1, 2]
        found[name] = outcome, seconds, again, fine
    found["made"] = [repr(comm) for comm in made]
    print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def outcomes():
    """What became of every wait; in a process of its own, which gets the signals."""
    return json.loads(scripts.run(WAITS + "main()", limit=60))


NAMES = [line.split('"')[1] for line in WAITS.splitlines() if line.startswith('    "')]


@pytest.mark.parametrize("name", NAMES)
def test_ctrl_c_ends_a_waiting_call(name, outcomes):
    outcome, seconds, again, fine = outcomes[name]
    assert outcome == "KeyboardInterrupt"
    assert 0.2 < seconds < 2
    assert fine
    # The communicator that was used is broken, and says by what.
    assert "interrupt" in again or name.startswith(("creation", "init"))


def test_no_communicator_of_an_interrupted_group_counts_as_being_created(outcomes):
    assert len(outcomes["made"]) == 2
    assert all("not created" in text for text in outcomes["made"])


def test_peer_of_an_interrupted_rank_hears_of_it():
    code = """
        import sys, threading, time
        import numpy as np, pynccl
        comm = pynccl.Communicator(2, bytes.fromhex(sys.argv[1]), int(sys.argv[2]), timeout=20)
        print("there", flush=True)
        try:
            time.sleep(int(sys.argv[2]))
            for _ in range(2):  # rank 0's part of the first may have been there before it was interrupted
                comm.all_reduce(np.arange(3))
        except (KeyboardInterrupt, pynccl.NCCLError) as error:
            print(type(error).__name__, error)
    """
    uid = new_id().hex()
    ranks = [scripts.start(code, uid, str(rank)) for rank in range(2)]
    for rank in ranks:
        scripts.wait_for_line(rank, "there")
    time.sleep(0.3)
    ranks[0].send_signal(signal.SIGINT)
    (_, first, _), (_, second, _) = (scripts.finish(rank) for rank in ranks)
    assert first.startswith("KeyboardInterrupt")
    assert second.startswith("RemoteError") and "rank 0" in second, second


STUBBED = """
import atexit, os, signal, sys, threading, time
import pynccl
from helpers.stubs import NcclStub, build_nccl_stub, build_cuda_stub, CudaStub
CudaStub(build_cuda_stub()).start()
path = str(build_nccl_stub())
nccl = NcclStub(path)
def create(**words):
    return pynccl.Communicator(2, pynccl.unique_id(path), 0, device=0, library=path, **words)
def interrupt(call):
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    start = time.monotonic()
    try:
        call()
    except KeyboardInterrupt as error:
        assert time.monotonic() - start < 2
        return error
    raise AssertionError("it came back")
def until(condition):
    deadline = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)
"""

IN_NCCL = {
    "a creation, which is aborted should it come about after all": """
nccl.hold("ncclCommInitRank")
error = interrupt(create)
assert not hasattr(error, "__notes__") or "abandoned" in error.__notes__[0]
nccl.release()
until(lambda: nccl.live == 0 and "ncclCommAbort" in nccl.names)
""",
    "a nonblocking creation, which is aborted": """
nccl.asynchronous(7, polls=1 << 30)
interrupt(lambda: create(timeout=20))
assert (nccl.names[-1], nccl.live) == ("ncclCommAbort", 0), nccl.names
""",
    "a split, which holds its parent until it is done": """
comm = create()
nccl.hold("ncclCommSplit")
interrupt(lambda: comm.split(0))
try:
    comm.premul_sum(2, "f4")
except pynccl.InvalidUsageError as error:
    assert "another thread" in str(error)
else:
    raise AssertionError
nccl.release()
until(lambda: "ncclCommAbort" in nccl.names)
comm.premul_sum(2, "f4")
comm.close()
assert nccl.live == 0
""",
    "a close": """
comm = create()
nccl.hold("ncclCommDestroy")
interrupt(comm.close)
assert comm.closed
nccl.release()
""",
    "the wait of a nonblocking call": """
comm = create(timeout=20)
nccl.asynchronous(7, polls=1 << 30)
nccl.fail("ncclRedOpCreatePreMulSum", 7)
interrupt(lambda: comm.premul_sum(2, "f4"))
comm.abort()
""",
}


@pytest.mark.parametrize("code", IN_NCCL.values(), ids=IN_NCCL)
def test_ctrl_c_ends_a_wait_inside_nccl(code):
    status, _, err = scripts.finish(
        scripts.start(STUBBED + code, PYNCCL_LIBCUDA=str(build_cuda_stub()))
    )
    assert status == 0, err
