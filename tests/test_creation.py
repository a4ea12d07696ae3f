"""How communicators come to be: unique ids, arguments, and creations that cannot come about."""

import copy
import os
import pathlib
import pickle
import signal
import socket
import struct
import time
from datetime import timedelta

import numpy as np
import pytest

import pynccl
from helpers import cases, scripts
from helpers.ranks import create, new_id

# --- unique ids ----------------------------------------------------------------------------------------


def test_unique_id_is_128_bytes_that_differ():
    ids = [new_id() for _ in range(20)]
    assert all(isinstance(uid, bytes) and len(uid) == 128 for uid in ids)
    assert len(set(ids)) == 20


def test_unique_id_survives_pickle_copy_and_file(tmp_path):
    uid = new_id()
    for other in (
        *(pickle.loads(pickle.dumps(uid, p)) for p in range(2, pickle.HIGHEST_PROTOCOL + 1)),
        copy.copy(uid),
        copy.deepcopy(uid),
    ):
        assert other == uid
        assert type(other) is pynccl.UniqueId
    (tmp_path / "id").write_bytes(uid)
    assert (tmp_path / "id").read_bytes() == uid


@pytest.mark.parametrize("byte", [0x00, 0x7F, 0x80, 0xFF])
def test_unique_id_keeps_every_byte(byte):
    raw = bytes([byte]) * 64 + bytes(range(64))
    assert bytes(pynccl.UniqueId(raw)) == raw
    assert pickle.loads(pickle.dumps(pynccl.UniqueId(raw))) == raw


@pytest.mark.parametrize("form", [bytes, bytearray, memoryview, pynccl.UniqueId])
def test_any_128_bytes_of_an_id_serve(form):
    with create(1, form(bytes(new_id())), 0) as comm:
        cases.sum_of_ranks(comm)


@pytest.mark.parametrize("length", [0, 1, 127, 129, 256])
def test_id_of_another_length_is_a_value_error_with_the_number(length):
    with pytest.raises(ValueError, match=rf"128.*\b{length}\b"):
        create(1, bytes(length), 0)


@pytest.mark.parametrize("thing", ["x" * 128, None, 5, tuple(range(128)), list(range(128))])
def test_thing_that_is_no_id_is_a_type_error(thing):
    with pytest.raises(TypeError, match=type(thing).__name__):
        create(1, thing, 0)


def test_id_of_nobody_is_refused():
    with pytest.raises((ValueError, pynccl.NCCLError), match="id"):
        create(1, bytes(range(128)), 0)


def test_forged_host_id_is_refused_or_times_out_soon():
    uid = bytearray(new_id())
    uid[:64] = os.urandom(64)
    start = time.monotonic()
    with pytest.raises(pynccl.NCCLError):
        create(2, bytes(uid), 1, timeout=1.0)
    assert time.monotonic() - start < 5


# --- arguments of the creation -------------------------------------------------------------------------


@pytest.mark.parametrize(("nranks", "rank"), [(2, 2), (2, -1), (1, 1), (4, 100), (3, 2**31)])
def test_rank_out_of_range_is_a_value_error_with_the_range(nranks, rank):
    with pytest.raises(ValueError, match=rf"{rank}") as caught:
        create(nranks, new_id(), rank)
    assert f"0 to {nranks - 1}" in str(caught.value) or "32 bits" in str(caught.value)


@pytest.mark.parametrize("nranks", [0, -1, -(2**40)])
def test_number_of_ranks_below_one_is_a_value_error(nranks):
    with pytest.raises(ValueError, match=f"{nranks}"):
        create(nranks, new_id(), 0)


@pytest.mark.parametrize(
    "words", [{"nranks": "2"}, {"rank": 0.0}, {"nranks": True}, {"rank": None}]
)
def test_number_that_is_no_int_is_a_type_error(words):
    arguments = {"nranks": 1, "uid": new_id(), "rank": 0} | words
    with pytest.raises(TypeError, match=next(iter(words))):
        pynccl.Communicator(**arguments, library="host")


