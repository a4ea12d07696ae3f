from pynccl._nccl cimport CommBase


cdef class Collectives(CommBase):
    cdef object ops                 # weak set of the UserOps made here
    cdef list retired               # codes of UserOps that are gone, not yet destroyed in C

    cdef int destroy_retired(self) except -1
