"""Pretended devices: communicators of the recording NCCL over the recording driver, without a GPU.

Bodies of tests run in one process that has the stub driver from its start (fixture ``device_process``).
Device memory is pretended: the driver says that some addresses are on a device, and nothing ever touches
them.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import pynccl
from helpers.elsewhere import elsewhere
from helpers.stubs import LATEST, CudaStub, NcclStub, build_cuda_stub, build_nccl_stub

NRANKS, RANK = 4, 1
BASE = 0x7E00_0000_0000  # of the pretended memory; far from anything real
SPAN = 1 << 40  # bytes of it on each device
X, OUT = 0x1000, 0x9000  # places in it


on_device = elsewhere("device_process")
"""Turn a test's body into a test that runs the body in the other process."""


@functools.cache
def cuda() -> CudaStub:
    """The stub driver."""
    stub = CudaStub(build_cuda_stub())
    stub.start()
    return stub


def forget(nccl: NcclStub) -> None:
    """Empty the logs; device d has the addresses from ``BASE + d * SPAN``."""
    nccl.reset()
    cuda().reset()
    for device in range(2):
        cuda().memory(BASE + device * SPAN, SPAN, device)


@contextlib.contextmanager
def communicator(
    version: int = LATEST, device: int = 0, **words: Any
) -> Iterator[tuple[Any, NcclStub]]:
    """One rank of a communicator of the stub NCCL, and that stub with an empty log."""
    path = build_nccl_stub(version)
    nccl = NcclStub(path)
    nccl.share(cuda())
    cuda().make_current(cuda().primary(0))
    uid = pynccl.unique_id(library=str(path))
    comm = pynccl.Communicator(NRANKS, uid, RANK, device=device, library=str(path), **words)
    forget(nccl)
    try:
        yield comm, nccl
    finally:
        nccl.reset()
        comm.abort()


class DeviceArray:
    """Pretended device memory with a CUDA array interface."""

    def __init__(self, place, shape, typestr="<f4", device=0, stream=None, version=3):
        self.place = BASE + device * SPAN + place
        self.shape = shape if isinstance(shape, tuple) else (shape,)
        self.__cuda_array_interface__ = {
            "shape": self.shape,
            "typestr": typestr,
            "data": (self.place, False),
            "version": version,
            "stream": stream,
        }


class Stream:
    """An object with one attribute that says its handle."""

    def __init__(self, **attributes):
        self.__dict__.update(attributes)
