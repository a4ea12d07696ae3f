"""Groups of calls: recorded while the block runs, launched in one native stretch when it ends.

Nothing reaches the library before the end, so that an error inside the block leaves nothing behind:
the library's own group is opened and closed only around calls that were all checked.  What was
recorded stays: calling the group runs the same calls on the same memory again.
"""

cimport cython
from cpython.list cimport PyList_GET_ITEM, PyList_GET_SIZE
from cpython.mem cimport PyMem_Free, PyMem_Realloc
from cpython.object cimport PyObject
from cpython.ref cimport Py_DECREF, Py_INCREF

from pynccl._buffer cimport BufferView
from pynccl._call cimport Call
from pynccl._keep cimport Keep, lend, take_back
from pynccl._nccl cimport (
    GIVEN_UP,
    CommBase,
    Library,
    NCCL_UNDEF_FLOAT,
    NCCL_VERSION_CODE,
    PYNCCL_SIM_INFO_MAGIC,
    Recorder,
    Step,
    at_once,
    dispatch,
    failure,
    forks,
    holding,
    interrupted,
    is_queue,
    nccl_api,
    ncclInProgress,
    ncclResult_t,
    ncclSimInfo_t,
    ncclSuccess,
    order_call,
    recorder,
    run_steps,
    set_recorder,
    went,
)

import threading

from pynccl.errors import CommunicatorClosedError


cdef extern from *:
    """
    /* Let calls of a type's instances go through the vectorcallfunc at `offset` in each of them (PEP 590):
       it spares every call the tuple of its arguments.  Cython has no word for it. */
    static void pynccl_call_by(PyObject *object, Py_ssize_t offset) {
        PyTypeObject *type = (PyTypeObject *)object;
        type->tp_vectorcall_offset = offset;
        type->tp_flags |= Py_TPFLAGS_HAVE_VECTORCALL;
        PyType_Modified(type);
    }
    """
    void pynccl_call_by(object type, Py_ssize_t offset)
    Py_ssize_t PyVectorcall_NARGS(size_t nargs)


cdef object call_plan(object plan, PyObject *const *args, size_t nargs, PyObject *names):
    """What calling a plan does: `Group.__call__` without a tuple on the way."""
    if PyVectorcall_NARGS(nargs) or names is not NULL:
        raise TypeError("group: a plan takes no arguments")
    (<Group>plan).again()
    return None


