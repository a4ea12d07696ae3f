"""The calls of the list API: what `pynccl.multi`'s functions do.

They bring the arguments into one form, tuples with one entry per rank, and fill a `Batch` from them.
"""

from cpython.pycapsule cimport PyCapsule_GetPointer, PyCapsule_IsValid
from libc.stdint cimport uintptr_t
from libc.stdlib cimport getenv

from pynccl._batch cimport Batch, Title, title_of
from pynccl._buffer cimport BufferView, of_jax, same_type
from pynccl._call cimport (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    AT_ROOT,
    BROADCAST,
    GATHER,
    RECV_FROM,
    REDUCE,
    REDUCE_SCATTER,
    SAME,
    SCATTER,
    SEND_TO,
    Kind,
    Place,
    Spec,
    UserOp,
    element,
    spec_of,
    stream_handle,
)
from pynccl._nccl cimport CommBase, Library, load, new_result

from pynccl import _alloc
from pynccl._comm import Communicator
from pynccl.enums import ReduceOp

# The verbs, for multi.py.
KINDS = {
    "all_reduce": <int>ALL_REDUCE,
    "reduce": <int>REDUCE,
    "broadcast": <int>BROADCAST,
    "all_gather": <int>ALL_GATHER,
    "reduce_scatter": <int>REDUCE_SCATTER,
    "all_to_all": <int>ALL_TO_ALL,
    "gather": <int>GATHER,
    "scatter": <int>SCATTER,
}

# The name under which torch.cuda.nccl.init_rank puts a communicator into a capsule.
cdef const char *CAPSULE = b"torch.cuda.nccl.Communicator"


cdef Title *INPUTS = title_of(b"inputs[")
cdef Title *OUTPUTS = title_of(b"outputs[")
cdef Title *INPUT = title_of(b"input")
cdef Title *OUTPUT = title_of(b"output")


# ---- the two calls of multi.py -------------------------------------------------------------------

def call(int kind, object inputs, object outputs, object op, object root, object streams,
         object comms, object library):
    """Run one collective on lists; what it returns is what multi's function returns."""
    cdef Batch batch = Batch.__new__(Batch)
    cdef const Spec *spec = spec_of(<Kind>kind)
    cdef tuple xs = None
    cdef tuple outs = None
    cdef list made = None
    cdef object x, out, result, source = None
    cdef Py_ssize_t i
    cdef const Place *at
    cdef Title *x_title = INPUTS
    cdef Title *out_title = OUTPUTS
    batch.verb = spec.verb
    if kind == SCATTER:
        x_title = INPUT
        outs = entries(spec.verb, "outputs", outputs)
        batch.n = len(outs)
        result = listed(outputs, outs)
    else:
        xs = entries(spec.verb, "inputs", inputs)
        batch.n = len(xs)
        result = listed(inputs, xs)
    if spec.recv == AT_ROOT:
        out_title = OUTPUT
    elif outputs is not None and outs is None:
        outs = entries(spec.verb, "outputs", outputs)
        same_length(spec.verb, "outputs", len(outs), batch.n)
        result = listed(outputs, outs)
    elif spec.in_place != SAME and outs is None:
        result = made = []
    batch.streams = handles(spec.verb, streams, batch.n)
    batch.ops = operators(spec.verb, op, batch.n)
    choose(batch, comms, library)
    batch.reserve(batch.n)
    if spec.recv == AT_ROOT:
        result = None
    for i in range(batch.n):
        at = batch.place(i)
        x = inputs if xs is None else xs[i]
        if spec.recv == AT_ROOT:
            out = outputs
            if is_root(spec, at, root):
                source = x
                if outputs is None:
                    out = x if spec.in_place == SAME else allocate(spec, at, x, i)
                result = out
        elif outs is not None:
            out = outs[i]
        elif spec.in_place == SAME:
            out = x
        else:
            out = allocate(spec, at, x, i)
            made.append(out)
        batch.add(<Kind>kind, i, at, x, out, root, x_title, out_title)
    batch.alike()
    if batch.locate():
        batch.settle()
        batch.as_many()
        batch.disjoint()
        batch.run()
        if made is not None and any(of_jax(x) for x in xs) or of_jax(source):
            batch.finish()
    # Results of libraries whose arrays never change become such arrays when they are there.
    if made is not None:
        for i in range(batch.n):
            made[i] = _alloc.finished(xs[i], made[i])
    elif kind == GATHER and outputs is None and result is not None:
        result = _alloc.finished(source, result)
    return result


