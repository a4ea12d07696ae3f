# Who holds the arrays of calls that are queued.  _keep uses nothing; the call path and the streams use it.

# pyncclHostKeep: what the calling thread gives is held by the next item that it queues.
ctypedef void *(*Keep)(void *owner, void (*release)(void *) noexcept nogil) noexcept nogil

cdef int lend(Keep keep, object held) except -1
cdef void take_back(Keep keep) noexcept
cdef void drop_returned() noexcept
