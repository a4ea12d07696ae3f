"""BufferView: what a call needs to know of an array, and the rules that every array has to keep."""

from cpython.object cimport PyObject
from cpython.ref cimport Py_XDECREF
from libc.stdint cimport uintptr_t

from pynccl._elem cimport TYPE_NAME, ElemType, Found

cdef extern from *:
    """
    #if PY_VERSION_HEX < 0x030D0000     /* public, under this name, since 3.13 */
    #define PyObject_GetOptionalAttr _PyObject_LookupAttr
    #endif
    #define pynccl_of_jax(obj) (strncmp(Py_TYPE(obj)->tp_name, "jaxlib.", 7) == 0)
    """
    # Whether this is an array of JAX, which never changes: calls cannot work on it in place.
    bint of_jax "pynccl_of_jax"(object) noexcept
    # 1 and a new reference, or 0 where there is no such attribute: AttributeError is never made to be thrown away.
    int PyObject_GetOptionalAttr(object, object, PyObject **) except -1

cdef inline object take(PyObject *owned):
    """Make an owned reference that came as a pointer an ordinary one."""
    cdef object it = <object>owned
    Py_XDECREF(owned)
    return it

cdef enum Order:
    ORDER_BOTH          # at most one axis is longer than 1, or the array is empty
    ORDER_C
    ORDER_F

# What the caller wants; the names are read only for messages.
cdef struct Ask:
    const char *verb
    const char *arg
    bint writable
    bint on_device              # an NCCL communicator asks: the CUDA array interface comes before PEP 3118
    const ElemType *as_elem     # dtype= override, or NULL

cdef struct BufferView:
    char *ptr                   # NULL if the array is empty
    size_t count                # elements of elem
    size_t nbytes
    const ElemType *elem
    size_t itemsize
    int device                  # CUDA ordinal, -1 = host; says nothing about an empty array
    bint readonly
    int order                   # Order
    bint has_stream
    uintptr_t stream            # the producer's, only if has_stream
    PyObject *owner             # strong, or NULL: what must live until release
    char type_name[TYPE_NAME]   # the dtype's own name, only where elem is OPAQUE

cdef enum:
    MAX_AXES = 64

# What a protocol says, before anything of it is believed.
cdef struct Raw:
    char *ptr
    int ndim
    Py_ssize_t *shape
    Py_ssize_t *strides         # bytes; NULL = C order
    Found found
    bint readonly

cdef int settle(Raw *raw, BufferView *out, const Ask *ask) except -1
cdef int finish(bint foreign, BufferView *out, const Ask *ask) except -1
cdef void release(BufferView *v) noexcept
cdef const char *type_name(const BufferView *v) noexcept
cdef bint same_type(const BufferView *a, const BufferView *b) noexcept
cdef str who(const Ask *ask)
cdef tuple shape_of(Raw *raw)
cdef object masked(const Ask *ask)
