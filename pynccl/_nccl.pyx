"""Libraries, result codes, and the one way of a call: bind, dispatch, check.

Everything that leaves Python for NCCL or for the host library goes through `CommBase.run` (at once)
or through a `Recorder` (a group, later).  `dispatch` is the only place where a checked `Call` becomes
a C call; `failure` is the only place where a result code becomes an exception.
"""

from cpython.exc cimport PyErr_CheckSignals, PyErr_Occurred
from cpython.object cimport PyObject
from libc.string cimport memset

from pynccl._buffer cimport ORDER_F, Ask, Buffer, BufferView, keep, of_jax, order_streams, release, view
from pynccl._device cimport follows_producers, sync_stream
from pynccl._call cimport (
    ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, BROADCAST, GATHER, RECV, RECV_FROM, REDUCE, REDUCE_SCATTER, SCATTER, SEND,
    SEND_TO, Call, Kind, Place, Spec, bind, put_setting, separate, spec_of, stream_handle, wants,
)
from pynccl._keep cimport Keep, drop_returned, lend, take_back

import os
import threading
import time
import warnings

from pynccl import _alloc, _config
from pynccl.errors import (
    CommunicatorClosedError, HostFallbackWarning, InProgressError, InvalidUsageError, LayoutError,
    LibraryNotFoundError, NCCLTimeoutError, UnsupportedError, error_for,
)


cdef extern from "_threads.h":
    PyObject *pynccl_recorder
    int pynccl_recording
    PyObject *pynccl_open() noexcept
    unsigned int pynccl_forks
    int pynccl_watch_forks()
    int pynccl_interrupt_hook() noexcept nogil


cdef enum:
    PAIRWISE_BEFORE = 22800     # ncclAlltoAll, ncclGather and ncclScatter came with 2.28

# Bytes of an element, by ncclDataType_t.
cdef size_t[12] SIZES = [1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1]

pynccl_watch_forks()


cdef unsigned int forks() noexcept nogil:
    return pynccl_forks


# ---- libraries ---------------------------------------------------------------------------------

cdef dict _LIBRARIES = {}
cdef object _LOADING = threading.RLock()        # never inherited locked by a forked child
os.register_at_fork(before=_LOADING.acquire, after_in_parent=_LOADING.release,
                    after_in_child=_LOADING.release)
cdef bint _warned = False


cdef class Library:
    """A loaded NCCL, or the host library.

    Attributes
    ----------
    path : str
        The file that was loaded.
    kind : {"nccl", "host"}
        Whether it moves GPU memory or host memory.
    version : int
        As NCCL codes it: 23203 is 2.32.3.
    missing : list of (str, int)
        Functions of NCCL 2.32 that this library lacks, with the version that brought each.
    """

    def __init__(self):
        raise TypeError("use pynccl.library() to load a library")

    @property
    def missing(self):
        cdef int i
        names = [nccl_symbol_name(i) for i in range(nccl_symbol_count())]
        return [(n.decode(), nccl_symbol_version(n)) for n in names if not nccl_api_has(self.api, n)]

    cdef int needs(self, const char *function) except -1:
        """Raise if the library lacks a function, where finding out by the call would be too late."""
        if not nccl_api_has(self.api, function):
            raise failure(PYNCCL_MISSING, function, self.api, NULL, None)
        return 0

    def require(self, function):
        """Raise if this library lacks a function.

        Parameters
        ----------
        function : str
            Name of one of NCCL's C functions, e.g. ``"ncclAlltoAll"``.

        Raises
        ------
        UnsupportedError
            The library is older than the function; the message names both versions.
        ValueError
            NCCL has no such function.
        """
        cdef bytes name = function.encode()
        if not nccl_symbol_version(name):
            raise ValueError(f"NCCL has no function {function}")
        self.needs(name)

    def __repr__(self):
        return f"<Library {self.kind} {version_text(self.version)} {self.path!r}>"


cdef str version_text(int code):
    return f"{code // 10000}.{code // 100 % 100}.{code % 100}"


