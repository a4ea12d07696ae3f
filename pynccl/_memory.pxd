from pynccl._collectives cimport Collectives


cdef class Memory(Collectives):
    pass
