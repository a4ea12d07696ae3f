"""In place exactly where NCCL allows it; every other overlap is refused; inputs stay as they are."""

import ctypes

import numpy as np
import pytest

import pynccl
from helpers import cases, data, oracle

MOVERS_AND_REDUCERS = [name for name in oracle.COLLECTIVES if name != "all_to_all"]


@pytest.mark.parametrize("nranks", [1, 2, 3])
@pytest.mark.parametrize("name", MOVERS_AND_REDUCERS)
def test_in_place_form_is_right_at_every_root(threads, name, nranks):
    dtypes = ["int32", "float16", "uint8"]
    threads(nranks).run(
        cases.play, cases.grid([name], dtypes, nranks, (1, 3, 1000, 70001), ["in place"])
    )


def slot_gather(comm):
    out = np.zeros(6, np.int64)
    mine = out[2 * comm.rank : 2 * comm.rank + 2]
    mine[:] = comm.rank
    comm.all_gather(mine, out=out)
    assert out.tolist() == [0, 0, 1, 1, 2, 2]


def test_all_gather_in_place_means_the_own_slot(threads):
    threads(3).run(slot_gather)


def refuse(comm, call, *match):
    """The call raises on this rank, nothing is written, and the communicator still works."""
    memory = np.arange(24.0)
    before = memory.copy()
    with pytest.raises(ValueError, match="overlap") as caught:
        call(comm, memory)
    for word in match:
        assert word in str(caught.value)
    assert (memory == before).all()
    cases.sum_of_ranks(comm)


# Every rank refuses on its own, so that no partner is left waiting.
OVERLAPS = {
    "all_reduce shifted up": lambda c, m: c.all_reduce(m[0:4], out=m[2:6]),
    "all_reduce shifted down": lambda c, m: c.all_reduce(m[2:6], out=m[0:4]),
    "all_reduce by one element": lambda c, m: c.all_reduce(m[0:4], out=m[3:7]),
    "reduce_scatter at the start": lambda c, m: c.reduce_scatter(
        m[0:6], out=m[1:3] if c.rank != 0 else m[2:4]
    ),
    "reduce_scatter in another's block": lambda c, m: c.reduce_scatter(
        m[0:6], out=m[2 * ((c.rank + 1) % 3) :][:2]
    ),
    "all_gather in another's block": lambda c, m: c.all_gather(
        m[2 * ((c.rank + 1) % 3) :][:2], out=m[0:6]
    ),
    "all_gather between blocks": lambda c, m: c.all_gather(m[1:3], out=m[0:6]),
    "all_to_all in place": lambda c, m: c.all_to_all(m[0:6], out=m[0:6]),
    "all_to_all of one array": lambda c, m: (lambda v: c.all_to_all(v, out=v))(m[0:6]),
    "all_to_all shifted": lambda c, m: c.all_to_all(m[0:6], out=m[5:11]),
    "send_recv in place": lambda c, m: c.send_recv(
        m[0:4], (c.rank + 1) % 3, out=m[0:4], source=(c.rank - 1) % 3
    ),
    "send_recv shifted": lambda c, m: c.send_recv(
        m[0:4], (c.rank + 1) % 3, out=m[1:5], source=(c.rank - 1) % 3
    ),
}


@pytest.mark.parametrize("call", OVERLAPS.values(), ids=OVERLAPS)
def test_other_overlap_is_refused_by_name(threads, call):
    threads(3).run(refuse, call)


def refuse_at_root(comm, name, root):
    memory = np.arange(24.0)
    if comm.rank == root:
        with pytest.raises(ValueError, match=f"^{name}: .*overlap"):
            if name == "reduce":
                comm.reduce(memory[0:4], out=memory[1:5], root=root)
            elif name == "broadcast":
                comm.broadcast(memory[0:4], root, out=memory[1:5])
            elif name == "gather":
                comm.gather(memory[1:3], out=memory[0:6], root=root)
            else:
                comm.scatter(memory[0:6], out=memory[1:3], root=root)
    assert (memory == np.arange(24.0)).all()
    cases.sum_of_ranks(comm)


