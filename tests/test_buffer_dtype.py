"""``dtype=``: how it is spelt, and which bytes may be read as what."""

import sys

import numpy as np
import pytest

from helpers import arrays
from pynccl import DataType
from pynccl._buffer import Buffer


@pytest.mark.parametrize("dtype", [*arrays.ALL, "int16", "uint16"])
def test_raw_bytes_may_be_read_as_any_type(dtype):
    size = arrays.dtype(dtype).itemsize
    for source in (np.zeros(4 * size, "u1"), np.zeros(4 * size, "V1"), bytearray(4 * size)):
        buffer = Buffer(source, dtype)
        assert (buffer.dtype, buffer.count, buffer.itemsize) == (dtype, 4, size)
        assert buffer.nbytes == 4 * size


@pytest.mark.parametrize(
    ("source", "dtype", "count"),
    [
        ("f4", "uint8", 16),  # anything as bytes
        ("M8[s]", "uint8", 32),
        ("V6", "int8", 24),
        ("V2", "bfloat16", 4),
        ("V1", "float8_e4m3fn", 4),
        ("u2", "bfloat16", 4),  # the same size
        ("i2", "float16", 4),
        ("u1", "float8_e5m2", 4),
        ("f4", "int32", 4),
        ("c8", "float32", 8),  # its parts
        ("c16", "float64", 8),
    ],
)
def test_dtype_reinterprets(source, dtype, count):
    memory = np.zeros(4, source)
    buffer = Buffer(memory, dtype=dtype)
    assert (buffer.dtype, buffer.count, buffer.nbytes) == (dtype, count, memory.nbytes)


@pytest.mark.parametrize(
    ("source", "dtype"), [("f4", "float16"), ("f4", "float64"), ("i8", "int32")]
)
def test_dtype_that_would_be_a_slip_is_refused(source, dtype):
    with pytest.raises(TypeError, match="which dtype='.*' does not fit: .*converts nothing"):
        Buffer(np.zeros(4, source), dtype=dtype)


def test_bytes_that_do_not_divide():
    with pytest.raises(
        ValueError, match="has 7 bytes, not a multiple of 4, the size of dtype='float32'"
    ):
        Buffer(bytearray(7), "float32")


def test_foreign_byte_order_may_be_moved_as_bytes_only():
    memory = np.ones(3, np.dtype("f4").newbyteorder())
    assert Buffer(memory, "uint8").nbytes == 12
    with pytest.raises(TypeError, match="does not fit"):
        Buffer(memory, "float32")


def spellings():
    import ml_dtypes

    torch_like = type("dtype", (), {"__str__": lambda self: "torch.bfloat16"})()
    return [
        ("float32", "float32"),
        ("<f4", "float32"),
        ("f8", "float64"),
        ("|u1", "uint8"),
        ("half", "float16"),
        ("longlong", "int64"),
        (DataType.BFLOAT16, "bfloat16"),
        (DataType.INT8, "int8"),
        (np.float32, "float32"),
        (np.bool_, "bool"),
        (np.longlong, "int64"),
        (np.dtype("complex64"), "complex64"),
        (np.dtype("longlong"), "int64"),
        (ml_dtypes.bfloat16, "bfloat16"),
        (np.dtype(ml_dtypes.float8_e5m2), "float8_e5m2"),
        (float, "float64"),
        (int, "int64"),
        (bool, "bool"),
        (complex, "complex128"),
        (torch_like, "bfloat16"),
    ]


@pytest.mark.parametrize(("dtype", "name"), spellings(), ids=str)
def test_spellings_of_a_dtype(dtype, name):
    assert Buffer(bytearray(16), dtype).dtype == name


FOREIGN = np.dtype("f4").newbyteorder()


@pytest.mark.parametrize(
    "dtype",
    ["float33", "", "O", ">f4" if sys.byteorder == "little" else "<f4", "V2", FOREIGN, 7, True, object(),
     np.dtype("V3"), np.dtype("i4,f8"), list, "float\ud800"],
    ids=repr,
)  # fmt: skip
def test_dtypes_that_are_none(dtype):
    with pytest.raises(
        TypeError, match=r"is not an element type of pynccl; use one of int8, uint8, "
    ):
        Buffer(bytearray(16), dtype)
