"""The table of collectives, and the one place where a call's arguments are checked.

A row of `SPECS` says which buffers matter on which rank, which of them hold one block per rank, and
whether an operator or a root applies.  `bind` turns a row and a user's arguments into a `Call`: all
counts, dtypes, ranges, overlaps and streams are settled there, so that a call either is right as far
as one rank can tell, or has raised before anything moved.

Messages read *verb: what is wrong, the numbers, what would be right*.
"""

from cpython.long cimport PyLong_AsLongAndOverflow, PyLong_AsUnsignedLongLong
from libc.stdint cimport uintptr_t

from pynccl._buffer cimport (
    ELEM_BOOL,
    ELEM_COMPLEX,
    ELEM_OPAQUE,
    ORDER_BOTH,
    ORDER_F,
    Ask,
    BufferView,
    ElemType,
    elem_of,
    same_type,
    type_name,
    view,
)

import operator

from pynccl._stream import handle_of
from pynccl.enums import DataType, ReduceOp
from pynccl.errors import LayoutError

cdef extern from "nccl_abi.h":
    enum:
        PYNCCL_HOST_FORTRAN


cdef enum:
    OP_SUM = 0
    OP_PROD = 1
    OP_MAX = 2
    OP_MIN = 3
    OP_AVG = 4
    NCCL_UINT8 = 1
    NCCL_FP8 = 10               # this code and above
    NCCL_FP8_SINCE = 22400

cdef Spec SPECS[<int>KINDS]


cdef void row(Kind kind, const char *verb, const char *function, Use send, Use recv,
              bint send_blocks, bint recv_blocks, bint reduces, const char *root,
              InPlace in_place) noexcept:
    SPECS[<int>kind] = Spec(kind, verb, function, send, recv, send_blocks, recv_blocks, reduces,
                            root, in_place)


#   kind            verb              C function           send     recv     blocks op root      in place
row(ALL_REDUCE,     "all_reduce",     "ncclAllReduce",     ALWAYS,  ALWAYS,  0, 0,  1, NULL,     SAME)
row(REDUCE,         "reduce",         "ncclReduce",        ALWAYS,  AT_ROOT, 0, 0,  1, "root",   SAME)
row(BROADCAST,      "broadcast",      "ncclBroadcast",     AT_ROOT, ALWAYS,  0, 0,  0, "root",   SAME)
row(ALL_GATHER,     "all_gather",     "ncclAllGather",     ALWAYS,  ALWAYS,  0, 1,  0, NULL,     IN_RECV)
row(REDUCE_SCATTER, "reduce_scatter", "ncclReduceScatter", ALWAYS,  ALWAYS,  1, 0,  1, NULL,     IN_SEND)
row(ALL_TO_ALL,     "all_to_all",     "ncclAlltoAll",      ALWAYS,  ALWAYS,  1, 1,  0, NULL,     NOWHERE)
row(GATHER,         "gather",         "ncclGather",        ALWAYS,  AT_ROOT, 0, 1,  0, "root",   IN_RECV)
row(SCATTER,        "scatter",        "ncclScatter",       AT_ROOT, ALWAYS,  1, 0,  0, "root",   IN_SEND)
row(SEND,           "send",           "ncclSend",          ALWAYS,  NEVER,   0, 0,  0, "peer",   NOWHERE)
row(RECV,           "recv",           "ncclRecv",          NEVER,   ALWAYS,  0, 0,  0, "peer",   NOWHERE)
row(SEND_TO,        "send_recv",      "ncclSend",          ALWAYS,  NEVER,   0, 0,  0, "dest",   NOWHERE)
row(RECV_FROM,      "send_recv",      "ncclRecv",          NEVER,   ALWAYS,  0, 0,  0, "source", NOWHERE)


cdef const Spec *spec_of(Kind kind) noexcept nogil:
    return &SPECS[<int>kind]


cdef int wants(Kind kind, const Place *at, object root, bint *send, bint *recv) except -1:
    """Tell which buffers matter on this rank; checks `root` on the way."""
    cdef const Spec *spec = &SPECS[<int>kind]
    cdef int r = 0
    if spec.root != NULL:
        r = root_of(spec, at, root)
    send[0] = spec.send == ALWAYS or (spec.send == AT_ROOT and r == at.rank)
    recv[0] = spec.recv == ALWAYS or (spec.recv == AT_ROOT and r == at.rank)
    return 0


