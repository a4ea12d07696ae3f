from pynccl._nccl cimport Library, ncclConfig_t


cdef class Config:
    cdef ncclConfig_t c             # what the library reads
    cdef readonly dict values       # what was given, by name
    cdef dict held                  # the texts that `c` points to

    cdef object put(self, str name, object value)
    cdef int fits(self, Library library) except -1
