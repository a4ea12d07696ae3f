"""What every kind of array becomes, and the rules that hold for all of them."""

import array
import ctypes
import gc
import inspect
import pickle
import sys

import numpy as np
import pytest

from helpers import arrays, scripts
from helpers.arrays import ABSENT, KINDS, CaiArray, DlpackArray, InterfaceArray
from pynccl import LayoutError
from pynccl._buffer import Buffer


def values(dtype, shape=(2, 3)):
    dtype = arrays.dtype(dtype)
    size = int(np.prod(shape))
    if dtype.kind in "SU":
        return np.arange(size).astype(dtype).reshape(shape)
    return (np.arange(size * dtype.itemsize) % 2).astype("u1").view(dtype).reshape(shape)


def expected_name(dtype):
    return dtype if dtype in arrays.ALL or dtype in NAMED_BUT_MOVED else arrays.dtype(dtype).str


NAMED_BUT_MOVED = ("int16", "uint16", "float8_e4m3fnuz", "int4")


# ---- every kind ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "dtype"), arrays.made(), ids=str)
def test_what_a_buffer_says(kind, dtype):
    given = values(dtype, (2, 3) if kind.axes > 1 else (6,))
    obj, memory = kind.make(given)
    buffer = Buffer(obj)
    assert buffer.ptr == memory.ctypes.data
    assert buffer.count == len(buffer) == 6
    assert buffer.dtype == expected_name(dtype)
    assert buffer.itemsize == given.dtype.itemsize
    assert buffer.nbytes == given.nbytes
    assert buffer.device == -1
    assert buffer.readonly is False
    assert buffer.stream is None
    assert buffer.order == ("C" if kind.axes > 1 else "A")
    assert memory.tobytes() == given.tobytes(), "looking must not write"


KIND = pytest.mark.parametrize("kind", KINDS.values(), ids=str)
SHAPED = pytest.mark.parametrize("kind", [k for k in KINDS.values() if k.axes > 1], ids=str)


@SHAPED
def test_fortran_order(kind):
    obj, memory = kind.make(values("int32", (2, 3)).T)
    assert memory.flags.f_contiguous
    buffer = Buffer(obj)
    assert (buffer.order, buffer.count, buffer.ptr) == ("F", 6, memory.ctypes.data)


@SHAPED
@pytest.mark.parametrize("shape", [(), (1,), (5,), (1, 5), (5, 1), (1, 1, 1), (1, 5, 1)])
def test_one_long_axis_has_both_orders(kind, shape):
    obj, _ = kind.make(values("float32", shape))
    assert (Buffer(obj).order, Buffer(obj).count) == ("A", int(np.prod(shape)))


@SHAPED
@pytest.mark.parametrize("shape", [(0,), (3, 0, 2), (0, 0), (1, 0)])
def test_empty(kind, shape):
    obj, _ = kind.make(values("float64", shape))
    buffer = Buffer(obj)
    assert (buffer.ptr, buffer.count, buffer.nbytes, buffer.order) == (0, 0, 0, "A")
    assert (buffer.dtype, buffer.itemsize) == ("float64", 8)


CUT = {
    "gaps": lambda a: a[:, ::2],
    "rows": lambda a: a[::2],
    "column": lambda a: a[:, 1],
    "reversed": lambda a: a[::-1],
    "broadcast": lambda a: np.broadcast_to(a[:1], a.shape),
    "swapped axes": lambda a: np.stack([a, a]).transpose(1, 0, 2),
}


@SHAPED
@pytest.mark.parametrize("cut", CUT.values(), ids=CUT)
def test_what_is_not_one_block_is_refused(kind, cut):
    part = cut(np.arange(16, dtype="i4").reshape(4, 4))
    obj = _wrap(kind, part)
    with pytest.raises(LayoutError) as caught:
        Buffer(obj)
    text = str(caught.value)
    for number in (part.shape, part.strides, part.itemsize):
        assert str(number) in text
    assert text.startswith("Buffer: x is not contiguous")
    assert isinstance(caught.value, BufferError)
    assert isinstance(caught.value, ValueError)


