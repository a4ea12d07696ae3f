"""Forks: what is the parent's stays the parent's, and a child can begin anew, in any way it was started."""

import subprocess
import sys

import pytest

from helpers import scripts

FORK = """
import os, sys, threading, time, warnings
import numpy as np, pynccl
warnings.simplefilter("ignore", DeprecationWarning)
x = np.arange(3)
def alone():
    return pynccl.Communicator(1, pynccl.unique_id("host"), 0, library="host")
def in_child(function):
    # Exit status of a child that runs a function and leaves by sys.exit().
    child = os.fork()
    if child == 0:
        function()
        sys.exit(0)
    deadline = time.monotonic() + 15
    while not (done := os.waitpid(child, os.WNOHANG))[0]:
        if time.monotonic() > deadline:
            os.kill(child, 9)
        time.sleep(0.005)
    return os.waitstatus_to_exitcode(done[1])
def refused(call):
    try:
        call()
    except pynccl.CommunicatorClosedError as error:
        assert "fork" in str(error), error
    else:
        raise AssertionError(call)
def begin_anew():
    with alone() as mine:
        assert mine.all_reduce(x).tolist() == [0, 1, 2]
        out = np.zeros(3, int)
        with pynccl.group() as plan:
            mine.all_reduce(x, out=out)
        assert out.tolist() == [0, 1, 2]
        plan()
"""


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
                assert "before the fork" in repr(comm), repr(comm)
                comm.close(), comm.abort()
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


EVERY_USE = """
comm = alone()
op = comm.premul_sum(2, "int64")
with pynccl.group() as plan:
    comm.all_reduce(x, out=x)
y = np.zeros((1, 3), int)
def child():
    for use in (
        lambda: comm.all_reduce(x), lambda: comm.reduce(x), lambda: comm.broadcast(x),
        lambda: comm.all_gather(x), lambda: comm.reduce_scatter(y), lambda: comm.all_to_all(y),
        lambda: comm.gather(x), lambda: comm.scatter(y), lambda: comm.send(x, 0),
        lambda: comm.recv(x, 0), lambda: comm.send_recv(x, 0), comm.barrier,
        lambda: comm.split(0), lambda: comm.premul_sum(2, "f8"), lambda: comm.handle,
        lambda: comm.all_reduce(x, op=op), plan, comm.__enter__,
    ):
        refused(use)
    assert (comm.rank, comm.nranks, comm.device, comm.closed) == (0, 1, 0, True)
    assert comm.timeout > 0 and comm.library.kind == "host" and "before the fork" in repr(comm)
    comm.close(), comm.abort()
    begin_anew()
assert in_child(child) == 0
assert comm.all_reduce(x, op=op).tolist() == [0, 2, 4]
plan()
"""

IN_A_GROUP = """
comm = alone()
out = np.zeros(3, int)
with pynccl.group():
    with pynccl.group():
        comm.all_reduce(x, out=out)
        assert in_child(begin_anew) == 0
    assert out.tolist() == [0, 0, 0]
assert out.tolist() == [0, 1, 2]
"""

LEAVING_THE_BLOCK = """
comm = alone()
def block(calls, how):
    child = 1
    try:
        with pynccl.group():
            for i in range(calls):
                comm.all_reduce(x)
            child = os.fork()
            if child == 0:
                how()
    except (pynccl.CommunicatorClosedError, KeyError) as error:
        if child:
            raise
        print(type(error).__name__, error, flush=True)
    if child == 0:
        begin_anew()
        sys.exit(3)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
def fail():
    raise KeyError("mine")
assert block(1, lambda: sys.exit(7)) == 7
assert block(2, lambda: None) == 3       # a CommunicatorClosedError: two calls will not run
assert block(0, lambda: None) == 3       # nothing is lost: no error
assert block(1, fail) == 3
"""

