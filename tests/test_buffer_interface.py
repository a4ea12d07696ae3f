"""``__cuda_array_interface__`` and ``__array_interface__``, field by field."""

import collections
import ctypes

import numpy as np
import pytest

from helpers import scripts
from helpers.arrays import ABSENT, CaiArray, CaiProperty, InterfaceArray, NamedArray, dtype
from helpers.build import ROOT
from helpers.stubs import build_cuda_stub
from pynccl import LayoutError
from pynccl._buffer import Buffer

BOTH = pytest.mark.parametrize("Array", [CaiArray, CaiProperty, InterfaceArray])
MEMORY = np.arange(16, dtype="f4")
HERE = MEMORY.ctypes.data


# ---- shape and strides --------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("strides", [None, ABSENT, (12, 4), [12, 4], (np.int64(12), np.int32(4))])
def test_three_ways_to_say_c_order(Array, strides):
    buffer = Buffer(Array(MEMORY, shape=(2, 3), strides=strides))
    assert (buffer.ptr, buffer.count, buffer.order) == (HERE, 6, "C")


@BOTH
@pytest.mark.parametrize(
    ("shape", "strides", "count"),
    [
        ((1, 10), (800, 4), 10),
        ((10, 1), (4, 0), 10),
        ((10, 1), (4, -4), 10),
        ((1, 1), (99, -99), 1),
        ((1, 0, 2), (64, 16, 8), 0),
        ((0,), (7,), 0),
        ((3, 0), (-5, 3), 0),
        ((), (), 1),
        ([2, 3], (12, 4), 6),
        ((np.uint8(2), np.int64(3)), None, 6),
    ],
)
def test_strides_that_do_not_matter(Array, shape, strides, count):
    buffer = Buffer(Array(MEMORY, shape=shape, strides=strides))
    assert (buffer.count, buffer.nbytes) == (count, 4 * count)


@BOTH
@pytest.mark.parametrize(
    ("shape", "strides"),
    [
        ((2, 4), (0, 4)),
        ((4,), (-4,)),
        ((4,), (8,)),
        ((3,), (6,)),  # not even a multiple of the element
        ((2, 3), (4, 4)),
        ((2, 3), (12, 8)),
        ((2, 2, 2), (4, 16, 8)),  # dense, but neither C nor Fortran
        ((2,), (1 << 62,)),
    ],
)
def test_layouts_that_are_refused(Array, shape, strides):
    with pytest.raises(LayoutError) as caught:
        Buffer(Array(MEMORY, shape=shape, strides=strides))
    assert f"shape {shape}, strides {strides}, itemsize 4; pass a contiguous copy" in str(
        caught.value
    )


@BOTH
@pytest.mark.parametrize(
    ("fields", "error", "match"),
    [
        ({"shape": ABSENT}, TypeError, "its shape is None, not a tuple of integers"),
        ({"shape": 3}, TypeError, "its shape is 3, not a tuple"),
        ({"shape": "12"}, TypeError, "its shape is '12', not a tuple"),
        ({"shape": (2.0,)}, TypeError, r"its shape \(2.0,\) holds 2.0, not an integer"),
        ({"shape": (2, None)}, TypeError, "holds None, not an integer"),
        ({"shape": (-1,)}, ValueError, r"negative length in its shape \(-1,\)"),
        ({"shape": (0, -1)}, ValueError, "negative length"),
        ({"shape": (1 << 63,)}, ValueError, "holds a number beyond 64 bits"),
        ({"shape": (1 << 62,)}, ValueError, "more bytes than there are addresses"),
        ({"shape": (1 << 40, 1 << 40)}, ValueError, "more bytes than there are addresses"),
        ({"shape": (3, 1 << 63 - 1)}, ValueError, "more bytes than there are addresses"),
        ({"shape": (1,) * 65}, ValueError, "its shape has 65 axes; 64 are the limit"),
        (
            {"shape": (2, 3), "strides": (4,)},
            ValueError,
            r"strides \(4,\) and shape \(2, 3\) differ in length",
        ),
        ({"shape": (2,), "strides": 4}, TypeError, "its strides is 4, not a tuple"),
        ({"shape": (2,), "strides": (1 << 64,)}, ValueError, "beyond 64 bits"),
    ],
)
def test_shapes_that_are_none(Array, fields, error, match):
    with pytest.raises(error, match=match) as caught:
        Buffer(Array(MEMORY, **fields))
    assert str(caught.value).startswith("Buffer: x")


