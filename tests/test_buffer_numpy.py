"""NumPy arrays: read through their struct, and right also where the struct is not what we know."""

import sys

import numpy as np
import pytest

from helpers import arrays, scripts
from pynccl import LayoutError
from pynccl._buffer import Buffer


@pytest.mark.parametrize("letter", "?bBhHiIlLqQefdFD")
def test_every_type_number(letter):
    memory = np.zeros(3, letter)
    assert Buffer(memory).dtype == memory.dtype.name
    assert Buffer(memory).itemsize == memory.itemsize


@pytest.mark.parametrize(
    "dtype", ["g", "G", "S4", "U3", "M8[ns]", "m8[D]", "V6", "i4,f8", ">M8[s]"]
)
def test_types_that_are_only_moved_keep_their_name(dtype):
    memory = np.zeros(3, dtype)
    if memory.dtype.isnative:
        buffer = Buffer(memory)
        assert (buffer.dtype, buffer.itemsize, buffer.count) == (
            memory.dtype.str,
            memory.itemsize,
            3,
        )
    else:
        with pytest.raises(TypeError, match="foreign byte order"):
            Buffer(memory)


@pytest.mark.parametrize("code", "hiqfdFDe")
def test_foreign_byte_order(code):
    memory = np.ones(3, np.dtype(code).newbyteorder())
    with pytest.raises(
        TypeError, match=f"x holds {memory.dtype.newbyteorder().name} in foreign byte order"
    ):
        Buffer(memory)


def test_foreign_fields_of_a_structure_are_bytes():
    assert Buffer(np.zeros(2, ">i4,>f8")).nbytes == 24


@pytest.mark.parametrize(
    "dtype",
    ["O", [("a", "i4"), ("b", "O")], getattr(np.dtypes, "StringDType", lambda: "O")()],
    ids=str,
)
def test_references_are_refused(dtype):
    memory = np.zeros(2, dtype)
    with pytest.raises(TypeError, match="x has dtype .*, whose elements are references, not data"):
        Buffer(memory)


def test_elements_of_no_bytes_are_refused():
    for memory in (np.empty(3, np.dtype((np.void, 0))), np.empty(0, np.dtype((np.void, 0)))):
        with pytest.raises(
            TypeError, match="Buffer: x has elements of 0 bytes; there is nothing to move"
        ):
            Buffer(memory)


def test_the_first_array_of_ml_dtypes_and_the_second_are_alike():
    out = scripts.run(
        """
        import numpy as np, ml_dtypes
        from pynccl._buffer import Buffer
        swapped = np.zeros(2, np.dtype(ml_dtypes.bfloat16).newbyteorder())
        for _ in range(2):
            print(Buffer(np.zeros(2, ml_dtypes.bfloat16)).dtype)
            print(Buffer(np.zeros(2, ml_dtypes.float8_e5m2)).dtype)
            print(Buffer(np.zeros((4, 4), ml_dtypes.bfloat16).T).order)
            try:
                print(Buffer(swapped).dtype)
            except TypeError:
                print("foreign")
        """
    )
    assert out.split() == ["bfloat16", "float8_e5m2", "F", "foreign"] * 2


# ---- subclasses ---------------------------------------------------------------------------------------


def test_a_mask_is_refused_and_its_absence_is_not():
    assert Buffer(np.ma.array([1.0, 2.0])).count == 2
    for mask in ([True, False], [False, False]):
        masked = np.ma.array([1.0, 2.0], mask=mask)
        with pytest.raises(
            ValueError, match="Buffer: x has a mask, which would be lost; pass its data"
        ):
            Buffer(masked)
        assert Buffer(masked.data).count == 2


def test_usual_subclasses(tmp_path):
    mapped = np.memmap(tmp_path / "file", "f4", "w+", shape=(2, 3))
    assert Buffer(mapped).ptr == mapped.ctypes.data
    record = np.zeros(3, "i4,f8").view(np.recarray)
    assert Buffer(record).nbytes == 36


def test_a_subclass_cannot_lie():
    """The struct says where the data is, whatever the attributes of a subclass say."""

    class Liar(np.ndarray):
        shape = (1 << 40,)
        ctypes = __array_interface__ = dtype = strides = None

    memory = np.arange(3.0)
    buffer = Buffer(memory.view(Liar))
    assert (buffer.ptr, buffer.count, buffer.dtype) == (memory.ctypes.data, 3, "float64")