# What the methods of a communicator call their two arrays.
cdef Names METHOD = Names(b"x", b"out")


cdef int bind(Call *call, BufferView *views, Kind kind, const Place *at,
              object x, object out, object op, object root,
              object stream, object dtype) except -1:
    """Check the arguments of one call and fill `call`.

    `views` are two zeroed views; the caller releases both, also after an error.
    """
    look(call, views, kind, at, x, out, root, dtype, &METHOD)
    return fit(call, views, at, op, stream, &METHOD)


cdef int look(Call *call, BufferView *views, Kind kind, const Place *at,
              object x, object out, object root, object dtype, const Names *names) except -1:
    """Read the arrays that matter on this rank; of `at`, the device is not asked yet."""
    cdef const Spec *spec = &SPECS[<int>kind]
    cdef BufferView *send = &views[0]
    cdef BufferView *recv = &views[1]
    cdef Ask ask

    call.spec = spec
    call.config = NULL
    call.root = 0
    if spec.root != NULL:
        call.root = root_of(spec, at, root)
    call.sends = spec.send == ALWAYS or (spec.send == AT_ROOT and call.root == at.rank)
    call.receives = spec.recv == ALWAYS or (spec.recv == AT_ROOT and call.root == at.rank)
    call.shared = x is out

    ask.verb = spec.verb
    ask.on_device = not at.host
    ask.as_elem = NULL
    if dtype is not None:
        ask.as_elem = elem_of(dtype)
    if call.sends:
        ask.arg = names.x
        ask.writable = call.shared and call.receives
        view(x, send, &ask)
    if call.sends and call.receives and call.shared:
        recv[0] = send[0]
        recv.owner = NULL           # send's owner keeps the memory for both
    elif call.receives:
        ask.arg = names.x if call.shared and spec.send == AT_ROOT else names.out
        ask.writable = True
        view(out, recv, &ask)
    return 0


cdef int fit(Call *call, const BufferView *views, const Place *at, object op, object stream,
             const Names *names) except -1:
    """Check what `look` has read against each other and against the place, and fill `call`."""
    cdef const Spec *spec = call.spec
    cdef const BufferView *send = &views[0] if call.sends else NULL
    cdef const BufferView *recv = &views[1] if call.receives else NULL
    cdef const BufferView *given = &views[0 if call.sends else 1]
    cdef size_t block

    if call.sends:
        placed(spec, at, send, names.x)
    if call.receives and not (call.sends and call.shared):
        placed(spec, at, recv, names.x if call.shared and spec.send == AT_ROOT else names.out)
        if call.sends:
            agree(spec, send, recv, names)
    block = block_count(spec, at, send, recv, names)
    number(call, spec, at, given, block, op, names)
    if call.sends and call.receives:
        apart(spec, at, send, recv, block * given.itemsize, names)
    call.send = send.ptr if call.sends else NULL
    call.recv = recv.ptr if call.receives else NULL
    if call.sends and call.shared:
        recv = NULL                 # one array, one producer
    return streams(call, spec, stream, send, recv)


cdef int root_of(const Spec *spec, const Place *at, object root) except -1:
    cdef int overflow = 0
    cdef long value
    if type(root) is not int:
        if isinstance(root, bool):
            raise TypeError(f"{text(spec.verb)}: {text(spec.root)} must be a rank, not a bool")
        try:
            root = operator.index(root)
        except TypeError:
            raise TypeError(
                f"{text(spec.verb)}: {text(spec.root)} must be an int, "
                f"not {type(root).__name__!r}"
            ) from None
    value = PyLong_AsLongAndOverflow(root, &overflow)
    if overflow or value < 0 or value >= at.nranks:
        raise ValueError(
            f"{text(spec.verb)}: {text(spec.root)} {root} is not a rank of this communicator; "
            f"its size is {at.nranks}, ranks are 0 to {at.nranks - 1}"
        )
    return <int>value


