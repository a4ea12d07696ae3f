"""DLPack: both kinds of capsules and the C exchange table; each tensor is given back once."""

import gc
import sys

import numpy as np
import pytest

from helpers import arrays, capsules, scripts
from helpers.arrays import DlpackArray, OldDlpackArray
from helpers.build import build_shared
from helpers.stubs import build_cuda_stub
from pynccl import LayoutError
from pynccl._buffer import Buffer

BOTH = pytest.mark.parametrize("versioned", [True, False], ids=["current", "old"])


@pytest.fixture(autouse=True)
def nothing_is_left():
    before = capsules.held()
    yield
    if capsules.held() != before:
        gc.collect()
    assert capsules.held() == before


def look(array):
    """A buffer of the array; its only export must be in use as long as the buffer is, and given back then."""
    buffer = Buffer(array)
    (export,) = array.exports
    assert export.deleted == 0
    said = {
        name: getattr(buffer, name)
        for name in ("ptr", "count", "dtype", "nbytes", "device", "readonly", "order", "stream")
    }
    del buffer
    assert export.deleted == 1
    return said


def refused(array, error, match):
    """The array must be refused, and what it exported given back by then."""
    with pytest.raises(error, match=match) as caught:
        Buffer(array)
    del caught
    for export in array.exports:
        assert export.deleted == 1


class Tabled(DlpackArray):
    """An array whose type has a C exchange table; its methods must not be called."""

    __dlpack_c_exchange_api__ = None

    def __dlpack_device__(self):
        raise AssertionError("not asked for")

    def __dlpack__(self, **_):
        raise AssertionError("not asked for")

    @property
    def exported(self):
        export = capsules.Export(self.values, **self.fields)
        self.exports.append(export)
        return export.address


@pytest.fixture(params=["capsule", "old capsule", "table"])
def make(request):
    """``make(memory, **fields)``: an array with DLPack of one of the three kinds."""
    if request.param == "table":
        Tabled.__dlpack_c_exchange_api__ = capsules.exchange_table()
    return {"capsule": DlpackArray, "old capsule": OldDlpackArray, "table": Tabled}[request.param]


# ---- tensors ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", arrays.ALL)
def test_types(make, dtype):
    memory = np.zeros(4, arrays.dtype(dtype))
    assert look(make(memory))["dtype"] == dtype


@pytest.mark.parametrize(
    ("dtype", "name", "nbytes"),
    [
        ((0, 16, 1), "int16", 2),
        ((1, 16, 1), "uint16", 2),
        ((8, 8, 1), "float8_e4m3", 1),
        ((11, 8, 1), "float8_e4m3fnuz", 1),
        ((14, 8, 1), "float8_e8m0fnu", 1),
        ((5, 32, 1), "complex32", 4),
        ((2, 128, 1), "float128", 16),
        ((2, 32, 4), "float32x4", 16),
        ((2, 32, 2), "float32x2", 8),
        ((17, 4, 2), "dlpack17_4x2", 1),
        ((99, 8, 1), "dlpack99_8", 1),
    ],
)
def test_types_that_are_only_moved(make, dtype, name, nbytes):
    said = look(make(np.zeros(16, "u1"), shape=(1,), strides=(1,), dtype=dtype))
    assert (said["dtype"], said["nbytes"], said["count"]) == (name, nbytes, 1)


@pytest.mark.parametrize(
    ("dtype", "match"),
    [
        ((3, 64, 1), "x has elements that are handles, not data"),
        ((17, 4, 1), "x has elements of 4 bits; only whole bytes can be moved"),
        ((15, 6, 1), "x has elements of 6 bits"),
        ((2, 0, 1), "x has elements of 0 bits"),
        ((2, 32, 0), "x has elements of 0 bits"),
    ],
)
def test_types_that_are_refused(make, dtype, match):
    refused(make(np.zeros(16, "u1"), dtype=dtype), TypeError, "Buffer: " + match)


@pytest.mark.parametrize("strides", [None, (3, 1)])
def test_c_order_with_and_without_strides(make, strides):
    memory = np.zeros((2, 3), "f4")
    said = look(make(memory, strides=strides))
    assert (said["ptr"], said["count"], said["order"]) == (memory.ctypes.data, 6, "C")


def test_the_byte_offset_counts(make):
    memory = np.zeros(8, "f4")
    assert look(make(memory, shape=(4,), byte_offset=16))["ptr"] == memory.ctypes.data + 16