def exchange(object inputs, object outputs, object peers, object streams, object comms, object library):
    """Send entry i of the inputs to entry ``peers[i]`` of the outputs, all at once."""
    cdef Batch batch = Batch.__new__(Batch)
    cdef const char *verb = b"send_recv"
    cdef tuple xs = entries(verb, "inputs", inputs)
    cdef tuple outs = entries(verb, "outputs", outputs)
    cdef tuple to = entries(verb, "peers", peers)
    cdef Py_ssize_t i, peer
    cdef const Place *at
    cdef list senders
    batch.verb = verb
    batch.n = len(xs)
    same_length(verb, "outputs", len(outs), batch.n)
    same_length(verb, "peers", len(to), batch.n)
    batch.streams = handles(verb, streams, batch.n)
    choose(batch, comms, library)
    if batch.some:
        raise ValueError(
            f"send_recv: the lists have {batch.n} entries, and the communicator {(<CommBase>batch.comms[0]).at.nranks} "
            f"ranks; they must be all of them (otherwise use Communicator.send and recv in a group)"
        )
    batch.reserve(2 * batch.n)
    senders = [None] * batch.n
    for i in range(batch.n):
        if (to[i] is None) != (xs[i] is None):
            raise ValueError(
                f"send_recv: inputs[{i}] is {'None' if xs[i] is None else 'an array'}, and peers[{i}] is {to[i]!r}; "
                f"an entry that sends nothing has None in both"
            )
        if to[i] is None:
            continue
        at = batch.place(i)
        batch.add(SEND_TO, i, at, xs[i], None, to[i], INPUTS, OUTPUTS)
        peer = batch.steps[batch.count - 1].call.root
        if senders[peer] is not None:
            raise ValueError(
                f"send_recv: entries {senders[peer]} and {i} both send to entry {peer}; an entry receives from one"
            )
        senders[peer] = i
    for i in range(batch.n):
        if (senders[i] is None) != (outs[i] is None):
            raise ValueError(
                f"send_recv: outputs[{i}] is None, and entry {senders[i]} sends to it" if outs[i] is None else
                f"send_recv: outputs[{i}] is an array, and no entry sends to it; pass None there"
            )
        if senders[i] is None:
            continue
        at = batch.place(i)
        batch.add(RECV_FROM, i, at, None, outs[i], senders[i], INPUTS, OUTPUTS)
        paired(batch, senders[i], batch.count - 1)
    if batch.count and batch.locate():
        batch.settle()
        batch.disjoint()
        batch.run()
    return listed(outputs, outs)


cdef int paired(Batch batch, Py_ssize_t sender, Py_ssize_t j) except -1:
    """What entry `sender` sends must be what call `j` receives."""
    cdef const BufferView *recv = &batch.entries[j].views[1]
    cdef const BufferView *send
    cdef Py_ssize_t i
    for i in range(j):
        if batch.entries[i].index == sender and batch.steps[i].call.sends:
            send = &batch.entries[i].views[0]
            if not same_type(send, recv):
                raise TypeError(
                    f"send_recv: {batch.title(i)} is {element(send)}, and {batch.title(j)}, which receives it, is "
                    f"{element(recv)}; both must have one dtype"
                )
            if send.count != recv.count:
                raise ValueError(
                    f"send_recv: {batch.title(i)} has {send.count} elements, and {batch.title(j)}, which receives "
                    f"it, has {recv.count}"
                )
            return 0
    return 0


# ---- arguments -----------------------------------------------------------------------------------

cdef tuple entries(const char *verb, str name, object given):
    """A list of arguments as a tuple, which nobody changes while the call runs."""
    cdef tuple them
    if type(given) is list or type(given) is tuple:
        them = tuple(given)
    else:
        if is_array(given) or not hasattr(given, "__iter__"):
            raise TypeError(
                f"{verb.decode()}: {name} must be a list with one entry per device, not a "
                f"{type(given).__name__!r}"
                + (f"; did you mean [{name}], or list({name})?" if is_array(given) else "")
            )
        them = tuple(given)
    if not them:
        raise ValueError(f"{verb.decode()}: {name} is empty; it must hold one entry per device")
    return them


cdef object listed(object given, tuple them):
    """What a caller gets back of its list: the list itself, unless it has been used up."""
    return given if type(given) is list or type(given) is tuple else list(them)


cdef tuple handles(const char *verb, object streams, Py_ssize_t n):
    """The handles of the streams that were given, None for a producer's own; None where none were."""
    cdef list them = []
    cdef bytes name
    if streams is None:
        return None
    streams = entries(verb, "streams", streams)
    same_length(verb, "streams", len(streams), n)
    for stream in streams:
        if stream is not None:
            name = f"streams[{len(them)}]".encode()
            stream = <object>stream_handle(verb, name, stream)
        them.append(stream)
    return tuple(them)


