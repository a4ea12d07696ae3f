"""What a creation or init() that failed leaves behind: nothing."""

import contextlib
import gc
import os
import pathlib
import time

import pytest

import pynccl
from helpers import scripts
from helpers.ranks import create, new_id


def held():
    """What this process holds that a failed creation could have left."""
    maps = pathlib.Path("/proc/self/maps").read_text().splitlines()
    sockets = pathlib.Path("/proc/net/unix").read_text().splitlines()
    mine = {os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if _open(fd)}
    return {
        "files": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "mappings": sum("memfd" in line or "/dev/shm" in line for line in maps),
        "shared memory": sum("pynccl" in name for name in os.listdir("/dev/shm")),
        "listeners": sum("@pynccl" in line and f"socket:[{line.split()[6]}]" in mine for line in sockets),
    }  # fmt: skip


def _open(fd):
    with contextlib.suppress(OSError):
        return os.readlink(f"/proc/self/fd/{fd}")
    return None


def resident():
    """Bytes of memory that this process has in use."""
    return int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def first_alone(crew, monkeypatch):
    create(3, new_id(), 0, timeout=0.02)


def last_alone(crew, monkeypatch):
    create(3, new_id(), 2, timeout=0.02)


def raise_first(outcomes):
    for outcome in outcomes:
        if outcome.error is not None:
            raise outcome.error


def ranks_disagree(crew, monkeypatch):
    uid = new_id()
    raise_first(crew.run(lambda rank: create(2 + rank, uid, rank, timeout=0.5), 20))


def rank_comes_twice(crew, monkeypatch):
    uid = new_id()
    raise_first(crew.run(lambda i: create(3, uid, 1, timeout=0.2), 20))


def id_was_used(crew, monkeypatch):
    uid = new_id()
    create(1, uid, 0).close()
    create(1, uid, 0, timeout=0.5)


def id_of_nobody(crew, monkeypatch):
    create(2, bytes(100) + new_id()[100:], 1, timeout=0.02)


def wrong_argument(crew, monkeypatch):
    create(2, new_id(), 2)


def group_that_raises(crew, monkeypatch):
    with pynccl.group():
        create(1, new_id(), 0)
        raise ValueError


def group_with_a_rank_missing(crew, monkeypatch):
    uid = new_id()
    with pynccl.group():
        create(3, uid, 0, timeout=0.02)
        create(3, uid, 1, timeout=0.02)


def group_with_a_failure_among_others(crew, monkeypatch):
    used = new_id()
    create(1, used, 0).close()
    with pynccl.group():
        kept = create(1, new_id(), 0, timeout=0.5)
        create(1, used, 0, timeout=0.5)
    assert kept.closed


def split_with_a_rank_missing(crew, monkeypatch):
    uid = new_id()
    comms = [o.value for o in crew.run(lambda rank: create(2, uid, rank, timeout=0.1), 20)]
    try:
        comms[0].split(0)
    finally:
        for comm in comms:
            comm.close()


def init_as(rank, **words):
    def fail(crew, monkeypatch):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", "3")
        monkeypatch.setenv("PYNCCL_JOB_ID", new_id()[:8].hex())
        pynccl.init(**({"timeout": 0.05, "library": "host"} | words))

    return fail


def init_of_ranks_that_disagree(crew, monkeypatch):
    from pynccl._rendezvous import share

    job = {"PYNCCL_JOB_ID": new_id()[:8].hex()}

    def meet(rank):
        env = job | {"RANK": str(rank), "WORLD_SIZE": str(2 + rank)}
        share(rank, 2 + rank, lambda: b"", timeout=0.5, env=env)

    raise_first(crew.run(meet, 20))


FAILURES = {
    "the first rank alone": first_alone,
    "the last rank alone": last_alone,
    "ranks disagree": ranks_disagree,
    "a rank comes twice": rank_comes_twice,
    "an id that was used": id_was_used,
    "an id of nobody": id_of_nobody,
    "a wrong argument": wrong_argument,
    "a group that raises": group_that_raises,
    "a group with a rank missing": group_with_a_rank_missing,
    "a group with one failure": group_with_a_failure_among_others,
    "a split with a rank missing": split_with_a_rank_missing,
    "init of rank 0 alone": init_as(0),
    "init of rank 1 alone": init_as(1),
    "init with no library": init_as(0, library="/nowhere/libnccl.so"),
    "init of ranks that disagree": init_of_ranks_that_disagree,
}


@pytest.mark.parametrize("failure", FAILURES.values(), ids=FAILURES)
def test_nothing_is_left_of_a_failed_creation(failure, crew, monkeypatch):
    two = crew(2)

    def rounds(count):
        for _ in range(count):
            with pytest.raises((ValueError, ImportError, pynccl.NCCLError)):
                failure(two, monkeypatch)
        gc.collect()

    rounds(1)
    before, memory = held(), resident()
    rounds(4)
    with contextlib.suppress(AssertionError):  # a peer's thread may still be on its way out
        scripts.wait_until(lambda: held() == before, 2)
    assert held() == before
    assert resident() - memory < 4 << 20  # what a communicator maps is megabytes


def test_failed_init_may_be_tried_again(monkeypatch, crew):
    with pytest.raises(pynccl.NCCLTimeoutError):
        init_as(0)(None, monkeypatch)
    monkeypatch.setenv("WORLD_SIZE", "1")
    start = time.monotonic()
    pynccl.init(library="host").close()
    assert time.monotonic() - start < 5