@cython.final
cdef class Group(Recorder):
    """A list of calls that the library runs together; made by `pynccl.group`."""

    def __cinit__(self):
        self.call = <void *>call_plan
        self.held = []
        self.comms = []
        self.creations = []
        self.gates = []

    def __init__(self, *, run=True):
        self.at_end = run

    def __dealloc__(self):
        PyMem_Free(self.steps)

    def __len__(self):
        return self.count

    def __repr__(self):
        state = "built" if self.built else "open" if self.entered else "new"
        return f"<pynccl.group: {self.count} calls, {state}>"

    def __enter__(self):
        if self.entered or self.built:
            raise ValueError("group: a group records once; call it to run the same calls again")
        self.entered = True
        self.thread = threading.get_ident()
        self.outer = recorder()
        self.born = forks()
        set_recorder(self)
        Py_INCREF(self)         # by the thread, which may meet it after the user has lost it
        return self

    def __exit__(self, kind, value, traceback):
        if not self.entered:
            raise ValueError("group: the block has not begun, or has ended already")
        if self.born != forks():
            # In a forked child, where no group is open any more.
            self.entered = False
            if kind is None and (self.count or self.creations):
                raise CommunicatorClosedError(
                    f"group: it was opened before the process forked; its {self.count} calls are the "
                    f"parent's, and are not run in the child"
                )
            return False
        if threading.get_ident() != self.thread:
            raise ValueError("group: the block must end on the thread that began it")
        if recorder() is not self:
            raise ValueError("group: the block must end after the groups that began inside of it")
        set_recorder(self.outer)
        Py_DECREF(self)
        outer, self.outer = self.outer, None
        self.entered = False
        if kind is not None:
            self.drop()
            return False
        self.built = True
        if (len(self.comms) == 1 and not self.creations and not self.waits and not self.queues
                and not self.gates):
            self.only = self.comms[0]
        if not self.at_end:
            return False
        if outer is not None:
            (<Group>outer).append(self)
        else:
            self.launch()
        return False

    def __call__(self):
        """Run the recorded calls again, on the same arrays."""
        self.again()

    cdef int again(self) except -1:
        cdef Recorder outer
        if self.only is not None and self.replay():
            return 0
        if not self.built:
            raise ValueError("group: the plan can run only after its with-block has ended well")
        if self.creations:
            raise ValueError("group: the plan creates communicators, which cannot be done twice")
        outer = recorder()
        if outer is not None:
            return (<Group>outer).append(self)
        return self.launch()

    def simulate(self):
        """Ask the library how long the recorded calls would take.

        Returns
        -------
        float
            NCCL's estimate in seconds; negative when it has none.

        Raises
        ------
        UnsupportedError
            The library is older than NCCL 2.22.

        Notes
        -----
        C function: ``ncclGroupSimulateEnd``, NCCL 2.22.  Nothing is run.
        """
        cdef ncclSimInfo_t info
        cdef ncclResult_t result, end
        cdef Py_ssize_t i
        cdef const nccl_api *api
        if not self.built or self.creations or self.count == 0:
            raise ValueError("group: only a finished, non-empty plan without creations can be simulated")
        if recorder() is not None:
            raise ValueError("group: simulate() does not work inside an open group")
        self.claim()
        self.library.needs(b"ncclGroupSimulateEnd")
        api = self.library.api
        info.size = sizeof(info)
        info.magic = PYNCCL_SIM_INFO_MAGIC
        info.version = NCCL_VERSION_CODE
        info.estimatedTime = NCCL_UNDEF_FLOAT
        result = api.ncclGroupStart()
        for i in range(self.count):
            if result == ncclSuccess:
                result = dispatch(api, self.steps[i].comm[0], self.steps[i].at, &self.steps[i].call)
        with nogil:
            end = api.ncclGroupSimulateEnd(&info)
        if result == ncclSuccess:
            result = end
        if result != ncclSuccess:
            raise failure(result, b"ncclGroupSimulateEnd", api, NULL, None)
        return info.estimatedTime * 1e-6

    # ---- recording

    cdef int record(self, CommBase comm, const Call *call, BufferView *views,
                    object x, object out, object op) except -1:
        cdef Step *step
        self.join(comm.library, call.spec.verb)
        self.grow(1)
        step = &self.steps[self.count]
        step.call = call[0]
        step.comm = &comm.handle
        step.at = &comm.at
        self.count += 1
        self.waits = self.waits or call.n_after > 0
        self.queues = self.queues or is_queue(comm.api, call)
        self.held.append((op, comm, holding(&views[0], &views[1], x, out)))
        if comm not in self.comms:
            self.comms.append(comm)
            if comm.gate is not None and comm.gate not in self.gates:
                self.gates.append(comm.gate)
        return 0

    cdef int record_creation(self, CommBase comm, CommBase parent) except -1:
        self.join(comm.library, b"Communicator")
        self.creations.append(comm)
        if parent is not None and parent not in self.comms:
            self.comms.append(parent)       # a split is a call on its parent
        return 0

    cdef int join(self, Library library, const char *verb) except -1:
        if self.library is None:
            self.library = library
        elif self.library.api != library.api:
            raise ValueError(
                f"{verb.decode()}: this group already holds calls for {self.library.path}, and this "
                f"communicator's library is {library.path}; use one group per library"
            )
        return 0

    cdef int append(self, Group plan) except -1:
        """Take over the calls of a plan that ended, or is replayed, inside this group."""
        cdef Py_ssize_t i
        if plan.library is None:
            return 0
        self.join(plan.library, b"group")
        self.grow(plan.count)
        for i in range(plan.count):
            self.steps[self.count + i] = plan.steps[i]
        self.count += plan.count
        self.waits = self.waits or plan.waits
        self.queues = self.queues or plan.queues
        self.held.append(plan.held)
        self.creations.extend(plan.creations)
        for comm in plan.comms:
            if comm not in self.comms:
                self.comms.append(comm)
        for gate in plan.gates:
            if gate not in self.gates:
                self.gates.append(gate)
        return 0

    cdef int grow(self, Py_ssize_t more) except -1:
        cdef Py_ssize_t room = max(self.room, 4)
        cdef void *steps
        while room < self.count + more:
            room *= 2
        if room != self.room:
            steps = PyMem_Realloc(self.steps, room * sizeof(Step))
            if steps is NULL:
                raise MemoryError("group: no memory for the recorded calls")
            self.steps = <Step *>steps
            self.room = room
        return 0

    cdef int drop(self) except -1:
        """Forget what was recorded: the block ended with an exception."""
        self.count = 0
        for comm in self.creations:
            (<CommBase>comm).created(<ncclResult_t>GIVEN_UP)
        self.creations = []
        self.comms = []
        self.gates = []
        self.held = []
        return 0

    # ---- running

    cdef int claim(self) except -1:
        """Check that every communicator may be used now."""
        cdef Py_ssize_t i
        for i in range(PyList_GET_SIZE(self.comms)):
            (<CommBase>PyList_GET_ITEM(self.comms, i)).ready(b"group")
        return 0

    cdef void occupy(self, int by) noexcept:
        """Mark the communicators as inside a call, or as out of it again."""
        cdef Py_ssize_t i
        for i in range(PyList_GET_SIZE(self.comms)):
            (<CommBase>PyList_GET_ITEM(self.comms, i)).busy += by

    cdef bint replay(self) except -1:
        """Launch the plan if nothing is in the way; else the long way says what."""
        cdef CommBase comm = self.only
        cdef ncclResult_t result
        cdef Py_ssize_t failed = -1
        if not at_once(comm):
            return False
        comm.busy = 1
        with nogil:
            result = run_steps(comm.api, self.steps, self.count, &failed)
        comm.busy = 0
        if result != ncclSuccess:
            self.report(result, failed)
        return True

    cdef int launch(self) except -1:
        if self.library is None:
            return 0
        if not self.gates:
            self.claim()
            return self.launch_now()
        # One order for all threads, so that none waits for another in a circle.
        self.gates.sort(key=id)
        entered = []
        began = False
        try:
            for gate in self.gates:
                gate.enter()
                entered.append(gate)
            self.claim()            # what fails up to here has not hurt the communicators
            began = True
            self.launch_now()
            began = False
        finally:
            for gate in entered:
                gate.leave(not began)
        return 0

    cdef int launch_now(self) except -1:
        cdef Keep keep = <Keep>self.library.api.pyncclHostKeep
        if not self.queues:
            return self.launch_steps()
        lend(keep, self)            # and with it all that it holds
        try:
            return self.launch_steps()
        finally:
            take_back(keep)

    cdef int launch_steps(self) except -1:
        cdef const nccl_api *api
        cdef const Step *steps = self.steps
        cdef ncclResult_t result
        cdef Py_ssize_t count = self.count
        cdef Py_ssize_t failed = -1
        cdef Py_ssize_t i
        api = self.library.api
        if self.waits:
            for i in range(count):
                order_call(api, &steps[i].call)
        if self.creations:
            result = self.create_and_run(&failed)
        else:
            self.occupy(1)
            with nogil:
                result = run_steps(api, steps, count, &failed)
            self.occupy(-1)
        if result != ncclSuccess:
            self.report(result, failed)
        return 0

    cdef ncclResult_t create_and_run(self, Py_ssize_t *failed) except *:
        cdef const nccl_api *api = self.library.api
        cdef ncclResult_t result, end
        cdef CommBase comm
        cdef Py_ssize_t i
        cdef list creations = self.creations
        result = api.ncclGroupStart()
        self.occupy(1)
        try:
            for comm in creations:
                if went(result):
                    result = comm.create()
            with nogil:
                for i in range(self.count):
                    if went(result):
                        result = dispatch(api, self.steps[i].comm[0], self.steps[i].at,
                                          &self.steps[i].call)
                        failed[0] = i
        finally:
            # The end is reached whatever happened, or the library's group would stay open.
            with nogil:
                end = api.ncclGroupEnd()
            self.occupy(-1)
        if went(result):
            result = end
            failed[0] = -1
        error = None
        for comm in creations:
            try:
                comm.created(result)
            except BaseException as e:      # each must hear of it, also after Ctrl-C
                error = error or e
        if error is not None:
            raise error
        if result == ncclInProgress:
            self.report(result, -1)
            return ncclSuccess
        return result

    cdef int report(self, ncclResult_t result, Py_ssize_t failed) except -1:
        """Wait for nonblocking communicators, or raise what the library reported."""
        cdef CommBase comm
        cdef const char *function = b"ncclGroupEnd"
        cdef object rank = None
        interrupted()
        if result == ncclInProgress:
            for comm in self.comms:
                if comm.nonblocking:
                    comm.wait(function)
            return 0
        if failed >= 0:
            function = self.steps[failed].call.spec.function
            rank = self.steps[failed].at.rank
        error = failure(result, function, self.library.api, NULL, rank)
        if self.count > 1 and failed >= 0 and hasattr(error, "add_note"):
            error.add_note(f"It was call {failed + 1} of {self.count} in the group.")
        raise error


