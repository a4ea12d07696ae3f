"""Kinds of faults that people met elsewhere: the table in docs/faults.md, and those with no test yet."""

import ast
import gc
import itertools
import mmap
import re
import time
from pathlib import Path

import numpy as np
import pytest

import pynccl
from helpers import cases, data, scripts
from helpers.ranks import ThreadWorld, create, new_id

TESTS = Path(__file__).resolve().parent
TABLE = TESTS.parent / "docs" / "faults.md"
ROW = re.compile(r"\| (B\d{3}) \| ([^|]+) \| ([^|]+) \|")


def rows():
    """(id, kind, named tests) of each row."""
    found = [ROW.fullmatch(line) for line in TABLE.read_text().splitlines()]
    return [(m[1], m[2], re.findall(r"`(\w+\.py)::(\w+)`", m[3])) for m in found if m]


def functions_of(name):
    """The test functions that pytest collects from a file."""
    body = ast.parse((TESTS / name).read_text()).body
    return {
        node.name
        for node in body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }


def test_every_row_of_the_table_names_tests_that_exist():
    table = rows()
    lines = [line for line in TABLE.read_text().splitlines() if line.startswith("| B")]
    assert len(table) == len(lines) >= 25  # each line has the form of a row
    assert all(first[0] < second[0] for first, second in itertools.pairwise(table))
    for name, _, tests in table:
        assert tests, f"{name}: no test is named"
        for file, function in tests:
            assert (TESTS / file).exists(), f"{name}: {file}"
            assert function in functions_of(file), f"{name}: {file}::{function}"


# --- the kinds that no other file has ------------------------------------------------------------------


def scalars(comm):
    x = np.array(comm.rank + 1, np.float32)
    assert x.shape == ()
    assert comm.all_reduce(x) == 3
    assert comm.all_gather(x).tolist() == [1, 2]
    assert comm.gather(x, root=1) is None or comm.rank == 1
    assert comm.broadcast(x, root=1) == 2
    assert comm.send_recv(x + comm.rank, 1 - comm.rank) == 3 - comm.rank


def test_array_without_axes_is_one_element(threads):
    threads(2).run(scalars)


def guarded(comm):
    n = comm.nranks
    x = data.values("float32", 4, comm.rank)
    for size in (4 * n - 1, 4 * n + 1):
        out = data.Guarded("float32", (size,))
        with pytest.raises(ValueError, match=rf"all_gather: .*\b{size}\b"):
            comm.all_gather(x, out=out.array)
        out.check_poisoned()
    for size in (2 * n - 1, 2 * n + 1):
        out = data.Guarded("float32", (2,))
        with pytest.raises(ValueError, match=rf"reduce_scatter: .*\b{size}\b"):
            comm.reduce_scatter(data.values("float32", size, comm.rank), out=out.array)
        out.check_poisoned()
    cases.sum_of_ranks(comm)


@pytest.mark.parametrize("nranks", [2, 3])
def test_wrong_sizes_touch_neither_the_output_nor_what_lies_around_it(nranks, threads):
    threads(nranks).run(guarded)


def off_the_root(comm):
    x, nothing = np.arange(3.0) + comm.rank, np.full(6, -1.0)
    for other in (None, nothing, np.empty(0)) if comm.rank else (None,):
        gathered = comm.gather(x, out=other)
        assert (gathered is None) == (comm.rank > 0)
    if comm.rank == 0:
        assert gathered.tolist() == [[0, 1, 2], [1, 2, 3]]
        comm.gather(x), comm.gather(x)
    assert nothing.tolist() == [-1] * 6
    out = np.zeros(3)
    for other in (None, nothing, np.empty(0)):
        comm.scatter(np.arange(6.0) if comm.rank == 0 else other, out=out)
        assert out.tolist() == [3.0 * comm.rank + i for i in range(3)]


def test_what_is_given_off_the_root_is_ignored_alike_by_gather_and_scatter(threads):
    threads(2).run(off_the_root)


def two_dtypes(comm):
    x, y = np.arange(3, dtype="f4") + comm.rank, np.array([10, -(2**40)], "i8") * (comm.rank + 1)
    with pynccl.group():
        sums = comm.all_reduce(x), comm.all_reduce(y)
        both = comm.all_gather(x), comm.all_gather(y)
    assert [s.dtype for s in sums] == [np.float32, np.int64]
    assert [s.tolist() for s in sums] == [[1, 3, 5], [30, -3 * 2**40]]
    assert both[0].tolist() == [[0, 1, 2], [1, 2, 3]]
    assert both[1].tolist() == [[10, -(2**40)], [20, -(2**41)]]


