"""Descriptions of arrays, wrong in every way: no crash, no leak, and only the documented errors.

Addresses are always those of memory that exists; everything else may be anything.  Where an array is accepted
in spite of that, it must be one block where the description says, which an independent reader works out.

``PYNCCL_FUZZ`` multiplies the number of examples.  The seed is fixed, except in such a longer run.
"""

import gc
import math
import os
import random
from operator import index

import numpy as np
import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from helpers import arrays, capsules
from helpers.arrays import ABSENT, DlpackArray, OldDlpackArray
from pynccl import LayoutError
from pynccl._buffer import Buffer

TIMES = int(os.environ.get("PYNCCL_FUZZ", "1"))
DOCUMENTED = (TypeError, ValueError, BufferError)  # LayoutError is both of the last
PROTOCOLS = ["__cuda_array_interface__", "__array_interface__", "__dlpack__", "__dlpack_device__"]
MEMORY = np.zeros(4096, "u1")
START = MEMORY.ctypes.data


def fuzz(examples):
    """Decorate with the settings that all tests here have."""
    both = settings(
        max_examples=examples * TIMES,
        deadline=None,
        database=None,
        derandomize=TIMES == 1,
        suppress_health_check=list(HealthCheck),
    )
    drawn = seed(random.SystemRandom().getrandbits(64)) if TIMES > 1 else lambda test: test
    return lambda test: both(drawn(test))


# ---- what descriptions are made of --------------------------------------------------------------------


class Index:
    """An integer that is none."""

    def __init__(self, value):
        self.value = value

    def __index__(self):
        return self.value


class Failing:
    """Fails whatever is asked of it."""

    def _fail(self, *_):
        raise ValueError("no")

    __index__ = __iter__ = __len__ = __getitem__ = __eq__ = __bool__ = __str__ = __call__ = _fail
    __hash__ = None


EDGES = [
    0, 1, -1, 2, 3, 4, 7, 8, 64, 4096, 2**31 - 1, 2**31, 2**32, 2**62, 2**63 - 1, 2**63, 2**64, -(2**63),
]  # fmt: skip
JUNK = [
    None,
    True,
    1.5,
    math.nan,
    "",
    "3",
    b"3",
    (),
    [],
    {},
    object(),
    range(3),
    np.zeros(2),
    type,
    len,
]
KEYS = ["shape", "typestr", "data", "version", "strides", "stream", "mask", "descr", "x"]
SIZES = [0, 1, 2, 4, 8, 16]

whole = st.one_of(st.integers(0, 8), st.sampled_from(EDGES), st.integers(-(2**66), 2**66))
number = st.one_of(whole, st.builds(Index, whole), st.integers(0, 2**63).map(np.uint64))
junk = st.one_of(st.sampled_from(JUNK), st.builds(Failing), whole, st.text(max_size=5))
length = st.one_of(st.integers(0, 6), st.integers(0, 6), number, junk)
lengths = st.one_of(
    st.lists(st.integers(0, 6), max_size=4).map(tuple),
    st.lists(length, max_size=5).map(tuple),
    st.lists(length, max_size=5),
    st.sampled_from([(1,) * 64, (1,) * 65]),
    junk,
)
typestr = st.one_of(
    st.tuples(
        st.sampled_from("<>|="), st.sampled_from("iufcbVSUMmOtax"), st.sampled_from(SIZES).map(str)
    ).map("".join),
    st.text("<>|=iufcbVSUMmO0123456789[]ns", max_size=8),
    st.text(max_size=4),
    st.sampled_from(["<M8[ns]", "<f" + "9" * 30, "<V2147483647", "<f4\0", "\ud800"]),
    junk,
)
address = st.one_of(
    st.integers(START, START + 2048),
    st.just(START),
    st.sampled_from([0, None, -1, 2**64, "x", 1.0]),
)
data = st.one_of(
    st.tuples(address, st.booleans()),
    st.tuples(address, junk),
    st.lists(address, max_size=3).map(tuple),
    st.sampled_from([None, START, (), (START,), [START, False]]),
)
version = st.one_of(st.integers(0, 3), st.just(ABSENT), number, junk)
stream = st.one_of(st.just(ABSENT), st.none(), number, junk)
mask = st.one_of(st.just(ABSENT), st.just(ABSENT), st.none(), junk)
key = st.sampled_from(KEYS)


