"""What NCCL is told of children, growth, revocation and settings, seen by a recording library."""

import struct

import pytest

import pynccl
from helpers.device import NRANKS, RANK, communicator, cuda, on_device
from helpers.stubs import NcclStub, build_nccl_stub
from test_children import FIELDS

UNDEF = -(2**31)


def config_of(call, name="config"):
    """Return the numbers of a recorded ncclConfig_t, in its own order."""
    raw = call.attached[name]
    return struct.unpack("@NIIiiiiPiiP15i", raw[:116])[3:]


@on_device
def test_shrink_tells_the_list_and_the_flag():
    with communicator() as (comm, nccl):
        with comm.shrink([1, 0] if RANK > 1 else [NRANKS - 1], abort=True) as child:
            assert child.nranks < NRANKS
        (call,) = nccl.of("ncclCommShrink")
        assert (call.shrinkFlags, call.config) == (1, 0)
        assert call.comm == comm.handle
        size = call.excludeRanksCount
        listed = struct.unpack(f"<{size}i", call.attached["excludeRanksList"])
        assert list(listed) == ([0, 1] if RANK > 1 else [NRANKS - 1])
        comm.shrink([NRANKS - 1]).abort()
        assert nccl.of("ncclCommShrink")[1].shrinkFlags == 0


@on_device
def test_grow_tells_the_id_only_where_it_is_brought():
    with communicator() as (comm, nccl):
        uid = comm.unique_id()
        comm.grow(NRANKS + 1, bytes(range(96)) + bytes(32)).abort()
        comm.grow(NRANKS + 1).abort()
        brings, waits = nccl.of("ncclCommGrow")
        assert brings.attached["uniqueId"] == bytes(range(96)) + bytes(32)
        assert (waits.uniqueId, waits.rank, waits.nRanks) == (0, -1, NRANKS + 1)
        path = comm.library.path
        pynccl.Communicator.join(9, uid, 8, library=path, device=0).abort()
        joins = nccl.of("ncclCommGrow")[2]
        assert (joins.comm, joins.rank, joins.nRanks) == (0, 8, 9)


@on_device
def test_revoke_finalize_and_async_error_are_nccls():
    with communicator() as (comm, nccl):
        nccl.asynchronous(6)
        assert comm.async_error is pynccl.Result.REMOTE_ERROR
        comm.revoke()
        (call,) = nccl.of("ncclCommRevoke")
        assert (call.comm, call.revokeFlags) == (comm.handle, 0)
        comm.finalize()
        assert len(nccl.of("ncclCommFinalize")) == 1
        with pytest.raises(pynccl.CommunicatorClosedError, match="was finalized"):
            comm.barrier()


@on_device
def test_every_field_of_a_config_arrives():
    with communicator(config=pynccl.Config(**FIELDS)) as (comm, nccl):
        comm.split(0, config=pynccl.Config(**FIELDS)).abort()
        numbers = config_of(nccl.of("ncclCommSplit")[0])
        texts = [i for i, name in enumerate(FIELDS) if isinstance(FIELDS[name], str)]
        for i, (name, value) in enumerate(FIELDS.items()):
            if i in texts:
                assert numbers[i] != 0, name
            else:
                assert numbers[i] == value, name
        comm.split(0, config=pynccl.Config(nvls_ctas=3)).abort()
        numbers = config_of(nccl.of("ncclCommSplit")[1])
        assert [n for n in numbers if n not in (UNDEF, 0)] == [3]


@on_device
def test_field_that_is_newer_than_nccl_is_refused_by_name():
    path = str(build_nccl_stub(22105))
    NcclStub(path).share(cuda())
    uid = pynccl.unique_id(path)
    with pytest.raises(pynccl.UnsupportedError, match=r"comm_name needs NCCL 2\.27, loaded 2\.21"):
        pynccl.Communicator(2, uid, 0, library=path, device=0, config=pynccl.Config(comm_name="a"))


@on_device
def test_creation_in_the_background_is_polled():
    path = str(build_nccl_stub())
    nccl = NcclStub(path)
    nccl.share(cuda())
    cuda().make_current(cuda().primary(0))
    uid = pynccl.unique_id(path)
    nccl.asynchronous(7, polls=3)
    config = pynccl.Config(blocking=False)
    comm = pynccl.Communicator(NRANKS, uid, RANK, library=path, device=0, config=config, timeout=5)
    assert comm.async_error is pynccl.Result.IN_PROGRESS
    with pytest.raises(pynccl.InProgressError, match="wait_ready"):
        comm.split(0)
    comm.wait_ready()
    assert comm.rank == RANK
    nccl.asynchronous(7, polls=2)
    nccl.fail("ncclCommSplit", 7)  # its handle comes later, or never
    assert comm.split(0).closed
    nccl.reset()
    comm.abort()


@on_device
def test_several_ids_go_to_nccl_together():
    path = str(build_nccl_stub())
    nccl = NcclStub(path)
    nccl.share(cuda())
    cuda().make_current(cuda().primary(0))
    ids = [pynccl.unique_id(path) for _ in range(2)]
    pynccl.Communicator(NRANKS, ids, RANK, library=path, device=0).abort()
    (call,) = nccl.of("ncclCommInitRankScalable")
    assert (call.nranks, call.myrank, call.nId) == (NRANKS, RANK, 2)
    assert call.attached["commIds"] == b"".join(ids)
    nccl.reset()
