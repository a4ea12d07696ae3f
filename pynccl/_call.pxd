# The collective table and the one validator.  _call uses _buffer and errors, nothing above.

from libc.stdint cimport uintptr_t

from pynccl._buffer cimport BufferView, ElemType
from pynccl._fields cimport Fields


cdef enum Use:
    NEVER       # the buffer is not looked at
    ALWAYS
    AT_ROOT     # only on the root rank


cdef enum Kind:
    ALL_REDUCE
    REDUCE
    BROADCAST
    ALL_GATHER
    REDUCE_SCATTER
    ALL_TO_ALL
    GATHER
    SCATTER
    SEND
    RECV
    SEND_TO     # the two halves of send_recv
    RECV_FROM
    KINDS       # how many there are


cdef enum InPlace:
    NOWHERE     # any overlap of send and recv is refused
    SAME        # send and recv are the same memory
    IN_RECV     # send is this rank's block of recv
    IN_SEND     # recv is this rank's block of send


cdef struct Spec:
    Kind kind
    const char *verb        # the method's name, first word of every message
    const char *function    # the C function that the call ends in
    Use send
    Use recv
    bint send_blocks        # send holds one block per rank
    bint recv_blocks        # recv holds one block per rank
    bint reduces            # op applies
    const char *root        # what `root` is called here; NULL where it does not apply
    InPlace in_place


# Where calls run: the facts about a communicator that the checks need.
cdef struct Place:
    int rank
    int nranks
    int device              # CUDA ordinal; meaningless on the host library
    int version             # of the library, as NCCL codes it
    bint host               # the host library
    void *comm              # identity of the communicator, for the ops that belong to one


# One checked call, ready for the C function.
cdef struct Call:
    const Spec *spec
    const void *send
    void *recv
    size_t count            # as NCCL counts: elements of `dtype`, per block
    int dtype
    int op
    int root
    bint sends              # this rank's input matters
    bint receives           # this rank has a result
    bint shared             # x is out: one array for both
    const void *config      # NULL, or an ncclCollConfig_t: whoever keeps the call keeps its CollConfig
    void *configured        # with it: the function that makes the C call
    void *stream
    uintptr_t after[2]      # producers' streams that `stream` must wait for first
    int n_after


# What the caller calls its two arrays, for messages: "x" and "out", or "inputs[3]" and "outputs[3]".
cdef struct Names:
    const char *x
    const char *out


cdef class UserOp:
    # A reduction made by Communicator.premul_sum.
    cdef int code
    cdef void *comm                 # identity only; NULL once destroyed
    cdef const ElemType *elem
    cdef readonly object scalar
    cdef list retired               # the communicator's: codes to destroy at its next call
    cdef object __weakref__


cdef class Setting(Fields):
    # What a call is told beyond its arguments; CollConfig is the one there is.
    cdef int put(self, Call *call, object library) except -1


cdef int put_setting(Call *call, object config, object library) except -1

cdef uintptr_t stream_handle(const char *verb, const char *name, object stream) except? 0

cdef const Spec *spec_of(Kind kind) noexcept nogil

cdef int bind(Call *call, BufferView *views, Kind kind, const Place *at,
              object x, object out, object op, object root,
              object stream, object dtype) except -1

# The two halves of bind, for a caller that learns only from the arrays where the call will run.
cdef int look(Call *call, BufferView *views, Kind kind, const Place *at,
              object x, object out, object root, object dtype, const Names *names) except -1

cdef int fit(Call *call, const BufferView *views, const Place *at, object op, object stream,
             const Names *names) except -1

cdef int separate(const char *verb, const BufferView *x, const BufferView *out) except -1

cdef str element(const BufferView *v)

cdef int wants(Kind kind, const Place *at, object root, bint *send, bint *recv) except -1
