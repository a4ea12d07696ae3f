from pynccl._nccl cimport Library, ncclComm_t, ncclResult_t


# A communicator of NCCL that nobody holds any more.
cdef class Orphan:
    cdef Library library
    cdef ncclComm_t handle
    cdef void *token                # the barrier's element, freed before a destroy
    cdef int device

    cdef int destroy(self, double seconds, ncclResult_t *result) except -1


cdef Orphan orphan(Library library, ncclComm_t handle, void *token, int device)
cdef bint destroy_all(list orphans, double seconds) except -1
cdef bint abort_all(list orphans, double seconds) except -1