def test_sixty_four_axes():
    assert Buffer(CaiArray(MEMORY, shape=(1,) * 63 + (4,))).count == 4


def test_an_empty_array_may_have_impossible_axes():
    assert Buffer(CaiArray(MEMORY, shape=(1 << 40, 1 << 40, 0))).count == 0


# ---- data ---------------------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize(
    "data", [(0, False), (None, False), (HERE, False), (1, False), ("junk", False), None, 7, ABSENT]
)
def test_the_pointer_of_an_empty_array_is_not_looked_at(Array, data):
    buffer = Buffer(Array(MEMORY, shape=(3, 0, 2), data=data))
    assert (buffer.ptr, buffer.count, buffer.readonly) == (0, 0, False)


@BOTH
@pytest.mark.parametrize(
    ("data", "error", "match"),
    [
        ((None, False), TypeError, r"the pointer in its data \(None, False\) is not an integer"),
        (("4096", False), TypeError, "the pointer in its data .* is not an integer"),
        ((4096.0, False), TypeError, "the pointer in its data .* is not an integer"),
        ((0, False), ValueError, r"its shape is \(16,\), but the pointer in its data is 0"),
        ((-4096, False), ValueError, "the pointer in its data .* is not an address"),
        ((1 << 64, False), ValueError, "the pointer in its data .* is not an address"),
        (None, TypeError, "its data is None, not a pair"),
        (ABSENT, TypeError, "its data is None, not a pair"),
        (4096, TypeError, "its data is 4096, not a pair"),
        ((4096,), TypeError, "its data is .*, not a pair"),
        ((4096, False, 0), TypeError, "its data is .*, not a pair"),
    ],
)
def test_pointers_that_are_none(Array, data, error, match):
    with pytest.raises(error, match=match):
        Buffer(Array(MEMORY, data=data))


@BOTH
@pytest.mark.parametrize("data", [(HERE, False), [HERE, 0], (np.uint64(HERE), np.False_)])
def test_spellings_of_data(Array, data):
    buffer = Buffer(Array(MEMORY, data=data))
    assert (buffer.ptr, buffer.readonly) == (HERE, False)


@BOTH
@pytest.mark.parametrize("flag", [True, 1, np.True_])
def test_the_read_only_flag(Array, flag):
    assert Buffer(Array(MEMORY, data=(HERE, flag))).readonly is True
    assert Buffer(Array(MEMORY, shape=(0,), data=(0, flag))).readonly is True


def test_a_pointer_of_64_bits():
    assert (
        Buffer(CaiArray(MEMORY, typestr="|V4", data=((1 << 64) - 64, False))).ptr == (1 << 64) - 64
    )


# ---- typestr ------------------------------------------------------------------------------------------

SWAPPED = np.dtype("f4").newbyteorder().str[0]
NATIVE = np.dtype("f4").str[0]


@BOTH
@pytest.mark.parametrize(
    ("typestr", "name"),
    [
        ("|i1", "int8"), ("|u1", "uint8"), (NATIVE + "i2", "int16"), (NATIVE + "u2", "uint16"),
        (NATIVE + "i4", "int32"), (NATIVE + "u4", "uint32"), (NATIVE + "i8", "int64"),
        (NATIVE + "u8", "uint64"), (NATIVE + "f2", "float16"), (NATIVE + "f4", "float32"),
        (NATIVE + "f8", "float64"), ("|b1", "bool"), (NATIVE + "c8", "complex64"),
        (NATIVE + "c16", "complex128"), ("f4", "float32"), ("=f4", "float32"), (SWAPPED + "u1", "uint8"),
        (NATIVE + "V2", NATIVE + "V2"), ("|V1", "|V1"), (NATIVE + "f1", NATIVE + "f1"), ("|V16", "|V16"),
        (SWAPPED + "V4", SWAPPED + "V4"), ("|S3", "|S3"), (NATIVE + "U2", NATIVE + "U2"),
        (NATIVE + "M8[ns]", NATIVE + "M8[ns]"), (NATIVE + "m8[25s]", NATIVE + "m8[25s]"),
        (NATIVE + "M8", NATIVE + "M8"), (NATIVE + "f16", NATIVE + "f16"), (NATIVE + "c4", "complex32"),
    ],
)  # fmt: skip
def test_type_strings(Array, typestr, name):
    buffer = Buffer(Array(MEMORY, shape=(1,), typestr=typestr))
    assert buffer.dtype == name
    assert buffer.itemsize == (
        8
        if typestr.endswith("U2")
        else np.dtype(typestr.replace("f1", "V1").replace("c4", "V4")).itemsize
    )