BESIDE_A_CALL = """
uid = pynccl.unique_id("host")
with pynccl.group():
    comms = [pynccl.Communicator(2, uid, rank, timeout=20) for rank in range(2)]
results = []
def call():
    results.append(comms[0].all_reduce(x).tolist())
def grouped():
    with pynccl.group():
        begun.set()
        go_on.wait(20)
begun, go_on = threading.Event(), threading.Event()
threads = [threading.Thread(target=call), threading.Thread(target=grouped)]
for thread in threads:
    thread.start()
begun.wait(20)
time.sleep(0.2)
def child():
    refused(lambda: comms[0].barrier())
    refused(lambda: comms[1].barrier())
    begin_anew()
assert in_child(child) == 0
go_on.set()
comms[1].all_reduce(x)
for thread in threads:
    thread.join(20)
assert results == [[0, 2, 4]]
"""

WHILE_LOADING = """
import pathlib
from helpers.build import build_shared
source = pathlib.Path(sys.argv[1]) / "slow.c"
source.write_text("#include <unistd.h>\\n__attribute__((constructor)) static void slow(void) { sleep(1); }")
slow = build_shared("libslow.so", [source])
def load():
    try:
        pynccl.library(str(slow))
    except pynccl.LibraryNotFoundError:
        pass
thread = threading.Thread(target=load)
thread.start()
time.sleep(0.3)
assert thread.is_alive()
assert in_child(begin_anew) == 0
thread.join(20)
"""

CASES = {
    "every use": EVERY_USE,
    "in a group": IN_A_GROUP,
    "leaving the block": LEAVING_THE_BLOCK,
    "beside a call": BESIDE_A_CALL,
    "while a library is loaded": WHILE_LOADING,
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_child_goes_on_without_what_is_its_parents(case, tmp_path):
    out = scripts.run(FORK + case, str(tmp_path))
    if case is LEAVING_THE_BLOCK:
        assert out.splitlines() == [
            "CommunicatorClosedError group: it was opened before the process forked; its 2 calls are "
            "the parent's, and are not run in the child",
            "KeyError 'mine'",
        ]


WORKERS = """
import multiprocessing, sys
import numpy as np
import pynccl

kept = []

def work(arguments):
    uid, rank = arguments
    comm = pynccl.Communicator(2, uid, rank, timeout=20, library="host")
    total = comm.all_reduce(np.array([rank + 1])).tolist()
    if rank:
        kept.append(comm)       # one closes, the other does not
    else:
        comm.close()
    return total

def use(comm):
    try:
        comm.barrier()
    except pynccl.CommunicatorClosedError as error:
        assert "fork" in str(error)
        sys.exit(5)

def main(method):
    context = multiprocessing.get_context(method)
    comm = pynccl.Communicator(1, pynccl.unique_id("host"), 0, library="host")
    for _ in range(2):          # pools one after the other
        uid = pynccl.unique_id("host")
        with context.Pool(2) as pool:
            assert pool.map(work, [(uid, 0), (uid, 1)], chunksize=1) == [[3], [3]]
            pool.close()
            pool.join()
    uid = pynccl.unique_id("host")
    children = [context.Process(target=work, args=((uid, rank),)) for rank in range(2)]
    for child in children:
        child.start()
    for child in children:
        child.join(20)
        assert child.exitcode == 0, child.exitcode
    from concurrent.futures import ProcessPoolExecutor
    uid = pynccl.unique_id("host")
    with ProcessPoolExecutor(2, mp_context=context) as pool:
        assert list(pool.map(work, [(uid, 0), (uid, 1)])) == [[3], [3]]
    # A communicator itself does not travel.
    child = context.Process(target=use, args=(comm,))
    try:
        child.start()
    except TypeError as error:
        assert method != "fork" and "cannot be pickled" in str(error), error
    else:
        child.join(20)
        assert method == "fork" and child.exitcode == 5, child.exitcode
    assert comm.all_reduce(np.array([1])).tolist() == [1]

if __name__ == "__main__":
    main(sys.argv[1])
"""


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_workers_create_communicators_however_they_were_started(method, tmp_path):
    script = tmp_path / "workers.py"
    script.write_text(WORKERS)
    done = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", str(script), method],
        cwd=tmp_path, env=scripts.environment(PYNCCL_LIBRARY="host"), capture_output=True, text=True,
        timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
