"""Readers of ``__cuda_array_interface__`` and ``__array_interface__``: one dict, two places where memory may be."""

import sys
from operator import index

from cpython.bool cimport PyBool_Check
from cpython.dict cimport PyDict_Next
from cpython.long cimport PyLong_AsSsize_t, PyLong_CheckExact
from cpython.object cimport PyObject
from libc.stdint cimport uintptr_t

from pynccl._device cimport pointer_device
from pynccl._elem cimport OPAQUE, ElemType, Found, copy_name, dtype_name, elem_named, read_typestr
from pynccl._view cimport (
    MAX_AXES, Ask, BufferView, PyObject_GetOptionalAttr, Raw, masked, settle, shape_of, take, who,
)

cdef extern from *:
    const char *PyUnicode_AsUTF8AndSize(object, Py_ssize_t *) except NULL
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


cdef int view_interface(object obj, object said, BufferView *out, const Ask *ask, bint cuda) except -1:
    """Read an array interface of either kind: the two differ in where the memory is and in the stream."""
    cdef Py_ssize_t shape[MAX_AXES]
    cdef Py_ssize_t strides[MAX_AXES]
    cdef object a_shape = None, a_typestr = None, a_data = None, a_version = None, a_strides = None
    cdef object a_stream = None, a_mask = None
    cdef bint strange = False
    cdef PyObject *key
    cdef PyObject *value
    cdef Py_ssize_t at = 0
    cdef const char *text
    cdef Py_ssize_t length
    cdef Raw raw
    if not isinstance(said, dict):
        raise TypeError(f"{who(ask)}: its array interface is a {type(said).__name__}, not a dict")
    while PyDict_Next(said, &at, &key, &value):
        if key == <PyObject *>SHAPE:
            a_shape = <object>value
        elif key == <PyObject *>TYPESTR:
            a_typestr = <object>value
        elif key == <PyObject *>DATA:
            a_data = <object>value
        elif key == <PyObject *>VERSION:
            a_version = <object>value
        elif key == <PyObject *>STRIDES:
            a_strides = <object>value
        elif key == <PyObject *>STREAM:
            a_stream = <object>value
        elif key == <PyObject *>MASK:
            a_mask = <object>value
        elif key != <PyObject *>DESCR:
            strange = True
    if strange:             # equal keys need not be identical ones
        a_shape = said.get(SHAPE)
        a_typestr = said.get(TYPESTR)
        a_data = said.get(DATA)
        a_version = said.get(VERSION)
        a_strides = said.get(STRIDES)
        a_stream = said.get(STREAM)
        a_mask = said.get(MASK)

    if a_mask is not None:
        raise masked(ask)
    if a_version is not None:
        read_version(a_version, ask)
    if not isinstance(a_typestr, str):
        raise TypeError(f"{who(ask)}: its typestr is {a_typestr!r}, not a string such as '<f4'")
    text = PyUnicode_AsUTF8AndSize(a_typestr, &length)
    if read_typestr(text, length, &raw.found) < 0:
        raise TypeError(f"{who(ask)}: its typestr {a_typestr!r} names no type of data; expected one such as '<f4'")
    if raw.found.elem == OPAQUE:
        name_opaque(obj, a_typestr, &raw.found, out.type_name)

    raw.ndim = read_lengths(a_shape, shape, SHAPE, ask)
    raw.shape = shape
    raw.strides = NULL
    if a_strides is not None:
        if read_lengths(a_strides, strides, STRIDES, ask) != raw.ndim:
            raise ValueError(f"{who(ask)}: its strides {a_strides} and shape {a_shape} differ in length")
        raw.strides = strides
    read_data(a_data, &raw, ask)
    settle(&raw, out, ask)

    if cuda:
        if a_stream is not None:
            out.stream = read_stream(a_stream, ask)
            out.has_stream = True
        if out.count:
            out.device = pointer_device(out.ptr)
    return 0


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
            to[i] = PyLong_AsSsize_t(value) if PyLong_CheckExact(value) else value
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
        raw.ptr = <char *><uintptr_t>address
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