cdef Library load(object choice):
    """Find, load and remember the library that `choice` names."""
    global _warned
    found = _config.find_library(choice)
    if found.fallback and not _warned:
        _warned = True
        warnings.warn(
            f"no GPU was found ({found.reason}): using the host library, which works on host "
            f"memory; pass library='host' or set PYNCCL_LIBRARY=host to choose it silently",
            HostFallbackWarning,
            stacklevel=_config.callers_level(),
        )
    with _LOADING:
        library = _LIBRARIES.get(found.path)
        if library is None:
            library = _open(found.path)
            _LIBRARIES[found.path] = library
    return library


cdef Library _open(str path):
    cdef nccl_api *api = NULL
    cdef char error[1024]
    cdef bytes name = os.fsencode(path)
    cdef const char *c_name = name
    cdef int status
    cdef Library library
    error[0] = 0
    with nogil:
        status = nccl_api_load(c_name, &api, error, sizeof(error))
    if status != 0:
        raise LibraryNotFoundError(os.fsdecode(error))  # a sentence: the path and the reason
    if api.is_host:
        api.pyncclHostSetInterrupt(pynccl_interrupt_hook)
    library = Library.__new__(Library)
    library.api = api
    library.path = os.fsdecode(api.path)
    library.version = api.version
    library.kind = "host" if api.is_host else "nccl"
    return library


# ---- errors ------------------------------------------------------------------------------------

cdef Exception failure(ncclResult_t result, const char *function, const nccl_api *api,
                       ncclComm_t comm, object rank):
    """Build the exception for a C function's result."""
    cdef str name = function.decode()
    cdef const char *detail
    if result == PYNCCL_MISSING:
        return unsupported(name, nccl_symbol_version(function), api)
    # The host library keeps the text for each thread: with ranks as threads, the process's last
    # error is as often another rank's.
    detail = api.pyncclHostLastError() if api.is_host else api.ncclGetLastError(comm)
    text = "" if detail is NULL else detail.decode(errors="replace")
    return error_for(<int>result, name, rank, text)


cdef Exception unsupported(str what, int needed, const nccl_api *api):
    path = os.fsdecode(api.path)
    if needed <= api.version:  # not for its age: the host library's, or a build without it
        return UnsupportedError(f"{what} is not offered by {path}")
    return UnsupportedError(
        f"{what} needs NCCL {needed // 10000}.{needed // 100 % 100}, loaded {version_text(api.version)} from {path}"
    )


cdef int interrupted() except -1:
    """Let the exception of a signal handler that ran inside the library reach the user."""
    if PyErr_Occurred() is not NULL:
        return -1
    return PyErr_CheckSignals()


cdef int passed(const nccl_api *api, ncclResult_t result, const char *function) except -1:
    """Raise what a function that belongs to no communicator has reported."""
    if result != ncclSuccess:
        interrupted()
        raise failure(result, function, api, NULL, None)
    return 0


# ---- the recorder of an open group ---------------------------------------------------------------

cdef class Recorder:
    cdef int record(self, CommBase comm, const Call *call, BufferView *views,
                    object x, object out, object op) except -1:
        raise NotImplementedError

    cdef int record_creation(self, CommBase comm, CommBase parent) except -1:
        raise NotImplementedError


cdef bint at_once(CommBase comm) noexcept:
    """Whether a call may be made now: the communicator is usable, and this thread has no open group."""
    return (comm.state == OPEN and comm.busy == 0 and comm.born == pynccl_forks
            and pynccl_open() is NULL)


cdef Recorder recorder():
    return None if pynccl_open() is NULL else <Recorder>pynccl_recorder


cdef void set_recorder(Recorder group) noexcept:
    global pynccl_recorder, pynccl_recording
    pynccl_recording += <int>(group is not None) - <int>(pynccl_recorder is not NULL)
    pynccl_recorder = NULL if group is None else <PyObject *>group


# ---- from a checked call to C --------------------------------------------------------------------

