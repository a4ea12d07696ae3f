"""Streams on pretended devices: which integer reaches NCCL, and which events the driver sees before."""

import ctypes
import os

import numpy as np
import pytest

import pynccl
from helpers.device import OUT, RANK, DeviceArray, Stream, X, communicator, cuda, on_device

STREAMS = {
    "nothing": (None, 0),
    "0": (0, 0),
    "1": (1, 1),
    "2": (2, 2),
    "64 bits": (2**64 - 8, 2**64 - 8),
    "numpy": (np.uint64(2**63 + 8), 2**63 + 8),
    "numba": ({"handle": 0x7F00_0000_0010}, 0x7F00_0000_0010),
    "cupy": ({"ptr": 0x7F00_0000_0020}, 0x7F00_0000_0020),
    "torch": ({"cuda_stream": 0x7F00_0000_0030}, 0x7F00_0000_0030),
    "protocol": ({"__cuda_stream__": (0, 0x7F00_0000_0040)}, 0x7F00_0000_0040),
}


@pytest.mark.parametrize("which", STREAMS)
@pytest.mark.parametrize("name", ["all_reduce", "scatter", "send"])
@on_device
def test_stream_reaches_nccl_as_the_same_integer(name, which):
    given, wanted = STREAMS[which]
    if isinstance(given, dict):
        given = Stream(**given)
    if which == "numba":
        given.handle = ctypes.c_void_p(wanted)
    with communicator() as (comm, nccl):
        x, out = DeviceArray(X, 8), DeviceArray(OUT, 8 if name != "scatter" else 2)
        if name == "send":
            comm.send(x, 0, stream=given)
        elif name == "scatter":
            comm.scatter(x, out=out, root=RANK, stream=given)
        else:
            comm.all_reduce(x, out=out, stream=given)
        assert nccl.calls[-1].stream & (2**64 - 1) == wanted


@on_device
def test_producers_stream_is_the_default():
    with communicator() as (comm, nccl):
        comm.all_reduce(DeviceArray(X, 4, stream=0x50), out=DeviceArray(OUT, 4))
        assert nccl.calls[-1].stream == 0x50
        comm.recv(DeviceArray(OUT, 4, stream=0x60), 0)
        assert nccl.calls[-1].stream == 0x60


@on_device
def test_stream_0_of_an_array_is_refused():
    with communicator() as (comm, nccl):
        with pytest.raises(ValueError, match="stream"):
            comm.all_reduce(DeviceArray(X, 4, stream=0), out=DeviceArray(OUT, 4))
        assert nccl.names == []


@pytest.mark.parametrize("producers", [1, 2])
@pytest.mark.parametrize("way", ["call", "group", "replay"])
@on_device
def test_call_waits_for_the_streams_of_its_arrays(way, producers):
    with communicator() as (comm, nccl):
        first, second, mine = (cuda().stream(0) for _ in range(3))
        x = DeviceArray(X, 4, stream=first)
        out = DeviceArray(OUT, 4, stream=second if producers == 2 else mine)
        if way == "call":
            comm.all_reduce(x, out=out, stream=mine)
        else:
            with pynccl.group(run=way == "group") as plan:
                comm.all_reduce(x, out=out, stream=mine)
            if way == "replay":
                assert cuda().of("cuEventRecord") == []
                plan()
        records, waits = cuda().of("cuEventRecord"), cuda().of("cuStreamWaitEvent")
        assert [r.args["stream"] for r in records] == [first, second][:producers]
        assert [w.args["stream"] for w in waits] == [mine] * producers
        (call,) = nccl.of("ncclAllReduce")
        for record, wait in zip(records, waits):
            assert record.tick < wait.tick < call.tick


@on_device
def test_no_event_where_the_streams_agree_or_it_is_turned_off():
    with communicator() as (comm, _):
        mine, other = cuda().stream(0), cuda().stream(0)
        same = DeviceArray(X, 4, stream=mine), DeviceArray(OUT, 4, stream=mine)
        comm.all_reduce(same[0], out=same[1], stream=mine)
        comm.all_reduce(same[0], out=same[1])
        comm.all_reduce(DeviceArray(X, 4), out=DeviceArray(OUT, 4), stream=mine)
        assert cuda().names.count("cuEventRecord") == 0
        try:
            for off in ("0", "off", "False"):
                os.environ["PYNCCL_CAI_SYNC"] = off
                comm.all_reduce(DeviceArray(X, 4, stream=other), out=same[1], stream=mine)
            os.environ["PYNCCL_CAI_SYNC"] = "never"
            with pytest.raises(ValueError, match="PYNCCL_CAI_SYNC='never' is neither 0 nor 1"):
                comm.all_reduce(DeviceArray(X, 4, stream=other), out=same[1], stream=mine)
        finally:
            del os.environ["PYNCCL_CAI_SYNC"]
        assert cuda().names.count("cuEventRecord") == 0
        cuda().capture(mine)
        comm.all_reduce(DeviceArray(X, 4, stream=other), out=same[1], stream=mine)
        cuda().capture(mine, 0)
        assert cuda().names.count("cuEventRecord") == 0