# ---- what must come of them ---------------------------------------------------------------------------


class Described:
    """An object with one protocol."""

    def __init__(self, name, said):
        setattr(self, name, said)


def block(said, itemsize):
    """Work out where an accepted description says its elements are: address, count.

    An assertion fails if they are not one block.
    """
    shape, strides = said["shape"], said.get("strides")
    count = math.prod(map(index, shape))
    if count == 0:
        return 0, 0
    if strides is not None:
        # Each axis steps over all that the faster ones hold.
        axes = [
            (s, n) for s, n in zip(map(index, strides), map(index, shape), strict=True) if n != 1
        ]
        assert axes in (sorted(axes), sorted(axes, reverse=True)), "neither C nor Fortran order"
        for stride, n in sorted(axes):
            assert stride == itemsize, "not one block"
            itemsize *= n
    return index(said["data"][0]), count


def look(array, dtype=None):
    """Return a buffer of the array, or None after one of the documented errors."""
    try:
        return Buffer(array, dtype)
    except LayoutError as error:
        text = str(error)
    except DOCUMENTED:
        return None
    assert "not contiguous" in text
    return None


def check(array, said):
    """Look at the array: what is accepted must be what is described."""
    buffer = look(array)
    if buffer is not None:
        assert (buffer.ptr, buffer.count) == block(said, buffer.itemsize)
        assert buffer.nbytes == buffer.count * buffer.itemsize
    raw = look(array, "uint8")
    assert raw is None or raw.nbytes == raw.count


# ---- the array interfaces -----------------------------------------------------------------------------


@fuzz(250)
@given(
    st.sampled_from(PROTOCOLS[:2]),
    st.fixed_dictionaries(
        {
            "shape": lengths,
            "typestr": typestr,
            "data": data,
            "version": version,
            "strides": st.one_of(st.none(), lengths),
            "stream": stream,
            "mask": mask,
        }
    ),
)
def test_interfaces_of_any_fields(name, fields):
    said = {k: v for k, v in fields.items() if v is not ABSENT}
    check(Described(name, said), said)


def interface(shape, letter, offset, order, extra):
    """Return a right interface of a block in the memory."""
    said = {
        "shape": tuple(shape),
        "typestr": letter,
        "data": (START + 16 * offset, False),
        "version": 3,
    }
    if order:
        said["strides"] = np.empty(shape, letter, order).strides
    return {**said, **extra}


good = st.builds(
    interface,
    st.lists(st.integers(0, 5), max_size=4),
    st.sampled_from(["<f4", "<f8", "|u1", "<i8", "<c16", "|V3"]),
    st.integers(0, 20),
    st.sampled_from(["", "C", "F"]),
    st.sampled_from(
        [{}, {"stream": 1}, {"stream": None}, {"mask": None}, {"descr": [("", "<f4")]}]
    ),
)
change = st.one_of(
    st.tuples(key, junk),
    st.tuples(st.sampled_from(["shape", "strides"]), lengths),
    st.tuples(st.just("typestr"), typestr),
    st.tuples(st.just("data"), data),
    st.tuples(key, st.just(ABSENT)),
    st.tuples(key.map(lambda k: "".join(list(k))), st.sampled_from([3, None, (1,)])),
)


@fuzz(250)
@given(st.sampled_from(PROTOCOLS[:2]), good, st.lists(change, max_size=3))
def test_good_interfaces_with_changes(protocol, said, changes):
    for name, value in changes:
        said.pop(name, None)
        if value is not ABSENT:
            said[name] = value
    check(Described(protocol, said), said)


@fuzz(100)
@given(good)
def test_good_interfaces_are_accepted(said):
    assert Buffer(Described("__cuda_array_interface__", said)).count == math.prod(said["shape"])


