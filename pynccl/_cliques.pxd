cimport cython

from pynccl._nccl cimport Library


@cython.final
cdef class Clique:
    cdef readonly tuple comms       # in rank order
    cdef readonly bint broken       # a call failed, or it was ended: its communicators are not to be used
    cdef object lock
    cdef tuple key

    cdef int enter(self) except -1
    cdef int leave(self, bint well) except -1


cdef Clique find(Library library, Py_ssize_t n, list devices)
