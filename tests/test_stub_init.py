"""init() on pretended devices: which device becomes current."""

import os

import pynccl
from helpers.device import LATEST, cuda, forget, on_device
from helpers.stubs import NcclStub, build_nccl_stub
from pynccl import _rendezvous


@on_device
def test_device_local_rank_is_current_after_init_and_no_other_creation_changes_it():
    path = str(build_nccl_stub(LATEST))
    nccl = NcclStub(path)
    nccl.share(cuda())
    cuda().make_current(cuda().primary(0))
    forget(nccl)
    environ = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    share, uid = _rendezvous.share, pynccl.unique_id(path)
    os.environ.update(environ)
    _rendezvous.share = lambda *args, **words: uid
    try:
        with pynccl.init(library=path) as comm:
            assert comm.rank == 1
            assert cuda().current_context == cuda().primary(1)
            (init,) = nccl.of("ncclCommInitRank")
            assert (init.device, init.rank) == (1, 1)
        with pynccl.Communicator(2, uid, 0, device=0, library=path):
            assert cuda().current_context == cuda().primary(1)
        with pynccl.Communicator(2, uid, 0, device=0, timeout=5, library=path):
            assert cuda().current_context == cuda().primary(1)
    finally:
        _rendezvous.share = share
        for name in environ:
            del os.environ[name]
        cuda().make_current(cuda().primary(0))
