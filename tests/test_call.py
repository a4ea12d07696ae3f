"""Wrong arguments: each raises the builtin error that fits, says what is wrong with the numbers, and
changes nothing.  All of these are told by one rank alone, before anything reaches the library."""

import ctypes

import numpy as np
import pytest

import pynccl
from helpers import cases, data, oracle
from helpers.ranks import create, new_id

VERBS = [*oracle.COLLECTIVES, "send", "recv", "send_recv"]
REDUCERS = [name for name, spec in oracle.COLLECTIVES.items() if spec.op]
ROOTED = [name for name, spec in oracle.COLLECTIVES.items() if spec.root]


@pytest.fixture(scope="module")
def alone():
    """A communicator of one rank, kept over the module."""
    with create(1, new_id(), 0) as comm:
        yield comm


@pytest.fixture(scope="module")
def pair():
    """Both communicators of a world of two, in this thread: their calls must fail on their own."""
    comms = pynccl.init_all(2, library="host")
    yield comms
    for comm in comms:
        comm.abort()


@pytest.fixture(autouse=True)
def nothing_changed(request):
    """After every test here the communicators it used still work."""
    yield
    if "alone" in request.fixturenames:
        cases.sum_of_ranks(request.getfixturevalue("alone"))
    if "pair" in request.fixturenames:
        outs = []
        with pynccl.group():
            for comm in request.getfixturevalue("pair"):
                outs.append(comm.all_reduce(np.array([comm.rank + 1])))
        assert [out.tolist() for out in outs] == [[3], [3]]


def call(comm, verb, x, out=None, **words):
    """Make a call with x (and out) where the verb takes them."""
    if verb == "recv":
        return comm.recv(x if out is None else out, words.pop("peer", 0), **words)
    if verb == "send":
        return comm.send(x, words.pop("peer", 0), **words)
    if verb == "send_recv":
        return comm.send_recv(x, 0, out=out, **words)
    return getattr(comm, verb)(x, out=out, **words)


# --- roots and peers -----------------------------------------------------------------------------------


@pytest.mark.parametrize("root", [-1, 2, 3, 2**31, -(2**63), 2**64, 10**30])
@pytest.mark.parametrize("verb", ROOTED)
def test_root_out_of_range_is_a_value_error_with_the_range(pair, verb, root):
    with pytest.raises(ValueError, match=rf"^{verb}: root {root} .*2.*0 to 1"):
        getattr(pair[0], verb)(np.arange(4), root=root)


@pytest.mark.parametrize("peer", [-1, 2, 2**40])
@pytest.mark.parametrize("verb", ["send", "recv"])
def test_peer_out_of_range_is_a_value_error_with_the_range(pair, verb, peer):
    with pytest.raises(ValueError, match=rf"^{verb}: peer {peer} .*2.*0 to 1"):
        getattr(pair[0], verb)(np.arange(4), peer)


def test_dest_and_source_out_of_range_are_value_errors(pair):
    with pytest.raises(ValueError, match=r"send_recv: .*5.*0 to 1"):
        pair[0].send_recv(np.arange(4), 5)
    with pytest.raises(ValueError, match=r"send_recv: .*-1.*0 to 1"):
        pair[0].send_recv(np.arange(4), 1, source=-1)


@pytest.mark.parametrize("root", [1.0, "0", None, True, np.float64(0), [0]])
@pytest.mark.parametrize("verb", ROOTED)
def test_root_that_is_no_int_is_a_type_error(pair, verb, root):
    with pytest.raises(TypeError, match=f"^{verb}: root must be .*{type(root).__name__}"):
        getattr(pair[0], verb)(np.arange(4), root=root)


@pytest.mark.parametrize("root", [np.int64(0), np.uint8(0), ctypes.c_int(0).value])
def test_root_may_be_any_index(alone, root):
    assert alone.reduce(np.array([5]), root=root).tolist() == [5]


# --- dtypes --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", list(oracle.COLLECTIVES))
def test_input_and_output_of_different_dtypes_are_a_type_error(alone, verb):
    out = data.Guarded("int64", (4,))
    with pytest.raises(TypeError, match=rf"^{verb}: x is float32 and out is int64"):
        call(alone, verb, np.ones(4, np.float32), out.array)
    out.check_poisoned()