@pytest.mark.parametrize("shape", [(0,), (3, 0), (1 << 40, 0, 1 << 40)])
@pytest.mark.parametrize("data", [0, 64])
def test_empty(make, shape, data):
    said = look(make(np.zeros(1), shape=shape, strides=None, data=data, byte_offset=data))
    assert (said["ptr"], said["count"]) == (0, 0)


def test_a_scalar_needs_no_shape(make):
    array = make(np.zeros((), "f4"))
    said = look(array)
    assert (said["count"], said["order"]) == (1, "A")


@pytest.mark.parametrize(
    ("shape", "strides"),
    [
        ((4,), (2,)),
        ((4,), (-1,)),
        ((2, 2), (0, 1)),
        ((2, 2), (1, 1)),
        ((2,), (1 << 62,)),
        ((2,), (-(1 << 63),)),
    ],
)
def test_layouts_that_are_refused(make, shape, strides):
    refused(
        make(np.zeros(16, "f4"), shape=shape, strides=strides),
        LayoutError,
        "x is not contiguous: shape",
    )


def test_the_message_counts_strides_in_bytes(make):
    refused(
        make(np.zeros(16, "f4"), shape=(4,), strides=(2,)),
        LayoutError,
        r"strides \(8,\), itemsize 4",
    )


def test_a_stride_that_does_not_matter_may_be_anything(make):
    assert look(make(np.zeros(16, "f4"), shape=(1, 4), strides=(-(1 << 63), 1)))["count"] == 4


@pytest.mark.parametrize(
    ("fields", "error", "match"),
    [
        ({"ndim": -1}, ValueError, "its DLPack tensor has -1 axes; 0 to 64 are possible"),
        ({"ndim": 65}, ValueError, "its DLPack tensor has 65 axes"),
        ({"ndim": 1 << 30}, ValueError, "its DLPack tensor has 1073741824 axes"),
        ({"shape": (-1,), "strides": None}, ValueError, r"negative length in its shape \(-1,\)"),
        ({"shape": (1 << 62,), "strides": None}, ValueError, "more bytes than there are addresses"),
        (
            {"shape": (1 << 40, 1 << 40), "strides": None},
            ValueError,
            "more bytes than there are addresses",
        ),
        ({"data": 0}, ValueError, "16 elements, but its data pointer is 0"),
        ({"data": 0, "byte_offset": 64}, ValueError, "its data pointer is 0"),
    ],
)
def test_malformed_tensors(make, fields, error, match):
    refused(make(np.zeros(16, "f4"), **fields), error, match)


def test_a_tensor_without_a_shape():
    class Array(DlpackArray):
        def export(self):
            export = capsules.Export(self.values, **self.fields)
            export.struct.tensor.shape = None
            self.exports.append(export)
            return export.capsule()

    refused(Array(np.zeros(3)), ValueError, "its DLPack tensor has 1 axes but no shape")
    assert look(Array(np.zeros(())))["count"] == 1


def test_no_deleter_is_needed(make):
    array = make(np.zeros(3), deleter=False)
    assert Buffer(array).count == 3
    capsules._held.clear()


def test_the_read_only_bit():
    memory = np.zeros(3)
    Tabled.__dlpack_c_exchange_api__ = capsules.exchange_table()
    for Array in (DlpackArray, Tabled):
        assert look(Array(memory, flags=capsules.READ_ONLY))["readonly"] is True
        assert look(Array(memory, flags=capsules.READ_ONLY | 2))["readonly"] is True
        assert look(Array(memory, flags=6))["readonly"] is False


# ---- devices and streams ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("device", "expected"),
    [((capsules.CPU, 0), -1), ((capsules.CPU, 5), -1), ((capsules.CUDA, 0), 0), ((capsules.CUDA, 7), 7),
     ((capsules.CUDA_HOST, 0), -1), ((capsules.CUDA_MANAGED, 0), -1)],
)  # fmt: skip
def test_devices(make, device, expected):
    assert look(make(np.zeros(3), device=device))["device"] == expected


@pytest.mark.parametrize(
    ("device", "name"),
    [((8, 0), "Metal"), ((10, 0), "ROCm"), ((14, 1), "oneAPI"), ((77, 0), r"unknown \(77\)")],
)
@BOTH
def test_other_devices_are_refused_by_name(device, name, versioned):
    Array = DlpackArray if versioned else OldDlpackArray
    array = Array(np.zeros(3), device=device)
    refused(array, BufferError, f"Buffer: x is in {name} memory; NCCL moves CUDA memory")
    assert array.exports == [], "it must be refused before anything is exported"


def test_the_table_refuses_other_devices_too():
    Tabled.__dlpack_c_exchange_api__ = capsules.exchange_table()
    refused(Tabled(np.zeros(3), device=(8, 0)), BufferError, "x is in Metal memory")