cdef inline int placed(const Spec *spec, const Place *at, const BufferView *v,
                       const char *arg) except -1:
    """Refuse memory that this communicator's library cannot reach."""
    if v.nbytes == 0 or (v.device < 0 if at.host else v.device == at.device):
        return 0
    if at.host:
        raise ValueError(
            f"{text(spec.verb)}: {text(arg)} is on GPU {v.device}, and this communicator's library "
            f"works on host memory; copy the array to the host, or create the communicator with "
            f"library='nccl'"
        )
    if v.device < 0:
        raise ValueError(
            f"{text(spec.verb)}: {text(arg)} is in host memory, and this communicator works on "
            f"GPU {at.device}; copy the array there first, or create the communicator with "
            f"library='host'"
        )
    raise ValueError(
        f"{text(spec.verb)}: {text(arg)} is on GPU {v.device}, and this communicator works on "
        f"GPU {at.device}; copy the array there first"
    )


cdef inline int agree(const Spec *spec, const BufferView *send, const BufferView *recv,
                      const Names *names) except -1:
    """Input and output must have one dtype and one memory order."""
    if not same_type(send, recv):
        raise TypeError(
            f"{text(spec.verb)}: {text(names.x)} is {element(send)} and {text(names.out)} is "
            f"{element(recv)}; both must have one dtype"
        )
    return same_order(spec.verb, send, recv, names)


cdef int same_order(const char *verb, const BufferView *send, const BufferView *recv,
                    const Names *names) except -1:
    if send.order != recv.order and send.order != ORDER_BOTH and recv.order != ORDER_BOTH:
        raise LayoutError(
            f"{text(verb)}: {text(names.x)} is in {order(send)} order and {text(names.out)} in "
            f"{order(recv)} order; the elements would end up transposed; use the same order for both"
        )
    return 0


cdef inline size_t block_count(const Spec *spec, const Place *at, const BufferView *send,
                               const BufferView *recv, const Names *names) except? 0:
    """Elements of one block, after both sizes were found to fit."""
    cdef size_t n = <size_t>at.nranks
    cdef size_t block, rest
    if (send is not NULL and spec.send_blocks and send.order == ORDER_F or
            recv is not NULL and spec.recv_blocks and recv.order == ORDER_F):
        raise LayoutError(
            f"{text(spec.verb)}: "
            f"{text(names.x if spec.send_blocks and send is not NULL else names.out)} is in "
            f"Fortran order, so that the block of a rank is not contiguous; use a C-ordered array"
        )
    if send is not NULL:
        block = send.count
        if spec.send_blocks:
            block = send.count // n
            if send.count % n:
                raise ValueError(
                    f"{text(spec.verb)}: {text(names.x)} has {send.count} elements, not a multiple of "
                    f"nranks={n}; it must hold one block per rank"
                )
    else:
        block = recv.count // n if spec.recv_blocks else recv.count
    if recv is NULL:
        return block
    if spec.recv_blocks:
        # Divide rather than multiply: a claimed size may be anything up to 2**64.
        rest = recv.count % n
        if rest or recv.count // n != block:
            raise ValueError(
                f"{text(spec.verb)}: {text(names.out)} has {recv.count} elements, expected "
                f"{<object>block * <object>n}: nranks={n} blocks of {block}"
            )
    elif recv.count != block:
        raise ValueError(
            f"{text(spec.verb)}: {text(names.out)} has {recv.count} elements, expected {block}"
            + (f": {text(names.x)} has {send.count} for nranks={n}" if spec.send_blocks else
               f", as many as {text(names.x)}")
        )
    return block


cdef inline int number(Call *call, const Spec *spec, const Place *at, const BufferView *v,
                       size_t block, object op, const Names *names) except -1:
    """Say dtype, count and operator in NCCL's numbers."""
    cdef const ElemType *elem = v.elem
    call.op = OP_SUM
    if spec.reduces:
        call.op = op_of(spec, at, v, op, names)
    if elem.nccl >= 0 and (elem.nccl < NCCL_FP8 or at.version >= NCCL_FP8_SINCE):
        call.dtype = elem.nccl
        call.count = block * <size_t>elem.width
    else:
        # Moved as bytes: what they mean matters to nobody on the way.  (The 8-bit floats too, where
        # the library does not know their codes; op_of has refused to reduce them.)
        call.dtype = NCCL_UINT8
        call.count = block * v.itemsize
    if at.host and v.order == ORDER_F:
        # No rank can see another's memory order; the host library compares this bit across ranks.
        call.dtype |= PYNCCL_HOST_FORTRAN
    return 0


