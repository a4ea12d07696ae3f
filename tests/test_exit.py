"""The end of a process: whatever is alive then, it ends at once, with its own exit status."""

import time

import pytest

from helpers import scripts
from helpers.ranks import new_id
from helpers.stubs import build_cuda_stub

LIVE = """
import atexit, builtins, contextvars, ctypes, os, sys, threading, time
import numpy as np, pynccl
uid = pynccl.unique_id("host")
x = np.arange(3.0)
def alone():
    return pynccl.Communicator(1, pynccl.unique_id("host"), 0, library="host")
def create(rank):
    return pynccl.Communicator(2, uid, rank, timeout=60, library="host")
def in_thread(function):
    threading.Thread(target=function, daemon=True).start()
    time.sleep(0.2)
with pynccl.group():
    first, second = create(0), create(1)
def plan_of(comm):
    with pynccl.group(run=False) as plan:
        comm.all_reduce(x, out=x)
        comm.broadcast(x)
    return plan
class Late:
    # Looks at its communicator when it is collected, which may be at the very end.
    def __init__(self, comm):
        self.comm, self.me = comm, self
    def __del__(self):
        repr(self.comm), self.comm.rank, self.comm.closed
        try:
            self.comm.all_reduce(x)
        except pynccl.CommunicatorClosedError:
            pass
        self.comm.close()
"""

# What is alive when the process ends, and what it prints.
ALIVE = {
    "globals": (
        "comm, plan, op = first, plan_of(first), first.premul_sum(2, 'f8'); view = pynccl.Buffer(x)",
        "",
    ),
    "a split": ("with pynccl.group(): parts = first.split(0), second.split(0)", ""),
    "a class": ("class Holder: comm = alone()", ""),
    "a context variable": ("contextvars.ContextVar('v').set(alone())", ""),
    "a thread's variable": ("local = threading.local(); local.comm = alone()", ""),
    "a module": ("builtins.kept = Late(alone())", ""),
    "a cycle": ("Late(alone())", ""),
    "a cycle with a plan": ("Late(first).plan = plan_of(first)", ""),
    "references that C code holds": (
        "for thing in (first, plan_of(first), first.premul_sum(2, 'f8'), pynccl.Buffer(x)):\n"
        "    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))",
        "",
    ),
    "an open group": ("pynccl.group().__enter__(); first.all_reduce(x)", ""),
    "a group in a generator": (
        "def steps():\n    with pynccl.group():\n        yield first.all_reduce(x)\n"
        "running = steps(); next(running)",
        "",
    ),
    "the block of a group": ("with pynccl.group(): first.all_reduce(x); sys.exit(0)", ""),
    "the block of a communicator": ("with first: sys.exit(0)", ""),
    "a creation in an open group": (
        "pynccl.group().__enter__(); pynccl.Communicator(2, pynccl.unique_id('host'), 0)",
        "",
    ),
    "a thread in a call": ("in_thread(lambda: first.all_reduce(x))", ""),
    "a thread in a large call": ("in_thread(lambda: first.all_reduce(np.ones(1000000)))", ""),
    "a thread in a plan": ("in_thread(plan_of(first))", ""),
    "a thread in a split": ("in_thread(lambda: first.split(0))", ""),
    "a thread in a barrier": ("in_thread(first.barrier)", ""),
    "a thread in a creation": ("uid = pynccl.unique_id('host'); in_thread(lambda: create(0))", ""),
    "a thread in init": (
        "os.environ.update(RANK='0', WORLD_SIZE='2'); in_thread(lambda: pynccl.init(library='host'))",
        "",
    ),
    "threads at work": (
        "for comm in (first, second):\n"
        "    threading.Thread(target=lambda c=comm: (time.sleep(0.3), print(c.all_reduce(x)[2]))).start()",
        "4.0\n4.0\n",
    ),
    "a thread that failed": (
        "threading.excepthook = lambda *a: None\nin_thread(lambda: first.all_reduce(None))",
        "",
    ),
    "a hook from after": (
        "atexit.register(lambda: (first.close(), print(first.closed)))",
        "True\n",
    ),
    "a hook that creates": (
        "atexit.register(lambda: (alone().all_reduce(x), print('created')))",
        "created\n",
    ),
    "an exit without hooks": ("os._exit(0)", ""),
}


@pytest.mark.parametrize(("code", "printed"), ALIVE.values(), ids=ALIVE)
def test_process_ends_well_whatever_is_alive(code, printed):
    start = time.monotonic()
    assert scripts.finish(scripts.start(LIVE + code)) == (0, printed, "")
    assert time.monotonic() - start < 8


def test_hook_registered_before_the_first_communicator_finds_it_closed():
    out = scripts.run("""
        import atexit
        import pynccl
        made = []
        def hook():
            try:
                made[0].barrier()
            except pynccl.CommunicatorClosedError as error:
                print(error)
            made[0].close()
        atexit.register(hook)
        made.append(pynccl.Communicator(1, pynccl.unique_id("host"), 0, library="host"))
    """)
    assert out == "barrier: this communicator is closed\n"


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


def test_nccl_communicator_that_is_collected_is_aborted_at_exit_and_never_destroyed():
    status, lines, _ = stubbed("""
import gc, warnings
warnings.simplefilter("ignore", ResourceWarning)
class Cycle: pass
cycle = Cycle()
cycle.me, cycle.comm = cycle, create()
del comm, cycle
gc.collect()
print([name for name in nccl.names if name in ends], flush=True)
""")
    assert (status, lines) == (0, ["[]", "['ncclCommAbort', 'ncclCommAbort']"])


def test_all_aborts_together_have_two_seconds():
    status, lines, _ = stubbed("""
more = [create() for _ in range(5)]
nccl.hold('ncclCommAbort')
start = time.monotonic()
atexit._run_exitfuncs()
print(1.8 < time.monotonic() - start < 4, flush=True)
os._exit(8)
""")
    assert (status, lines) == (8, ["['ncclCommAbort']", "True"])


def test_exit_hook_of_the_user_may_close_an_nccl_communicator():
    """Python 3.12 starts no thread at that time, and close() must not need one of Python's."""
    status, lines, _ = stubbed("atexit.register(comm.close)")
    assert (status, lines) == (0, ["['ncclCommDestroy']"])


def test_communicator_of_a_forked_child_is_aborted_when_the_child_exits():
    status, lines, _ = stubbed("""
import warnings
warnings.simplefilter("ignore", DeprecationWarning)
comm.close()
if (child := os.fork()) == 0:
    nccl.reset()
    mine = create()
    sys.exit(0)
os.waitpid(child, 0)
""")
    assert (status, lines) == (0, ["['ncclCommAbort']", "['ncclCommDestroy']"])


def test_exception_in_a_with_block_is_told_although_the_abort_fails():
    status, lines, _ = stubbed("""
nccl.fail("ncclCommAbort", 3)
with comm:
    sys.exit(9)
""")
    assert (status, lines) == (9, ["['ncclCommAbort']"])