cdef ncclResult_t dispatch(const nccl_api *api, ncclComm_t comm, const Place *at,
                           const Call *call) noexcept nogil:
    cdef ncclDataType_t dtype = <ncclDataType_t>call.dtype
    cdef ncclRedOp_t op = <ncclRedOp_t>call.op
    cdef cudaStream_t stream = <cudaStream_t>call.stream
    cdef Kind kind = call.spec.kind
    if call.config is not NULL:
        return (<Configured>call.configured)(api, comm, call)
    if kind == ALL_REDUCE:
        return api.ncclAllReduce(call.send, call.recv, call.count, dtype, op, comm, stream)
    elif kind == REDUCE:
        return api.ncclReduce(call.send, call.recv, call.count, dtype, op, call.root, comm, stream)
    elif kind == BROADCAST:
        return api.ncclBroadcast(call.send, call.recv, call.count, dtype, call.root, comm, stream)
    elif kind == ALL_GATHER:
        return api.ncclAllGather(call.send, call.recv, call.count, dtype, comm, stream)
    elif kind == REDUCE_SCATTER:
        return api.ncclReduceScatter(call.send, call.recv, call.count, dtype, op, comm, stream)
    elif kind == SEND or kind == SEND_TO:
        return api.ncclSend(call.send, call.count, dtype, call.root, comm, stream)
    elif kind == RECV or kind == RECV_FROM:
        return api.ncclRecv(call.recv, call.count, dtype, call.root, comm, stream)
    elif at.version < PAIRWISE_BEFORE:
        return pairwise(api, comm, at, call)
    elif kind == ALL_TO_ALL:
        return api.ncclAlltoAll(call.send, call.recv, call.count, dtype, comm, stream)
    elif kind == GATHER:
        return api.ncclGather(call.send, call.recv, call.count, dtype, call.root, comm, stream)
    else:
        return api.ncclScatter(call.send, call.recv, call.count, dtype, call.root, comm, stream)


cdef ncclResult_t pairwise(const nccl_api *api, ncclComm_t comm, const Place *at,
                           const Call *call) noexcept nogil:
    """Gather, scatter and all-to-all as grouped sends and receives, for libraries without them."""
    cdef ncclDataType_t dtype = <ncclDataType_t>call.dtype
    cdef cudaStream_t stream = <cudaStream_t>call.stream
    cdef size_t block = call.count * SIZES[call.dtype]
    cdef const char *send = <const char *>call.send
    cdef char *recv = <char *>call.recv
    cdef bint root = call.root == at.rank
    cdef Kind kind = call.spec.kind
    cdef ncclResult_t result, end
    cdef int peer
    if call.count == 0:
        return ncclSuccess      # as the native functions: a zero count needs no partner
    result = api.ncclGroupStart()
    if result != ncclSuccess:
        return result
    for peer in range(at.nranks):
        if went(result) and (kind == ALL_TO_ALL or kind == SCATTER and root):
            result = api.ncclSend(send + peer * block, call.count, dtype, peer, comm, stream)
        elif went(result) and kind == GATHER and peer == call.root:
            result = api.ncclSend(send, call.count, dtype, peer, comm, stream)
        if went(result) and (kind == ALL_TO_ALL or kind == GATHER and root):
            result = api.ncclRecv(recv + peer * block, call.count, dtype, peer, comm, stream)
        elif went(result) and kind == SCATTER and peer == call.root:
            result = api.ncclRecv(recv, call.count, dtype, peer, comm, stream)
    # The end is reached whatever happened, or the library's group would stay open on this thread.
    end = api.ncclGroupEnd()
    return end if went(result) else result


cdef bint went(ncclResult_t result) noexcept nogil:
    """Whether a call was taken: a nonblocking communicator may answer that it is in progress."""
    return result == ncclSuccess or result == ncclInProgress


