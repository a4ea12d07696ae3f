"""Fixtures that need ranks, and the path by which tests find ``helpers``."""

import pathlib
import signal
import sys

TESTS = str(pathlib.Path(__file__).resolve().parent)
if TESTS not in sys.path:
    sys.path.insert(0, TESTS)

# Under nohup SIGHUP is ignored, in a background job SIGINT; every process that a test starts would
# inherit that.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)

import pytest  # noqa: E402

import pynccl  # noqa: E402, F401  (once, before ranks start: an editable install compiles at import)
from helpers.ranks import Crew, GroupWorld, ProcessWorld, ThreadWorld, Worker, create, new_id  # noqa: E402
from helpers.scripts import environment  # noqa: E402


@pytest.fixture(scope="module")
def threads():
    """``threads(n)``: the module's `ThreadWorld` of n ranks."""
    worlds = {}

    def world(nranks: int) -> ThreadWorld:
        if nranks not in worlds:
            worlds[nranks] = ThreadWorld(nranks)
        return worlds[nranks]

    yield world
    for each in worlds.values():
        each.close()


@pytest.fixture(scope="session")
def processes():
    """``processes(nprocs, nlocal=1, grouped=False)``: the session's `ProcessWorld` of that form."""
    worlds = {}

    def world(nprocs: int, nlocal: int = 1, grouped: bool = False) -> ProcessWorld:
        form = (nprocs, nlocal, grouped)
        if form not in worlds:
            worlds[form] = ProcessWorld(*form)
        return worlds[form]

    yield world
    for each in worlds.values():
        each.close()


@pytest.fixture(scope="module")
def one_thread():
    """``one_thread(n)``: the module's `GroupWorld` of n ranks."""
    worlds = {}

    def world(nranks: int) -> GroupWorld:
        if nranks not in worlds:
            worlds[nranks] = GroupWorld(nranks)
        return worlds[nranks]

    yield world
    for each in worlds.values():
        each.close()


@pytest.fixture
def alone():
    """A communicator of one rank."""
    with create(1, new_id(), 0) as comm:
        yield comm


@pytest.fixture
def crew():
    """``crew(n)``: n threads, for jobs that need no world."""
    made = []

    def make(size: int) -> Crew:
        made.append(Crew(size))
        return made[-1]

    yield make
    for each in made:
        each.stop()


@pytest.fixture(scope="session")
def device_process():
    """The process in which tests of `helpers.device` run: the stub driver is there from its start."""
    from helpers.stubs import build_cuda_stub

    worker = Worker(env=environment(PYNCCL_LIBCUDA=str(build_cuda_stub()), PYNCCL_LIBRARY=None))
    yield worker
    worker.kill()


@pytest.fixture(scope="session")
def library_process():
    """The process in which tests import Torch and JAX, whose threads and warnings the test run is spared."""
    worker = Worker(env=environment(PYNCCL_LIBRARY="host", PYNCCL_TIMEOUT="30"))
    yield worker
    worker.kill()