@pytest.mark.parametrize("dtype", ["<i2", "<u2", "<M8[s]", "S4", "<U2", [("a", "<f8")], "V16", "g"])
@pytest.mark.parametrize("verb", REDUCERS)
def test_dtype_that_nccl_cannot_reduce_is_a_type_error_listing_what_it_can(alone, verb, dtype):
    x = np.zeros(4, dtype)
    out = data.Guarded.holding(x)
    with pytest.raises(TypeError, match=rf"^{verb}: .*(?=.*float16)(?=.*int8)(?=.*bfloat16)"):
        call(alone, verb, x, out.array)


def test_message_names_the_dtype_that_cannot_be_reduced(alone):
    with pytest.raises(TypeError, match="int16"):
        alone.all_reduce(np.zeros(4, np.int16))


@pytest.mark.parametrize("verb", VERBS)
def test_foreign_byte_order_is_refused(alone, verb):
    x = np.ones(4, ">f4")
    with pytest.raises(TypeError, match=rf"^{verb}: .*byte"):
        call(alone, verb, x)
    assert x.tolist() == [1] * 4


@pytest.mark.parametrize("thing", [None, 5, "text", [1.0, 2.0], object(), {"a": 1}])
@pytest.mark.parametrize("verb", VERBS)
def test_thing_that_is_no_array_is_a_type_error(alone, verb, thing):
    if verb == "recv" and thing is None:
        with pytest.raises(ValueError, match="^recv: out is needed"):
            alone.recv(None, 0)
        return
    with pytest.raises(TypeError, match=f"^{verb}: .*{type(thing).__name__}"):
        call(alone, verb, thing)


@pytest.mark.parametrize("verb", [v for v in VERBS if v != "send"])
def test_output_that_is_no_array_is_a_type_error(alone, verb):
    with pytest.raises(TypeError, match=f"^{verb}: out.*list"):
        call(alone, verb, np.arange(4), [0, 0, 0, 0])


def test_dtype_keyword_says_what_the_bytes_are(alone):
    bits = np.array([0x3F80, 0x4000], np.uint16)  # 1.0 and 2.0 in bfloat16
    out = np.zeros(2, np.uint16)
    alone.all_reduce(bits, out=out, op=alone.premul_sum(3.0, "bfloat16"), dtype="bfloat16")
    assert out.tolist() == [0x4040, 0x40C0]


@pytest.mark.parametrize("dtype", ["nonsense", "float128x", 3.5, object()])
def test_unknown_dtype_keyword_is_refused(alone, dtype):
    with pytest.raises((TypeError, ValueError), match="dtype"):
        alone.all_reduce(np.zeros(4, np.uint16), dtype=dtype)


def test_dtype_keyword_that_does_not_divide_the_memory_is_refused(alone):
    with pytest.raises((TypeError, ValueError), match="6|float32|itemsize"):
        alone.all_reduce(np.zeros(3, np.uint16), dtype="float32")


# --- reductions ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", ["band", "BOR", "bxor", "mean", "summ", "", "land", "SUM "])
@pytest.mark.parametrize("verb", REDUCERS)
def test_unknown_op_is_an_error_naming_it_and_the_known_ones(alone, verb, op):
    x = np.array([6, 3], np.int32)
    out = data.Guarded("int32", (2,))
    with pytest.raises(
        ValueError, match=rf"(?i)^{verb}: .*{op}.*'sum'.*'prod'.*'max'.*'min'.*'avg'"
    ):
        call(alone, verb, x, out.array, op=op)
    out.check_poisoned()


@pytest.mark.parametrize("op", [np.bitwise_and, np.logical_or, np.subtract, np.fmax, np.power])
@pytest.mark.parametrize("verb", REDUCERS)
def test_ufunc_that_nccl_lacks_is_an_error_naming_it(alone, verb, op):
    with pytest.raises(ValueError, match=rf"^{verb}: .*{op.__name__}"):
        call(alone, verb, np.array([[6, 3]]), op=op)


@pytest.mark.parametrize("op", [0, 1, 2, 3, 4, 5, -1, True, 1.0, None, np.int64(0), sum, max])
@pytest.mark.parametrize("verb", REDUCERS)
def test_bare_number_or_other_object_is_no_op(alone, verb, op):
    with pytest.raises(TypeError, match=f"^{verb}: op must be .*{type(op).__name__}"):
        call(alone, verb, np.array([[6, 3]]), op=op)