def _wrap(kind, part):
    wrappers = {
        "numpy": lambda a: a,
        "subclass": lambda a: a.view(arrays._Subclass),
        "memoryview": memoryview,
        "cai": CaiArray,
        "cai-property": arrays.CaiProperty,
        "cai-named": arrays.NamedArray,
        "dlpack": DlpackArray,
        "dlpack-old": arrays.OldDlpackArray,
        "array-interface": InterfaceArray,
        "simulator": arrays.simulated,
        "buffer": lambda a: a,
    }
    return wrappers[kind.name](part)


READ_ONLY = {
    "numpy": lambda a: a,
    "bytes": lambda a: a.tobytes(),
    "memoryview": memoryview,
    "cai": CaiArray,
    "dlpack": DlpackArray,
    "array-interface": InterfaceArray,
    "simulator": arrays.simulated,
    "scalar": lambda a: a[0],
}


@pytest.mark.parametrize("wrap", READ_ONLY.values(), ids=READ_ONLY)
def test_read_only_is_seen(wrap):
    memory = np.arange(3, dtype="f4")
    memory.flags.writeable = False
    assert Buffer(wrap(memory)).readonly is True


@KIND
def test_a_buffer_keeps_its_array_alive_and_lets_it_go(kind):
    obj, memory = kind.make(values("uint8", (6,)))
    before = sys.getrefcount(obj), sys.getrefcount(memory)
    buffer = Buffer(obj)
    assert sys.getrefcount(obj) > before[0]
    del buffer
    getattr(obj, "exports", []).clear()
    gc.collect()
    assert (sys.getrefcount(obj), sys.getrefcount(memory)) == before


@KIND
def test_looking_many_times_leaks_nothing(kind):
    obj, memory = kind.make(values("uint8", (6,)))
    Buffer(obj)
    getattr(obj, "exports", []).clear()
    gc.collect()
    before = sys.getrefcount(obj), sys.getrefcount(memory), sys.getallocatedblocks()
    for _ in range(2000):
        Buffer(obj)
    if hasattr(obj, "exports"):
        assert sum(export.deleted for export in obj.exports) == len(obj.exports) == 2000
        obj.exports.clear()
        obj.asked.clear()
    gc.collect()
    assert (sys.getrefcount(obj), sys.getrefcount(memory)) == before[:2]
    assert sys.getallocatedblocks() < before[2] + 1000


# ---- PEP 3118 -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ctype", "name"),
    [
        (ctypes.c_byte, "int8"),
        (ctypes.c_ubyte, "uint8"),
        (ctypes.c_short, "int16"),
        (ctypes.c_int, "int32"),
        (ctypes.c_long, "int64"),
        (ctypes.c_longlong, "int64"),
        (ctypes.c_ulonglong, "uint64"),
        (ctypes.c_float, "float32"),
        (ctypes.c_double, "float64"),
        (ctypes.c_bool, "bool"),
    ],
)
def test_ctypes_arrays(ctype, name):
    block = ((ctype * 3) * 2)()
    buffer = Buffer(block)
    assert (buffer.dtype, buffer.count, buffer.ptr) == (name, 6, ctypes.addressof(block))


@pytest.mark.parametrize("code", "bBhHiIlLqQfd")
def test_every_code_of_the_array_module(code):
    it = array.array(code, [1, 2, 3])
    address, count = it.buffer_info()
    buffer = Buffer(it)
    assert (buffer.ptr, buffer.count, buffer.itemsize) == (address, count, it.itemsize)
    assert buffer.dtype == np.dtype(code).name


def test_a_format_that_names_no_known_type_is_moved_as_bytes():
    class Pair(ctypes.Structure):
        _fields_ = [("a", ctypes.c_int), ("O", ctypes.c_int)]

    buffer = Buffer((Pair * 3)())
    assert (buffer.count, buffer.itemsize, buffer.dtype) == (3, 8, "T{<i:a:<i:O:}")
    assert Buffer(memoryview(b"abc").cast("c")).dtype == "c"


