"""DLPack tensors: owned for as long as an object of ours lives, and given back once."""

from cpython.object cimport PyObject
from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint64_t, uintptr_t

from pynccl._elem cimport Found
from pynccl._view cimport Ask

# Our own declaration of DLPack 1.3, whose layout is the same since 1.0.
cdef enum:
    DL_CPU = 1
    DL_CUDA = 2
    DL_CUDA_HOST = 3
    DL_CUDA_MANAGED = 13

cdef struct DLDevice:
    int32_t type
    int32_t id

cdef struct DLDataType:
    uint8_t code
    uint8_t bits
    uint16_t lanes

cdef struct DLTensor:
    void *data
    DLDevice device
    int32_t ndim
    DLDataType dtype
    int64_t *shape
    int64_t *strides            # in elements; NULL = C order
    uint64_t byte_offset

cdef class Tensor:
    """A managed tensor of a producer; its deleter is called when this object goes."""
    cdef void *managed
    cdef bint versioned
    cdef DLTensor *tensor
    cdef bint readonly
    cdef bint has_stream
    cdef uintptr_t stream

cdef Tensor tensor_of_table(object obj, PyObject *table, const Ask *ask)
cdef Tensor tensor_of_capsule(object obj, object export, const Ask *ask)
cdef int read_dltype(DLDataType dtype, Found *out, char *name, const Ask *ask) except -1
