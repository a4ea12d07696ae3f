"""What the list API refuses: each message names the entry, and nothing has changed."""

import numpy as np
import pytest

import pynccl
import pynccl.multi as nccl
from helpers import oracle
from helpers.arrays import CaiArray


def f(*shape, dtype="f4"):
    return np.zeros(shape, dtype)


def readonly():
    x = f(3)
    x.setflags(write=False)
    return x


class Failing:
    @property
    def __cuda_array_interface__(self):
        raise KeyError("the array's own error")


BASE = f(12)

CASES = {
    # name: (function, arguments, exception, message)
    "count": ("all_reduce", [[f(3), f(3), f(4)]], ValueError,
              r"inputs\[2\] has 4 elements and inputs\[0\] has 3; all entries must have as many"),
    "dtype": ("all_reduce", [[f(3), f(3, dtype="i4")]], TypeError,
              r"inputs\[1\] is int32 and inputs\[0\] is float32; all entries must have one dtype"),
    "order": ("all_reduce", [[f(3, 2), np.asfortranarray(f(3, 2))]], BufferError,
              r"inputs\[1\] and inputs\[0\] are in different memory orders"),
    "strides": ("all_reduce", [[f(3), f(6)[::2]]], BufferError, r"inputs\[1\] .*strides"),
    "read-only": ("all_reduce", [[f(3), readonly()]], BufferError, r"inputs\[1\].*read-only"),
    "read-only output": ("all_reduce", [[f(3), f(3)], [f(3), readonly()]], BufferError,
                         r"outputs\[1\].*read-only"),
    "not an array": ("all_reduce", [[f(3), [1, 2, 3]]], TypeError, r"inputs\[1\] is a 'list'"),
    "nothing": ("all_reduce", [[f(3), None]], TypeError, r"inputs\[1\] is a 'NoneType'"),
    "pair dtype": ("all_reduce", [[f(3), f(3)], [f(3), f(3, dtype="i4")]], TypeError,
                   r"inputs\[1\] is float32 and outputs\[1\] is int32"),
    "pair count": ("all_reduce", [[f(3), f(3)], [f(3), f(2)]], ValueError,
                   r"outputs\[1\] has 2 elements, expected 3, as many as inputs\[1\]"),
    "outputs length": ("all_reduce", [[f(3), f(3)], [f(3)]], ValueError,
                       r"outputs has 1 entries, expected 2: one per device"),
    "no inputs": ("all_reduce", [[]], ValueError, "inputs is empty"),
    "one array": ("all_reduce", [f(2, 3)], TypeError,
                  r"inputs must be a list .* not a 'ndarray'; did you mean \[inputs\], or list"),
    "bytes": ("all_reduce", [bytearray(4)], TypeError, "inputs must be a list"),
    "int": ("all_reduce", [3], TypeError, "inputs must be a list .* not a 'int'"),
    "int16": ("all_reduce", [[f(3, dtype="i2"), f(3, dtype="i2")]], TypeError,
              "int16 cannot be reduced"),
    "ops": ("all_reduce", [[f(3), f(3)], None, ["sum", "max"]], ValueError,
            r"op\[1\] is 'max' and op\[0\] is 'sum'; all entries must reduce alike"),
    "kind of stream": ("all_reduce", [[f(3), f(3)], None, "sum", [None, "x"]], TypeError,
                       r"streams\[1\] must be an int"),
    "negative stream": ("all_reduce", [[f(3), f(3)], None, "sum", [-1, None]], TypeError,
                        r"streams\[0\] -1 is negative"),
    "large stream": ("all_reduce", [[f(3), f(3)], None, "sum", [0, 2**64]], ValueError,
                     r"streams\[1\] 0x1\d* does not fit in 64 bits"),
    "one output twice": ("all_reduce", [[f(3), f(3)], [BASE[:3], BASE[:3]]], ValueError,
                         r"outputs\[0\] and outputs\[1\] share memory"),
    "later outputs": ("all_reduce", [[f(3) for _ in range(4)], [f(3), BASE[:3], BASE[3:6], BASE[5:8]]],
                      ValueError, r"outputs\[2\] and outputs\[3\] share memory"),
    "one input twice, in place": ("all_reduce", [[BASE[:3], BASE[2:5]]], ValueError,
                                  r"inputs\[0\] and inputs\[1\] share memory"),
    "output over another input": ("all_reduce", [[f(3), BASE[:3]], [BASE[2:5], f(3)]], ValueError,
                                  r"outputs\[0\] and inputs\[1\] share memory; what one entry"),
    "output over own input": ("all_reduce", [[BASE[:4], f(4)], [BASE[2:6], f(4)]], ValueError,
                              r"inputs\[0\] \(16 bytes .*\) and outputs\[0\] .* overlap"),
    "reduce output": ("reduce", [[f(3), f(3)], f(4)], ValueError,
                      r"output has 4 elements, expected 3, as many as inputs\[0\]"),
    "reduce output dtype": ("reduce", [[f(3), f(3)], f(3, dtype="f8"), 1], TypeError,
                            r"inputs\[1\] is float32 and output is float64"),
    "broadcast count": ("broadcast", [[f(3), f(3), f(2)], 1], ValueError,
                        r"inputs\[2\] has 2 elements and inputs\[0\] has 3"),
    "broadcast read-only": ("broadcast", [[f(3), readonly()]], BufferError, r"inputs\[1\].*read-only"),
    "all_gather size": ("all_gather", [[f(3), f(3)], [f(6), f(5)]], ValueError,
                        r"outputs\[1\] has 5 elements, expected 6: nranks=2 blocks of 3"),
    "all_gather one output": ("all_gather", [[f(2), f(2)], [BASE[:4], BASE[:4]]], ValueError,
                              r"outputs\[0\] and outputs\[1\] share memory"),
    "all_gather wrong block": ("all_gather", [[BASE[:2], f(2)], [f(4), BASE[0:4]]], ValueError,
                               "share memory"),
    "reduce_scatter blocks": ("reduce_scatter", [[f(3), f(3)], [f(1), f(1)]], ValueError,
                              r"inputs\[0\] has 3 elements, not a multiple of nranks=2"),
    "reduce_scatter output": ("reduce_scatter", [[f(4), f(4)], [f(2), f(3)]], ValueError,
                              r"outputs\[1\] has 3 elements, expected 2: inputs\[1\] has 4"),
    "reduce_scatter shape": ("reduce_scatter", [[f(4), f(4)]], ValueError,
                             r"shape \(4,\).*reshape\(2, 2\)"),
    "gather output": ("gather", [[f(3), f(3)], f(5)], ValueError, "output has 5 elements, expected 6"),
    "gather count": ("gather", [[f(3), f(2)], f(6)], ValueError, r"inputs\[1\] has 2 elements"),
    "gather dtype": ("gather", [[f(3), f(3, dtype="f8")]], TypeError, r"inputs\[1\] is float64"),
    "scatter input": ("scatter", [f(5), [f(2), f(2)]], ValueError,
                      "input has 5 elements, not a multiple of nranks=2"),
    "scatter outputs": ("scatter", [f(4), [f(2), f(3)]], ValueError,
                        r"outputs\[1\] has 3 elements and input has 4; one must be 2 times"),
    "scatter root's output": ("scatter", [f(4), [f(3), f(2)]], ValueError,
                              "outputs\\[0\\] has 3 elements, expected 2"),
    "scatter dtype": ("scatter", [f(4), [f(2), f(2, dtype="i4")]], TypeError, r"outputs\[1\] is int32"),
    "scatter list": ("scatter", [[f(2), f(2)], [f(2), f(2)]], TypeError, "input is a 'list'"),
    "scatter without outputs": ("scatter", [f(4), None], TypeError, "outputs must be a list"),
}  # fmt: skip