def test_foreign_byte_order_of_a_buffer_is_refused():
    block = (ctypes.c_int.__ctype_be__ * 2)()
    with pytest.raises(TypeError, match="Buffer: x holds int32 in foreign byte order"):
        Buffer(block)


def test_a_buffer_of_objects_is_refused():
    with pytest.raises(TypeError, match="whose elements are references, not data"):
        Buffer((ctypes.py_object * 2)())


def test_a_bytearray_cannot_move_while_a_buffer_looks_at_it():
    it = bytearray(4)
    buffer = Buffer(it)
    with pytest.raises(BufferError):
        it.append(1)
    del buffer
    it.append(1)


def test_a_released_memoryview_says_so_itself():
    it = memoryview(b"abc")
    it.release()
    with pytest.raises(ValueError, match="released memoryview"):
        Buffer(it)


# ---- which protocol -----------------------------------------------------------------------------------


def test_pep_3118_before_the_cuda_interface_on_the_host():
    class Both(bytearray):
        @property
        def __cuda_array_interface__(self):
            raise AssertionError("not asked for")

    assert Buffer(Both(3)).count == 3


def test_the_cuda_interface_before_dlpack():
    class Both(CaiArray):
        def __dlpack__(self, **_):
            raise AssertionError("not asked for")

        __dlpack_device__ = __dlpack__

    assert Buffer(Both(np.zeros(3))).count == 3


def test_dlpack_before_the_array_interface():
    class Both(DlpackArray):
        __array_interface__ = None

    assert Buffer(Both(np.zeros(3))).count == 3


def test_an_attribute_error_means_that_there_is_no_such_protocol():
    """As torch does it for tensors that are not on a CUDA device."""

    class Cpu(DlpackArray):
        @property
        def __cuda_array_interface__(self):
            raise AttributeError("not a CUDA tensor")

    assert Buffer(Cpu(np.zeros(3))).count == 3


def test_the_reason_of_a_missing_protocol_is_the_cause_of_the_error():
    class Sparse:
        @property
        def __cuda_array_interface__(self):
            raise AttributeError("sparse tensors have none")

    with pytest.raises(TypeError, match="offers none of") as caught:
        Buffer(Sparse())
    assert str(caught.value.__cause__) == "sparse tensors have none"


@pytest.mark.parametrize("name", ["__cuda_array_interface__", "__array_interface__", "__dlpack__"])
def test_an_exception_of_a_property_is_the_users(name):
    class Mine(Exception):
        pass

    def fail(self):
        raise mine

    mine = Mine("in the property")
    cls = type("Array", (), {name: property(fail)})
    with pytest.raises(Mine) as caught:
        Buffer(cls())
    assert caught.value is mine


def test_protocols_are_looked_up_on_the_instance():
    class Proxy:
        def __init__(self, of):
            self.of = of

        def __getattr__(self, name):
            return getattr(self.of, name)

    for of in (CaiArray, DlpackArray, InterfaceArray):
        assert Buffer(Proxy(of(np.zeros(3)))).count == 3


def test_a_class_is_not_an_array():
    class Array:
        @property
        def __cuda_array_interface__(self):
            raise AssertionError("not asked for")

    with pytest.raises(TypeError, match="is a property, not a dict|offers none of|'property'"):
        Buffer(Array)


@pytest.mark.parametrize(
    ("obj", "match"),
    [
        (
            [1, 2],
            r"Buffer: x is a 'list', which offers none of DLPack, .*; pass an array, e\.g\. numpy",
        ),
        ((1, 2), "is a 'tuple', .*numpy.asarray"),
        (1.5, "is a 'float', .*numpy.asarray"),
        (0x7F0000000000, r"is a 'int', .*pynccl\.Buffer\(ptr=, count=, dtype=\)"),
        ("abc", "is a 'str', .*; pass an array$"),
        ({"shape": (1,)}, "is a 'dict', .*__array_interface__"),
        (object(), "is a 'object'"),
    ],
)
def test_no_array_at_all(obj, match):
    with pytest.raises(TypeError, match=match):
        Buffer(obj)


# ---- raw memory ---------------------------------------------------------------------------------------


