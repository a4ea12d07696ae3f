"""The CUDA driver as the rest of the package sees it: where memory is, devices, the order of streams.

No state of its own; _cuda.c says what it keeps.
"""

from libc.stdint cimport uintptr_t
from libc.stdlib cimport getenv

from . import _config
from .errors import CudaError

cdef extern from "_cuda.h" nogil:
    int cuda_ready() noexcept
    int cuda_pointer_device(const void *p) noexcept
    int cuda_stream_wait(uintptr_t producer, uintptr_t consumer) noexcept
    int cuda_stream_sync(uintptr_t stream) noexcept
    int cuda_get_device(int *device) noexcept
    int cuda_set_device(int device) noexcept
    int cuda_device_enter(int device, void **saved) noexcept
    int cuda_device_leave(void *saved) noexcept
    int cuda_malloc(void **p, size_t nbytes) noexcept
    int cuda_free(void *p) noexcept
    const char *cuda_error(int code) noexcept


cdef int pointer_device(const void *p) noexcept:
    """The CUDA device whose memory this is; -1 for host memory, which is all there is without a driver."""
    cdef int device = cuda_pointer_device(p)
    return device if device >= 0 else -1


cdef int current_device() noexcept nogil:
    """The calling thread's current device, or -1."""
    cdef int device = -1
    return device if cuda_get_device(&device) == 0 else -1


cdef int use_device(int device) noexcept nogil:
    """Make a device current in the calling thread; 0, or the driver's code."""
    return cuda_set_device(device)


def make_current(device):
    """Make a device current in the calling thread, for good."""
    check(cuda_set_device(device), "cuCtxSetCurrent")


cdef int enter_device(int device, void **saved) noexcept nogil:
    """Make a device current until leave_device; 0, or the driver's code."""
    return cuda_device_enter(device, saved)


cdef int leave_device(void *saved) noexcept nogil:
    return cuda_device_leave(saved)


cdef bint follows_producers() except -1:
    """Whether calls wait for the streams that arrays name as their producers."""
    # Asked of the C library first: hardly anyone sets it, and Python's environment is slow to ask.
    return getenv("PYNCCL_CAI_SYNC") == NULL or _config.get("PYNCCL_CAI_SYNC")


cdef int order_streams(uintptr_t producer, uintptr_t consumer) except -1:
    """Make the consumer's stream wait for what the producer's has been given so far."""
    if (producer or 1) == (consumer or 1):      # 0 and 1 are both the legacy default stream
        return 0
    if not cuda_ready():
        return 0
    if not follows_producers():
        return 0
    return check(cuda_stream_wait(producer, consumer), "cuStreamWaitEvent")


cdef int sync_stream(uintptr_t stream) except -1:
    """Block until the stream has run dry."""
    cdef int code
    if not cuda_ready():
        return 0
    with nogil:
        code = cuda_stream_sync(stream)
    return check(code, "cuStreamSynchronize")


cdef void *device_alloc(size_t nbytes) except NULL:
    """Memory of the current device."""
    cdef void *p = NULL
    check(cuda_malloc(&p, nbytes), "cuMemAlloc")
    return p


cdef void device_free(void *p) noexcept:
    """Give it back; NULL is fine."""
    cuda_free(p)


cdef int check(int code, str function) except -1:
    if code != 0:
        raise CudaError(1, function, None, cuda_error(code).decode())
    return 0
