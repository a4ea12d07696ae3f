"""Readers of ``__cuda_array_interface__`` and ``__array_interface__``: one dict, two places where memory may be."""

import sys
from operator import index

from cpython.bool cimport PyBool_Check
from cpython.dict cimport PyDict_CheckExact, PyDict_Next
from cpython.object cimport PyObject
from libc.stdint cimport uint64_t, uintptr_t

from pynccl._device cimport pointer_device
from pynccl._elem cimport OPAQUE, ElemType, Found, copy_name, dtype_name, elem_named, read_typestr
from pynccl._view cimport (
    MAX_AXES, Ask, BufferView, PyObject_GetOptionalAttr, Raw, finish, masked, settle, shape_of, take, who,
)

cdef extern from *:
    """
    /* A number that no other state of this or any other dict has; 0 where CPython keeps none. */
    #if PY_VERSION_HEX < 0x030E0000 && !defined(Py_GIL_DISABLED)
    #pragma GCC diagnostic push
    #pragma GCC diagnostic ignored "-Wdeprecated-declarations"
    static inline uint64_t dict_version(PyObject *dict) {
        return ((PyDictObject *)dict)->ma_version_tag;
    }
    #pragma GCC diagnostic pop
    #else
    #define dict_version(dict) ((uint64_t)0)
    #endif
    """
    uint64_t dict_version(PyObject *) noexcept
    # Cython's own declarations take objects, and so count references; these look at borrowed ones.
    bint PyLong_CheckExact(PyObject *) noexcept
    long PyLong_AsLongAndOverflow(PyObject *, int *) noexcept
    bint PyTuple_CheckExact(PyObject *) noexcept
    Py_ssize_t PyTuple_GET_SIZE(PyObject *) noexcept
    PyObject *PyTuple_GET_ITEM(PyObject *, Py_ssize_t) noexcept
    bint PyUnicode_CheckExact(PyObject *) noexcept
    bint PyUnicode_IS_COMPACT_ASCII(PyObject *) noexcept
    void *PyUnicode_DATA(PyObject *) noexcept
    Py_ssize_t PyUnicode_GET_LENGTH(PyObject *) noexcept
    const char *PyUnicode_AsUTF8AndSize(object, Py_ssize_t *) except NULL
    PyObject *Py_None
    PyObject *Py_True
    PyObject *Py_False
    const uintptr_t UINTPTR_MAX

# Keys of the array interfaces.  A literal in a producer's code is interned too, so that the dict's own key is
# usually this very object.
cdef object SHAPE = sys.intern("shape")
cdef object TYPESTR = sys.intern("typestr")
cdef object DATA = sys.intern("data")
cdef object VERSION = sys.intern("version")
cdef object STRIDES = sys.intern("strides")
cdef object STREAM = sys.intern("stream")
cdef object MASK = sys.intern("mask")
cdef object DESCR = sys.intern("descr")
cdef object LATEST = 3


cdef int view_interface(object obj, object said, BufferView *out, const Ask *ask, bint cuda) except -1:
    """Read an array interface of either kind: the two differ in where the memory is and in the stream."""
    cdef Py_ssize_t shape[MAX_AXES]
    cdef Py_ssize_t strides[MAX_AXES]
    cdef Raw raw
    cdef uintptr_t stream = 0
    cdef bint exact = PyDict_CheckExact(said)
    raw.shape = shape
    raw.strides = strides
    if exact and recall(<PyObject *>said, out, &stream):
        finish(False, out, ask)
    elif exact and read_plain(said, &raw, &stream):
        settle(&raw, out, ask)
        remember(<PyObject *>said, &raw, out, ask, stream)
    else:
        raw.strides = strides
        stream = read_any(obj, said, &raw, out.type_name, ask)
        settle(&raw, out, ask)
    if cuda:
        out.stream = stream
        out.has_stream = stream != 0
        if out.count:
            out.device = pointer_device(out.ptr)
    return 0


# ---- dicts seen before -----------------------------------------------------------------------------------------

# Whoever wraps memory of his own often keeps one dict for it.  CPython numbers every state of every dict, and a plain
# interface holds nothing that could change behind the number, so that a state seen before needs no second look.

cdef struct Seen:
    uint64_t version
    PyObject *said      # never followed
    BufferView view
    uintptr_t stream

cdef enum:
    PLACES = 64         # a power of two

cdef Seen seen[PLACES]


cdef inline bint recall(PyObject *said, BufferView *out, uintptr_t *stream) noexcept:
    cdef uint64_t version = dict_version(said)
    cdef Seen *place = &seen[version & (PLACES - 1)]
    if place.version != version or place.said != said or version == 0:
        return False
    out.ptr = place.view.ptr
    out.count = place.view.count
    out.nbytes = place.view.nbytes
    out.elem = place.view.elem
    out.itemsize = place.view.itemsize
    out.readonly = place.view.readonly
    out.order = place.view.order
    stream[0] = place.stream
    return True


