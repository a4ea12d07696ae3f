from pynccl._buffer cimport BufferView
from pynccl._call cimport Kind, Names, Place
from pynccl._cliques cimport Clique
from pynccl._nccl cimport Library, Recorder, Step, ncclResult_t


cdef enum:
    NAME = 24       # bytes of "outputs[2147483647]"
    FEW = 16        # calls for which memory is kept ready
    TITLES = 4      # names of lists


cdef struct Entry:
    BufferView views[2]
    Names names
    char x[NAME]    # where no ready name is long enough
    char out[NAME]
    int index       # its place in the lists


cdef struct Title:
    const char *prefix      # "inputs[", or a whole name without an index
    char few[FEW][NAME]     # "inputs[0]" and so on, ready


cdef class Batch:
    cdef Entry *entries
    cdef Step *steps
    cdef Py_ssize_t room, count
    cdef Py_ssize_t n           # length of the lists
    cdef tuple comms            # one per entry of the lists; None until they are known
    cdef Clique clique          # that the comms were taken from; None where they were given
    cdef Library library
    cdef bint host
    cdef bint some              # the lists are only some of the communicator's ranks
    cdef Place at
    cdef bint began             # the library was called
    cdef const char *verb
    cdef Recorder group         # that is open on this thread; None otherwise
    cdef list arrays            # what was looked at, for the group's plan to keep
    cdef object ops             # one, or a tuple with one per entry
    cdef tuple streams          # or None

    cdef int reserve(self, Py_ssize_t room) except -1
    cdef int use(self, tuple comms, Library library) except -1
    cdef const Place *place(self, Py_ssize_t index)
    cdef Entry *add(self, Kind kind, Py_ssize_t index, const Place *at, object x, object out,
                    object root, Title *x_title, Title *out_title) except NULL
    cdef const BufferView *given(self, Py_ssize_t i) noexcept
    cdef str name(self, Py_ssize_t i, bint recv)
    cdef str title(self, Py_ssize_t i)
    cdef int alike(self) except -1
    cdef int as_many(self) except -1
    cdef int disjoint(self) except -1
    cdef bint touch(self, Py_ssize_t i, int a, Py_ssize_t j, int b) noexcept
    cdef int overwrites(self, Py_ssize_t i, Py_ssize_t j) except -1
    cdef bint locate(self) except -1
    cdef int settle(self) except -1
    cdef int run(self) except -1
    cdef int launch(self) except -1
    cdef object held(self)
    cdef int finish(self) except -1
    cdef void occupy(self, int by) noexcept
    cdef int report(self, ncclResult_t result, Py_ssize_t failed) except -1


cdef Title *title_of(const char *prefix) noexcept
