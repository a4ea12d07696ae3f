"""The way to NCCL, against a library that really progresses: the host library behind a mask.

Arrays are pretended device memory here, which the driver's stub says of ordinary memory.
"""

import contextlib
import threading
import time

import numpy as np
import pytest

import pynccl
from helpers import scripts
from helpers.device import cuda, on_device
from helpers.shim import build_shim


class OnDevice:
    """A NumPy array that the stub driver says is on device 0."""

    def __init__(self, array):
        self.array = array
        cuda().memory(array.ctypes.data, max(array.nbytes, 1), 0)
        self.__cuda_array_interface__ = {
            "shape": array.shape,
            "typestr": array.dtype.str,
            "data": (array.ctypes.data, False),
            "version": 3,
        }


def run(nranks, live):
    """Run each rank in a thread, and return what it returned."""
    path = str(build_shim())
    cuda().reset()
    uid = pynccl.unique_id(path)
    assert uid.kind == "nccl"
    found, errors = [None] * nranks, []

    def rank_of(rank):
        cuda().make_current(cuda().primary(0))

        def create(**words):
            return pynccl.Communicator(nranks, uid, rank, device=0, library=path, **words)

        try:
            found[rank] = live(rank, create)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=rank_of, args=(rank,)) for rank in range(nranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not any(thread.is_alive() for thread in threads)
    if errors:
        raise errors[0]
    return found


def sums(comm):
    """Check an all-reduce."""
    x = np.full(5000, comm.rank + 1, "f4")
    comm.all_reduce(OnDevice(x), out=OnDevice(x))
    assert (x == comm.nranks * (comm.nranks + 1) / 2).all()


def life(rank, create):
    with create(timeout=10) as comm:  # nonblocking, for NCCL
        assert comm.library.kind == "nccl"
        sums(comm)
        with comm.split(rank % 2, -rank) as part:  # whose handle comes when it is done
            sums(part)
            place = part.rank, part.nranks
        assert comm.split(None if rank else 0) is None or rank == 0
        if rank != 1:
            with comm.shrink([1]) as less:
                sums(less)
        comm.finalize()
    return place


@on_device
def test_nonblocking_communicators_divide():
    assert run(4, life) == [(1, 2), (1, 2), (0, 2), (0, 2)]


def background(rank, create):
    comm = create(timeout=10, config=pynccl.Config(blocking=False))
    comm.wait_ready()
    with comm:
        sums(comm)
    return True


@on_device
def test_creation_in_the_background_gets_ready():
    assert run(3, background) == [True] * 3


def alone(rank, create):
    if rank:
        return None
    start = time.monotonic()
    with pytest.raises(pynccl.NCCLTimeoutError, match="in progress after 1 s"):
        create(timeout=1)
    return time.monotonic() - start


@on_device
def test_missing_rank_is_a_timeout_and_the_creation_is_aborted():
    assert 0.9 < run(2, alone)[0] < 3


def lose(rank, create):
    comm = create(timeout=10)
    sums(comm)
    if rank == 1:
        comm.abort()
        return None
    x = np.ones(3, "f4")
    with pytest.raises(pynccl.RemoteError, match="aborted"):
        comm.all_reduce(OnDevice(x), out=OnDevice(x))
    with comm.shrink([1], abort=True) as rest:
        sums(rest)
        place = rest.rank, rest.nranks
    with contextlib.suppress(pynccl.NCCLError):
        comm.abort()
    return place


@on_device
def test_shrink_goes_on_without_a_lost_rank():
    assert run(3, lose) == [(0, 2), None, (1, 2)]


def grow(rank, create):
    comm = create(timeout=10)
    if rank == 0:
        ids.append(comm.unique_id())
    bigger = comm.grow(3, ids[0] if rank == 0 else None)
    if rank == 1:
        comm.close()
    with bigger:
        sums(bigger)
        place = bigger.rank, bigger.nranks
    if rank == 0:
        comm.close()
    return place


ids = []


def join(path, found):
    cuda().make_current(cuda().primary(0))
    scripts.wait_until(lambda: ids)
    with pynccl.Communicator.join(3, ids[0], 2, device=0, library=path, timeout=10) as comm:
        sums(comm)
        found.append((comm.rank, comm.nranks))


@on_device
def test_growth_takes_a_new_rank_in():
    found = []
    ids.clear()
    newcomer = threading.Thread(target=join, args=(str(build_shim()), found))
    newcomer.start()
    assert run(2, grow) == [(0, 3), (1, 3)]
    newcomer.join(20)
    assert found == [(2, 3)]
