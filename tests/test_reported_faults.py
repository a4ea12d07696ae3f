"""Faults that people met with arrays elsewhere, as small inputs between two ranks."""

import numpy as np
import pytest

import pynccl
from helpers.arrays import ABSENT, CaiArray
from pynccl import LayoutError


class Said:
    """An object whose interface says anything."""

    def __init__(self, **fields):
        self.keep = fields.pop("memory", None)
        self.__cuda_array_interface__ = {"version": 3, **fields}


def empties(comm):
    for shape in ((0,), (3, 0, 2)):
        for data in ((0, False), (None, False), (12345, True)):
            x = Said(shape=shape, typestr="<f4", data=data)
            out = Said(shape=shape, typestr="<f4", data=(data[0], False))
            assert comm.all_reduce(x, out=out) is out
    return comm.all_reduce(np.array([1.0 + comm.rank])).tolist()


def test_empty_arrays_take_part_and_their_pointer_is_not_looked_at(threads):
    assert threads(2).run(empties) == [[3.0], [3.0]]


def strides_of_c_order(comm):
    totals = []
    for strides in (None, ABSENT, (12, 4)):
        x = CaiArray(np.arange(6, dtype="f4").reshape(2, 3), strides=strides)
        totals.append(comm.all_reduce(x, out=np.zeros((2, 3), "f4")).ravel().tolist())
    return totals


def test_c_order_may_be_said_in_three_ways(threads):
    assert threads(2).run(strides_of_c_order) == [[[0, 2, 4, 6, 8, 10]] * 3] * 2


def odd_strides(comm):
    x = np.arange(10.0)
    row = Said(
        shape=(1, 10), typestr="<f8", strides=(800, 8), data=(x.ctypes.data, False), memory=x
    )
    none = Said(shape=(1, 0, 2), typestr="<f8", strides=(64, 16, 8), data=(0, False))
    comm.all_reduce(none, out=none)
    return comm.all_reduce(row, out=np.zeros(10)).tolist()


def test_the_stride_of_an_axis_of_one_does_not_matter(threads):
    assert threads(2).run(odd_strides) == [(2 * np.arange(10.0)).tolist()] * 2


def refused(comm, error, match, call):
    with pytest.raises(error, match=match):
        call(comm)
    return comm.all_reduce(np.array([1])).tolist()  # nothing of it has reached the library


def wide():
    memory = np.arange(4, dtype="i8")
    return Said(
        shape=(2, 4), typestr="<i8", strides=(0, 8), data=(memory.ctypes.data, False), memory=memory
    )


def foreign(comm):
    x = np.ones(2, ">f4")
    return comm.all_reduce(CaiArray(x), out=np.zeros(2, "f4"))


def gap(comm):
    x = np.zeros(8, "f4")
    said = {"shape": (3,), "typestr": "<f4", "strides": (6,), "data": (x.ctypes.data, False)}
    return comm.broadcast(Said(**said, memory=x))


def read_only(comm):
    x = CaiArray(np.ones(3), data=(np.ones(3).ctypes.data, True))
    return comm.all_reduce(x, out=x)


