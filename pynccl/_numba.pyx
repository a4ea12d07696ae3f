"""Numba's device arrays, recognised and read without importing Numba, and without asking for their interface.

Numba writes its ``__cuda_array_interface__`` anew for each look, in about two microseconds: many times the price of a
call.  It writes what stands in five attributes, and to look at these takes a tenth of that.  The first array met has to
say the same in both ways; if it does not, or wherever something unusual stands in an attribute, the interface is asked.

The remembered fact is written once, under the GIL.
"""

import sys

from cpython.long cimport PyLong_CheckExact
from cpython.object cimport PyObject, PyTypeObject
from cpython.ref cimport Py_INCREF
from cpython.tuple cimport PyTuple_CheckExact
from libc.stdint cimport uintptr_t

from pynccl._device cimport pointer_device
from pynccl._elem cimport Found
from pynccl._ndarray cimport NDDescr, is_ndarray, native_elem, struct_agrees
from pynccl._view cimport MAX_AXES, Ask, BufferView, PyObject_GetOptionalAttr, Raw, settle, take

cdef extern from *:
    PyTypeObject *Py_TYPE(object) noexcept

cdef object SHAPE = sys.intern("shape")
cdef object STRIDES = sys.intern("strides")
cdef object DTYPE = sys.intern("dtype")
cdef object STREAM = sys.intern("stream")
cdef object MEMORY = sys.intern("gpu_data")
cdef object POINTER = sys.intern("device_pointer")
cdef object VALUE = sys.intern("value")

device_array = NULL
cdef object numpy_dtype = None                  # the types of its dtypes and pointers
cdef object c_void_p = None
cdef bint tried = False                         # one array is compared, and no more


cdef int learn_device_array(object obj, dict said) except -1:
    """Compare the attributes of an array whose type is called as Numba's with the interface that it wrote."""
    global c_void_p, device_array, numpy_dtype, tried
    cdef object kind = type(obj)
    cdef object ctypes = sys.modules.get("ctypes"), numpy = sys.modules.get("numpy")
    cdef Py_ssize_t shape[MAX_AXES]
    cdef Py_ssize_t strides[MAX_AXES]
    cdef uintptr_t stream = 0
    cdef Raw raw
    if tried or ctypes is None or numpy is None or kind.__module__.partition(".")[0] != "numba":
        return 0
    tried = True
    is_ndarray(<PyTypeObject *>numpy.ndarray)   # NumPy's structs become known, or not
    numpy_dtype, c_void_p = numpy.dtype, ctypes.c_void_p
    raw.shape = shape
    raw.strides = strides
    if not read(obj, &raw, &stream) or said.get("mask") is not None:
        return 0
    if (<uintptr_t>raw.ptr, False) != said.get("data") or (stream or None) != said.get("stream"):
        return 0
    if tuple([shape[i] for i in range(raw.ndim)]) != said.get("shape") or obj.dtype.str != said.get("typestr"):
        return 0
    Py_INCREF(kind)
    device_array = <PyTypeObject *>kind
    return 0


cdef int view_device_array(object obj, BufferView *out, const Ask *ask) except -1:
    """Read one of Numba's arrays; 1, or 0 if its interface has to be asked."""
    cdef Py_ssize_t shape[MAX_AXES]
    cdef Py_ssize_t strides[MAX_AXES]
    cdef uintptr_t stream = 0
    cdef Raw raw
    raw.shape = shape
    raw.strides = strides
    if not read(obj, &raw, &stream):
        return 0
    settle(&raw, out, ask)
    out.stream = stream
    out.has_stream = stream != 0
    if out.count:
        out.device = pointer_device(out.ptr)
    return 1


cdef bint read(object obj, Raw *raw, uintptr_t *stream) except -1:
    """Read the attributes; False if one of them holds anything but the usual."""
    cdef object value = attribute(obj, STREAM)
    cdef object shape = attribute(obj, SHAPE)
    cdef object strides = attribute(obj, STRIDES)
    cdef object dtype = attribute(obj, DTYPE)
    cdef Py_ssize_t i
    if not struct_agrees or not isinstance(dtype, numpy_dtype):
        return False
    if not PyTuple_CheckExact(shape) or not PyTuple_CheckExact(strides):
        return False
    if len(<tuple>shape) > MAX_AXES or len(<tuple>strides) != len(<tuple>shape):
        return False
    if not PyLong_CheckExact(value):
        value = int(value)                      # an object of Numba's: its handle
    stream[0] = value
    raw.ndim = <int>len(<tuple>shape)
    for i in range(raw.ndim):
        raw.shape[i] = (<tuple>shape)[i]
        raw.strides[i] = (<tuple>strides)[i]
    raw.found = Found(native_elem(<NDDescr *><PyObject *>dtype), 0, False, False)
    if raw.found.elem == NULL:
        return False
    raw.found.itemsize = <size_t>raw.found.elem.itemsize
    raw.readonly = False
    value = attribute(attribute(obj, MEMORY), POINTER)
    if Py_TYPE(value) != <PyTypeObject *>c_void_p:
        return False
    value = attribute(value, VALUE)
    raw.ptr = <char *><uintptr_t>value if value is not None else NULL
    return True


cdef inline object attribute(object obj, object name):
    """The attribute, or None."""
    cdef PyObject *found = NULL
    if not PyObject_GetOptionalAttr(obj, name, &found):
        return None
    return take(found)