def test_scalars_of_numpy_may_be_read():
    buffer = Buffer(np.float32(3))
    assert (buffer.dtype, buffer.count, buffer.readonly) == ("float32", 1, True)


# ---- what an array says is what it is -----------------------------------------------------------------


def test_changes_are_seen():
    memory = np.zeros((2, 3), "f4")
    assert Buffer(memory).order == "C"
    memory.resize((6,), refcheck=False)  # in place; to assign to .shape is deprecated
    assert Buffer(memory).order == "A"
    memory.flags.writeable = False
    assert Buffer(memory).readonly


@pytest.mark.parametrize("strides", [(8, 3), (0, 0), (-4, 4), (4, 4)])
def test_strides_made_by_hand(strides):
    memory = np.lib.stride_tricks.as_strided(np.zeros(100, "f4")[50:], (2, 3), strides)
    with pytest.raises((LayoutError, ValueError), match="not contiguous"):
        Buffer(memory)


def test_axes_of_length_one_do_not_matter():
    memory = np.lib.stride_tricks.as_strided(np.zeros(8, "f4"), (1, 8, 1), (999, 4, -7))
    assert (Buffer(memory).order, Buffer(memory).count) == ("A", 8)


UNKNOWN_STRUCT = """
    import sys, types
    import numpy as np
    import ml_dtypes
    from helpers import arrays

    # A NumPy which does not say of its arrays what the struct says: the first one met is studied.
    class Other:
        def __getattr__(self, name):
            return getattr(np, name)
        def arange(self, *args, **kwargs):
            whole = np.arange(*args, **kwargs)
            {change}
            return whole

    sys.modules["numpy"] = Other()
    from pynccl._buffer import Buffer
    Buffer(np.zeros(1))
    sys.modules["numpy"] = np
    for obj in (np.zeros((2, 3), "f4"), np.zeros((2, 3), "f4").T, np.zeros(3, "M8[s]"), np.zeros(4, "i4,f8"),
                np.zeros(2, ml_dtypes.bfloat16), np.zeros(2, ml_dtypes.float8_e5m2), np.zeros(2, "?"),
                np.ma.array([1, 2]), arrays.CaiArray(np.zeros(7)), np.zeros(0)):
        b = Buffer(obj)
        print(b.count, b.dtype, b.order)
    for obj in (np.zeros((4, 4))[:, 1], np.zeros(3, object), np.ma.array([1, 2], mask=[1, 0]),
                np.zeros(3, ">f4")):
        try:
            Buffer(obj)
        except Exception as error:
            print(type(error).__name__)
"""


@pytest.mark.parametrize("change", ["pass", "whole = whole.view(Lying)", "raise RuntimeError"])
def test_a_struct_that_is_not_known_is_never_read(change):
    script = UNKNOWN_STRUCT.replace("{change}", change)
    script = script.replace(
        "    sys.modules",
        """
    class Lying(np.ndarray):
        @property
        def __array_interface__(self):
            return {**super().__array_interface__, "data": (1, False)}

    sys.modules""",
        1,
    )
    assert scripts.run(script).splitlines() == [
        "6 float32 C",
        "6 float32 F",
        "3 <M8[s] A",
        "4 |V12 A",
        "2 bfloat16 A",
        "2 float8_e5m2 A",
        "2 bool A",
        "2 int64 A",
        "7 float64 A",
        "0 float64 A",
        "LayoutError",
        "TypeError",
        "ValueError",
        "TypeError",
    ]


def test_the_struct_of_this_numpy_is_the_one_that_we_know():
    """Through the struct an array costs next to nothing; every other way takes a multiple of this."""
    memory = np.zeros(16)

    class Liar(np.ndarray):
        __array_interface__ = None

    assert Buffer(memory.view(Liar)).ptr == memory.ctypes.data, "__array_interface__ was asked"


def test_the_registry_makes_what_it_says():
    for kind, name in arrays.made():
        obj, memory = kind.make(np.zeros(4, arrays.dtype(name)))
        assert memory.dtype == arrays.dtype(name)
        assert sys.getrefcount(obj) > 1