cdef ncclResult_t run_steps(const nccl_api *api, const Step *steps, Py_ssize_t count,
                            Py_ssize_t *failed) noexcept nogil:
    """Run calls inside one group of the library; its end is reached also after a failure.

    `failed` becomes the index of the call that failed, and stays as it is when the group did.
    """
    cdef ncclResult_t result
    cdef Py_ssize_t i
    if count == 1 and (steps[0].call.spec.kind < SEND or steps[0].call.root != steps[0].at.rank):
        # A group of one is the call itself, but for a message to oneself.
        failed[0] = 0
        return dispatch(api, steps[0].comm[0], steps[0].at, &steps[0].call)
    result = api.ncclGroupStart()
    if result != ncclSuccess:
        return result
    for i in range(count):
        result = dispatch(api, steps[i].comm[0], steps[i].at, &steps[i].call)
        if not went(result):
            failed[0] = i
            api.ncclGroupEnd()
            return result
    return api.ncclGroupEnd()


cdef object new_result(const Spec *spec, const Place *at, object x, const char *arg):
    """Allocate a result for the input `x`, which messages call `arg`."""
    cdef Ask ask = Ask(spec.verb, arg, False, not at.host, NULL)
    cdef BufferView v
    # Look at x first: a wrong x deserves its own message, not the allocator's.
    v.owner = NULL
    view(x, &v, &ask)
    release(&v)
    if v.order == ORDER_F and (spec.send_blocks or spec.recv_blocks):
        raise LayoutError(
            f"{spec.verb.decode()}: {arg.decode()} is in Fortran order, where the block of a rank is not "
            f"contiguous; pass a C-ordered copy, or a flat out to have the memory as it is"
        )
    return _alloc.result(spec.verb.decode(), x, at.nranks, spec.send_blocks, spec.recv_blocks, v.device,
                         pynccl_open() is not NULL)


cdef int order_call(const nccl_api *api, const Call *call) except -1:
    """Let the call's stream wait for what the arrays' producers have queued by now."""
    cdef ncclResult_t result
    cdef int i
    for i in range(call.n_after):
        if not api.is_host:
            order_streams(call.after[i], <uintptr_t>call.stream)
        elif follows_producers():
            with nogil:
                result = api.pyncclHostStreamWaitStream(
                    <cudaStream_t>call.stream, <cudaStream_t>call.after[i])
            passed(api, result, b"pyncclHostStreamWaitStream")
    return 0


# ---- streams of the host library -----------------------------------------------------------------

cdef object holding(const BufferView *send, const BufferView *recv, object x, object out):
    """What must live for as long as the memory that was read of `x` and `out` is in use."""
    return (x, out, keep(x) if send.owner is NULL else <object>send.owner,
            keep(out) if recv.owner is NULL else <object>recv.owner)


cdef int drain(const nccl_api *api, void *stream, double seconds) except -1:
    """Wait until a stream of the host library is empty."""
    cdef ncclResult_t result
    with nogil:
        result = api.pyncclHostStreamSynchronize(<cudaStream_t>stream, seconds)
    drop_returned()
    return passed(api, result, b"pyncclHostStreamSynchronize")


# ---- communicators: the way of a call ------------------------------------------------------------

# An error of a barrier says so, although the library only sees an all-reduce.
cdef Spec BARRIER = spec_of(ALL_REDUCE)[0]
BARRIER.function = b"ncclAllReduce (barrier)"