def flat(arguments):
    for argument in arguments:
        if isinstance(argument, (list, tuple)):
            yield from flat(argument)
        elif isinstance(argument, np.ndarray):
            yield argument


@pytest.mark.parametrize("which", CASES)
def test_bad_lists_are_refused_by_index_and_nothing_changes(which):
    function, arguments, error, message = CASES[which]
    before = [x.copy() for x in flat(arguments)]
    with pytest.raises(error, match=f"^{function}: .*{message}"):
        getattr(nccl, function)(*arguments, library="host")
    for x, old in zip(flat(arguments), before):
        assert (x == old).all()


def test_names_of_long_lists():
    xs = [f(2) for _ in range(40)]
    xs[37] = f(3)
    with pytest.raises(ValueError, match=r"inputs\[37\] has 3 elements"):
        nccl.all_reduce(xs, library="host")
    xs[37] = f(2)
    nccl.all_reduce(xs, library="host")


@pytest.mark.parametrize("name", [*oracle.COLLECTIVES, "send_recv"])
def test_columns_of_a_matrix_are_refused_everywhere(name):
    columns = [np.array([1.0, 4.0]), (np.arange(6.0).reshape(2, 3) + 10)[:, 1]]
    arguments = {
        "scatter": [columns[1], [f(1, dtype="f8"), f(1, dtype="f8")]],
        "send_recv": [columns, [f(2, dtype="f8"), f(2, dtype="f8")], [1, 0]],
    }.get(name, [columns])
    with pytest.raises(pynccl.LayoutError, match=rf"^{name}: inputs?.* strides \(24,\)"):
        getattr(nccl, name)(*arguments, library="host")
    assert [list(x) for x in columns] == [[1, 4], [11, 14]]


