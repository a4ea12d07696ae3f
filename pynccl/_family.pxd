from pynccl._memory cimport Memory
from pynccl._nccl cimport CommBase, ncclConfig_t, ncclResult_t, ncclUniqueId
from pynccl._settings cimport Config


cdef enum Birth:
    INIT
    SPLIT
    SHRINK
    GROW            # as one of the ranks that there were
    JOIN            # as one of the new ones


cdef class Family(Memory):
    # What the creation needs, kept to the end of a group.
    cdef Birth birth
    cdef bytes uids                 # one id or several, one behind the other; None where another brings it
    cdef const ncclUniqueId *ids    # the same, as C sees it
    cdef int n_ids
    cdef CommBase parent            # of a split, shrink or growth; None otherwise
    cdef int color, key, flags
    cdef int *excluded              # of a shrink
    cdef int n_excluded
    cdef ncclConfig_t config
    cdef Config settings            # which holds the config's texts
    cdef bint deferred              # created in the background: wait_ready
    cdef int device_index           # -1: the current one

    cdef int set_ids(self, bytes uids) except -1
    cdef int set_config(self, object config) except -1
    cdef ncclResult_t call(self) noexcept nogil
    cdef const char *function(self) noexcept
    cdef bint is_whole(self) noexcept
    cdef Family sibling(self)
    cdef Family child(self, Birth birth, object timeout, object config)
    cdef int alive(self, const char *verb) except -1
    cdef int born_now(self) except -1
    cdef int opened(self) except -1
    cdef int give_up(self) except -1
