"""The list API on pretended devices, as NCCL and the driver see it."""

import contextlib
import ctypes

import numpy as np
import pytest

import pynccl
import pynccl.multi as nccl
from helpers.device import OUT, SPAN, DeviceArray, Stream, X, cuda, forget, on_device
from helpers.stubs import LATEST, NcclStub, build_nccl_stub


@contextlib.contextmanager
def library(version=LATEST):
    """Give the path of the stub NCCL and the stub, with device 0 current and empty logs."""
    path = str(build_nccl_stub(version))
    stub = NcclStub(path)
    stub.share(cuda())
    cuda().make_current(cuda().primary(0))
    nccl.clear_cache()
    forget(stub)
    try:
        yield path, stub
    finally:
        stub.reset()
        nccl.clear_cache()


def on(*devices, size=4, place=X, **words):
    return [DeviceArray(place, size, device=device, **words) for device in devices]


@on_device
def test_arrays_say_which_devices_make_the_communicator():
    with library() as (path, stub):
        for devices in ((1, 0), (0, 1), (1, 0)):
            xs = on(*devices)
            stub.reset()
            assert nccl.all_reduce(xs, library=path) is xs
            calls = stub.of("ncclAllReduce")
            assert [call.sendbuff for call in calls] == [x.place for x in xs]
        assert [call.device for call in stub.of("ncclCommInitRank")] == []
        nccl.clear_cache()
        stub.reset()
        nccl.all_reduce(on(1, 0), library=path)
        inits = stub.of("ncclCommInitRank")
        assert [(call.rank, call.device) for call in inits] == [(0, 1), (1, 0)]


@on_device
def test_rank_is_the_place_in_the_lists_on_permuted_devices():
    with library() as (path, stub):
        outs = on(1, 0, size=8, place=OUT)
        nccl.all_gather(on(1, 0), outs, library=path)
        inits = stub.of("ncclCommInitRank")
        assert [(call.rank, call.device) for call in inits] == [(0, 1), (1, 0)]
        assert [call.recvbuff for call in stub.of("ncclAllGather")] == [out.place for out in outs]


@pytest.mark.parametrize("root", [0, 1])
@on_device
def test_root_of_gather_and_scatter_is_the_given_place(root):
    """On the host library any root would do: there, all arrays are in one memory."""
    with library() as (path, stub):
        (whole,) = on((1, 0)[root], size=8, place=OUT)
        assert nccl.gather(on(1, 0), whole, root, library=path) is whole
        nccl.scatter(whole, on(1, 0), root, library=path)
        gathers, scatters = stub.of("ncclGather"), stub.of("ncclScatter")
        assert [call.root for call in gathers + scatters] == [root] * 4
        assert gathers[root].recvbuff == scatters[root].sendbuff == whole.place


@on_device
def test_two_entries_on_one_device_are_refused_by_name():
    with library() as (path, stub):
        with pytest.raises(
            pynccl.InvalidUsageError, match="entries 0 and 1 of the lists are both on device 1"
        ):
            nccl.all_reduce([*on(1), *on(1, place=OUT)], library=path)
        assert stub.names == []


@on_device
def test_two_entries_on_one_device_may_be_allowed():
    import os

    with library() as (path, stub):
        os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
        try:
            nccl.all_reduce([*on(1), *on(1, place=OUT)], library=path)
        finally:
            del os.environ["NCCL_MULTI_RANK_GPU_ENABLE"]
        assert len(stub.of("ncclAllReduce")) == 2


@pytest.mark.parametrize("how", ["well", "failed init", "failed call", "bad list"])
@on_device
def test_current_device_is_left_alone(how):
    with library() as (path, stub):
        before = cuda().current_context
        if how == "well":
            nccl.all_reduce(on(0, 1), library=path)
            nccl.clear_cache()
        elif how == "bad list":
            with pytest.raises(ValueError):
                nccl.all_reduce([*on(1, size=3), *on(0, size=4)], library=path)
        else:
            stub.fail("ncclCommInitRank" if how == "failed init" else "ncclAllReduce", 1, skip=1)
            with pytest.raises(pynccl.CudaError):
                nccl.all_reduce(on(0, 1), library=path)
        assert cuda().current_context == before


@on_device
def test_no_device_current_stays_so():
    with library() as (path, _):
        cuda().make_current(None)
        nccl.all_reduce(on(0, 1), library=path)
        assert cuda().current_context == 0


@on_device
def test_each_entry_has_its_own_stream():
    streams = [0x7F00_0000_0010, Stream(cuda_stream=2**64 - 8)]
    with library() as (path, stub):
        nccl.all_reduce(on(0, 1), streams=streams, library=path)
        assert [c.stream & (2**64 - 1) for c in stub.of("ncclAllReduce")] == [
            0x7F00_0000_0010,
            2**64 - 8,
        ]
        stub.reset()
        xs = [*on(0, stream=0x50), *on(1)]
        nccl.all_reduce(xs, streams=[None, None], library=path)
        nccl.broadcast(xs, library=path)
        assert [c.stream for c in stub.of("ncclAllReduce")] == [0x50, 0]
        assert [c.stream for c in stub.of("ncclBroadcast")] == [0x50, 0]