@BOTH
@pytest.mark.parametrize(
    "typestr",
    ["|i", "|", "", "f", "4", "<4", "|O8", "O", "|t3", "|x4", "<f4x", "<f4[ns]", "<M8[ns", "<f-4", "<f 4",
     "<<f4", "f4<", "<f99999999999999999999", "<V2147483648", "|V0", "<f0", "T{i:a:}", "float32", "<f٤"],
)  # fmt: skip
def test_type_strings_that_are_none(Array, typestr):
    with pytest.raises(TypeError, match="names no type of data; expected one such as '<f4'"):
        Buffer(Array(MEMORY, typestr=typestr))


@BOTH
@pytest.mark.parametrize("typestr", [ABSENT, None, b"<f4", 4, np.dtype("f4"), float])
def test_type_strings_that_are_no_strings(Array, typestr):
    with pytest.raises(TypeError, match="its typestr is .*, not a string such as '<f4'"):
        Buffer(Array(MEMORY, typestr=typestr))


def test_a_type_string_of_half_a_character():
    with pytest.raises(UnicodeEncodeError):
        Buffer(CaiArray(MEMORY, typestr="<f4\ud800"))


@BOTH
def test_foreign_byte_order(Array):
    with pytest.raises(
        TypeError, match=r"Buffer: x holds float32 in foreign byte order; convert it"
    ):
        Buffer(Array(MEMORY, typestr=SWAPPED + "f4"))
    with pytest.raises(TypeError, match=r"holds .M8\[ns\] in foreign byte order"):
        Buffer(Array(MEMORY, shape=(2,), typestr=SWAPPED + "M8[ns]"))


@pytest.mark.parametrize("name", ["bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz"])
def test_the_name_of_the_dtype_comes_before_a_vague_type_string(name):
    memory = np.zeros(4, dtype(name))
    assert Buffer(NamedArray(memory)).dtype == name
    assert Buffer(CaiArray(memory)).dtype == memory.dtype.str
    if name != "float8_e4m3fnuz":
        assert Buffer(CaiArray(memory), dtype=name).dtype == name
        assert Buffer(CaiArray(memory), dtype=memory.dtype).dtype == name


def test_the_name_may_be_one_of_torchs():
    class Array(CaiArray):
        dtype = type("dtype", (), {"__str__": lambda self: "torch.bfloat16"})()

    assert Buffer(Array(MEMORY, typestr="<V2")).dtype == "bfloat16"


def test_a_name_of_another_size_is_not_believed():
    class Array(CaiArray):
        dtype = "float32"

    assert Buffer(Array(MEMORY, typestr="<V2")).dtype == "<V2"


def test_an_exception_of_the_dtype_is_the_users():
    class Array(CaiArray):
        @property
        def dtype(self):
            raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        Buffer(Array(MEMORY, typestr="<V2"))
    assert Buffer(Array(MEMORY)).count == 16, "not asked for where the type string is clear"


def test_a_structure_is_moved_whole():
    memory = np.zeros(2, [("a", "f8"), ("b", "f8")])
    buffer = Buffer(CaiArray(memory, descr=memory.dtype.descr))
    assert (buffer.dtype, buffer.count, buffer.nbytes) == ("|V16", 2, 32)


# ---- version, mask, stream ----------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("version", [0, 1, 2, 3, ABSENT, None, np.int64(2)])
def test_versions(Array, version):
    assert Buffer(Array(MEMORY, version=version)).count == 16


@BOTH
@pytest.mark.parametrize(
    ("version", "error", "match"),
    [
        (4, ValueError, "has version 4; versions 0 to 3 are known"),
        (-1, ValueError, "has version -1"),
        (1 << 70, ValueError, "has version 1180591620717411303424"),
        ("3", TypeError, "version of its array interface is '3', not a number"),
        (3.0, TypeError, "version of its array interface is 3.0"),
    ],
)
def test_versions_that_are_none(Array, version, error, match):
    with pytest.raises(error, match=match):
        Buffer(Array(MEMORY, version=version))