REFUSED = {
    "broadcast input": (LayoutError, r"x is not contiguous: shape \(2, 4\), strides \(0, 8\)",
                        lambda comm: comm.all_reduce(wide(), out=np.zeros((2, 4), "i8"))),
    "broadcast output": (LayoutError, "out is not contiguous",
                         lambda comm: comm.all_reduce(np.zeros((2, 4), "i8"), out=wide())),
    "foreign byte order": (TypeError, "foreign byte order", foreign),
    "half a stride": (LayoutError, r"shape \(3,\), strides \(6,\), itemsize 4", gap),
    "read-only in place": (BufferError, "read-only", read_only),
    "typestr |i": (TypeError, r"typestr '\|i' names no type",
                   lambda comm: comm.broadcast(Said(shape=(1,), typestr="|i", data=(8, False)))),
    "None as pointer": (TypeError, "pointer in its data .* is not an integer",
                        lambda comm: comm.broadcast(Said(shape=(3,), typestr="<f4", data=(None, False)))),
    "stream 0": (ValueError, "is 0, which the protocol forbids",
                 lambda comm: comm.broadcast(CaiArray(np.ones(2), stream=0))),
    "mask": (ValueError, "has a mask", lambda comm: comm.broadcast(CaiArray(np.ones(2), mask=np.ones(2)))),
    "int16 sum": (TypeError, "int16 cannot be reduced; supported are int8",
                  lambda comm: comm.all_reduce(np.ones(2, "i2"))),
    "complex product": (TypeError, "complex64 can be summed and averaged",
                        lambda comm: comm.all_reduce(np.ones(2, "c8"), op="prod")),
    "structure sum": (TypeError, "cannot be reduced",
                      lambda comm: comm.reduce(CaiArray(np.zeros(2, "V16")), root=1 - comm.rank)),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_what_would_give_wrong_data_is_refused(threads, what):
    assert threads(2).run(refused, *REFUSED[what]) == [[2], [2]]


def structure(comm):
    kind = np.dtype([("a", "f8"), ("b", "f8")])
    x = np.zeros(3, kind)
    if comm.rank == 0:
        x[:2] = [(1.5, 2.5), (3.5, 4.5)]
    said = Said(shape=(2,), typestr="|V16", descr=kind.descr, data=(x.ctypes.data, False), memory=x)
    comm.broadcast(said, 0)
    return x.tolist()


def test_a_structure_moves_whole_and_not_a_byte_more(threads):
    assert threads(2).run(structure) == [[(1.5, 2.5), (3.5, 4.5), (0, 0)]] * 2


COLUMN = {
    "all_reduce": {}, "reduce": {}, "broadcast": {},
    "all_gather": {"out": np.zeros(4)}, "gather": {"out": np.zeros(4)},
    "reduce_scatter": {"out": np.zeros(1)}, "scatter": {"out": np.zeros(1)},
    "all_to_all": {"out": np.zeros(2)},
}  # fmt: skip


def columns(comm, name, words):
    grid = np.arange(6.0).reshape(2, 3) + 10 * comm.rank
    root = {"root": comm.rank} if name in ("reduce", "broadcast", "gather", "scatter") else {}
    with pytest.raises(LayoutError, match=f"^{name}: x is not contiguous: .*strides"):
        getattr(comm, name)(grid[:, 1], **words, **root)
    with pytest.raises(LayoutError, match="^send: x is not contiguous"):
        comm.send(grid[:, 1], 1 - comm.rank)
    with pytest.raises(LayoutError, match="^recv: out is not contiguous"):
        comm.recv(grid[:, 1], 1 - comm.rank)
    return comm.all_reduce(np.array([1])).tolist()


@pytest.mark.parametrize("name", COLUMN)
def test_a_column_is_refused_by_every_call(threads, name):
    assert threads(2).run(columns, name, COLUMN[name]) == [[2], [2]]


def complex_sums(comm):
    x = np.array([1 + 2j if comm.rank == 0 else 3 + 4j], "c8")
    moved = x.copy()
    comm.broadcast(moved, 1)
    return [comm.all_reduce(x)[0], comm.all_reduce(x, op="avg")[0], moved[0]]


def test_complex_numbers_are_summed_averaged_and_moved(threads):
    assert threads(2).run(complex_sums) == [[4 + 6j, 2 + 3j, 3 + 4j]] * 2


def mixed(comm):
    floats, integers = np.full(3, 0.5, "f4"), np.full(2, 1 << 40)
    with pynccl.group():
        first, second = comm.all_reduce(floats), comm.all_reduce(integers)
    return first.tolist(), second.tolist()


def test_a_group_of_two_dtypes_and_sizes(threads):
    assert threads(2).run(mixed) == [([1.0] * 3, [1 << 41] * 2)] * 2


# Last here: it breaks the communicators.
def orders(comm):
    x = np.arange(6.0).reshape(2, 3)
    with pytest.raises(pynccl.NCCLError, match="order"):
        comm.all_reduce(x if comm.rank == 0 else np.asfortranarray(x))


def test_one_rank_in_c_order_and_one_in_fortran_order_is_an_error(threads):
    threads(2).run(orders)
