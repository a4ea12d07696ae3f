from pynccl._family cimport Family
from pynccl._nccl cimport CommBase


cdef class Communicator(Family):
    cdef int read_back(self) except -1
    cdef int leave(self) except -1
    cdef int create_in_thread(self) except -1
    cdef int meet_under(self, object uid, object library) except -1
    cdef int wait_for(self, CommBase asked) except -1