cdef inline void remember(PyObject *said, const Raw *raw, const BufferView *out, const Ask *ask,
                          uintptr_t stream) noexcept:
    cdef uint64_t version = dict_version(said)
    cdef Seen *place = &seen[version & (PLACES - 1)]
    if raw.found.foreign or ask.as_elem != NULL:
        return          # what finish() made of it holds for this call only
    place.version = version
    place.said = said
    place.view = out[0]
    place.stream = stream


# ---- the quick reader ------------------------------------------------------------------------------------------


cdef bint read_plain(object said, Raw *raw, uintptr_t *stream) noexcept:
    """Read an interface that is right and made of nothing but Python's own tuples, strings and integers.

    In such a one no code but ours runs, so that borrowed references are safe and one walk over the dict is enough.
    Anything else is False, and `read_any` says what it is.
    """
    cdef PyObject *key
    cdef PyObject *value
    cdef Py_ssize_t at = 0
    cdef Py_ssize_t *strides = raw.strides
    cdef Py_ssize_t number = 0
    cdef int nstrides = -1
    raw.ndim = -1
    raw.ptr = NULL
    raw.strides = NULL
    raw.found.elem = NULL
    while PyDict_Next(said, &at, &key, &value):
        if key == <PyObject *>SHAPE:
            raw.ndim = plain_lengths(value, raw.shape)
            if raw.ndim < 0:
                return False
        elif key == <PyObject *>TYPESTR:
            if not PyUnicode_CheckExact(value) or not PyUnicode_IS_COMPACT_ASCII(value):
                return False
            if read_typestr(<const char *>PyUnicode_DATA(value), PyUnicode_GET_LENGTH(value), &raw.found) < 0:
                return False
            if raw.found.elem == OPAQUE:
                return False
        elif key == <PyObject *>DATA:
            if not PyTuple_CheckExact(value) or PyTuple_GET_SIZE(value) != 2:
                return False
            if not plain_number(PyTuple_GET_ITEM(value, 0), &number) or number <= 0:
                return False
            raw.ptr = <char *>number
            value = PyTuple_GET_ITEM(value, 1)
            if value != Py_True and value != Py_False:
                return False
            raw.readonly = value == Py_True
        elif key == <PyObject *>VERSION:
            # Usually the one small 3 that the interpreter has.
            if value != <PyObject *>LATEST and not (plain_number(value, &number) and 0 <= number < 3):
                return False
        elif key == <PyObject *>STRIDES:
            if value != Py_None:
                nstrides = plain_lengths(value, strides)
                if nstrides < 0:
                    return False
                raw.strides = strides
        elif key == <PyObject *>STREAM:
            if value != Py_None:
                if not plain_number(value, &number) or number <= 0:
                    return False
                stream[0] = <uintptr_t>number
        elif key == <PyObject *>MASK:
            if value != Py_None:
                return False
        elif key != <PyObject *>DESCR:
            return False
    return raw.ndim >= 0 and raw.found.elem != NULL and raw.ptr != NULL and (nstrides < 0 or nstrides == raw.ndim)


cdef inline bint plain_number(PyObject *value, Py_ssize_t *to) noexcept:
    cdef int overflow = 0
    if not PyLong_CheckExact(value):
        return False
    to[0] = PyLong_AsLongAndOverflow(value, &overflow)
    return not overflow


cdef inline int plain_lengths(PyObject *values, Py_ssize_t *to) noexcept:
    cdef Py_ssize_t n, i
    if not PyTuple_CheckExact(values):
        return -1
    n = PyTuple_GET_SIZE(values)
    if n > MAX_AXES:
        return -1
    for i in range(n):
        if not plain_number(PyTuple_GET_ITEM(values, i), &to[i]):
            return -1
    return <int>n


# ---- the thorough reader ---------------------------------------------------------------------------------------