@pytest.mark.parametrize("timeout", [-1, float("nan"), -0.5, timedelta(seconds=-1)])
def test_timeout_that_is_no_duration_is_a_value_error(timeout):
    with pytest.raises(ValueError, match="timeout"):
        create(1, new_id(), 0, timeout=timeout)


def test_timeout_is_seconds_or_timedelta():
    for timeout, seconds in ((3, 3.0), (2.5, 2.5), (timedelta(minutes=1), 60.0)):
        with create(1, new_id(), 0, timeout=timeout) as comm:
            assert comm.timeout == seconds


def test_properties_say_what_was_asked_for():
    with create(1, new_id(), 0, device=3) as comm:
        assert (comm.rank, comm.nranks, comm.device, comm.closed) == (0, 1, 3, False)
        assert comm.library.kind == "host"
        assert comm.library.version == pynccl.version_code("host") >= 21800
        assert os.path.basename(comm.library.path) == "libpynccl_host.so"
        assert "rank 0 of 1" in repr(comm)


def test_failed_creation_does_not_spoil_the_next(crew):
    uid = new_id()
    with pytest.raises(ValueError):
        create(2, uid, 5)
    comms = [o.value for o in crew(2).run(lambda rank: create(2, uid, rank), 20)]
    for comm in comms:
        assert comm.nranks == 2
        comm.close()


# --- creations that cannot come about ------------------------------------------------------------------


def test_missing_rank_times_out_and_is_named():
    start = time.monotonic()
    with pytest.raises(pynccl.NCCLTimeoutError, match="1") as caught:
        create(2, new_id(), 0, timeout=1.0)
    assert 0.9 < time.monotonic() - start < 4
    assert isinstance(caught.value, TimeoutError)


def test_rank_that_gathers_the_others_and_is_stopped_is_named():
    """It alone knows who has come; whoever waits for its answer can say at least which process it is."""
    uid = new_id()
    process = scripts.start(
        """
        import sys
        import pynccl
        pynccl.Communicator(3, bytes.fromhex(sys.argv[1]), 0, timeout=60)
        """,
        uid.hex(),
    )

    def listens():
        lines = pathlib.Path("/proc/net/unix").read_text().splitlines()
        return any(
            uid[:16].hex() in line and " 00010000 " in line for line in lines
        )  # SO_ACCEPTCON

    try:
        scripts.wait_until(listens, 20, "the first rank has not come")
        process.send_signal(signal.SIGSTOP)
        with pytest.raises(pynccl.NCCLTimeoutError, match=rf"pid {process.pid}\) does not answer"):
            create(3, uid, 1, timeout=0.5)
    finally:
        process.kill()
        scripts.finish(process)


def test_verdict_is_heard_although_the_connection_was_reset_after_it():
    """Linux tells a reset before what was sent ahead of it."""
    uid, code = new_id(), 5  # ncclInvalidUsage
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
        server.bind(f"\0pynccl-{uid[:16].hex()}")
        server.listen()
        guest = scripts.start(
            """
            import sys
            import pynccl
            try:
                pynccl.Communicator(2, bytes.fromhex(sys.argv[1]), 1, timeout=20)
            except pynccl.NCCLError as error:
                print(error)
            """,
            uid.hex(),
        )
        try:
            server.settimeout(20)
            connection, _ = server.accept()
            connection.recv(
                1, socket.MSG_PEEK
            )  # the greeting is there; closing with it unread is a reset
            guest.send_signal(signal.SIGSTOP)
            connection.send(struct.pack("=i512s", code, b"CommInitRank: the verdict"))
            connection.close()
            guest.send_signal(signal.SIGCONT)
            _, out, err = scripts.finish(guest, 30)
        finally:
            guest.kill()
    assert "the verdict" in out, (out, err)


def test_several_missing_ranks_are_all_named(crew):
    uid = new_id()
    ranks = [0, 3]
    for outcome in crew(2).run(lambda i: create(5, uid, ranks[i], timeout=1.0), 20):
        assert isinstance(outcome.error, pynccl.NCCLTimeoutError), outcome
        for missing in "124":
            assert missing in str(outcome.error).split("ncclCommInitRank")[1], outcome