cdef int op_of(const Spec *spec, const Place *at, const BufferView *v, object op,
               const Names *names) except -1:
    """NCCL's number for `op` on this dtype, or an error if the two do not go together."""
    cdef int code
    cdef UserOp user
    cdef const ElemType *elem = v.elem
    if elem.nccl < 0 and elem.kind == ELEM_OPAQUE:
        raise TypeError(
            f"{text(spec.verb)}: {element(v)} cannot be reduced; supported are "
            f"{', '.join(d.name.lower() for d in DataType)}, bool and complex; other data can be "
            f"moved (broadcast, gather, send, …) or seen as one of these with dtype="
        )
    if elem.nccl >= NCCL_FP8 and at.version < NCCL_FP8_SINCE:
        raise TypeError(
            f"{text(spec.verb)}: {element(v)} needs NCCL 2.24 to be reduced, loaded is "
            f"{at.version // 10000}.{at.version // 100 % 100}"
        )
    if op is SUM:
        code = OP_SUM
    elif type(op) is UserOp:
        user = <UserOp>op
        if user.comm is NULL:
            raise ValueError(f"{text(spec.verb)}: {user!r} was destroyed with its communicator")
        if user.comm != at.comm:
            raise ValueError(f"{text(spec.verb)}: {user!r} belongs to another communicator")
        if user.elem != elem:
            raise TypeError(
                f"{text(spec.verb)}: op was made for {text(user.elem.name)}, "
                f"and {text(names.x)} is {element(v)}"
            )
        return user.code
    else:
        code = builtin_op(spec, op)
    if elem.kind == ELEM_BOOL:
        if code == OP_AVG:
            raise TypeError(
                f"{text(spec.verb)}: bool has no average; use 'max' for any, 'min' for all"
            )
        # On bytes that are 0 or 1: or is the maximum, and is the minimum.
        return OP_MAX if code == OP_SUM or code == OP_MAX else OP_MIN
    if elem.kind == ELEM_COMPLEX and code != OP_SUM and code != OP_AVG:
        raise TypeError(
            f"{text(spec.verb)}: {element(v)} can be summed and averaged (as two reals), "
            f"not {ReduceOp(code).name}"
        )
    return code


SUM = ReduceOp.SUM
cdef dict _UFUNCS = {"add": OP_SUM, "multiply": OP_PROD, "maximum": OP_MAX, "minimum": OP_MIN}
cdef dict _NAMES = {member.name.lower(): int(member) for member in ReduceOp}


cdef int builtin_op(const Spec *spec, object op) except -1:
    """Accept a ReduceOp, its name, the NumPy ufunc, or torch's ReduceOp by its name."""
    cdef object name = None
    kind = type(op)
    if kind is ReduceOp:
        return <int>op
    if kind is str:
        name = op if op in _NAMES else op.lower()
    elif kind.__name__ == "ufunc":
        if op.__name__ in _UFUNCS:
            return _UFUNCS[op.__name__]
        name = op.__name__
    elif kind.__module__.partition(".")[0] == "torch":
        name = (getattr(getattr(op, "op", op), "name", None) or str(op)).lower()
    if name is None:
        raise TypeError(
            f"{text(spec.verb)}: op must be a ReduceOp, its name, a NumPy ufunc or the result of "
            f"premul_sum, not {kind.__name__!r}"
        )
    if name not in _NAMES:
        raise ValueError(
            f"{text(spec.verb)}: NCCL has no reduction {name!r}; it has "
            f"{', '.join(map(repr, _NAMES))}"
        )
    return _NAMES[name]


