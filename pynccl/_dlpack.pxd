"""DLPack tensors: owned for as long as an object of ours lives, and given back once."""

from cpython.object cimport PyObject
from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t, uintptr_t

from pynccl._view cimport Ask, BufferView

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

cdef struct DLVersion:
    uint32_t major
    uint32_t minor

cdef struct ManagedVersioned:   # DLManagedTensorVersioned, capsules named "dltensor_versioned"
    DLVersion version
    void *context
    void (*deleter)(ManagedVersioned *self) noexcept
    uint64_t flags
    DLTensor tensor

cdef struct Exchange:           # DLPackExchangeAPI, capsules named "dlpack_exchange_api"
    DLVersion version
    Exchange *previous          # an older table, for consumers that do not know this one's layout
    void *allocator
    int (*export)(PyObject *obj, ManagedVersioned **out) except -1
    void *to_object
    int (*borrow)(PyObject *obj, DLTensor *out) except -1
    int (*current_stream)(int32_t type, int32_t id, void **out) except -1

cdef class Tensor:
    """A managed tensor of a producer; its deleter is called when this object goes."""
    cdef void *managed
    cdef bint versioned
    cdef DLTensor *tensor
    cdef bint readonly
    cdef bint has_stream
    cdef uintptr_t stream

cdef Exchange *table_of(PyObject *capsule) except? NULL
cdef Tensor tensor_of_table(object obj, PyObject *table, const Ask *ask)
cdef Tensor tensor_of_capsule(object obj, object export, const Ask *ask)
cdef int view_tensor(Tensor t, BufferView *out, const Ask *ask) except -1
cdef int read_tensor(DLTensor *dl, bint readonly, BufferView *out, const Ask *ask) except -1
cdef int refuse_device(int where, const Ask *ask) except -1
