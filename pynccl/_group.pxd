cimport cython

from pynccl._nccl cimport CommBase, Library, Recorder, Step, ncclResult_t


@cython.final
cdef class Group(Recorder):
    cdef void *call             # the vectorcallfunc of plan()
    cdef Step *steps
    cdef Py_ssize_t count, room
    cdef list held              # arrays, owners of memory and ops of the steps
    cdef list comms             # communicators of the steps, each once
    cdef list creations         # communicators to be created
    cdef list gates             # of communicators that threads share, each once
    cdef Library library
    cdef Recorder outer
    cdef bint at_end            # run when the block ends
    cdef bint built
    cdef CommBase only          # set in a plan of one communicator, no waits and no queues, as most are
    cdef bint waits             # some step waits for a producer's stream
    cdef bint queues            # some step goes on a stream of the host library
    cdef unsigned long thread
    cdef bint entered
    cdef unsigned int born      # as a communicator's

    cdef int again(self) except -1
    cdef int grow(self, Py_ssize_t more) except -1
    cdef int join(self, Library library, const char *verb) except -1
    cdef int append(self, Group plan) except -1
    cdef int launch(self) except -1
    cdef int launch_now(self) except -1
    cdef int launch_steps(self) except -1
    cdef bint replay(self) except -1
    cdef int claim(self) except -1
    cdef void occupy(self, int by) noexcept
    cdef ncclResult_t create_and_run(self, Py_ssize_t *failed) except *
    cdef int report(self, ncclResult_t result, Py_ssize_t failed) except -1
    cdef int drop(self) except -1