@pytest.mark.parametrize("name", ["reduce", "broadcast", "gather", "scatter"])
def test_overlap_at_the_root_is_refused(threads, name):
    for root in range(3):
        threads(3).run(refuse_at_root, name, root)


def neighbours(comm):
    memory = np.zeros(8, np.int32)
    memory[:4] = comm.rank + 1
    comm.all_reduce(memory[:4], out=memory[4:])
    assert memory.tolist() == [comm.rank + 1] * 4 + [3] * 4


def test_arrays_that_only_touch_do_not_overlap(threads):
    threads(2).run(neighbours)


def overlap_message(comm):
    memory = np.arange(8.0)
    address = memory.ctypes.data
    with pytest.raises(ValueError) as caught:
        comm.all_reduce(memory[0:4], out=memory[2:6])
    text = str(caught.value)
    assert "32 bytes" in text and hex(address) in text and hex(address + 16) in text
    with pytest.raises(ValueError, match=r"x be out\[0\]"):
        comm.all_gather(memory[1:3], out=memory[0:2])
    with pytest.raises(ValueError, match=r"out be x\[0\]"):
        comm.reduce_scatter(memory[0:2], out=memory[1:3])
    with pytest.raises(ValueError, match="does not work in place"):
        comm.all_to_all(memory, out=memory)


def test_overlap_message_gives_addresses_and_the_right_form(threads):
    threads(1).run(overlap_message)


def outputs_as_inputs(comm):
    x = np.array([comm.rank + 1])
    out = np.array([100 * (comm.rank + 1)])
    comm.all_reduce(x, out=out)
    assert (x.tolist(), out.tolist()) == ([comm.rank + 1], [3])


def test_what_the_output_held_before_does_not_matter(threads):
    threads(2).run(outputs_as_inputs)


def reduce_off_root(comm):
    x = np.array([[1, 2], [3, 4]]) if comm.rank == 0 else np.array([[4, 5], [6, 7]])
    result = comm.reduce(x, out=x, root=0)
    if comm.rank == 0:
        assert result is x
        assert x.tolist() == [[5, 7], [9, 11]]
    else:
        assert result is None
        assert x.tolist() == [[4, 5], [6, 7]]


def test_reduce_in_place_changes_the_root_alone(threads):
    threads(2).run(reduce_off_root)


def given_off_the_root(comm, name):
    # pynccl passes no receive buffer off the root; other users of the library do.
    library = ctypes.CDLL(comm.library.path)
    x, out = data.values("int32", 20_000, comm.rank), data.Guarded("int32", (40_000,))
    pointers = [ctypes.c_void_p(x.ctypes.data), ctypes.c_void_p(out.array.ctypes.data)]
    op = [] if name == "ncclGather" else [0]
    result = getattr(library, name)(
        *pointers,
        ctypes.c_size_t(x.size),
        int(pynccl.DataType.INT32),
        *op,
        0,
        ctypes.c_void_p(comm.handle),
        None,
    )
    assert result == 0
    if comm.rank:
        out.check_poisoned()
    else:
        out.check_guards()
        assert out.array[0] == (1 if name == "ncclGather" else 3)


@pytest.mark.parametrize("name", ["ncclReduce", "ncclGather"])
def test_library_leaves_a_receive_buffer_off_the_root_alone(threads, name):
    threads(2).run(given_off_the_root, name)


def same_memory_two_objects(comm):
    memory = np.full(1000, comm.rank + 1.0)
    assert comm.all_reduce(memory[:], out=memory) is memory
    assert (memory == 3).all()
    memory[:] = comm.rank
    comm.broadcast(memory[:], 1, out=memory)
    assert (memory == 1).all()


def test_in_place_is_told_by_address_not_by_object(threads):
    threads(2).run(same_memory_two_objects)
