"""FileStore: writers that die at any byte, files that are not ours, and who removes the file."""

from __future__ import annotations

import fcntl
import os
import random
import signal
import time

import pytest

from helpers.scripts import finish, run, start
from pynccl import StoreError, StoreTimeoutError
from pynccl.distributed import FileStore


@pytest.fixture
def path(tmp_path):
    return tmp_path / "store"


def test_processes_count_together(path):
    code = """
        import sys
        from pynccl.distributed import FileStore
        store = FileStore(sys.argv[1], timeout=60)
        for i in range(200):
            store.add("n", 1)
            store.append("log", sys.argv[2])
    """
    processes = [start(code, str(path), name) for name in "abc"]
    for process in processes:
        assert finish(process, 60) == (0, "", "")
    store = FileStore(path)
    assert store.add("n", 0) == 600
    log = store.get("log")
    assert [log.count(name) for name in (b"a", b"b", b"c")] == [200] * 3


def test_a_forked_child_and_its_parent_exclude_each_other(path):
    # A lock of the inherited open file would be both processes' at once.
    code = """
        import os, sys
        from pynccl.distributed import FileStore
        store = FileStore(sys.argv[1], timeout=60)
        store.add("n", 0)
        pid = os.fork()
        for i in range(1500):
            store.add("n", 1)
        if not pid:
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
        print(store.add("n", 0))
    """
    assert run(code, str(path), limit=60) == "3000\n"


def test_a_record_cut_at_any_byte_is_as_if_never_written(path):
    FileStore(path).multi_set(["a", "b"], [b"1", b"22"])
    whole = path.read_bytes()
    FileStore(path).multi_set(["a", "c"], [b"3", b"4"])
    both = path.read_bytes()
    assert both.startswith(whole)
    for cut in range(len(whole), len(both)):
        path.write_bytes(both[:cut])
        store = FileStore(path)
        assert store.multi_get(["a", "b"]) == [b"1", b"22"] and not store.check(["c"])
        store.set("d", b"5")  # and the next record is readable by others
        fresh = FileStore(path)
        assert fresh.list_keys() == ["a", "b", "d"]
        assert path.read_bytes()[: len(whole)] == whole
        store.close(), fresh.close()


def test_a_header_cut_at_any_byte_is_written_again(path):
    FileStore(path).close()
    header = path.read_bytes()
    for cut in range(len(header)):
        path.write_bytes(header[:cut])
        assert FileStore(path).add("n", 1) == 1


def test_a_last_record_with_holes_is_dropped(path):
    # What a machine that lost power may leave: the length is there, the bytes are not.
    store = FileStore(path)
    store.set("a", b"1")
    size = path.stat().st_size
    store.set("b", bytes(range(100)))
    data = bytearray(path.read_bytes())
    data[size + 20 :] = bytes(len(data) - size - 20)
    path.write_bytes(data)
    assert FileStore(path).list_keys() == ["a"]
    path.write_bytes(data[:size] + bytes(4096))
    assert FileStore(path).list_keys() == ["a"]


def test_damage_before_the_end_is_an_error(path):
    store = FileStore(path)
    store.set("a", b"11111111")
    size = path.stat().st_size
    store.set("b", b"2")
    data = bytearray(path.read_bytes())
    data[size - 1] ^= 1
    path.write_bytes(data)
    with pytest.raises(StoreError, match="is damaged at byte 8: wrong checksum"):
        FileStore(path).get("b")


def test_a_file_of_another_kind_is_left_alone(path):
    path.write_bytes(b"my thesis")
    with pytest.raises(StoreError, match="is a file of another kind"):
        FileStore(path)
    assert path.read_bytes() == b"my thesis"
    with pytest.raises(StoreError, match="cannot open"):
        FileStore(path / "below")


@pytest.mark.fault
def test_writers_killed_at_any_moment_lose_only_their_last_call(path):
    # Values larger than a page, so that kills fall into writes too. Each value says what it must be.
    code = """
        import sys
        from pynccl.distributed import FileStore
        store = FileStore(sys.argv[1], timeout=30)
        print("ready", flush=True)
        while True:
            n = store.add("n", 1)
            store.multi_set(["a", "b"], [b"%d:" % n + bytes(300000), b"%d:" % n])
    """
    rng = random.Random(5)
    survivor = FileStore(path, timeout=20)
    last = 0
    for _ in range(15):
        process = start(code, str(path))
        assert process.stdout.readline() == "ready\n"
        time.sleep(rng.uniform(0.0, 0.05))
        process.send_signal(signal.SIGKILL)
        process.communicate()
        n = survivor.add("n", 0)
        assert n >= last
        last = n
        if survivor.check(["a"]):
            a, b = survivor.multi_get(["a", "b"])
            assert a == b + bytes(300000), "both keys of one call, or none"
        survivor.set("alive", b"%d" % n)
        fresh = FileStore(path)
        assert fresh.get("alive") == b"%d" % n
        fresh.close()
    assert last > 0


@pytest.mark.fault
def test_a_stopped_writer_that_holds_the_lock_ends_in_a_timeout(path):
    store = FileStore(path)
    other = os.open(path, os.O_RDWR)
    fcntl.flock(other, fcntl.LOCK_EX)
    begun = time.monotonic()
    with pytest.raises(StoreTimeoutError, match="another process holds the file's lock"):
        store.set("a", b"", timeout=0.3)
    assert 0.25 < time.monotonic() - begun < 1.5
    os.close(other)
    store.set("a", b"", timeout=0.3)


def test_a_full_disk_leaves_the_file_readable(path):
    code = """
        import resource, signal, sys
        from pynccl import StoreError
        from pynccl.distributed import FileStore
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        store = FileStore(sys.argv[1])
        store.set("a", b"1")
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
        try:
            store.set("b", bytes(10000))
        except StoreError as error:
            print("File too large" in str(error))
        store.set("c", b"3")
        print(store.list_keys())
    """
    assert run(code, str(path)) == "True\n['a', 'c']\n"
    assert FileStore(path).list_keys() == ["a", "c"]


def test_the_last_to_leave_removes_the_file(path):
    first, second = FileStore(path, 2), FileStore(path, 2)
    first.set("a", b"1")
    first.close()
    assert path.exists() and second.get("a") == b"1"
    second.close()
    assert not path.exists()
    # And the path is free for the next job, which sees nothing of this one.
    assert FileStore(path, 1).num_keys() == 0


def test_a_process_that_ends_has_left(path):
    code = """
        import os, sys
        from pynccl.distributed import FileStore
        store = FileStore(sys.argv[1], 2)
        store.add("n", 1)
        if not os.fork():
            sys.exit(0)   # a child's end does not count
        os.wait()
    """
    run(code, str(path))
    assert path.exists()
    run(code, str(path))
    assert not path.exists()


def test_without_a_world_size_the_file_stays(path):
    FileStore(path).close()
    FileStore(path, -1).close()
    assert path.exists()


def test_wrong_arguments_are_named(path):
    with pytest.raises(TypeError, match="FileStore: world_size is str; expected int"):
        FileStore(path, "2")
