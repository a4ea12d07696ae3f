from pynccl._fields cimport Fields
from pynccl._nccl cimport Library, ncclConfig_t


cdef class Config(Fields):
    cdef ncclConfig_t c             # what the library reads
    cdef dict held                  # the texts that `c` points to

    cdef object put(self, str name, object value)
    cdef int fits(self, Library library) except -1
