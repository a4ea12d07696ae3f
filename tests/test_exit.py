"""The end of a process: live communicators, forks, Ctrl-C."""

import signal
import time

import pytest

from helpers import scripts

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
                repr(comm), comm.close(), comm.abort()
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