@pytest.mark.parametrize("verb", REDUCERS)
def test_bool_has_no_average(alone, verb):
    with pytest.raises(TypeError, match=rf"^{verb}: bool .*average"):
        call(alone, verb, np.array([[True, False]]), op="avg")


@pytest.mark.parametrize("op", ["prod", "max", "min"])
@pytest.mark.parametrize("verb", REDUCERS)
def test_complex_numbers_are_only_summed_and_averaged(alone, verb, op):
    with pytest.raises(TypeError, match=rf"^{verb}: complex64 .*{op.upper()}"):
        call(alone, verb, np.array([[1 + 2j]], np.complex64), op=op)


# --- shapes and sizes ----------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", ["all_reduce", "reduce", "broadcast"])
@pytest.mark.parametrize("size", [3, 5, 0])
def test_output_of_another_size_is_an_error_with_both_numbers(alone, verb, size):
    out = data.Guarded("float64", (size,))
    with pytest.raises(ValueError, match=rf"^{verb}: out has {size} elements, expected 4"):
        call(alone, verb, np.arange(4.0), out.array)
    out.check_poisoned()


@pytest.mark.parametrize("verb", ["all_gather", "gather"])
@pytest.mark.parametrize("size", [7, 9, 4, 16])
def test_gathered_output_of_another_size_is_an_error_with_both_numbers(pair, verb, size):
    out = data.Guarded("float64", (size,))
    with pytest.raises(ValueError, match=rf"^{verb}: out has {size} elements, expected 8"):
        call(pair[0], verb, np.arange(4.0), out.array)
    out.check_poisoned()


@pytest.mark.parametrize("verb", ["reduce_scatter", "scatter", "all_to_all"])
def test_input_that_does_not_split_into_blocks_is_an_error_with_both_numbers(pair, verb):
    out = data.Guarded("float64", (2,))
    with pytest.raises(ValueError, match=rf"^{verb}: x has 5 elements, .*nranks=2"):
        call(pair[0], verb, np.arange(5.0), out.array)
    out.check_poisoned()


@pytest.mark.parametrize("verb", ["reduce_scatter", "scatter"])
@pytest.mark.parametrize("size", [1, 3, 6])
def test_scattered_output_of_another_size_is_an_error_with_both_numbers(pair, verb, size):
    out = data.Guarded("float64", (size,))
    with pytest.raises(ValueError, match=rf"^{verb}: out has {size} elements, expected 2"):
        call(pair[0], verb, np.arange(4.0), out.array)
    out.check_poisoned()


@pytest.mark.parametrize("size", [3, 5, 8])
def test_all_to_all_output_of_another_size_is_an_error_with_both_numbers(pair, size):
    out = data.Guarded("float64", (size,))
    with pytest.raises(ValueError, match=rf"^all_to_all: out has {size} elements, expected 4"):
        pair[0].all_to_all(np.arange(4.0), out=out.array)
    out.check_poisoned()


@pytest.mark.parametrize("shape", [(6,), (3, 2), (1, 2, 3), (6, 1)])
@pytest.mark.parametrize("verb", ["reduce_scatter", "scatter", "all_to_all"])
def test_rank_axis_of_another_length_is_an_error_that_prints_the_reshape(pair, verb, shape):
    x = np.zeros(shape)
    with pytest.raises(ValueError, match=rf"^{verb}: .*reshape\(2, ") as caught:
        call(pair[0], verb, x)
    # What it advises works.
    advice = str(caught.value).split("reshape(")[1].split(")")[0]
    blocks = x.reshape(tuple(int(n) for n in advice.replace("...", "-1").split(",") if n.strip()))
    assert blocks.shape[0] == 2


@pytest.mark.parametrize("verb", ["reduce_scatter", "scatter", "all_to_all"])
def test_scalar_has_no_rank_axis(pair, verb):
    with pytest.raises(ValueError, match=f"^{verb}: "):
        call(pair[0], verb, np.float64(1.0).reshape(()))


# --- layout --------------------------------------------------------------------------------------------


NOT_CONTIGUOUS = {
    "column": np.arange(12.0).reshape(3, 4)[:, 1],
    "every second": np.arange(8.0)[::2],
    "backwards": np.arange(4.0)[::-1],
    "repeated": np.broadcast_to(np.float64(1.0), (4,)),
    "inner block": np.arange(16.0).reshape(4, 4)[1:3, 1:3],
    "transposed 3-d": np.arange(24.0).reshape(2, 3, 4).transpose(1, 0, 2),
}