def test_raw_memory():
    memory = np.zeros(8, "f4")
    buffer = Buffer(ptr=memory.ctypes.data, count=8, dtype="float32")
    assert (buffer.ptr, buffer.count, buffer.nbytes) == (memory.ctypes.data, 8, 32)
    assert (buffer.device, buffer.readonly, buffer.order) == (-1, False, "A")
    there = Buffer(
        ptr=np.uint64(1 << 63), count=np.int32(2), dtype=np.float64, device=3, readonly=True
    )
    assert (there.ptr, there.count, there.device, there.readonly) == (1 << 63, 2, 3, True)
    assert Buffer(ptr=0, count=0, dtype="int8").count == 0


@pytest.mark.parametrize(
    ("words", "error", "match"),
    [
        ({}, TypeError, "pass either an array x, or ptr="),
        ({"x": b"a", "ptr": 1}, TypeError, "pass either an array x, or ptr="),
        ({"x": b"a", "count": 1}, TypeError, "describe raw memory at ptr="),
        ({"x": b"a", "device": 0}, TypeError, "describe raw memory at ptr="),
        ({"x": b"a", "readonly": True}, TypeError, "describe raw memory at ptr="),
        ({"ptr": 4096}, TypeError, "ptr= needs count= and dtype="),
        ({"ptr": 4096, "count": 1}, TypeError, "ptr= needs count= and dtype="),
        ({"ptr": 4096, "dtype": "int8"}, TypeError, "ptr= needs count= and dtype="),
        ({"ptr": "4096", "count": 1, "dtype": "int8"}, TypeError, "ptr is '4096', not an integer"),
        ({"ptr": 1.0, "count": 1, "dtype": "int8"}, TypeError, "ptr is 1.0, not an integer"),
        ({"ptr": True, "count": 1, "dtype": "int8"}, TypeError, "ptr is True, not an integer"),
        ({"ptr": 4096, "count": 1.0, "dtype": "int8"}, TypeError, "count is 1.0, not an integer"),
        (
            {"ptr": 4096, "count": 1, "dtype": "int8", "device": "cuda"},
            TypeError,
            "device is 'cuda'",
        ),
        ({"ptr": -1, "count": 1, "dtype": "int8"}, ValueError, "ptr=-1, count=1: not an address"),
        ({"ptr": 1 << 64, "count": 1, "dtype": "int8"}, ValueError, "not an address"),
        ({"ptr": 4096, "count": -1, "dtype": "int8"}, ValueError, "count=-1"),
        (
            {"ptr": 4096, "count": 1 << 63, "dtype": "int8"},
            ValueError,
            "not an address and a number",
        ),
        (
            {"ptr": 4096, "count": 1 << 61, "dtype": "int64"},
            ValueError,
            "more bytes than there are",
        ),
        (
            {"ptr": 0, "count": 1, "dtype": "int8"},
            ValueError,
            "1 elements, but its data pointer is 0",
        ),
        (
            {"ptr": 4098, "count": 1, "dtype": "int32"},
            ValueError,
            "0x1002, which is not aligned for int32",
        ),
        ({"ptr": 4096, "count": 1, "dtype": "int8", "device": -2}, ValueError, "device=-2"),
        (
            {"ptr": 4096, "count": 1, "dtype": "int8", "device": 1 << 31},
            ValueError,
            "device=2147483648",
        ),
    ],
)
def test_wrong_arguments(words, error, match):
    with pytest.raises(error, match=match):
        Buffer(**words)


# ---- the class ----------------------------------------------------------------------------------------


def test_signature_and_repr():
    assert str(inspect.signature(Buffer)) == (
        "(x=None, dtype=None, *, ptr=None, count=None, device=-1, readonly=False)"
    )
    assert repr(Buffer(b"abc")) == "<Buffer of 3 x uint8 on host, read-only>"
    assert (
        repr(Buffer(ptr=4096, count=2, dtype="int8", device=1))
        == "<Buffer of 2 x int8 on device 1>"
    )