@BOTH
@pytest.mark.parametrize("mask", [MEMORY, True, 0, CaiArray(MEMORY)])
def test_a_mask_is_refused(Array, mask):
    with pytest.raises(ValueError, match="Buffer: x has a mask, which would be lost"):
        Buffer(Array(MEMORY, mask=mask))


@BOTH
def test_no_mask(Array):
    assert Buffer(Array(MEMORY, mask=None)).count == 16


@pytest.mark.parametrize("stream", [1, 2, 0x7FFF00001234, (1 << 64) - 1, np.uint64(1 << 63)])
@pytest.mark.parametrize("Array", [CaiArray, CaiProperty])
def test_streams(Array, stream):
    assert Buffer(Array(MEMORY, stream=stream)).stream == stream


@pytest.mark.parametrize("stream", [None, ABSENT])
def test_no_stream(stream):
    assert Buffer(CaiArray(MEMORY, stream=stream)).stream is None


@pytest.mark.parametrize(
    ("stream", "error", "match"),
    [
        (
            0,
            ValueError,
            "is 0, which the protocol forbids as ambiguous; 1 is the legacy default stream",
        ),
        (-1, ValueError, "is -1, which is no handle"),
        (1 << 64, ValueError, "is 18446744073709551616, which is no handle"),
        (True, TypeError, "is True, not an integer or None"),
        ("1", TypeError, "is '1', not an integer or None"),
        (1.0, TypeError, "is 1.0, not an integer or None"),
    ],
)
def test_streams_that_are_none(stream, error, match):
    with pytest.raises(error, match="the stream in its CUDA array interface " + match):
        Buffer(CaiArray(MEMORY, stream=stream))


# ---- the dict itself ----------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize(
    "said", [None, 3, (1,), [("shape", (1,))], collections.UserDict(shape=(1,))]
)
def test_an_interface_that_is_no_dict(Array, said):
    array = InterfaceArray(MEMORY) if Array is InterfaceArray else CaiArray(MEMORY)
    for name in list(vars(array)):
        if name.endswith("interface__"):
            setattr(array, name, said)
    with pytest.raises(
        TypeError, match=f"its array interface is a '{type(said).__name__}', not a dict"
    ):
        Buffer(array)


class Text(str):
    """A key that is equal to a string, and not the same."""

    __slots__ = ()


def other(text):
    """The same text in another object."""
    return "".join(list(text))


@pytest.mark.parametrize("spell", [other, Text])
def test_keys_need_not_be_interned(spell):
    said = {spell(key): value for key, value in CaiArray(MEMORY).__cuda_array_interface__.items()}
    said[spell("stream")] = 5
    said[spell("strides")] = (4,)
    array = CaiArray(MEMORY)
    array.__cuda_array_interface__ = said
    buffer = Buffer(array)
    assert (buffer.ptr, buffer.count, buffer.dtype, buffer.stream) == (HERE, 16, "float32", 5)
    said[spell("mask")] = 1
    with pytest.raises(ValueError, match="has a mask"):
        Buffer(array)


def test_unknown_keys_are_ignored():
    assert Buffer(CaiArray(MEMORY, shape=(4,), offset=3, **{"x": object(), "1": 2})).count == 4


def test_a_dict_of_a_subclass():
    array = CaiArray(MEMORY)
    array.__cuda_array_interface__ = collections.OrderedDict(
        array.__cuda_array_interface__, stream=7
    )
    assert (Buffer(array).count, Buffer(array).stream) == (16, 7)


def test_an_interface_that_changes_while_it_is_read():
    """Numbers of a class of the user's run code; what was read before must stay alive."""

    class Number:
        def __init__(self, value):
            self.value = value

        def __index__(self):
            said.clear()
            return self.value

    said = CaiArray(MEMORY).__cuda_array_interface__
    array = CaiArray(MEMORY)
    array.__cuda_array_interface__ = said
    said["shape"] = (Number(4), Number(2))
    with pytest.raises(TypeError, match="its data is None"):
        Buffer(array)


def test_the_dict_is_not_kept():
    array = CaiArray(MEMORY)
    buffer = Buffer(array)
    array.__cuda_array_interface__.clear()
    assert buffer.ptr == HERE