def test_a_tensor_on_another_device_than_the_method_says():
    class Array(DlpackArray):
        def __dlpack_device__(self):
            return (capsules.CPU, 0)

    refused(Array(np.zeros(3), device=(8, 0)), BufferError, "x is in Metal memory")


@BOTH
def test_the_default_stream_is_asked_for_on_cuda_devices_only(versioned):
    Array = DlpackArray if versioned else OldDlpackArray
    for device, stream in (
        (capsules.CUDA, 1),
        (capsules.CUDA_MANAGED, 1),
        (capsules.CPU, None),
        (capsules.CUDA_HOST, None),
    ):
        array = Array(np.zeros(3), device=(device, 0))
        assert look(array)["stream"] == stream
        assert array.asked[-1].get("stream") == stream


@pytest.mark.parametrize("stream", [0, 1, 2, 0x7F0000001000])
def test_the_stream_of_a_table_is_the_producers_current_one(stream):
    Tabled.__dlpack_c_exchange_api__ = capsules.exchange_table(stream=stream)
    assert look(Tabled(np.zeros(3), device=(capsules.CUDA, 1)))["stream"] == stream
    assert look(Tabled(np.zeros(3)))["stream"] is None


def test_managed_memory_is_where_the_driver_says():
    out = scripts.run(
        """
        import os
        from pathlib import Path
        import numpy as np
        from helpers import arrays, capsules
        from helpers.stubs import CudaStub
        from pynccl._buffer import Buffer
        stub = CudaStub(Path(os.environ["PYNCCL_LIBCUDA"]))
        stub.start()
        memory = np.zeros(64, "f4")
        stub.memory(memory.ctypes.data, memory.nbytes, device=3)
        print(Buffer(arrays.DlpackArray(memory, device=(capsules.CUDA_MANAGED, 0))).device)
        print(Buffer(arrays.DlpackArray(memory, device=(capsules.CUDA, 1))).device)
        """,
        PYNCCL_LIBCUDA=str(build_cuda_stub()),
    )
    assert out.split() == ["3", "1"]


# ---- the capsule protocol -----------------------------------------------------------------------------


def test_versions_that_are_asked_for():
    new, old = DlpackArray(np.zeros(3)), OldDlpackArray(np.zeros(3))
    look(new)
    look(old)
    assert new.asked == [{"max_version": (1, 3)}]
    assert old.asked == [{}]


@pytest.mark.parametrize("version", [(1, 0), (1, 3), (1, 99)])
def test_versions_that_are_known(version):
    assert look(DlpackArray(np.zeros(3), version=version))["count"] == 3


@pytest.mark.parametrize("version", [(2, 0), (0, 8), (4294967295, 1)])
def test_versions_that_are_not_known(version):
    major, minor = version
    refused(
        DlpackArray(np.zeros(3), version=version),
        BufferError,
        f"x exports version {major}.{minor} of DLPack",
    )


def test_what_is_consumed_is_renamed():
    class Array(DlpackArray):
        def export(self):
            self.capsule = super().export()
            return self.capsule

    for Kind, name in (
        (Array, b"used_dltensor_versioned"),
        (type("Old", (Array, OldDlpackArray), {}), b"used_dltensor"),
    ):
        array = Kind(np.zeros(3))
        buffer = Buffer(array)
        assert capsules.name_of(array.capsule) == name
        del buffer
        assert array.exports[0].deleted == 1
        del array.capsule
        assert array.exports[0].deleted == 1, "the capsule must not give it back again"


def test_a_capsule_that_was_used_before():
    class Array(DlpackArray):
        def __dlpack__(self, **_):
            if not hasattr(self, "capsule"):
                self.capsule = self.export()
            return self.capsule

    array = Array(np.zeros(3))
    first = Buffer(array)
    with pytest.raises(BufferError, match="its __dlpack__ returned a capsule that was used before"):
        Buffer(array)
    assert first.count == 3
    assert array.exports[0].deleted == 0
    del first
    assert array.exports[0].deleted == 1


def test_a_capsule_of_another_name():
    class Array(DlpackArray):
        def __dlpack__(self, **_):
            return capsules.Export(self.values).capsule(b"dlsomething")

    with pytest.raises(BufferError, match="or that holds no tensor"):
        Buffer(Array(np.zeros(3)))
    capsules._held.clear()


@pytest.mark.parametrize("value", [None, 3, "capsule", object()])
def test_what_is_no_capsule(value):
    class Array(DlpackArray):
        def __dlpack__(self, **_):
            return value

    with pytest.raises(
        TypeError, match=f"its __dlpack__ returned a '{type(value).__name__}', not a capsule"
    ):
        Buffer(Array(np.zeros(3)))


