"""Which protocol speaks for an array when an NCCL communicator asks, seen at a recording stand-in."""

import pytest

from helpers import scripts
from helpers.stubs import build_cuda_stub, build_nccl_stub

SETUP = """
import os
from pathlib import Path
import numpy as np
import pynccl
from helpers import arrays, capsules
from helpers.stubs import CudaStub, NcclStub

nccl_path = os.environ["NCCL_STUB"]
cuda, nccl = CudaStub(Path(os.environ["PYNCCL_LIBCUDA"])), NcclStub(Path(nccl_path))
cuda.start()
cuda.make_current(cuda.primary(0))
nccl.share(cuda)
comm = pynccl.Communicator(2, pynccl.unique_id(library=nccl_path), 0, device=0, library=nccl_path)

HOST = np.zeros(16, "f4")
DEVICE = 0x7E0000000000
cuda.memory(DEVICE, 1 << 20, 0)

def said(**fields):
    return arrays.interface(HOST, data=(DEVICE, False), **fields)

def sent(x, **words):
    '''The address that NCCL gets for the array, how many elements, and its stream.'''
    nccl.reset()
    comm.broadcast(x, **words)
    (call,) = [call for call in nccl.calls if call.function == "ncclBroadcast"]
    assert call.sendbuff == call.recvbuff
    return hex(call.sendbuff), call.count, call.stream

def attempt(x):
    try:
        return sent(x)
    except (TypeError, ValueError, BufferError) as error:
        return f"{type(error).__name__}: {error}"
"""


def run(body, **words):
    out = scripts.run(
        SETUP + body + "\ncomm.abort()\n",
        PYNCCL_LIBCUDA=str(build_cuda_stub()),
        NCCL_STUB=str(build_nccl_stub()),
        **words,
    )
    return out.splitlines()


HEX = "0x7e0000000000"


def test_numbas_mapped_arrays_are_device_memory_though_they_are_numpy_arrays():
    assert run(
        """
class Mapped(np.ndarray):
    @property
    def __cuda_array_interface__(self):
        return said()

print(sent(HOST.view(Mapped)))
print(pynccl.Buffer(HOST.view(Mapped)).ptr == HOST.ctypes.data, "on the host it is a NumPy array")
"""
    ) == [f"('{HEX}', 16, 0)", "True on the host it is a NumPy array"]


def test_the_cuda_interface_comes_before_pep_3118():
    assert run(
        """
class Both(bytearray):
    __cuda_array_interface__ = said()

print(sent(Both(64)))
print(attempt(bytearray(64)))
"""
    ) == [
        f"('{HEX}', 16, 0)",
        "ValueError: broadcast: x is in host memory, and this communicator works on GPU 0; copy the array "
        "there first, or create the communicator with library='host'",
    ]


def test_a_mask_is_refused_before_the_host_is():
    (text,) = run("print(attempt(np.ma.array(HOST, mask=HOST > 1)))")
    assert text.startswith("ValueError: broadcast: x has a mask, which would be lost")


@pytest.mark.parametrize("Array", ["DlpackArray", "OldDlpackArray"])
def test_dlpack_capsules_of_a_device_are_given_back_after_the_call(Array):
    assert run(
        f"""
class Device(arrays.{Array}):
    def __init__(self):
        super().__init__(HOST, data=DEVICE, device=(capsules.CUDA, 0))

array, stream = Device(), cuda.stream(0)
cuda.reset()
address, count, used = sent(array, stream=stream)
print(address, count, used == stream)
print([export.deleted for export in array.exports], array.asked[-1]["stream"])
print("cuStreamWaitEvent" in cuda.names, "the producer made the data ready on stream 1 only")
"""
    ) == [
        f"{HEX} 16 True",
        "[1] 1",
        "True the producer made the data ready on stream 1 only",
    ]


def test_the_exchange_table_says_the_stream_that_a_call_takes_by_default():
    assert run(
        """
class Tensor:
    __dlpack_c_exchange_api__ = capsules.exchange_table(stream=0x6000)

    @property
    def exported(self):
        self.export = capsules.Export(HOST, data=DEVICE, device=(capsules.CUDA, 0))
        return self.export.address

    @property
    def __cuda_array_interface__(self):
        raise AssertionError("not asked for")

tensor = Tensor()
print(sent(tensor), tensor.export.deleted)
"""
    ) == [f"('{HEX}', 16, {0x6000}) 1"]


def test_other_devices_and_read_only_tensors_are_refused_by_the_name_of_the_argument():
    assert run(
        """
print(attempt(arrays.DlpackArray(HOST, device=(capsules.METAL, 0))))
print(attempt(arrays.DlpackArray(HOST, data=DEVICE, device=(capsules.CUDA, 0), flags=capsules.READ_ONLY)))
print(capsules.held())
"""
    ) == [
        "BufferError: broadcast: x is in Metal memory; NCCL moves CUDA memory, the host library CPU memory",
        "BufferError: broadcast: x is read-only; pass an array that may be written to",
        "0",
    ]
