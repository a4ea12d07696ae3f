from pynccl._collectives cimport Collectives
from pynccl._nccl cimport CommBase, ncclConfig_t, ncclUniqueId


cdef class Communicator(Collectives):
    # What create() needs, kept from __init__ or split() to the end of a group.
    cdef ncclUniqueId uid
    cdef CommBase parent            # of a split; None otherwise
    cdef int color, key
    cdef ncclConfig_t config
    cdef int device_index           # -1: the current one

    cdef int born_now(self) except -1
    cdef int read_back(self) except -1
    cdef int leave(self) except -1
    cdef int create_in_thread(self) except -1
    cdef int give_up(self) except -1
