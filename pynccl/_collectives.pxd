from pynccl._nccl cimport CommBase


cdef class Collectives(CommBase):
    pass