@pytest.mark.parametrize("x", NOT_CONTIGUOUS.values(), ids=NOT_CONTIGUOUS)
@pytest.mark.parametrize("verb", VERBS)
def test_memory_with_gaps_is_a_layout_error_with_the_strides(alone, verb, x):
    base = np.array(x)
    with pytest.raises(pynccl.LayoutError, match=f"^{verb}: ") as caught:
        call(alone, verb, x)
    text = str(caught.value)
    assert str(x.shape) in text and str(x.strides) in text and "8" in text
    assert isinstance(caught.value, BufferError) and isinstance(caught.value, ValueError)
    assert (x == base).all()


@pytest.mark.parametrize("verb", [v for v in VERBS if v not in ("send", "recv", "broadcast")])
def test_output_with_gaps_is_a_layout_error(alone, verb):
    memory = np.arange(8.0)
    with pytest.raises(pynccl.LayoutError, match=f"^{verb}: out"):
        call(alone, verb, np.arange(4.0), memory[::2])
    assert (memory == np.arange(8.0)).all()


@pytest.mark.parametrize("verb", ["all_reduce", "reduce", "broadcast"])
def test_input_and_output_of_different_order_are_a_layout_error(alone, verb):
    x = np.arange(6.0).reshape(2, 3)
    out = np.zeros((2, 3), order="F")
    with pytest.raises(pynccl.LayoutError, match=f"^{verb}: .*C.*Fortran"):
        call(alone, verb, x, out)
    with pytest.raises(pynccl.LayoutError, match=f"^{verb}: .*Fortran.*C"):
        call(alone, verb, np.asfortranarray(x), np.zeros((2, 3)))
    assert not out.any()


@pytest.mark.parametrize(
    "verb", ["all_gather", "reduce_scatter", "all_to_all", "gather", "scatter"]
)
def test_blocks_of_ranks_need_c_order(pair, verb):
    spec = oracle.COLLECTIVES[verb]
    block, blocks = np.zeros((2, 3), order="F"), np.zeros((2, 2, 3), order="F")
    x = blocks if spec.send_blocks else block
    out = blocks if spec.recv_blocks else block
    with pytest.raises(pynccl.LayoutError, match=f"^{verb}: .*Fortran"):
        call(pair[0], verb, x, out.copy(order="F"))


@pytest.mark.parametrize("verb", VERBS)
def test_memory_between_elements_is_a_value_error_with_the_address(alone, verb):
    x = data.Guarded("float64", (4,), offset=3).array
    with pytest.raises(ValueError, match=f"^{verb}: .*{x.ctypes.data:#x}.*float64"):
        call(alone, verb, x)


def test_one_dimensional_array_is_of_both_orders(alone):
    out = np.zeros((2, 3), order="F")
    alone.all_reduce(np.arange(6.0), out=out)
    assert out.ravel(order="K").tolist() == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("verb", [v for v in VERBS if v not in ("send", "recv")])
def test_read_only_output_is_refused_and_unchanged(alone, verb):
    out = np.full(4, -1.0)
    out.setflags(write=False)
    with pytest.raises((BufferError, ValueError), match=f"^{verb}: out.*read-only"):
        call(alone, verb, np.arange(4.0), out)
    assert out.tolist() == [-1] * 4


def test_read_only_array_cannot_be_received_into_or_reduced_in_place(alone):
    x = np.arange(4.0)
    x.setflags(write=False)
    for attempt in (
        lambda: alone.recv(x, 0),
        lambda: alone.all_reduce(x, out=x),
        lambda: alone.recv(b"12345678", 0),
    ):
        with pytest.raises((BufferError, ValueError), match="read-only"):
            attempt()
    assert x.tolist() == [0, 1, 2, 3]


def test_read_only_input_is_fine(alone):
    x = np.arange(4.0)
    x.setflags(write=False)
    for verb in ("all_reduce", "all_gather", "reduce"):
        assert call(alone, verb, x).ravel().tolist() == [0, 1, 2, 3]


# --- streams -------------------------------------------------------------------------------------------