cdef inline int apart(const Spec *spec, const Place *at, const BufferView *send,
                      const BufferView *recv, size_t nbytes, const Names *names) except -1:
    """Refuse input and output that overlap in any way but the row's in-place form."""
    cdef uintptr_t s = <uintptr_t>send.ptr
    cdef uintptr_t r = <uintptr_t>recv.ptr
    cdef size_t shift = <size_t>at.rank * nbytes
    if send.nbytes == 0 or recv.nbytes == 0 or s + send.nbytes <= r or r + recv.nbytes <= s:
        return 0
    if spec.in_place == SAME and s == r:
        return 0
    if spec.in_place == IN_RECV and s == r + shift:
        return 0
    if spec.in_place == IN_SEND and r == s + shift:
        return 0
    if spec.in_place == NOWHERE:
        right = "it does not work in place; use separate arrays"
    elif spec.in_place == SAME:
        right = "use separate arrays, or the same memory for both"
    elif spec.in_place == IN_RECV:
        right = (f"use separate arrays, or let {text(names.x)} be {text(names.out)}[{at.rank}], "
                 f"this rank's block")
    else:
        right = (f"use separate arrays, or let {text(names.out)} be {text(names.x)}[{at.rank}], "
                 f"this rank's block")
    raise ValueError(
        f"{text(spec.verb)}: {text(names.x)} ({send.nbytes} bytes at {s:#x}) and "
        f"{text(names.out)} ({recv.nbytes} bytes at {r:#x}) overlap; {right}"
    )


cdef int separate(const char *verb, const BufferView *x, const BufferView *out) except -1:
    """What send_recv asks of its two arrays: one memory order, and no overlap."""
    same_order(verb, x, out, &METHOD)
    if (x.nbytes and out.nbytes and x.ptr < out.ptr + out.nbytes and
            out.ptr < x.ptr + x.nbytes):
        raise ValueError(
            f"{text(verb)}: x ({x.nbytes} bytes at {<uintptr_t>x.ptr:#x}) and out ({out.nbytes} "
            f"bytes at {<uintptr_t>out.ptr:#x}) overlap; use separate arrays"
        )
    return 0


cdef inline int streams(Call *call, const Spec *spec, object stream, const BufferView *send,
                        const BufferView *recv) except -1:
    """Settle the call's stream, and which producers' streams it has to wait for."""
    cdef uintptr_t handle = 0
    call.n_after = 0
    if stream is None:
        if send is not NULL and send.has_stream:
            handle = send.stream
        elif recv is not NULL and recv.has_stream:
            handle = recv.stream
    else:
        handle = stream_handle(spec.verb, b"stream", stream)
    call.stream = <void *>handle
    if send is not NULL and send.has_stream and send.stream != handle:
        call.after[call.n_after] = send.stream
        call.n_after += 1
    if recv is not NULL and recv.has_stream and recv.stream != handle:
        call.after[call.n_after] = recv.stream
        call.n_after += 1
    return 0


cdef uintptr_t stream_handle(const char *verb, const char *name, object stream) except? 0:
    """The handle of a stream that a caller gave; None is the legacy default stream."""
    if stream is None:
        return 0
    if type(stream) is not int:
        stream = handle_of(stream, text(verb), text(name))
    if stream < 0:
        raise TypeError(f"{text(verb)}: {text(name)} {stream} is negative, which no handle is")
    if stream >> 64:
        raise ValueError(f"{text(verb)}: {text(name)} {stream:#x} does not fit in 64 bits")
    return PyLong_AsUnsignedLongLong(stream)


cdef class Setting(Fields):
    """Base of `pynccl.CollConfig`, which is built on the libraries' functions (_configured)."""

    cdef int put(self, Call *call, object library) except -1:
        raise NotImplementedError


cdef int put_setting(Call *call, object config, object library) except -1:
    if not isinstance(config, Setting):
        raise TypeError(
            f"{text(call.spec.verb)}: config must be a pynccl.CollConfig, not {type(config).__name__!r}"
        )
    return (<Setting>config).put(call, library)


cdef class UserOp:
    """A reduction that multiplies each rank's input by a scalar and then sums.

    Made by `Communicator.premul_sum`; it lives as long as its communicator.
    """

    def __del__(self):
        if self.comm is not NULL:
            self.retired.append(self.code)

    def __repr__(self):
        state = "" if self.comm is not NULL else ", destroyed"
        return f"premul_sum({self.scalar!r}, {text(self.elem.name)}{state})"


cdef str text(const char *s):
    return s.decode()


cdef str element(const BufferView *v):
    return text(type_name(v))


cdef str order(const BufferView *v):
    return "Fortran" if v.order == ORDER_F else "C"
