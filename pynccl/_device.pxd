"""The CUDA driver as the rest of the package sees it.  Without a driver nothing here fails or does anything.

The driver's table is static state, so that _cuda.c is linked into this module only.
"""

from libc.stdint cimport uintptr_t

cdef int pointer_device(const void *p) noexcept
cdef int current_device() noexcept nogil
cdef int use_device(int device) noexcept nogil
cdef int enter_device(int device, void **saved) noexcept nogil
cdef int leave_device(void *saved) noexcept nogil
cdef bint follows_producers() except -1
cdef int order_streams(uintptr_t producer, uintptr_t consumer) except -1
cdef int sync_stream(uintptr_t stream) except -1
cdef void *device_alloc(size_t nbytes) except NULL
cdef void device_free(void *p) noexcept