class Has:
    """An object with one given attribute."""

    def __init__(self, **attributes):
        self.__dict__.update(attributes)


STREAMS = {
    "0": 0,
    "legacy": 1,
    "per thread": 2,
    "None": None,
    "numba": Has(handle=ctypes.c_void_p(0)),
    "c_void_p": ctypes.c_void_p(1),
    "cupy": Has(ptr=0),
    "torch": Has(cuda_stream=0),
    "protocol": Has(__cuda_stream__=lambda: (0, 1)),
    "numpy int": np.int64(1),
}


@pytest.mark.parametrize("stream", STREAMS.values(), ids=STREAMS)
@pytest.mark.parametrize("verb", [*oracle.COLLECTIVES, "barrier"])
def test_stream_may_be_a_handle_or_an_object_that_has_one(alone, verb, stream):
    if verb == "barrier":
        alone.barrier(stream=stream)
    else:
        result = call(alone, verb, np.array([7]), np.zeros(1, int), stream=stream)
        assert result.tolist() == [7]


@pytest.mark.parametrize(
    "stream", [-1, -(2**70), True, False, "1", b"1", 1.5, object(), [1], (0, 1)]
)
@pytest.mark.parametrize("verb", [*VERBS, "barrier"])
def test_thing_that_is_no_stream_is_a_type_error(alone, verb, stream):
    out = data.Guarded("int64", (1,))
    with pytest.raises(TypeError, match=f"^{verb}: stream"):
        if verb == "barrier":
            alone.barrier(stream=stream)
        else:
            call(alone, verb, np.array([7]), out.array, stream=stream)
    out.check_poisoned()


@pytest.mark.parametrize("stream", [2**64, 2**100])
def test_stream_that_is_no_pointer_is_a_value_error(alone, stream):
    with pytest.raises(ValueError, match="^all_reduce: stream .*64"):
        alone.all_reduce(np.array([7]), stream=stream)


@pytest.mark.parametrize("stream", [3, 0x7F0012345678])
def test_handle_unknown_to_the_host_library_is_refused_and_never_followed(alone, stream):
    out = data.Guarded("int64", (1,))
    with pytest.raises(pynccl.InvalidArgumentError, match="stream"):
        alone.all_reduce(np.array([7]), out=out.array, stream=stream)
    out.check_poisoned()


# --- the rest ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(0,), (3, 0, 2), (0, 5)])
@pytest.mark.parametrize("verb", ["all_reduce", "reduce", "broadcast", "all_gather", "gather"])
def test_empty_array_is_fine(alone, verb, shape):
    result = call(alone, verb, np.empty(shape, np.float32))
    assert result.size == 0
    assert result.dtype == np.float32


def test_keyword_only_arguments_are_not_taken_by_position(alone):
    with pytest.raises(TypeError):
        alone.all_reduce(np.arange(3), None, "sum", 0)
    with pytest.raises(TypeError):
        alone.broadcast(np.arange(3), 0, np.arange(3))
    with pytest.raises(TypeError, match="nonsense"):
        alone.all_reduce(np.arange(3), nonsense=1)


def test_error_is_raised_before_the_group_ends_and_not_recorded(alone):
    out = np.zeros(3, int)
    with pynccl.group() as plan:
        for wrong in ({"op": "bxor"}, {"stream": -1}, {"out": np.zeros(4, int)}):
            with pytest.raises((ValueError, TypeError)):
                alone.all_reduce(np.arange(3), **wrong)
        alone.all_reduce(np.arange(3), out=out)
    assert out.tolist() == [0, 1, 2]
    out[:] = 0
    plan()
    assert out.tolist() == [0, 1, 2]


class Naughty:
    """An array whose interface raises an error of its own."""

    @property
    def __cuda_array_interface__(self):
        raise ZeroDivisionError("the producer's own")


@pytest.mark.parametrize("verb", VERBS)
def test_error_of_the_array_itself_reaches_the_user_unchanged(alone, verb):
    with pytest.raises(ZeroDivisionError, match="the producer's own"):
        call(alone, verb, Naughty())


def test_scatter_without_out_needs_the_size_off_the_root(pair):
    with pytest.raises((TypeError, ValueError), match="^scatter: .*out"):
        pair[1].scatter(None, root=0)
    with pytest.raises((TypeError, ValueError), match="^broadcast: "):
        pair[1].broadcast(None, 0)