def test_many_interfaces_with_changes():
    """The same without the library's bookkeeping: many more examples, but none is reduced."""
    draw = random.Random(4) if TIMES == 1 else random.Random()
    values = [
        *EDGES, *JUNK, ABSENT, START, (START, True), (START, 7), (2, 3), (12, 4), (4, 12), (0,), (6,), (4,),
        (-4,), (1, 6), [6], (2**40, 2**40), "<f4", ">f4", "|V3", "<M8[s]", "|b1", "<c8", "|O8", Failing(),
        Index(6), (Index(2), Index(3)), (Index(START), False),
    ]  # fmt: skip
    accepted = 0
    for _ in range(10_000 * TIMES):
        said = interface((6,), "<f4", 0, "", {"strides": None})
        for _ in range(draw.randrange(4)):
            name, value = draw.choice(KEYS), draw.choice(values)
            said.pop(name, None)
            if value is not ABSENT:
                said["".join(list(name)) if draw.random() < 0.1 else name] = value
        array = Described("__cuda_array_interface__", said)
        check(array, said)
        accepted += look(array) is not None
    assert 2000 * TIMES < accepted < 8000 * TIMES, "too few of one kind to mean much"


@fuzz(100)
@given(junk, st.sampled_from(PROTOCOLS))
def test_protocols_that_are_anything(value, name):
    assert look(Described(name, value)) is None


# ---- DLPack -------------------------------------------------------------------------------------------

int64 = st.one_of(
    st.integers(0, 6),
    st.integers(-(2**63), 2**63 - 1),
    st.sampled_from([-1, 2**62, 2**63 - 1, -(2**63)]),
)
tensors = st.fixed_dictionaries(
    {},
    optional={
        "shape": st.lists(int64, max_size=5).map(tuple),
        "strides": st.one_of(st.none(), st.lists(int64, min_size=5, max_size=5).map(tuple)),
        "dtype": st.one_of(
            st.tuples(st.integers(0, 255), st.integers(0, 255), st.integers(0, 65535)),
            st.tuples(
                st.integers(0, 18), st.sampled_from([1, 4, 8, 16, 32, 64]), st.integers(0, 4)
            ),
        ),
        "device": st.tuples(
            st.sampled_from([1, 2, 3, 13, 8, 0, -1, 2**31 - 1]), st.integers(-5, 5)
        ),
        "byte_offset": st.integers(0, 2048),
        "data": st.sampled_from([0, START, START + 1]),
        "flags": st.integers(0, 2**64 - 1),
        "version": st.tuples(
            st.sampled_from([1, 1, 1, 0, 2, 2**32 - 1]), st.integers(0, 2**32 - 1)
        ),
    },
)
# A few axes more than the shape has entries could only be read past its end; too many are refused before.
axes = st.one_of(st.none(), st.none(), st.integers(-(2**31), 0), st.integers(65, 2**31 - 1))


@fuzz(250)
@given(tensors, axes, st.booleans())
def test_dlpack_tensors_of_any_fields(fields, ndim, versioned):
    if ndim is not None:
        fields["ndim"] = ndim
    if not versioned:
        fields.pop("flags", None)
        fields.pop("version", None)
    array = (DlpackArray if versioned else OldDlpackArray)(MEMORY, **fields)
    buffer = look(array)
    if buffer is not None:
        assert buffer.nbytes == buffer.count * buffer.itemsize
        assert START <= buffer.ptr <= START + 2049 if buffer.count else buffer.ptr == 0
        assert [export.deleted for export in array.exports] == [0]
    del buffer
    assert all(export.deleted == 1 for export in array.exports)


def test_nothing_is_left_of_all_that():
    gc.collect()
    assert capsules.held() == 0


# ---- types --------------------------------------------------------------------------------------------


@fuzz(200)
@given(
    st.one_of(typestr, junk, st.text(max_size=12), st.integers()).filter(lambda d: d is not None)
)
def test_any_dtype(dtype):
    buffer = look(bytearray(48), dtype)
    if buffer is not None:
        assert buffer.nbytes == 48
        assert buffer.dtype in (*arrays.ALL, "int16", "uint16", "complex32")


@fuzz(200)
@given(st.text("@=<>!^bBhHiIlLqQnNefdgZ?cspPuwOXT{}:&0123456789 ", max_size=6))
def test_formats_of_the_struct_module(code):
    try:
        view = memoryview(bytearray(64)).cast(code)
    except (ValueError, TypeError):
        return
    buffer = Buffer(view)
    assert (buffer.nbytes, buffer.itemsize) == (view.nbytes, view.itemsize)


def test_the_independent_reader_sees_a_gap():
    """The check of the fuzz tests themselves."""
    with pytest.raises(AssertionError, match="not one block"):
        block({"shape": (3,), "strides": (2,), "data": (START, False)}, 4)