cdef class CommBase:
    """Handle and call path of a communicator; use `pynccl.Communicator`."""

    cdef int ready(self, const char *verb) except -1:
        """Pass if a call may be made now."""
        if self.state == OPEN and self.busy == 0 and self.born == pynccl_forks:
            return 0
        return self.refuse(verb)

    cdef int refuse(self, const char *verb) except -1:
        cdef str name = verb.decode()
        if self.state != UNBORN and self.born != pynccl_forks:
            raise CommunicatorClosedError(
                f"{name}: this communicator was created before the process forked, and does not "
                f"exist in the child; create one in the child, or start it with 'spawn'"
            )
        if self.state == CREATING:
            raise ValueError(f"{name}: this communicator is being created in a group that has not ended; "
                             f"use it after the group's with-block")
        if self.state == PENDING:
            raise InProgressError(
                <int>ncclInProgress, name, self.at.rank,
                "this communicator is still being created; wait_ready() waits for it")
        if self.state == OPEN:
            raise InvalidUsageError(
                <int>ncclInvalidUsage, name, self.at.rank,
                "another thread is inside a call on this communicator; a communicator serves one thread at a time")
        what = {UNBORN: "was never created", FINALIZED: "was finalized", CLOSED: "is closed", ABORTED: "was aborted"}
        raise CommunicatorClosedError(f"{name}: this communicator {what[self.state]}")

    cdef object run(self, Kind kind, object x, object out, object op, object root,
                    object stream, object dtype, object config):
        """Check one call, then make it or hand it to the open group."""
        cdef BufferView[2] views
        cdef Call call
        cdef bint made = out is None
        self.ready(spec_of(kind).verb)
        if made:
            out = self.output(kind, x, root)
            if dtype is None and type(x) is Buffer:
                dtype = (<Buffer>x).said    # the result is like the array, which says too little
        views[0].owner = NULL
        views[1].owner = NULL
        try:
            bind(&call, views, kind, &self.at, x, out, op, root, stream, dtype)
            if config is not None:
                put_setting(&call, config, self.library)
                op = op, config         # a plan keeps both
            if pynccl_open() is not NULL:
                (<Recorder>pynccl_recorder).record(self, &call, views, x, out, op)
                return out if call.receives else None
            if is_queue(self.api, &call):
                lend(<Keep>self.api.pyncclHostKeep, holding(&views[0], &views[1], x, out))
                try:
                    self.issue(&call)
                finally:
                    take_back(<Keep>self.api.pyncclHostKeep)
            else:
                self.issue(&call)
        finally:
            release(&views[0])
            release(&views[1])
        if made and type(x) is not type(out):
            if is_queue(self.api, &call):
                drain(self.api, call.stream, self.patience)     # what never changes must be complete
            out = _alloc.finished(x, out)
        return out if call.receives else None

    cdef int issue(self, const Call *call) except -1:
        """Make one checked call."""
        cdef ncclResult_t result
        self.ready(call.spec.verb)      # code that ran while the arrays were read may have closed it
        if call.n_after:
            order_call(self.api, call)
        self.busy += 1
        with nogil:
            result = dispatch(self.api, self.handle, &self.at, call)
        self.busy -= 1
        if result != ncclSuccess:
            self.settle(result, call.spec.function)
        return 0

    cdef object exchange(self, object x, object dest, object out, object source,
                         object stream, object dtype):
        """Send and receive at once: two checked calls inside one group of the library."""
        cdef BufferView[4] views
        cdef Step[2] steps
        cdef ncclResult_t result
        cdef Py_ssize_t failed = -1
        cdef const char *function = b"ncclGroupEnd"
        cdef bint made = out is None, queued = False
        cdef int i
        self.ready(b"send_recv")
        if made:
            out = self.output(SEND_TO, x, dest)
            if dtype is None and type(x) is Buffer:
                dtype = (<Buffer>x).said
        memset(views, 0, sizeof(views))
        try:
            bind(&steps[0].call, &views[0], SEND_TO, &self.at, x, None, None, dest, stream, dtype)
            bind(&steps[1].call, &views[2], RECV_FROM, &self.at, None, out, None, source, stream, dtype)
            separate(b"send_recv", &views[0], &views[3])
            if pynccl_open() is not NULL:
                (<Recorder>pynccl_recorder).record(self, &steps[0].call, &views[0], x, None, None)
                (<Recorder>pynccl_recorder).record(self, &steps[1].call, &views[2], None, out, None)
                return out
            for i in range(2):
                steps[i].comm = &self.handle
                steps[i].at = &self.at
                if steps[i].call.n_after:
                    order_call(self.api, &steps[i].call)
            self.ready(b"send_recv")
            queued = is_queue(self.api, &steps[0].call) or is_queue(self.api, &steps[1].call)
            if queued:
                lend(<Keep>self.api.pyncclHostKeep, holding(&views[0], &views[3], x, out))
            self.busy += 1
            with nogil:
                result = run_steps(self.api, steps, 2, &failed)
            self.busy -= 1
            if queued:
                take_back(<Keep>self.api.pyncclHostKeep)
            if failed >= 0:
                function = steps[failed].call.spec.function
            if result != ncclSuccess:
                self.settle(result, function)
        finally:
            for i in range(4):
                release(&views[i])
        if made and queued and type(x) is not type(out):
            drain(self.api, steps[1].call.stream, self.patience)
        return _alloc.finished(x, out) if made else out

    cdef int meet(self, object stream) except -1:
        """The barrier: an all-reduce of one element of the communicator's own."""
        cdef Call call
        cdef ncclResult_t result
        self.ready(b"barrier")
        if recorder() is not None:
            raise ValueError("barrier: it waits, and nothing runs before the group ends; call it after")
        memset(&call, 0, sizeof(call))
        call.spec = &BARRIER
        call.stream = <void *>stream_handle(b"barrier", b"stream", stream)
        call.count = 1
        call.dtype = ncclUint8
        call.op = ncclMax
        if self.at.host:
            call.send = call.recv = &self.host_token
        else:
            if self.token is NULL:
                self.library.needs(b"ncclMemAlloc")
                with nogil:
                    result = self.api.ncclMemAlloc(&self.token, 1)
                if result != ncclSuccess:
                    raise failure(result, b"ncclMemAlloc", self.api, self.handle, self.at.rank)
            call.send = call.recv = self.token
        self.issue(&call)
        if not self.at.host:
            sync_stream(<uintptr_t>call.stream)
        if is_queue(self.api, &call):
            drain(self.api, call.stream, self.patience)
        return 0

    cdef object output(self, Kind kind, object x, object root):
        """Allocate the result of a call that was given none; None where this rank has none."""
        cdef const Spec *spec = spec_of(kind)
        cdef bint send, recv
        wants(kind, &self.at, root, &send, &recv)
        if kind == BROADCAST and not of_jax(x):
            return x            # in place, as everybody expects of a broadcast
        if not recv and kind != SEND_TO:
            return None
        if not send and kind != BROADCAST:
            raise ValueError(
                f"{spec.verb.decode()}: out is needed on rank {self.at.rank}: only the root knows what it sends"
                if kind == SCATTER else f"{spec.verb.decode()}: out is needed, it receives the data")
        return new_result(spec, &self.at, x, b"x")

    cdef int settle(self, ncclResult_t result, const char *function) except -1:
        """Raise for a result that is not success; wait where a nonblocking call is under way."""
        interrupted()
        if result == ncclInProgress:
            return self.wait(function)
        raise failure(result, function, self.api, self.handle, self.at.rank)

    cdef int wait(self, const char *function, double seconds=-1) except -1:
        """Poll a nonblocking communicator until its last call is done; by default for its own timeout."""
        cdef ncclResult_t result, state = ncclInProgress
        cdef double patience = seconds if seconds >= 0 else self.patience
        # Its own the host library keeps itself, and says more about who is missing.
        cdef double deadline = time.monotonic() + patience + (5 if self.at.host and seconds < 0 else 0)
        cdef double pause = 20e-6
        self.busy += 1      # to other threads it is inside the call that it waits for
        try:
            while True:
                # With the GIL, so that no abort() of another thread comes in between; it does not wait.
                if self.state > OPEN:
                    self.refuse(function)
                result = self.api.ncclCommGetAsyncError(self.handle, &state)
                if result != ncclSuccess or state != ncclSuccess and state != ncclInProgress:
                    raise failure(result or state, function, self.api, self.handle, self.at.rank)
                if state == ncclSuccess:
                    return 0
                if time.monotonic() > deadline:
                    raise NCCLTimeoutError(<int>ncclTimeout, function.decode(), self.at.rank,
                                           f"still in progress after {patience:g} s")
                time.sleep(pause)
                interrupted()       # a signal that came outside of the sleep
                pause = min(pause * 2, 1e-3)
        except BaseException:
            if self.at.host and self.state == OPEN and state == ncclInProgress:
                self.api.ncclCommRevoke(self.handle, 0)     # it must not go on in the caller's arrays
            raise
        finally:
            self.busy -= 1

    cdef ncclResult_t create(self) except *:
        raise NotImplementedError

    cdef int created(self, ncclResult_t result) except -1:
        raise NotImplementedError