@on_device
def test_list_waits_for_the_streams_of_its_arrays_before_the_group():
    with library() as (path, stub):
        theirs, mine = cuda().stream(1), cuda().stream(1)
        xs = [*on(0), *on(1, stream=theirs)]
        nccl.all_reduce(on(0, 1), library=path)
        forget(stub)
        nccl.all_reduce(xs, streams=[None, mine], library=path)
        (record,), (wait,) = cuda().of("cuEventRecord"), cuda().of("cuStreamWaitEvent")
        assert (record.stream, wait.stream) == (theirs, mine)
        assert record.tick < wait.tick < stub.of("ncclGroupStart")[0].tick


@on_device
def test_failure_before_the_library_is_called_keeps_the_communicators():
    with library() as (path, stub):
        nccl.all_reduce(on(0, 1), library=path)
        forget(stub)
        cuda().fail("cuStreamWaitEvent", 999)
        theirs = cuda().stream(1)
        with pytest.raises(pynccl.CudaError):
            nccl.all_reduce([*on(0), *on(1, stream=theirs)], streams=[0, 0], library=path)
        nccl.all_reduce(on(0, 1), library=path)
        assert stub.of("ncclCommAbort") == stub.of("ncclCommInitRank") == []


@on_device
def test_host_array_on_a_list_of_devices_is_refused_by_index():
    with library() as (path, stub):
        with pytest.raises(
            ValueError, match=r"all_reduce: inputs\[1\] is in host memory.*library='host'"
        ):
            nccl.all_reduce([*on(0), np.zeros(4, "f4")], library=path)
        with pytest.raises(
            ValueError, match=r"outputs\[1\] is on GPU 0, and this communicator works on GPU 1"
        ):
            nccl.all_reduce(on(0, 1), [*on(0, place=OUT), *on(0, place=OUT + 0x100)], library=path)
        assert stub.of("ncclAllReduce") == []


@on_device
def test_device_array_on_the_host_library_is_refused_by_index():
    with pytest.raises(ValueError, match=r"all_reduce: inputs\[1\] is on GPU 1"):
        nccl.all_reduce([np.zeros(4, "f4"), *on(1)], library="host")


@on_device
def test_lists_of_empty_arrays_need_no_communicator():
    with library() as (path, stub):
        nccl.all_reduce([np.zeros(0, "f4"), np.zeros(0, "f4")], library=path)
        assert stub.names == []


@on_device
def test_counts_beyond_32_bits_reach_nccl():
    with library() as (path, stub):
        nccl.all_reduce(on(0, 1, size=2**33 + 1), library=path)
        assert [call.count for call in stub.of("ncclAllReduce")] == [2**33 + 1] * 2
        assert SPAN > 4 * (2**33 + 1)


@on_device
def test_reduce_and_broadcast_pass_the_root_on():
    with library() as (path, stub):
        out = on(1, place=OUT)[0]
        nccl.reduce(on(0, 1), out, root=1, library=path)
        assert [call.root for call in stub.of("ncclReduce")] == [1, 1]
        assert [call.recvbuff for call in stub.of("ncclReduce")] == [0, out.place]
        nccl.broadcast(on(0, 1), root=1, library=path)
        assert [call.root for call in stub.of("ncclBroadcast")] == [1, 1]


@on_device
def test_send_recv_finds_devices_from_either_list():
    with library() as (path, stub):
        (x,), (y,) = on(1), on(0, place=OUT)
        nccl.send_recv([x, None], [None, y], [1, None], library=path)
        (send,), (recv,) = stub.of("ncclSend"), stub.of("ncclRecv")
        assert (send.peer, send.sendbuff, recv.peer, recv.recvbuff) == (1, x.place, 0, y.place)
        assert [c.device for c in stub.of("ncclCommInitRank")] == [1, 0]
        with pytest.raises(ValueError, match="which device entry 2 of the lists is on; pass comms"):
            nccl.send_recv([x, None, None], [None, y, None], [1, None, None], library=path)


@on_device
def test_old_library_scatters_and_gathers_by_sends():
    with library(22103) as (path, stub):
        nccl.scatter(on(1, size=8)[0], on(0, 1, place=OUT), root=1, library=path)
        assert stub.names.count("ncclSend") == 2 and stub.names.count("ncclRecv") == 2


@on_device
def test_capsules_are_used_on_nccl_and_left_alone():
    new = ctypes.pythonapi.PyCapsule_New
    new.restype, new.argtypes = (
        ctypes.py_object,
        [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p],
    )
    name = b"torch.cuda.nccl.Communicator"
    with library() as (path, stub):
        comms = pynccl.init_all(2, library=path)
        capsules = [new(comm.handle, name, None) for comm in comms]
        stub.reset()
        nccl.all_reduce(on(0, 1), comms=capsules, library=path)
        assert [call.comm for call in stub.of("ncclAllReduce")] == [comm.handle for comm in comms]
        del capsules
        assert stub.of("ncclCommDestroy") == stub.of("ncclCommAbort") == []
        for comm in comms:
            comm.close()


@on_device
def test_availability_is_that_of_memory_the_library_works_on():
    with library() as (path, _):
        assert nccl.is_available(on(0, 1), library=path)
        assert not nccl.is_available(on(0, 1), library="host")
        assert not nccl.is_available([np.zeros(3)], library=path)
        assert not nccl.is_available(on(1, 1), library=path)
