"""suspend, resume, memory_stats."""

import numpy as np
import pytest

import pynccl
from helpers import cases
from helpers.ranks import ThreadWorld, create, new_id
from helpers.stubs import NcclStub, build_nccl_stub

LARGE = 300_000


def rss_shmem():
    """Shared memory that this process has in core, in bytes."""
    with open("/proc/self/status") as status:
        return 1024 * next(int(line.split()[1]) for line in status if line.startswith("RssShmem:"))


def rest_and_go_on(comm):
    x = np.arange(LARGE) + comm.rank
    assert comm.memory_stats()["suspendable"] == 0
    comm.all_reduce(x)
    before = comm.memory_stats()
    assert before["suspendable"] >= 1 << 20
    assert not before["suspended"]
    assert before["total"] == before["suspendable"] + before["persistent"]
    comm.barrier()
    comm.suspend()
    assert comm.memory_stats() == before | {"suspended": True}
    for call in (lambda: comm.all_reduce(x), comm.barrier, lambda: comm.split(0), comm.suspend):
        with pytest.raises(pynccl.InvalidUsageError, match="suspended"):
            call()
    comm.resume()
    with pytest.raises(pynccl.InvalidUsageError, match="Not in suspended state"):
        comm.resume()
    expected = comm.nranks * np.arange(LARGE) + sum(range(comm.nranks))
    assert (comm.all_reduce(x) == expected).all()
    cases.sum_of_ranks(comm)


def test_a_suspended_communicator_refuses_calls_and_goes_on_afterwards(threads):
    threads(3).run(rest_and_go_on)


def test_processes_may_rest(processes):
    processes(2).run(rest_and_go_on)


def test_memory_goes_when_all_rest():
    with ThreadWorld(2) as world:
        world.run(lambda comm: comm.all_reduce(np.arange(LARGE)))
        held = rss_shmem()
        world.run(lambda comm: comm.suspend() if comm.rank else None)
        assert rss_shmem() > held - (1 << 16)
        world.run(lambda comm: None if comm.rank else comm.suspend())
        assert rss_shmem() < held - (2 << 20)
        world.run(lambda comm: comm.resume())
        world.run(cases.sum_of_ranks)


def test_not_inside_a_group():
    with create(1, new_id(), 0) as comm, pynccl.group():
        for call in (comm.suspend, comm.resume):
            with pytest.raises(ValueError, match="group"):
                call()


@pytest.mark.parametrize("how", ["close", "abort"])
def test_a_suspended_communicator_can_end(how):
    comm = create(1, new_id(), 0)
    comm.suspend()
    getattr(comm, how)()
    for call in (comm.suspend, comm.resume, comm.memory_stats):
        with pytest.raises(pynccl.CommunicatorClosedError):
            call()


def on_stub(version=None):
    path = str(build_nccl_stub(*[version] if version else []))
    stub = NcclStub(path)
    stub.reset()
    return stub, pynccl.Communicator(1, pynccl.unique_id(library=path), 0, library=path)


def test_what_nccl_is_asked():
    stub, comm = on_stub()
    with comm:
        stub.reset()
        comm.suspend()
        comm.resume()
        comm.memory_stats()
        (suspend,) = stub.of("ncclCommSuspend")
        assert suspend.flags == 1
        assert len(stub.of("ncclCommResume")) == 1
        assert [call.stat for call in stub.of("ncclCommMemStats")] == [0, 1, 2, 3]
        stub.fail("ncclCommSuspend", 5)
        stub.last_error("MemManager: Suspend not supported, memory manager is disabled")
        with pytest.raises(pynccl.InvalidUsageError, match="memory manager is disabled"):
            comm.suspend()
        stub.reset()


def test_an_older_nccl_says_what_it_lacks():
    _, comm = on_stub(22800)
    with comm:
        for call in (comm.suspend, comm.resume, comm.memory_stats):
            with pytest.raises(pynccl.UnsupportedError, match=r"needs NCCL 2\.29"):
                call()
