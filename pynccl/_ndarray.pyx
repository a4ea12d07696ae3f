"""NumPy's array type, recognised and read without importing NumPy.

Whoever passes a NumPy array has imported NumPy, so that the type is met in sys.modules and remembered.  The
struct is trusted only after arrays of our own making show in it what they say of themselves; if one does not,
it is never read and the slower protocols serve.

The remembered facts are written once, under the GIL, and are the same whoever writes them.
"""

import sys

from cpython.object cimport PyObject, PyTypeObject
from cpython.ref cimport Py_INCREF
from libc.stdint cimport uintptr_t

from pynccl._elem cimport OPAQUE, Found, copy_name, dtype_name, elem_by_kind, elem_named

cdef extern from "Python.h":
    bint PyType_IsSubtype(PyTypeObject *, PyTypeObject *) noexcept

cdef str FOREIGN = ">" if sys.byteorder == "little" else "<"

ndarray_type = NULL
struct_agrees = False


cdef bint is_ndarray(PyTypeObject *tp) except -1:
    """Whether this is NumPy's array type or a subclass of it; the first one met is studied."""
    global ndarray_type, struct_agrees
    cdef object numpy, array_type
    if ndarray_type != NULL:
        return PyType_IsSubtype(tp, ndarray_type)
    numpy = sys.modules.get("numpy")
    array_type = getattr(numpy, "ndarray", None)
    if not isinstance(array_type, type) or not issubclass(<object>tp, array_type):
        return False
    try:
        struct_agrees = study(numpy)
    except Exception:       # whatever this NumPy is, it is not one that we know
        struct_agrees = False
    Py_INCREF(array_type)
    ndarray_type = <PyTypeObject *>array_type
    return True


cdef bint study(object numpy) except -1:
    """Compare the struct with what arrays say of themselves, and learn NumPy's type numbers."""
    cdef object whole, parts, dtype
    cdef int num
    if numpy.ndarray.__basicsize__ < <Py_ssize_t>sizeof(NDArray):
        return False
    if numpy.dtype.__basicsize__ < <Py_ssize_t>sizeof(NDDescr):
        return False
    whole = numpy.arange(24, dtype="<i4").reshape(2, 3, 4)
    parts = whole.astype(">i2").transpose(2, 0, 1)[::-2]
    parts.flags.writeable = False
    for array in (whole, parts, whole.T, whole[:, 1:2], numpy.zeros((), "?"), numpy.zeros((3, 0), "V5")):
        if not tells_truth(array):
            return False
    unaligned = numpy.zeros(9, "u1")[1:].view("f8")
    if not tells_truth(unaligned):
        return False
    for letter in "?bBhHiIlLqQefdgFDG":
        dtype = numpy.dtype(letter)
        num = dtype.num
        if not 0 <= num < ND_BUILTIN:
            return False
        builtin_elem[num] = elem_by_kind(<char>ord(dtype.kind), dtype.itemsize)
    return True


cdef bint tells_truth(object array) except -1:
    cdef NDArray *nd = <NDArray *><PyObject *>array
    cdef object told = array.__array_interface__
    cdef object dtype = array.dtype
    cdef object flags = array.flags
    cdef Py_ssize_t i
    if nd.nd != len(told["shape"]) or <uintptr_t>nd.data != told["data"][0]:
        return False
    for i in range(nd.nd):
        if nd.dimensions[i] != told["shape"][i] or nd.strides[i] != array.strides[i]:
            return False
    if <PyObject *>nd.descr != <PyObject *>dtype:
        return False
    if nd.descr.kind != ord(dtype.kind) or nd.descr.byteorder != ord(dtype.byteorder) or nd.descr.num != dtype.num:
        return False
    return (
        bool(nd.flags & ND_WRITEABLE) == (not told["data"][1])
        and bool(nd.flags & ND_ALIGNED) == flags.aligned
        and bool(nd.flags & ND_C_CONTIGUOUS) == flags.c_contiguous
        and bool(nd.flags & ND_F_CONTIGUOUS) == flags.f_contiguous
    )


cdef int read_dtype(object dtype, Found *out, char *name) except -1:
    """Read a NumPy dtype; 0 if its elements are or hold Python objects or references, else 1."""
    cdef object kind = dtype.kind
    cdef int num = dtype.num
    cdef unsigned int slot = <unsigned int>(num - ND_USER)
    cdef object own
    out.itemsize = dtype.itemsize
    out.vague = False
    # A structure has no order of its own, and its fields are moved as they are.
    out.foreign = dtype.byteorder == FOREIGN
    if slot < ND_USER_KNOWN and user_elem[slot] != NULL:
        out.elem = user_elem[slot]
        return 1
    out.elem = elem_by_kind(<char>ord(kind), out.itemsize) if 0 <= num < ND_BUILTIN else NULL
    if out.elem != NULL:
        return 1
    if dtype.hasobject or (0 <= num < ND_BUILTIN and kind not in "fcMmSUV"):
        return 0
    out.elem = OPAQUE
    own = dtype.str
    if not 0 <= num < ND_BUILTIN:
        # ml_dtypes and the like: the type string says <V2, or <f1; the name says bfloat16.
        if kind not in "biufcV":
            return 0
        own = dtype_name(dtype) or own
        out.elem = elem_named(own.encode())
        if out.elem == NULL or <size_t>out.elem.itemsize != out.itemsize:
            out.elem = OPAQUE
        elif slot < ND_USER_KNOWN and not out.foreign:
            user_elem[slot] = out.elem
    copy_name(name, own)
    return 1


cdef bint is_masked(object array) except -1:
    """Whether an ndarray of a subclass is a numpy.ma array that really has a mask."""
    cdef object ma = sys.modules.get("numpy.ma")
    cdef object masked = getattr(ma, "MaskedArray", None)
    if masked is None or not isinstance(array, masked):
        return False
    return array.mask is not ma.nomask