def test_a_buffer_of_a_buffer():
    memory = np.zeros(4, "u2")
    first = Buffer(memory)
    again = Buffer(first, "bfloat16")
    assert (again.ptr, again.dtype) == (memory.ctypes.data, "bfloat16")
    references = sys.getrefcount(memory)
    del first
    assert sys.getrefcount(memory) == references
    del again
    assert sys.getrefcount(memory) == references - 1


def test_the_array_behind_a_buffer():
    for obj in (np.zeros(3), bytearray(3), DlpackArray(np.zeros(3)), CaiArray(np.zeros(3))):
        assert Buffer(obj).obj is obj
    pair = (ctypes.c_int * 2)()
    assert Buffer(pair).obj is pair
    assert Buffer(ptr=4096, count=1, dtype="int8").obj is None


def test_a_buffer_is_made_once():
    buffer = Buffer(b"abc")
    with pytest.raises(TypeError, match="initialised already"):
        buffer.__init__(b"defg")
    empty = Buffer.__new__(Buffer)
    assert repr(empty) == "<Buffer, not initialised>"
    with pytest.raises(ValueError, match="Buffer: x is a Buffer that was never initialised"):
        Buffer(empty)


def test_a_buffer_cannot_be_pickled_or_subclassed():
    with pytest.raises(TypeError, match="address of this process"):
        pickle.dumps(Buffer(b"abc"))
    with pytest.raises(TypeError):
        type("Mine", (Buffer,), {})


def test_a_failed_buffer_can_be_tried_again():
    buffer = Buffer.__new__(Buffer)
    with pytest.raises(TypeError):
        buffer.__init__([1])
    buffer.__init__(b"ab")
    assert buffer.count == 2


def test_misaligned_elements_are_refused_but_bytes_are_not():
    memory = np.zeros(17, "u1")[1:]
    for wrap in (lambda a: a, CaiArray, InterfaceArray, DlpackArray):
        with pytest.raises(
            ValueError, match="which is not aligned for float64; pass a copy, or dtype='uint8'"
        ):
            Buffer(wrap(memory.view("f8")))
        assert Buffer(wrap(memory.view("f8")), "uint8").count == 16
    assert Buffer(memory.view("V8")).count == 2
    # A complex number is aligned as its parts are.
    floats = np.zeros(9, "f4")[1:]
    assert Buffer(floats.view("c8")).count == 4


# ---- other processes ----------------------------------------------------------------------------------


def test_numpy_is_not_imported():
    out = scripts.run(
        """
        import array, sys
        from pynccl._buffer import Buffer
        class Array:
            __cuda_array_interface__ = {"shape": (0,), "typestr": "<f4", "data": (0, False), "version": 3}
        for obj in (array.array("f", [1]), bytearray(3), Array(), Buffer(b"a")):
            Buffer(obj)
        try:
            Buffer([1])
        except TypeError:
            print("numpy" in sys.modules)
        """
    )
    assert out.split() == ["False"]


def test_arrays_of_numbas_simulator():
    out = scripts.run(
        """
        import numpy as np
        from numba import cuda
        from pynccl._buffer import Buffer
        from pynccl import LayoutError
        for dtype in ("f4", "M8[s]", "c8", "i2"):
            host = np.zeros((2, 3), dtype)
            device = cuda.to_device(host)
            print(Buffer(device).count, Buffer(device).dtype, Buffer(device).device)
        print(Buffer(cuda.device_array((2, 3), order="F")).order)
        print(Buffer(cuda.mapped_array(4)).count, Buffer(cuda.pinned_array(4)).count)
        try:
            Buffer(cuda.to_device(np.zeros((4, 4)))[:, 1])
        except LayoutError as error:
            print("refused")
        """,
        NUMBA_ENABLE_CUDASIM="1",
    )
    assert out.split() == [
        "6", "float32", "-1", "6", "<M8[s]", "-1", "6", "complex64", "-1", "6", "int16", "-1",
        "F", "4", "4", "refused",
    ]  # fmt: skip


def test_absent_is_absent():
    assert "mask" not in arrays.interface(np.zeros(2))
    assert "strides" not in arrays.interface(np.zeros(2), strides=ABSENT)
