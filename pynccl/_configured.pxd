from pynccl._call cimport Call, Setting
from pynccl._nccl cimport ncclCollConfig_t


cdef class CollConfig(Setting):
    cdef ncclCollConfig_t c         # what the library reads
    cdef readonly dict values       # what was given, by name
    cdef bytes algorithm            # the text that `c` points to
