"""What reaches NCCL and the CUDA driver, seen by recording stand-ins for both: no GPU is needed."""

import threading
import time

import numpy as np
import pytest

import pynccl
from helpers import oracle
from helpers.device import (
    NRANKS,
    OUT,
    RANK,
    SPAN,
    DeviceArray,
    Stream,
    X,
    communicator,
    cuda,
    on_device,
)
from helpers.stubs import NcclStub, build_nccl_stub

# What each call must say: the arguments of the method, the C function and its arguments.
CALLS = {
    "all_reduce": ((5, 5), {"op": "max"}, "ncclAllReduce", {"op": 2}),
    "reduce": ((5, 5), {"op": "avg", "root": RANK}, "ncclReduce", {"op": 4, "root": RANK}),
    "broadcast": ((5, 5), {"root": RANK}, "ncclBroadcast", {"root": RANK}),
    "all_gather": ((5, 20), {}, "ncclAllGather", {}),
    "reduce_scatter": ((20, 5), {"op": "min"}, "ncclReduceScatter", {"op": 3}),
    "all_to_all": ((20, 20), {}, "ncclAlltoAll", {}),
    "gather": ((5, 20), {"root": RANK}, "ncclGather", {"root": RANK}),
    "scatter": ((20, 5), {"root": RANK}, "ncclScatter", {"root": RANK}),
}
COUNTS = {"sendcount", "recvcount", "count"}


def of_names(call, *names):
    """The one argument of a call that has one of these names."""
    (value,) = [call.args[name] for name in names if name in call.args]
    return value


def count_of(call):
    return of_names(call, *COUNTS)


@pytest.mark.parametrize("name", CALLS)
@on_device
def test_call_passes_pointers_count_dtype_op_root_and_stream(name):
    (nx, nout), words, function, wanted = CALLS[name]
    with communicator() as (comm, nccl):
        x, out = DeviceArray(X, nx), DeviceArray(OUT, nout)
        assert getattr(comm, name)(x, out=out, stream=0x7F12_3456_789A, **words) is out
        (call,) = nccl.calls
        assert call.function == function
        assert of_names(call, "sendbuff") == x.place
        assert of_names(call, "recvbuff") == out.place
        assert count_of(call) == 5
        assert call.datatype == pynccl.DataType.FLOAT32
        assert call.stream == 0x7F12_3456_789A
        for key, value in wanted.items():
            assert call.args[key] == value


@pytest.mark.parametrize("name", ["send", "recv"])
@on_device
def test_message_passes_pointer_count_peer_and_stream(name):
    with communicator() as (comm, nccl):
        array = DeviceArray(X, (2, 3), "<i8")
        getattr(comm, name)(array, 3, stream=17)
        (call,) = nccl.calls
        assert call.function == {"send": "ncclSend", "recv": "ncclRecv"}[name]
        assert of_names(call, "sendbuff", "recvbuff") == array.place
        assert (call.count, call.peer, call.stream) == (6, 3, 17)
        assert call.datatype == pynccl.DataType.INT64


@on_device
def test_send_recv_is_one_group_of_two_calls():
    with communicator() as (comm, nccl):
        out = DeviceArray(OUT, 7, "<i4")
        assert comm.send_recv(DeviceArray(X, 3), 2, out=out, source=0) is out
        assert nccl.names == ["ncclGroupStart", "ncclSend", "ncclRecv", "ncclGroupEnd"]
        _, send, recv, _ = nccl.calls
        assert (send.count, send.peer, send.datatype) == (3, 2, pynccl.DataType.FLOAT32)
        assert (recv.count, recv.peer, recv.datatype) == (7, 0, pynccl.DataType.INT32)


@pytest.mark.parametrize("name", ["reduce", "broadcast", "gather", "scatter"])
@on_device
def test_buffer_that_does_not_matter_off_the_root_is_not_passed_on(name):
    with communicator() as (comm, nccl):
        array = DeviceArray(X, 8)
        if oracle.COLLECTIVES[name].sends == "root":
            getattr(comm, name)(None, out=array, root=0)
        else:
            assert getattr(comm, name)(array, root=0) is None
        (call,) = nccl.calls
        assert {call.sendbuff, call.recvbuff} in ({array.place, 0}, {array.place})
        assert count_of(call) == 8