cdef uintptr_t read_any(object obj, object said, Raw *raw, char *name, const Ask *ask) except? 0:
    """Read any interface, or say what is wrong with it; return the stream, 0 if there is none."""
    cdef object shape, typestr, strides, stream, value
    cdef const char *text
    cdef Py_ssize_t length
    if not isinstance(said, dict):
        raise TypeError(f"{who(ask)}: its array interface is a {type(said).__name__!r}, not a dict")
    if said.get(MASK) is not None:
        raise masked(ask)
    value = said.get(VERSION)
    if value is not None:
        read_version(value, ask)
    typestr = said.get(TYPESTR)
    if not isinstance(typestr, str):
        raise TypeError(f"{who(ask)}: its typestr is {typestr!r}, not a string such as '<f4'")
    text = PyUnicode_AsUTF8AndSize(typestr, &length)
    if read_typestr(text, length, &raw.found) < 0:
        raise TypeError(f"{who(ask)}: its typestr {typestr!r} names no type of data; expected one such as '<f4'")
    if raw.found.elem == OPAQUE:
        name_opaque(obj, typestr, &raw.found, name)
    shape = said.get(SHAPE)
    raw.ndim = read_lengths(shape, raw.shape, SHAPE, ask)
    strides = said.get(STRIDES)
    if strides is None:
        raw.strides = NULL
    elif read_lengths(strides, raw.strides, STRIDES, ask) != raw.ndim:
        raise ValueError(f"{who(ask)}: its strides {strides} and shape {shape} differ in length")
    read_data(said.get(DATA), raw, ask)
    stream = said.get(STREAM)
    return read_stream(stream, ask) if stream is not None else 0


cdef int read_version(object version, const Ask *ask) except -1:
    try:
        version = index(version)
    except TypeError:
        raise TypeError(f"{who(ask)}: the version of its array interface is {version!r}, not a number") from None
    if not 0 <= version <= 3:
        raise ValueError(f"{who(ask)}: its array interface has version {version}; versions 0 to 3 are known")
    return 0


cdef int read_lengths(object values, Py_ssize_t *to, str what, const Ask *ask) except -1:
    """Read a shape or strides; return how many axes."""
    cdef Py_ssize_t n, i
    cdef object value
    if not isinstance(values, tuple):
        if not isinstance(values, list):
            raise TypeError(f"{who(ask)}: its {what} is {values!r}, not a tuple of integers")
        values = tuple(values)
    n = len(<tuple>values)
    if n > MAX_AXES:
        raise ValueError(f"{who(ask)}: its {what} has {n} axes; {MAX_AXES} are the limit")
    for i in range(n):
        value = (<tuple>values)[i]
        try:
            to[i] = value
        except OverflowError:
            raise ValueError(f"{who(ask)}: its {what} {values} holds a number beyond 64 bits") from None
        except TypeError:
            raise TypeError(f"{who(ask)}: its {what} {values} holds {value!r}, not an integer") from None
    return <int>n


cdef int read_data(object data, Raw *raw, const Ask *ask) except -1:
    """Read the pointer and the read-only flag; the pointer of an empty array is not looked at."""
    cdef int i
    cdef object address
    raw.ptr = NULL
    raw.readonly = False
    if isinstance(data, (tuple, list)) and len(data) == 2:
        raw.readonly = data[1]
        address = data[0]
    else:
        address = NotImplemented
    for i in range(raw.ndim):
        if raw.shape[i] == 0:
            return 0
    if address is NotImplemented:
        raise TypeError(f"{who(ask)}: its data is {data!r}, not a pair (pointer, readonly)")
    try:
        raw.ptr = <char *><uintptr_t>index(address)
    except OverflowError:
        raise ValueError(f"{who(ask)}: the pointer in its data {data} is not an address") from None
    except TypeError:
        raise TypeError(f"{who(ask)}: the pointer in its data {data} is not an integer") from None
    if raw.ptr == NULL:
        raise ValueError(f"{who(ask)}: its shape is {shape_of(raw)}, but the pointer in its data is 0")
    return 0


cdef uintptr_t read_stream(object stream, const Ask *ask) except? 0:
    """Read the stream key: 1 is the legacy default, 2 the per-thread default, else a handle."""
    cdef str what = "the stream in its CUDA array interface"
    try:
        if PyBool_Check(stream):
            raise TypeError
        stream = index(stream)
    except TypeError:
        raise TypeError(f"{who(ask)}: {what} is {stream!r}, not an integer or None") from None
    if stream == 0:
        raise ValueError(
            f"{who(ask)}: {what} is 0, which the protocol forbids as ambiguous; 1 is the legacy default stream, "
            "2 the per-thread one"
        )
    if not 0 < stream <= UINTPTR_MAX:
        raise ValueError(f"{who(ask)}: {what} is {stream}, which is no handle")
    return stream


cdef int name_opaque(object obj, str typestr, Found *found, char *name) except -1:
    """Where the type string gives no more than a size, the array's own dtype may say what it is."""
    cdef PyObject *dtype = NULL
    cdef object own = None
    cdef const ElemType *elem
    if found.vague and PyObject_GetOptionalAttr(obj, "dtype", &dtype):
        own = dtype_name(take(dtype))
        if own is not None:
            elem = elem_named(own.encode())
            if elem != NULL and <size_t>elem.itemsize == found.itemsize:
                found.elem = elem
                found.vague = False
                return 0
    copy_name(name, typestr)
    return 0