# ---- the device ---------------------------------------------------------------------------------------


def test_the_device_is_the_drivers_word():
    out = scripts.run(
        """
        import os, sys
        import numpy as np
        from helpers import arrays
        from helpers.stubs import CudaStub
        from pathlib import Path
        from pynccl._buffer import Buffer
        stub = CudaStub(Path(os.environ["PYNCCL_LIBCUDA"]))
        stub.start()
        memory = np.zeros(64, "f4")
        print(Buffer(arrays.CaiArray(memory)).device)
        stub.memory(memory.ctypes.data, memory.nbytes, device=2)
        print(Buffer(arrays.CaiArray(memory)).device, Buffer(arrays.CaiArray(memory[1:])).device)
        print(Buffer(arrays.CaiArray(memory[:0])).device)
        print(Buffer(arrays.CaiArray(memory)))
        print(Buffer(memory).device, Buffer(arrays.InterfaceArray(memory)).device)
        """,
        PYNCCL_LIBCUDA=str(build_cuda_stub()),
    )
    assert out.splitlines() == ["-1", "2 2", "-1", "<Buffer of 64 x float32 on device 2>", "-1 -1"]


def test_the_helpers_describe_what_they_hold():
    assert ROOT.joinpath("meson.build").exists()
    assert ctypes.c_float.from_address(HERE + 4).value == 1.0


def test_a_dict_that_was_read_before_is_read_again_when_it_changes():
    """Readers remember a dict's state: every way of changing it must make them forget."""
    memory = np.arange(8, dtype="f8")
    address = memory.ctypes.data

    class Keeper:
        pass

    keeper = Keeper()
    keeper.__cuda_array_interface__ = said = {
        "shape": (8,),
        "typestr": "<f8",
        "data": (address, False),
        "version": 3,
        "strides": None,
    }
    for _ in range(3):
        b = Buffer(keeper)
        assert (b.ptr, b.count, b.dtype, b.readonly) == (address, 8, "float64", False)
    said["data"] = (address + 16, True)
    assert (Buffer(keeper).ptr, Buffer(keeper).readonly) == (address + 16, True)
    said["shape"] = (2, 3)
    assert (Buffer(keeper).count, Buffer(keeper).nbytes) == (6, 48)
    said.update(typestr="<i4", data=(address, False))
    assert (Buffer(keeper).dtype, Buffer(keeper).nbytes) == ("int32", 24)
    said["strides"] = (24, 8)
    with pytest.raises(LayoutError, match="not contiguous"):
        Buffer(keeper)
    del said["strides"], said["typestr"]
    with pytest.raises(TypeError, match="typestr"):
        Buffer(keeper)


def test_a_dtype_for_one_call_is_not_remembered():
    memory = np.arange(8, dtype="u1")
    said = {"shape": (8,), "typestr": "|u1", "data": (memory.ctypes.data, False), "version": 3}

    class Keeper:
        __cuda_array_interface__ = said

    keeper = Keeper()
    assert (Buffer(keeper, dtype="bfloat16").dtype, Buffer(keeper).dtype) == ("bfloat16", "uint8")
    assert (Buffer(keeper, dtype="float32").count, Buffer(keeper).count) == (2, 8)


def test_new_dicts_at_an_old_address_are_read():
    """A dict that is freed gives its address to the next one; nothing of the first may be believed."""
    memory = np.arange(64, dtype="f4")

    class Maker:
        @property
        def __cuda_array_interface__(self):
            return {"shape": (n,), "typestr": "<f4", "data": (memory.ctypes.data + 4 * n, False)}

    maker = Maker()
    for n in range(1, 32):
        assert (Buffer(maker).count, Buffer(maker).ptr) == (n, memory.ctypes.data + 4 * n)


def test_memory_beyond_the_last_address_is_refused():
    """Such a pointer is no address of four floats, and copying from it would be a crash."""
    wraps = CaiArray(np.zeros(4, "f4"), data=(2**64 - 8, False))
    with pytest.raises(ValueError, match="16 bytes at 0xfffffffffffffff8, beyond the last address"):
        Buffer(wraps)
    with pytest.raises(ValueError, match="beyond the last address"):
        Buffer(ptr=2**64 - 8, count=1024, dtype="f8")