@pytest.mark.parametrize("name", CALLS)
@on_device
def test_counts_are_64_bits_wide(name):
    (nx, nout), words, function, _ = CALLS[name]
    big = 2**33 + 7
    with communicator() as (comm, nccl):
        x = DeviceArray(0, big * (nx // 5), "|i1")
        out = DeviceArray(SPAN // 2, big * (nout // 5), "|i1")
        getattr(comm, name)(x, out=out, **words)
        assert count_of(nccl.of(function)[0]) == big


@pytest.mark.parametrize(
    ("typestr", "dtype", "code", "factor"),
    [
        *(
            (np.dtype(name).str, None, pynccl.DataType[name.upper()], 1)
            for name in (*oracle.INTEGERS, "float16", "float32", "float64")
        ),
        ("<u2", "bfloat16", pynccl.DataType.BFLOAT16, 1),
        ("|u1", "float8_e4m3fn", pynccl.DataType.FLOAT8_E4M3FN, 1),
        ("|u1", "float8_e5m2", pynccl.DataType.FLOAT8_E5M2, 1),
        ("<c8", None, pynccl.DataType.FLOAT32, 2),
        ("<c16", None, pynccl.DataType.FLOAT64, 2),
    ],
)
@on_device
def test_dtype_reaches_nccl_by_its_number(typestr, dtype, code, factor):
    with communicator() as (comm, nccl):
        comm.all_reduce(DeviceArray(X, 6, typestr), out=DeviceArray(OUT, 6, typestr), dtype=dtype)
        (call,) = nccl.calls
        assert (call.datatype, call.count) == (code, 6 * factor)


@pytest.mark.parametrize(
    ("op", "code"), [("sum", 2), ("max", 2), ("prod", 3), ("min", 3)]
)  # on bytes of 0 and 1, or is the maximum and and is the minimum
@on_device
def test_booleans_are_reduced_as_bytes(op, code):
    with communicator() as (comm, nccl):
        comm.all_reduce(DeviceArray(X, 6, "|b1"), out=DeviceArray(OUT, 6, "|b1"), op=op)
        (call,) = nccl.calls
        assert (call.datatype, call.op) == (pynccl.DataType.UINT8, code)


@on_device
def test_other_dtypes_move_as_bytes():
    with communicator() as (comm, nccl):
        for typestr, size in (("<i2", 2), ("|V16", 16), ("<M8[s]", 8)):
            nccl.reset()
            comm.all_gather(DeviceArray(X, 3, typestr), out=DeviceArray(OUT, 12, typestr))
            (call,) = nccl.calls
            assert call.datatype in (pynccl.DataType.UINT8, pynccl.DataType.INT8)
            assert count_of(call) == 3 * size


# --- places --------------------------------------------------------------------------------------------


@on_device
def test_array_elsewhere_is_refused_by_name():
    with communicator(device=0) as (comm, nccl):
        here, there = DeviceArray(X, 4), DeviceArray(X, 4, device=1)
        host = np.zeros(4, np.float32)
        with pytest.raises(ValueError, match="all_reduce: x is on GPU 1, .*GPU 0"):
            comm.all_reduce(there, out=here)
        with pytest.raises(ValueError, match="all_gather: out is on GPU 1, .*GPU 0"):
            comm.all_gather(here, out=DeviceArray(OUT, 16, device=1))
        with pytest.raises(ValueError, match="broadcast: x is in host memory, .*GPU 0.*host"):
            comm.broadcast(host)
        with pytest.raises(ValueError, match="recv: out is in host memory"):
            comm.recv(host, 0)
        assert nccl.names == []
    uid = pynccl.unique_id("host")
    with pynccl.Communicator(1, uid, 0, library="host") as comm:
        with pytest.raises(ValueError, match="all_reduce: x is on GPU 1, .*host"):
            comm.all_reduce(there, out=host)
        with pytest.raises(ValueError, match="send: x is on GPU 0"):
            comm.send(here, 0)
        # The interface is the same over host memory, which is fine here.
        array = np.arange(4, dtype=np.float32)
        view = Stream(
            __cuda_array_interface__={**array.__array_interface__, "version": 3, "stream": None}
        )
        out = np.zeros(4, np.float32)
        comm.all_reduce(view, out=out)
        assert out.tolist() == [0, 1, 2, 3]


@on_device
def test_empty_arrays_are_nowhere_and_never_looked_up():
    with communicator() as (comm, nccl):
        empty = np.zeros(0, np.float32)
        comm.all_reduce(empty, out=empty)
        (call,) = nccl.calls
        assert call.count == 0
        assert cuda().of("cuPointerGetAttribute") == []


@on_device
def test_calls_leave_the_current_device_alone():
    with communicator(device=1) as (comm, _):
        cuda().make_current(cuda().primary(0))
        before = cuda().current_context
        other = cuda().stream(1)
        comm.all_reduce(
            DeviceArray(X, 4, device=1, stream=other), out=DeviceArray(OUT, 4, device=1), stream=1
        )
        assert cuda().current_context == before


@on_device
def test_result_of_an_unknown_array_library_must_be_given():
    with communicator() as (comm, nccl):
        with pytest.raises(TypeError, match="all_reduce: cannot allocate .*DeviceArray.*out="):
            comm.all_reduce(DeviceArray(X, 4))
        assert nccl.names == []


# --- groups --------------------------------------------------------------------------------------------


@on_device
def test_group_reaches_the_library_when_it_ends_and_not_before():
    with communicator() as (comm, nccl):
        x, out = DeviceArray(X, 4), DeviceArray(OUT, 4)
        with pynccl.group() as plan:
            comm.all_reduce(x, out=out)
            comm.send(x, 0)
            with pynccl.group():
                comm.recv(out, 0)
            assert nccl.names == []
        once = ["ncclGroupStart", "ncclAllReduce", "ncclSend", "ncclRecv", "ncclGroupEnd"]
        assert nccl.names == once
        nccl.reset()
        plan()
        assert nccl.names == once
        nccl.reset()
        with pytest.raises(KeyError), pynccl.group():
            comm.all_reduce(x, out=out)
            raise KeyError
        assert nccl.names == []


@on_device
def test_estimate_asks_the_library_and_runs_nothing():
    with communicator() as (comm, nccl):
        with pynccl.group(run=False) as plan:
            comm.all_reduce(DeviceArray(X, 4), out=DeviceArray(OUT, 4))
        assert isinstance(plan.simulate(), float)
        assert nccl.names == ["ncclGroupStart", "ncclAllReduce", "ncclGroupSimulateEnd"]


@on_device
def test_group_is_ended_although_a_call_in_it_failed():
    with communicator() as (comm, nccl):
        x, out = DeviceArray(X, 4), DeviceArray(OUT, 4)
        nccl.fail("ncclSend", 5)
        nccl.last_error("the peer is odd")
        with (
            pytest.raises(pynccl.InvalidUsageError, match="the peer is odd") as caught,
            pynccl.group(),
        ):
            comm.all_reduce(x, out=out)
            comm.send(x, 0)
            comm.recv(out, 0)
        assert caught.value.function == "ncclSend"
        assert nccl.names[:4] == ["ncclGroupStart", "ncclAllReduce", "ncclSend", "ncclGroupEnd"]
        assert nccl.names.count("ncclGroupStart") == nccl.names.count("ncclGroupEnd")
        assert "ncclRecv" not in nccl.names


@on_device
def test_libraries_do_not_mix_in_a_group():
    with communicator() as (comm, nccl), communicator(22703) as (other, old):
        x, out = DeviceArray(X, 4), DeviceArray(OUT, 4)
        comm.all_reduce(x, out=out)  # side by side they are fine
        other.all_reduce(x, out=out)
        assert nccl.names == old.names == ["ncclAllReduce"]
        with pynccl.group():
            comm.all_reduce(x, out=out)
            with pytest.raises(ValueError, match="library"):
                other.all_reduce(x, out=out)
        assert old.names == ["ncclAllReduce"]


# --- results and versions ------------------------------------------------------------------------------

ERRORS = {
    1: (pynccl.CudaError, RuntimeError),
    2: (pynccl.NCCLSystemError, OSError),
    3: (pynccl.NCCLInternalError, RuntimeError),
    4: (pynccl.InvalidArgumentError, ValueError),
    5: (pynccl.InvalidUsageError, RuntimeError),
    6: (pynccl.RemoteError, ConnectionError),
    8: (pynccl.NCCLTimeoutError, TimeoutError),
}


@pytest.mark.parametrize("code", ERRORS)
@on_device
def test_result_code_becomes_its_exception_with_the_facts(code):
    kind, builtin = ERRORS[code]
    with communicator() as (comm, nccl):
        nccl.fail("ncclAllReduce", code)
        nccl.last_error("what NCCL had to say")
        with pytest.raises(kind, match="what NCCL had to say") as caught:
            comm.all_reduce(DeviceArray(X, 4), out=DeviceArray(OUT, 4))
        error = caught.value
        assert isinstance(error, builtin)
        assert isinstance(error, pynccl.NCCLError)
        assert (error.result, error.function, error.rank) == (code, "ncclAllReduce", RANK)
        assert error.detail == "what NCCL had to say"


@pytest.mark.parametrize("name", ["all_to_all", "gather", "scatter"])
@on_device
def test_library_before_2_28_gets_sends_and_receives_instead(name):
    (nx, nout), words, function, _ = CALLS[name]
    with communicator(22703) as (comm, nccl):
        x, out = DeviceArray(X, nx), DeviceArray(OUT, nout)
        getattr(comm, name)(x, out=out, stream=9, **words)
        assert function not in nccl.names
        assert (nccl.names[0], nccl.names[-1]) == ("ncclGroupStart", "ncclGroupEnd")
        sends = {c.peer: c.args["sendbuff"] for c in nccl.of("ncclSend")}
        recvs = {c.peer: c.args["recvbuff"] for c in nccl.of("ncclRecv")}
        assert all(c.count == 5 and c.stream == 9 for c in nccl.calls[1:-1])
        blocks = {peer: peer * 5 * 4 for peer in range(NRANKS)}
        if name == "gather":
            assert sends == {RANK: x.place}
        else:
            assert sends == {peer: x.place + shift for peer, shift in blocks.items()}
        if name == "scatter":
            assert recvs == {RANK: out.place}
        else:
            assert recvs == {peer: out.place + shift for peer, shift in blocks.items()}


@on_device
def test_fallback_off_the_root_is_one_message():
    with communicator(22703) as (comm, nccl):
        comm.gather(DeviceArray(X, 5), root=3)
        comm.scatter(None, out=DeviceArray(OUT, 5), root=3)
        (send,), (recv,) = nccl.of("ncclSend"), nccl.of("ncclRecv")
        assert (send.peer, send.count, recv.peer, recv.count) == (3, 5, 3, 5)


@on_device
def test_8_bit_floats_are_reduced_from_2_24_on_and_always_moved():
    bits, out, all_of_them = (DeviceArray(p, n, "|u1") for p, n in ((X, 4), (OUT, 4), (OUT, 16)))
    with communicator(22305) as (comm, nccl):
        with pytest.raises(TypeError, match="float8_e4m3fn needs NCCL 2.24 .*2.23"):
            comm.all_reduce(bits, out=out, dtype="float8_e4m3fn")
        assert nccl.names == []
        comm.all_gather(bits, out=all_of_them, dtype="float8_e4m3fn")
        (call,) = nccl.calls
        assert (call.datatype, count_of(call)) == (pynccl.DataType.UINT8, 4)
    with communicator(22403) as (comm, nccl):
        comm.all_reduce(bits, out=out, dtype="float8_e4m3fn")
        assert nccl.calls[0].datatype == pynccl.DataType.FLOAT8_E4M3FN


@on_device
def test_function_that_the_library_lacks_is_named_with_both_versions():
    with communicator(21805) as (comm, nccl):
        with pynccl.group(run=False) as plan:
            comm.all_reduce(DeviceArray(X, 4), out=DeviceArray(OUT, 4))
        with pytest.raises(pynccl.UnsupportedError, match=r"2\.22.*2\.18\.5") as caught:
            plan.simulate()
        assert isinstance(caught.value, NotImplementedError)
        assert nccl.names.count("ncclGroupStart") == nccl.names.count("ncclGroupEnd")
        nccl.reset()
        comm.all_reduce(DeviceArray(X, 4), out=DeviceArray(OUT, 4))  # and nothing is left open
        assert nccl.names == ["ncclAllReduce"]


# --- nonblocking communicators and the end --------------------------------------------------------------


@on_device
def test_timeout_makes_a_communicator_nonblocking_and_its_calls_are_polled():
    with communicator(timeout=5) as (comm, nccl):
        nccl.fail("ncclAllReduce", 7)
        nccl.asynchronous(7, polls=3)
        comm.all_reduce(DeviceArray(X, 4), out=DeviceArray(OUT, 4))
        assert nccl.names[:4] == ["ncclAllReduce"] + ["ncclCommGetAsyncError"] * 3


@on_device
def test_nonblocking_call_that_never_ends_times_out():
    with communicator(timeout=0.3) as (comm, nccl):
        nccl.fail("ncclAllReduce", 7)
        nccl.asynchronous(7, polls=1 << 30)
        start = time.monotonic()
        with pytest.raises(pynccl.NCCLTimeoutError):
            comm.all_reduce(DeviceArray(X, 4), out=DeviceArray(OUT, 4))
        assert 0.25 < time.monotonic() - start < 3


@on_device
def test_close_that_a_peer_holds_up_times_out():
    path = build_nccl_stub()
    nccl = NcclStub(path)
    comm = pynccl.Communicator(
        NRANKS, pynccl.unique_id(str(path)), RANK, device=0, library=str(path)
    )
    nccl.hold("ncclCommDestroy")
    start = time.monotonic()
    with pytest.raises(pynccl.NCCLTimeoutError, match="peer"):
        comm.close(timeout=0.3)
    assert 0.25 < time.monotonic() - start < 3
    nccl.release()
    assert comm.closed


@on_device
def test_waiting_nccl_call_lets_other_threads_run():
    with communicator() as (comm, nccl):
        nccl.hold("ncclAllReduce")
        thread = threading.Thread(
            target=lambda: comm.all_reduce(DeviceArray(X, 4), out=DeviceArray(OUT, 4))
        )
        thread.start()
        deadline = time.monotonic() + 5
        while not nccl.held and time.monotonic() < deadline:
            time.sleep(0.001)  # this thread runs although that one is inside the library
        assert nccl.held == 1
        nccl.release()
        thread.join(5)
        assert not thread.is_alive()
