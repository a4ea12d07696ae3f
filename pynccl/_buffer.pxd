"""BufferView: what a call needs to know of an array; and the one function that makes it.

A view borrows: whoever made it keeps the array itself alive while the view is in use, and gives it back with
``release``.
"""

from cpython.object cimport PyObject
from libc.stdint cimport uintptr_t

from pynccl._device cimport current_device, order_streams, sync_stream, use_device
from pynccl._elem cimport (
    ELEM_BOOL, ELEM_COMPLEX, ELEM_FLOAT, ELEM_INT, ELEM_OPAQUE, OPAQUE, TYPE_NAME, ElemType, elem_of,
)

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

cdef int view(object obj, BufferView *out, const Ask *ask) except -1
cdef void release(BufferView *v) noexcept
cdef const char *type_name(const BufferView *v) noexcept
cdef bint same_type(const BufferView *a, const BufferView *b) noexcept

cdef class Buffer:
    cdef BufferView view        # view.owner is NULL: base holds it
    cdef object base            # the array, kept alive with its exports