def test_all_to_all_does_not_work_in_place():
    xs = [f(4), f(4)]
    with pytest.raises(
        ValueError, match=r"inputs\[0\] .* and outputs\[0\] .*does not work in place"
    ):
        nccl.all_to_all(xs, xs, library="host")


@pytest.mark.parametrize(
    ("streams", "error", "message"),
    [
        ([0], ValueError, "streams has 1 entries, expected 2"),
        (0, TypeError, "streams must be a list"),
        ([0, "x"], TypeError, "stream"),
        ([0, -1], TypeError, "negative"),
        ([0, True], TypeError, "bool"),
    ],
)
def test_streams_are_a_list_of_handles(streams, error, message):
    with pytest.raises(error, match=f"all_reduce: .*{message}"):
        nccl.all_reduce([f(1), f(1)], streams=streams, library="host")


def test_streams_may_be_none_or_default():
    xs = [np.ones(1), np.ones(1), np.ones(1)]
    nccl.all_reduce(xs, streams=[None, 0, 1], library="host")
    assert xs == [3.0, 3.0, 3.0]


@pytest.mark.parametrize(
    ("comms", "error", "message"),
    [
        ([], ValueError, "comms is empty"),
        (["x", "y"], TypeError, r"comms\[0\] must be a Communicator"),
        (7, TypeError, "comms must be a list"),
    ],
)
def test_comms_are_a_list_of_communicators(comms, error, message):
    with pytest.raises(error, match=f"all_reduce: {message}"):
        nccl.all_reduce([f(1), f(1)], comms=comms)


def test_comms_are_the_ranks_of_one_communicator():
    comms, others = pynccl.init_all(2, library="host"), pynccl.init_all(3, library="host")
    xs = [f(1), f(1)]
    try:
        with pytest.raises(ValueError, match=r"comms has 1 entries, expected 2"):
            nccl.all_reduce(xs, comms=comms[:1])
        with pytest.raises(ValueError, match=r"comms has 1 entries, expected 2"):
            nccl.all_reduce(xs, comms=comms[0])
        with pytest.raises(
            ValueError, match=r"comms\[0\] and comms\[1\] are the same communicator"
        ):
            nccl.all_reduce(xs, comms=[comms[0], comms[0]])
        with pytest.raises(ValueError, match="must be ranks of one communicator"):
            nccl.all_reduce(xs, comms=[comms[0], others[1]])
    finally:
        for comm in comms + others:
            comm.close()


def test_error_of_a_property_comes_through_unchanged():
    with pytest.raises(KeyError, match="the array's own error"):
        nccl.all_reduce([f(1), Failing()], library="host")


def test_entries_that_only_send_may_share_memory():
    x = np.arange(3.0)
    outs = [f(3, dtype="f8"), f(3, dtype="f8")]
    nccl.all_reduce([x, x], outs, library="host")
    assert all((out == 2 * x).all() for out in outs)
    assert (nccl.reduce([x, x], outs[0], library="host") == 2 * x).all()


def test_unknown_library_is_told():
    with pytest.raises(pynccl.LibraryNotFoundError):
        nccl.all_reduce([f(1)], library="/nowhere/libnccl.so.2")


def test_array_is_refused_before_anything_is_created():
    nccl.clear_cache()
    with pytest.raises(TypeError):
        nccl.all_reduce([CaiArray(np.zeros(3, "i2"))] * 2, library="host")
