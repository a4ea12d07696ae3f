"""The end of a process: live communicators, forks, Ctrl-C."""

import signal
import time

import pytest

from helpers import scripts
from helpers.ranks import new_id
from helpers.stubs import build_cuda_stub

PAIR = """
import os, signal, sys, threading, time
import numpy as np, pynccl
uid = pynccl.unique_id(library="host")
def create(rank):
    return pynccl.Communicator(2, uid, rank, timeout=20, library="host")
"""


@pytest.mark.parametrize("status", [0, 3])
def test_live_communicators_do_not_keep_the_process_or_change_its_status(status):
    code = f"""
        import sys, pynccl
        alone = pynccl.Communicator(1, pynccl.unique_id("host"), 0, library="host")
        several = pynccl.init_all(3, library="host")
        sys.exit({status})
    """
    start = time.monotonic()
    got, out, err = scripts.finish(scripts.start(code))
    assert (got, out, err) == (status, "", "")
    assert time.monotonic() - start < 5


def test_rank_whose_process_has_ended_well_counts_as_gone_not_as_dead():
    leaver = """
        import sys
        import numpy as np, pynccl
        uid = bytes.fromhex(sys.argv[1])
        comm = pynccl.Communicator(2, uid, 1, timeout=20, library="host")
        comm.all_reduce(np.arange(3))
    """
    stayer = """
        import sys
        import numpy as np, pynccl
        uid = bytes.fromhex(sys.argv[1])
        comm = pynccl.Communicator(2, uid, 0, timeout=20, library="host")
        comm.all_reduce(np.arange(3))
        try:
            comm.all_reduce(np.arange(3))
        except pynccl.RemoteError as error:
            print(error)
        comm.close()
    """
    uid = bytes(new_id()).hex()
    first, second = scripts.start(leaver, uid), scripts.start(stayer, uid)
    assert scripts.finish(first) == (0, "", "")
    status, out, err = scripts.finish(second)
    assert (status, err) == (0, "")
    assert "rank 1" in out
    assert "has destroyed its communicator" in out


STUBBED = """
import atexit, os, sys, time
import pynccl
from helpers.stubs import NcclStub, build_nccl_stub, build_cuda_stub, CudaStub
CudaStub(build_cuda_stub()).start()
path = str(build_nccl_stub())
nccl = NcclStub(path)
ends = ("ncclCommAbort", "ncclCommDestroy")
atexit.register(lambda: print([name for name in nccl.names if name in ends], flush=True))
def create():
    return pynccl.Communicator(2, pynccl.unique_id(path), 0, device=0, library=path)
comm = create()
"""


def stubbed(rest):
    """Run code that has one open communicator of the recording NCCL; status, output, seconds."""
    start = time.monotonic()
    process = scripts.start(STUBBED + rest, PYNCCL_LIBCUDA=str(build_cuda_stub()))
    status, out, err = scripts.finish(process)
    assert err == ""
    return status, out.splitlines(), time.monotonic() - start


def test_open_nccl_communicator_is_aborted_at_exit_and_never_destroyed():
    status, lines, _ = stubbed("sys.exit(5)")
    assert (status, lines) == (5, ["['ncclCommAbort']"])


def test_closed_nccl_communicator_is_left_alone_at_exit():
    status, lines, _ = stubbed("comm.close()")
    assert (status, lines) == (0, ["['ncclCommDestroy']"])


def test_abort_that_hangs_does_not_keep_the_process_from_ending():
    status, lines, seconds = stubbed("nccl.hold('ncclCommAbort'); sys.exit(6)")
    assert (status, lines) == (6, ["['ncclCommAbort']"])
    assert seconds < 8  # of which two belong to the abort; the stub would hold it for ten


def test_forked_child_does_not_abort_what_is_its_parents():
    status, lines, _ = stubbed("""
import warnings
warnings.simplefilter("ignore", DeprecationWarning)
if (child := os.fork()) == 0:
    sys.exit(0)
os.waitpid(child, 0)
""")
    assert (status, lines) == (0, ["[]", "['ncclCommAbort']"])


def test_process_may_end_while_a_thread_waits_in_a_call():
    code = (
        PAIR
        + """
comms = [None, None]
def work():
    comms[1] = create(1)
    comms[1].all_reduce(np.arange(3))
threading.Thread(target=work, daemon=True).start()
comms[0] = create(0)
time.sleep(0.3)
"""
    )
    start = time.monotonic()
    got, out, err = scripts.finish(scripts.start(code))
    assert (got, out, err) == (0, "", "")
    assert time.monotonic() - start < 8


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


BLOCKED = {
    "all_reduce": "comm.all_reduce(np.arange(3))",
    "large all_reduce": "comm.all_reduce(np.arange(1000000))",
    "recv": "comm.recv(np.arange(3), 1)",
    "send": "comm.send(np.arange(3), 1)",
    "barrier": "comm.barrier()",
}


@pytest.mark.parametrize("call", BLOCKED.values(), ids=BLOCKED)
def test_ctrl_c_ends_a_waiting_call(call):
    code = (
        PAIR
        + f"""
def other():        # it stays: with nobody left to make rank 1's call, waiting would be an error at once
    comm = create(1)
    time.sleep(60)

threading.Thread(target=other, daemon=True).start()
comm = create(0)
print("waiting", flush=True)
try:
    {call}
except KeyboardInterrupt:
    print("interrupted", flush=True)
else:
    print("it came back", flush=True)
try:
    comm.all_reduce(np.arange(3))
except pynccl.NCCLError as error:
    print("broken:", error)
comm.close()
"""
    )
    process = scripts.start(code)
    scripts.wait_for_line(process, "waiting")
    time.sleep(0.4)
    start = time.monotonic()
    process.send_signal(signal.SIGINT)
    status, out, err = scripts.finish(process)
    assert time.monotonic() - start < 3
    assert out.startswith("interrupted\nbroken:"), (out, err)
    assert "interrupt" in out.splitlines()[1]
    assert status == 0


def test_ctrl_c_ends_a_waiting_creation():
    process = scripts.start(
        PAIR
        + """
print("waiting", flush=True)
try:
    create(0)
except KeyboardInterrupt:
    print("interrupted")
"""
    )
    scripts.wait_for_line(process, "waiting")
    time.sleep(0.4)
    start = time.monotonic()
    process.send_signal(signal.SIGINT)
    status, out, err = scripts.finish(process)
    assert (status, out) == (0, "interrupted\n"), err
    assert time.monotonic() - start < 3