@pytest.mark.parametrize(
    "device", [None, 1, "cpu", (), ("cpu", 0), [], {}, (1 << 40, 0), (None, 0)]
)
def test_what_is_no_device(device):
    class Array(DlpackArray):
        def __dlpack_device__(self):
            return device

    with pytest.raises(
        TypeError, match=r"its __dlpack_device__ returned .*, not \(device type, device number\)"
    ):
        Buffer(Array(np.zeros(3)))


def test_an_array_that_does_not_say_its_device_is_asked_without_a_stream():
    class Array:
        def __init__(self):
            self.inner = DlpackArray(np.zeros(3))

        def __dlpack__(self, **asked):
            return self.inner.__dlpack__(**asked)

    assert Buffer(Array()).count == 3


class Mine(Exception):
    pass


@pytest.mark.parametrize("method", ["__dlpack__", "__dlpack_device__"])
@pytest.mark.parametrize(
    "error", [Mine("mine"), BufferError("requires grad"), ValueError("no"), RuntimeError("no")]
)
def test_exceptions_of_the_methods_are_the_users(method, error):
    def fail(self, **_):
        raise error

    Array = type("Array", (DlpackArray,), {method: fail})
    with pytest.raises(type(error)) as caught:
        Buffer(Array(np.zeros(3)))
    assert caught.value is error


def test_a_type_error_of_the_method_is_the_users():
    class Array(DlpackArray):
        def __dlpack__(self, **_):
            raise TypeError("mine")

    with pytest.raises(TypeError, match="mine"):
        Buffer(Array(np.zeros(3)))


def test_read_only_arrays_of_numpy_through_a_capsule():
    memory = np.zeros(3)
    memory.flags.writeable = False

    class Wrapped:
        def __dlpack__(self, **asked):
            return memory.__dlpack__(**asked)

        def __dlpack_device__(self):
            return memory.__dlpack_device__()

    if np.lib.NumpyVersion(np.__version__) < "2.1.0":
        with pytest.raises(BufferError, match="Cannot export readonly array"):  # NumPy's own words
            Buffer(Wrapped())
        return
    references = sys.getrefcount(memory)
    buffer = Buffer(Wrapped())
    assert (buffer.ptr, buffer.readonly) == (memory.ctypes.data, True)
    del buffer
    assert sys.getrefcount(memory) == references


# ---- the exchange table -------------------------------------------------------------------------------


def test_an_exception_of_the_table_is_the_users():
    class Array(Tabled):
        __dlpack_c_exchange_api__ = capsules.exchange_table()

        @property
        def exported(self):
            raise Mine("in the export")

    with pytest.raises(Mine, match="in the export"):
        Buffer(Array(np.zeros(3)))


def test_a_table_that_gives_nothing():
    class Array(Tabled):
        __dlpack_c_exchange_api__ = capsules.exchange_table()
        exported = 0

    with pytest.raises(
        BufferError, match="x: its DLPack exchange table gave neither a tensor nor an error"
    ):
        Buffer(Array(np.zeros(3)))


def test_a_table_of_a_later_version_is_not_used():
    class Array(DlpackArray):
        __dlpack_c_exchange_api__ = capsules.exchange_table(major=2)

    assert look(Array(np.zeros(3)))["count"] == 3


def test_an_older_table_behind_a_later_one_is_used():
    class Array(Tabled):
        __dlpack_c_exchange_api__ = capsules.exchange_table(major=2, older=True)

    assert look(Array(np.zeros(3)))["count"] == 3


@pytest.mark.parametrize("table", [None, 3, object(), property(lambda self: 1 / 0)])
def test_what_is_no_table_is_not_used(table):
    class Array(DlpackArray):
        __dlpack_c_exchange_api__ = table

    assert look(Array(np.zeros(3)))["count"] == 3


def test_a_capsule_of_another_name_is_no_table():
    class Array(DlpackArray):
        __dlpack_c_exchange_api__ = capsules.Export(np.zeros(1)).capsule()

    assert look(Array(np.zeros(3)))["count"] == 3
    del Array


def test_the_table_comes_before_all_other_protocols():
    class Array(Tabled):
        __dlpack_c_exchange_api__ = capsules.exchange_table()

        @property
        def __cuda_array_interface__(self):
            raise AssertionError("not asked for")

    assert look(Array(np.zeros(3)))["count"] == 3


def test_helpers_compile_once():
    assert build_shared.__module__ == "helpers.build"