def test_calls_of_one_group_keep_their_own_dtypes_and_sizes(threads):
    threads(2).run(two_dtypes)


def roots_of_a_part(comm):
    with comm.split(comm.rank // 2) as part:
        x = np.array([10 * comm.rank])
        part.broadcast(x, root=1)
        assert x.tolist() == [[10], [10], [30], [30]][comm.rank]
        total = part.reduce(np.array([comm.rank]), root=1)
        assert (total is None) == (comm.rank in (0, 2))
        for root in (comm.rank, 3, 2):
            if root > 1:
                with pytest.raises(ValueError, match=rf"root {root} .*size is 2"):
                    part.broadcast(x, root=root)


def test_root_is_a_rank_of_the_communicator_it_is_given_to(threads):
    threads(4).run(roots_of_a_part)


@pytest.mark.parametrize("verb", ["send", "recv", "send_recv"])
def test_tag_is_refused_and_not_ignored(verb, alone):
    with pytest.raises(TypeError, match="tag"):
        getattr(alone, verb)(np.zeros(3), 0, tag=1)


def test_group_that_has_not_begun_cannot_end(alone):
    group = pynccl.group()
    with pytest.raises(ValueError, match="group: the block has not begun"):
        group.__exit__(None, None, None)
    with group:
        pass
    with pytest.raises(ValueError, match="has ended already"):
        group.__exit__(None, None, None)
    cases.sum_of_ranks(alone)


def unanswered_batch(comm):
    if comm.rank == 0:
        return None
    out = np.full(3, -1.0)
    with pynccl.group():
        comm.recv(out, 0)
        comm.recv(out[:0], 0)
    return out


def test_receive_in_a_group_that_nobody_answers_times_out_and_the_process_goes_on():
    with ThreadWorld(2, timeout=1.0) as world:
        idle, waiting = world.outcomes(unanswered_batch, limit=20)
        assert idle.error is None
        assert isinstance(waiting.error, pynccl.NCCLTimeoutError), waiting
        assert 0.9 < waiting.seconds < 4
        text = str(waiting.error).lower()
        assert "recv" in text and "rank 0" in text, text
        for comm in world.comms:
            comm.close()
        world.renew()
        world.run(cases.sum_of_ranks)


def test_every_rank_of_init_hears_why_rank_0_has_no_library():
    env = {"WORLD_SIZE": "3", "PYNCCL_JOB_ID": new_id()[:8].hex()}
    code = """
        import os, pynccl
        try:
            library = "/nowhere/libnccl.so.2" if os.environ["RANK"] == "0" else "host"
            pynccl.init(library=library, timeout=20)
        except Exception as error:
            print(type(error).__name__, error)
    """
    start = time.monotonic()
    ranks = [scripts.start(code, RANK=str(rank), **env) for rank in range(3)]
    texts = [scripts.finish(rank)[1] for rank in ranks]
    assert time.monotonic() - start < 10
    assert texts[0].startswith("LibraryNotFoundError")
    for text in texts[1:]:
        assert text.startswith("RemoteError")
        assert "rank 0 failed: LibraryNotFoundError" in text
    assert all("/nowhere/libnccl.so.2" in text for text in texts)


def test_printing_reads_no_array_and_needs_no_communicator():
    comm = create(1, new_id(), 0)
    memory = mmap.mmap(-1, 4096)
    x = np.frombuffer(memory, "f8", 4)
    raw = pynccl.Buffer(ptr=x.ctypes.data, count=4, dtype="f8")
    with pynccl.group(run=False) as plan:
        comm.all_reduce(raw, out=raw)
    plan()
    shown = [repr(plan), repr(raw)]
    assert shown == ["<pynccl.group: 1 calls, built>", "<Buffer of 4 x float64 on host>"]
    del x
    memory.close()  # whoever reads there now dies
    comm.abort()
    assert [repr(plan), str(raw)] == shown
    assert repr(comm) == str(comm) == "<Communicator rank 0 of 1 of host, aborted>"
    del comm
    gc.collect()
    assert [str(plan), repr(raw)] == shown