def test_id_of_a_creation_that_timed_out_is_not_reusable(crew):
    uid = new_id()
    with pytest.raises(pynccl.NCCLTimeoutError):
        create(2, uid, 0, timeout=0.5)
    start = time.monotonic()
    for outcome in crew(2).run(lambda rank: create(2, uid, rank, timeout=3.0), 20):
        assert isinstance(outcome.error, pynccl.NCCLError), outcome
    assert time.monotonic() - start < 6


def test_number_of_ranks_on_which_ranks_disagree(crew):
    uid = new_id()
    start = time.monotonic()
    outcomes = crew(2).run(lambda rank: create(2 + rank, uid, rank, timeout=3.0), 20)
    assert time.monotonic() - start < 5
    for outcome in outcomes:
        assert isinstance(outcome.error, pynccl.NCCLError), outcome
    assert any(
        isinstance(o.error, pynccl.InvalidUsageError) and "2" in str(o) and "3" in str(o)
        for o in outcomes
    ), outcomes


def test_rank_that_comes_twice(crew):
    uid = new_id()
    start = time.monotonic()
    outcomes = crew(3).run(lambda i: create(3, uid, (0, 1, 1)[i], timeout=3.0), 20)
    assert time.monotonic() - start < 5
    for outcome in outcomes:
        assert isinstance(outcome.error, pynccl.NCCLError), outcome
    assert any(
        isinstance(o.error, pynccl.InvalidUsageError) and "rank 1" in str(o.error) for o in outcomes
    ), outcomes


def test_id_serves_once(crew):
    uid = new_id()
    first = [o.value for o in crew(2).run(lambda rank: create(2, uid, rank), 20)]
    start = time.monotonic()
    for outcome in crew(2).run(lambda rank: create(2, uid, rank, timeout=3.0), 20):
        assert isinstance(outcome.error, pynccl.NCCLError), outcome
        assert "id" in str(outcome.error)
    assert time.monotonic() - start < 2
    both = crew(2).run(lambda rank: cases.sum_of_ranks(first[rank]), 20)
    assert all(o.error is None for o in both), both
    for comm in first:
        comm.close()


def test_id_of_a_closed_communicator_does_not_serve_again():
    uid = new_id()
    create(1, uid, 0).close()
    with pytest.raises(pynccl.NCCLError, match="id"):
        create(1, uid, 0, timeout=2.0)


# --- many ----------------------------------------------------------------------------------------------


def test_many_communicators_live_side_by_side():
    comms = [create(1, new_id(), 0) for _ in range(40)]
    for i, comm in enumerate(comms):
        assert comm.all_reduce(np.array([i])).tolist() == [i]
    for comm in reversed(comms):
        comm.close()


# --- several at once -----------------------------------------------------------------------------------


@pytest.mark.parametrize("devices", [3, [0, 1, 2], (5, 2, 9), range(3), np.arange(3)])
def test_init_all_creates_one_communicator_per_device(devices):
    comms = pynccl.init_all(devices, library="host")
    numbers = list(range(3)) if isinstance(devices, int) else [int(d) for d in devices]
    assert [(c.rank, c.nranks, c.device) for c in comms] == [
        (i, 3, d) for i, d in enumerate(numbers)
    ]
    with pynccl.group():
        outs = [comm.all_reduce(np.array([comm.rank + 1])) for comm in comms]
    assert [out.tolist() for out in outs] == [[6]] * 3
    for comm in comms:
        comm.close()


@pytest.mark.parametrize("devices", [0, [], -1, [-1], [0, -3]])
def test_init_all_needs_devices(devices):
    with pytest.raises(ValueError, match="device"):
        pynccl.init_all(devices, library="host")


def test_init_all_refuses_a_device_named_twice(monkeypatch):
    monkeypatch.delenv("NCCL_MULTI_RANK_GPU_ENABLE", raising=False)
    with pytest.raises(pynccl.InvalidUsageError, match="ranks 0 and 2 .*device 4"):
        pynccl.init_all([4, 5, 4], library="host")
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    for comm in pynccl.init_all([4, 4], library="host"):
        comm.close()