cdef void use_vectorcall() except *:
    cdef Group plan = Group.__new__(Group)
    pynccl_call_by(Group, <char *>&plan.call - <char *><PyObject *>plan)


use_vectorcall()


def outside(function, /, *args, **words):
    """Call a function as if no group were open on this thread."""
    cdef Recorder group = recorder()
    set_recorder(None)
    try:
        return function(*args, **words)
    finally:
        set_recorder(group)


def share(comms, gate):
    """Let threads share communicators: a group takes the gate (``enter``, ``leave(well)``) to launch on them."""
    for comm in comms:
        (<CommBase>comm).gate = gate


def group(*, run=True):
    """Record calls in a with-block and launch them together when it ends.

    Parameters
    ----------
    run : bool, default: True
        Run the calls when the block ends; otherwise only keep them.

    Returns
    -------
    Group
        A context manager.  Calling it after the block runs the same calls again, on the same
        arrays, for little more than the price of the C calls; ``simulate()`` asks NCCL for an
        estimate.  It holds its arrays and ops.

    Raises
    ------
    ValueError
        A call inside belongs to another library than the first one.
    NCCLError
        The library reported a failure; no call of the group was launched then.

    Notes
    -----
    C functions: ``ncclGroupStart`` and ``ncclGroupEnd``, NCCL 2.0.  The arrays are read and written
    after the block, not inside it.  An exception inside the block launches nothing.  Groups nest:
    the calls of an inner one run with the outermost.  Communicators may be created in a group; this
    is how one thread creates several of them, and they are usable after the block.

    Examples
    --------
    >>> import array, pynccl
    >>> with pynccl.Communicator(1, pynccl.unique_id("host"), 0) as comm:
    ...     x, out = array.array("i", [4]), array.array("i", [0])
    ...     with pynccl.group() as plan:
    ...         comm.send(x, peer=0)
    ...         _ = comm.recv(out, peer=0)
    ...     x[0] = 5
    ...     plan()
    ...     out
    array('i', [5])
    """
    return Group(run=run)