cdef object operators(const char *verb, object op, Py_ssize_t n):
    """One operator for all, or a tuple with one per entry."""
    if type(op) is list or type(op) is tuple:
        same_length(verb, "op", len(op), n)
        ops = tuple([numbered(verb, one) for one in op])
        for one in ops:
            # Each communicator has its own premul_sum; anything else is the same for all ranks.
            if type(one) is not UserOp and one is not ops[0] and one != ops[0]:
                raise ValueError(
                    f"{verb.decode()}: op[{ops.index(one)}] is {one!r} and op[0] is {ops[0]!r}; all entries must "
                    f"reduce alike"
                )
        return ops
    return numbered(verb, op)


cdef object numbered(const char *verb, object op):
    """NCCL's numbers, too, are operators in the list API."""
    if type(op) is not int:
        return op
    try:
        return ReduceOp(op)
    except ValueError:
        raise ValueError(
            f"{verb.decode()}: NCCL has no reduction with number {op}; it has "
            f"{', '.join(f'{each.value} ({each.name})' for each in ReduceOp)}"
        ) from None


cdef int choose(Batch batch, object comms, object library) except -1:
    """Take the communicators that were given, or the library that is to create them."""
    if comms is None:
        return batch.use(None, library_of(library))
    return batch.use(communicators(batch.verb, comms, batch.n, library), None)


cdef bint is_array(object thing):
    if isinstance(thing, (str, bytes, bytearray, memoryview)):
        return True
    return any(
        hasattr(thing, name)
        for name in ("__cuda_array_interface__", "__array_interface__", "__dlpack__", "typecode")
    )


cdef int same_length(const char *verb, str name, Py_ssize_t length, Py_ssize_t n) except -1:
    if length != n:
        raise ValueError(
            f"{verb.decode()}: {name} has {length} entries, expected {n}: one per device"
        )
    return 0


cdef bint is_root(const Spec *spec, const Place *at, object root) except -1:
    """Whether the entry is the root's; a root that is none is told by `look`."""
    return not isinstance(root, bool) and hasattr(root, "__index__") and root == at.rank


cdef object allocate(const Spec *spec, const Place *at, object x, Py_ssize_t i):
    """Make the result of an entry that was given none."""
    cdef bytes name = f"inputs[{i}]".encode()
    return new_result(spec, at, x, name)


cdef tuple communicators(const char *verb, object comms, Py_ssize_t n, object library):
    """The communicators that a caller gave, one per entry of the lists."""
    cdef list them = []
    cdef CommBase comm, other
    cdef object one
    if isinstance(comms, CommBase) or PyCapsule_IsValid(comms, CAPSULE):
        comms = (comms,)
    comms = entries(verb, "comms", comms)
    same_length(verb, "comms", len(comms), n)
    for one in comms:
        if PyCapsule_IsValid(one, CAPSULE):
            one = Communicator.from_handle(
                <uintptr_t>PyCapsule_GetPointer(one, CAPSULE),
                library="nccl" if library is None or library == "auto" else library,
            )
        elif not isinstance(one, CommBase):
            raise TypeError(
                f"{verb.decode()}: comms[{len(them)}] must be a Communicator or a capsule of torch.cuda.nccl, "
                f"not {type(one).__name__!r}"
            )
        comm = one
        comm.ready(verb)
        for other in them:
            if other.handle == comm.handle:
                raise ValueError(
                    f"{verb.decode()}: comms[{them.index(other)}] and comms[{len(them)}] are the same communicator; "
                    f"each entry needs its own rank"
                )
            if other.api != comm.api or other.at.nranks != comm.at.nranks:
                raise ValueError(
                    f"{verb.decode()}: comms[{len(them)}] is {comm!r}, and comms[0] is {them[0]!r}; they must be "
                    f"ranks of one communicator"
                )
        them.append(comm)
    return tuple(them)


# What "auto" meant, by the value of PYNCCL_LIBRARY at that time, and named libraries: to search takes longer
# than a call.
cdef dict _CHOSEN = {}


cdef Library library_of(object choice):
    cdef const char *default
    cdef Library library
    cdef object key = choice
    if choice is None or choice == "auto":
        default = getenv("PYNCCL_LIBRARY")
        key = None if default is NULL else <bytes>default
    elif type(choice) is not str:
        return load(choice)
    library = _CHOSEN.get(key)
    if library is None:
        library = load(choice)
        _CHOSEN[key] = library
    return library
