from libc.stdint cimport uint64_t

from pynccl._call cimport Call, Setting
from pynccl._nccl cimport ncclCollConfig_t


cdef class CollConfig(Setting):
    cdef ncclCollConfig_t c         # what the library reads
    cdef bytes algorithm            # the text that `c` points to

    cdef int count(self, str name) except? -1
    cdef uint64_t word(self, str name) except? 1
