"""Communicators: how they come to be, are divided, and end.

Nothing here depends on the garbage collector doing the right thing at the right time: destroying a
communicator is a collective act in NCCL, so that only `close` does it.  An object that is collected
while open gives a warning; at exit the exit hook ends what is left, within a limit of time.
"""

from libc.stdint cimport uintptr_t
from libc.string cimport memcpy

from pynccl._device cimport current_device, enter_device, leave_device
from pynccl._call cimport UserOp
from pynccl._end cimport abort_all, orphan
from pynccl._nccl cimport (
    ABORTED,
    CLOSED,
    CREATING,
    OPEN,
    UNBORN,
    NCCL_CONFIG_DEFAULT,
    NCCL_SPLIT_NOCOLOR,
    failure,
    forks,
    ncclComm_t,
    load,
    ncclInProgress,
    ncclInvalidUsage,
    ncclResult_t,
    ncclSuccess,
    ncclUniqueId,
    Recorder,
    recorder,
    went,
)

import atexit
import operator
import threading
import warnings
import weakref

from pynccl import _config
from pynccl._uid import UNIQUE_ID_BYTES, UniqueId
from pynccl.errors import InvalidUsageError, NCCLError, NCCLTimeoutError

cdef class Communicator(Collectives):
    """A set of ranks that communicate; this object is one of them.

    Creation is collective: it returns when all `nranks` ranks have called it with the same `uid`.

    Parameters
    ----------
    nranks : int
        How many ranks there are.
    uid : bytes
        The id that one of them got from `unique_id`.
    rank : int
        This rank, from 0 to ``nranks - 1``.
    device : int, optional
        CUDA device on NCCL, where the default is the current one; a mere number on the host library.
    timeout : float or timedelta, optional
        Seconds that the creation and every later wait may take; 30 minutes by default, or
        ``PYNCCL_TIMEOUT``.  On NCCL it makes the communicator nonblocking, which costs a thread
        inside NCCL for each call.
    library : {"auto", "nccl", "host"} or path, default: "auto"
        Library to use; "auto" follows the id.

    Attributes
    ----------
    rank, nranks, device : int
        As the parameters.
    library : Library
        The library that it uses.

    Raises
    ------
    TypeError, ValueError
        An argument is wrong; nothing was created.
    NCCLError
        The library reported a failure: `NCCLTimeoutError` when a rank did not come,
        `InvalidUsageError` when the ranks disagree about `nranks` or one came twice.

    Notes
    -----
    C functions: ``ncclCommInitRank``, ``ncclCommInitRankConfig``, NCCL 2.0 and 2.14.

    Examples
    --------
    >>> import pynccl
    >>> with pynccl.Communicator(1, pynccl.unique_id("host"), 0) as comm:
    ...     comm.rank, comm.nranks
    (0, 1)
    """

    def __cinit__(self):
        self.state = UNBORN
        self.born = forks()
        self.device_index = -1
        self.config = NCCL_CONFIG_DEFAULT
        self.at.comm = <void *>self

    def __init__(self, nranks, uid, rank, *, device=None, timeout=None, library="auto"):
        if self.state != UNBORN:
            raise ValueError("Communicator: __init__ was called twice")
        self.at.nranks = _integer("nranks", nranks)
        self.at.rank = _integer("rank", rank)
        if self.at.nranks < 1:
            raise ValueError(f"Communicator: nranks is {nranks}; it must be at least 1")
        if not 0 <= self.at.rank < self.at.nranks:
            raise ValueError(
                f"Communicator: rank {rank} is not in 0 to {nranks - 1} (nranks is {nranks})"
            )
        if device is not None:
            self.device_index = _integer("device", device)
            if self.device_index < 0:
                raise ValueError(f"Communicator: device {device} is negative")
        self.patience = _config.timeout(timeout)
        uid = UniqueId(uid)
        if (library is None or library == "auto") and uid.kind == "host":
            library = "host"
        self.library = load(library)
        if uid.kind != self.library.kind:
            raise ValueError(
                f"Communicator: the unique id was made by the {uid.kind} library, and "
                f"{self.library!r} was chosen; use one library for both"
            )
        memcpy(self.uid.internal, <const char *>uid, UNIQUE_ID_BYTES)
        # A blocking call of NCCL cannot be left: only a nonblocking communicator can keep a deadline.
        if self.library.kind == "nccl" and timeout is not None:
            self.nonblocking = True
            self.config.blocking = 0
        self.born_now()

    cdef int born_now(self) except -1:
        """Create now, or queue the creation in the open group."""
        cdef Recorder group = recorder()
        self.api = self.library.api
        self.at.host = self.library.kind == "host"
        self.at.version = self.library.version
        if group is not None:
            group.record_creation(self, self.parent)
            self.state = CREATING
            return 0
        if not self.at.host and not self.nonblocking:
            return self.create_in_thread()
        return self.created(self.create())

    cdef int create_in_thread(self) except -1:
        """Create while this thread waits in Python, so that Ctrl-C works."""
        done = threading.Event()
        results = []
        abandoned = []

        def work():
            cdef Communicator me = self
            try:
                results.append(<int>me.create())
            except BaseException as error:
                results.append(error)
            finally:
                done.set()
            if abandoned and me.handle is not NULL:
                me.give_up()

        if self.device_index < 0:
            self.device_index = current_device()    # which a new thread would not inherit
        threading.Thread(target=work, name="pynccl-create", daemon=True).start()
        try:
            while not done.wait(0.05):
                pass
        except BaseException as error:
            abandoned.append(True)
            if hasattr(error, "add_note"):
                error.add_note(
                    "The creation of the communicator was abandoned: its thread waits inside NCCL "
                    "until the other ranks come or the process ends."
                )
            raise
        if isinstance(results[0], BaseException):
            raise results[0]
        return self.created(<ncclResult_t><int>results[0])

    cdef ncclResult_t create(self) except *:
        cdef ncclResult_t result
        cdef const ncclUniqueId *uid = &self.uid
        cdef bint elsewhere = not self.at.host and self.device_index >= 0
        cdef void *before = NULL
        if self.at.host:
            self.api.pyncclHostSetInitTimeout(self.patience)
        elif elsewhere and enter_device(self.device_index, &before) != 0:
            raise ValueError(f"Communicator: device {self.device_index} cannot be made current")
        if self.parent is not None:
            self.parent.busy += 1
        with nogil:
            if self.parent is not None:
                result = self.api.ncclCommSplit(
                    self.parent.handle, self.color, self.key, &self.handle,
                    NULL if self.at.host else &self.config)
            elif self.nonblocking:
                result = self.api.ncclCommInitRankConfig(
                    &self.handle, self.at.nranks, uid[0], self.at.rank, &self.config)
            else:
                result = self.api.ncclCommInitRank(&self.handle, self.at.nranks, uid[0], self.at.rank)
            if elsewhere:
                leave_device(before)
        if self.parent is not None:
            self.parent.busy -= 1
        return result

    cdef int created(self, ncclResult_t result) except -1:
        """Take the result of the creation: open, or as if it had never been."""
        cdef const char *function = b"ncclCommInitRank" if self.parent is None else b"ncclCommSplit"
        self.state = UNBORN
        try:
            if result == ncclInProgress and self.nonblocking and self.handle is not NULL:
                self.wait(function)
            elif result == ncclInProgress:
                return 0                # the group was given up before its end
            elif result != ncclSuccess:
                self.settle(result, function)
            if self.handle is NULL:
                self.state = CLOSED     # a split without a color: this rank is in no part
                return 0
            self.read_back()
        except BaseException:
            if went(result) and self.handle is not NULL:
                self.give_up()          # the library has it, the user will not
            self.handle = NULL
            raise
        finally:
            self.parent = None
        self.state = OPEN
        _alive.add(self)
        _watch_exit()
        return 0

    @classmethod
    def from_handle(cls, handle, *, timeout=None, library="auto"):
        """Use a communicator that other code has created, and will destroy.

        Parameters
        ----------
        handle : int
            Address of the ``ncclComm_t``; it must stay valid until this object is closed.
        timeout : float or timedelta, optional
            As for `Communicator`; seconds that a wait may take.
        library : {"auto", "nccl", "host"} or path, default: "auto"
            The library that created it; on the wrong one the process may crash.

        Returns
        -------
        Communicator
            Its `close` and `abort` forget the handle and leave the communicator as it is.

        Raises
        ------
        TypeError, ValueError
            `handle` is not an address.
        NCCLError
            The library does not know the handle.

        Notes
        -----
        C functions: ``ncclCommCount``, ``ncclCommUserRank``, ``ncclCommCuDevice``, NCCL 2.0.

        Examples
        --------
        >>> import pynccl
        >>> with pynccl.Communicator(1, pynccl.unique_id("host"), 0) as comm:
        ...     pynccl.Communicator.from_handle(comm.handle, library="host").nranks
        1
        """
        cdef Communicator comm
        if isinstance(handle, bool) or not hasattr(handle, "__index__"):
            raise TypeError(f"from_handle: handle must be an int, not {type(handle).__name__!r}")
        handle = operator.index(handle)
        if not 0 < handle < 2**64:
            raise ValueError(f"from_handle: {handle:#x} is not an address")
        comm = cls.__new__(cls)
        comm.patience = _config.timeout(timeout)
        comm.library = load(library)
        comm.api = comm.library.api
        comm.at.host = comm.library.kind == "host"
        comm.at.version = comm.library.version
        comm.nonblocking = not comm.at.host     # it may be; a blocking one is never in progress
        comm.foreign = True
        comm.handle = <ncclComm_t><uintptr_t>handle
        comm.read_back()
        comm.state = OPEN
        return comm

    cdef int give_up(self) except -1:
        abort_all([orphan(self.library, self.handle, NULL, -1)], EXIT_SECONDS)
        self.handle = NULL
        return 0

    cdef int read_back(self) except -1:
        cdef int count = 0, rank = 0, device = -1
        cdef ncclResult_t result
        result = self.api.ncclCommCount(self.handle, &count)
        if result == ncclSuccess:
            result = self.api.ncclCommUserRank(self.handle, &rank)
        if result == ncclSuccess:
            result = self.api.ncclCommCuDevice(self.handle, &device)
        if result == ncclSuccess and self.at.host and not self.foreign:
            result = self.api.pyncclHostSetTimeout(self.handle, self.patience)
        if result != ncclSuccess:
            raise failure(result, b"ncclCommCount", self.api, self.handle, self.at.rank)
        self.at.nranks = count
        self.at.rank = rank
        self.at.device = self.device_index if self.at.host and self.device_index >= 0 else device
        return 0

    # ---- what it is

    @property
    def rank(self):
        """int: This rank."""
        return self.at.rank

    @property
    def nranks(self):
        """int: How many ranks there are."""
        return self.at.nranks

    @property
    def device(self):
        """int: CUDA device on NCCL, a slot's number on the host library."""
        return self.at.device

    @property
    def timeout(self):
        """float: Seconds that a wait may take."""
        return self.patience

    @property
    def closed(self):
        """bool: Whether it cannot be used any more."""
        return self.state != OPEN or self.born != forks()

    @property
    def handle(self):
        """int: The ``ncclComm_t`` for other code; it stays this object's."""
        self.ready(b"handle")
        return <uintptr_t>self.handle

    def __repr__(self):
        state = {UNBORN: "not created", CREATING: "being created", OPEN: "open", CLOSED: "closed",
                 ABORTED: "aborted"}[self.state]
        if self.state == OPEN and self.born != forks():
            state = "of the process before the fork"
        where = f" of {self.library.kind}" if self.library is not None else ""
        return f"<Communicator rank {self.at.rank} of {self.at.nranks}{where}, {state}>"

    def __reduce__(self):
        raise TypeError("a Communicator cannot be pickled: share a unique_id and create it on each rank")

    # ---- dividing

    def split(self, color, key=0, *, timeout=None):
        """Divide the ranks into new communicators; every rank must call it.

        Parameters
        ----------
        color : int or None
            Ranks of one color form one communicator; None joins none.
        key : int, default: 0
            Orders the ranks of a color, ties by rank here.
        timeout : float or timedelta, optional
            As for `Communicator`; the default is this communicator's.

        Returns
        -------
        Communicator or None
            The new one, or None where `color` is None.

        Raises
        ------
        TypeError, ValueError
            `color` is negative, or an argument is not an int.
        NCCLError
            The library reported a failure.

        Notes
        -----
        C function: ``ncclCommSplit``, NCCL 2.18.

        Examples
        --------
        >>> import pynccl
        >>> with pynccl.Communicator(1, pynccl.unique_id("host"), 0) as comm:
        ...     with comm.split(color=0) as part:
        ...         part.nranks
        1
        """
        cdef Communicator child
        self.ready(b"split")
        child = Communicator.__new__(Communicator)
        child.color = NCCL_SPLIT_NOCOLOR if color is None else _integer("color", color)
        child.key = _integer("key", key)
        if color is not None and child.color < 0:
            raise ValueError(
                f"split: color {color} is negative; use 0 or more, or None to join no communicator"
            )
        child.patience = self.patience if timeout is None else _config.timeout(timeout)
        child.library = self.library
        child.parent = self
        child.device_index = self.at.device
        child.at.rank = self.at.rank        # until it has one of its own: errors name this one
        child.nonblocking = self.nonblocking
        if self.nonblocking:
            child.config.blocking = 0
        child.born_now()
        return None if color is None else child

    # ---- the end

    def close(self, timeout=None):
        """Destroy the communicator; nothing happens if it is closed already.

        On NCCL this is collective, and waits for work that was queued; on the host library it
        returns at once, and ranks that still need this one get an error.

        Parameters
        ----------
        timeout : float or timedelta, optional
            Seconds to wait on NCCL; the default is the communicator's own.

        Raises
        ------
        NCCLTimeoutError
            NCCL did not finish; the communicator is given up.
        ValueError
            Called inside a group.

        Notes
        -----
        C function: ``ncclCommDestroy``, NCCL 2.0.
        """
        cdef ncclResult_t result
        if self.state != OPEN or self.born != forks():
            self.leave()
            return
        if recorder() is not None:
            raise ValueError("close: the group's calls have not run yet; close after it ends")
        if self.busy:
            raise InvalidUsageError(
                <int>ncclInvalidUsage, "close", self.at.rank,
                "another thread is inside a call on this communicator; abort() ends that call",
            )
        patience = self.patience if timeout is None else _config.timeout(timeout)
        self.destroy_retired()
        self.state = CLOSED         # before any Python code runs, and with it perhaps another thread
        self.leave()
        if self.foreign:
            result = ncclSuccess
        elif self.at.host:
            with nogil:
                result = self.api.ncclCommDestroy(self.handle)
        elif not orphan(self.library, self.handle, self.token, self.at.device).destroy(
                patience, &result):
            raise NCCLTimeoutError(
                8, "ncclCommDestroy", self.at.rank,
                f"not done after {patience:g} s: a peer has not closed it, or work is still queued; "
                f"its memory on the GPU stays taken",
            )
        self.handle = NULL
        if result != ncclSuccess:
            raise failure(result, b"ncclCommDestroy", self.api, NULL, self.at.rank)

    def abort(self):
        """End the communicator at once, and with it any call that another thread has in it.

        Never waits for peers; what was under way leaves its arrays in an unknown state.  Nothing
        happens if it is closed already.

        Raises
        ------
        NCCLError
            The library reported a failure.

        Notes
        -----
        C function: ``ncclCommAbort``, NCCL 2.4.
        """
        cdef ncclResult_t result
        if self.state != OPEN or self.born != forks():
            self.leave()
            return
        self.state = ABORTED
        self.leave()
        result = ncclSuccess
        if not self.foreign:
            with nogil:
                result = self.api.ncclCommAbort(self.handle)
        self.handle = NULL
        if result != ncclSuccess:
            raise failure(result, b"ncclCommAbort", self.api, NULL, self.at.rank)

    cdef int leave(self) except -1:
        """Whatever ends it: its ops end with it, and the exit hook need not know of it."""
        cdef UserOp op
        for op in list(self.ops):
            op.comm = NULL
        _alive.discard(self)
        return 0

    def __enter__(self):
        if self.state != CREATING:
            self.ready(b"with")
        return self

    def __exit__(self, kind, value, traceback):
        # After an error the peers may never come: abort does not wait for them.
        if kind is None:
            self.close()
            return
        try:
            self.abort()
        except NCCLError as error:      # the exception on its way, perhaps sys.exit(), is the one to tell
            if hasattr(value, "add_note"):
                value.add_note(f"The communicator's abort failed: {error}")

    def __del__(self):
        if self.state != OPEN or self.born != forks() or self.foreign:
            return
        rank, nranks = self.at.rank, self.at.nranks
        self.leave()
        self.state = CLOSED
        if self.at.host:
            # Local and immediate on the host library: peers see that this rank has left.
            self.api.ncclCommDestroy(self.handle)
        else:
            # Collective on NCCL, so not from here: the exit hook aborts it.
            _orphans.append((orphan(self.library, self.handle, NULL, -1), self.born))
        self.handle = NULL
        warnings.warn(
            f"communicator (rank {rank} of {nranks}) was never closed; use it in a with-block",
            ResourceWarning,
            source=None,
            stacklevel=1,
        )


cdef int _integer(str name, object value) except? -1:
    if isinstance(value, bool):
        raise TypeError(f"{name} must be an int, not a bool")
    try:
        value = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an int, not {type(value).__name__!r}") from None
    if not -2**31 <= value < 2**31:
        raise ValueError(f"{name} {value} does not fit in 32 bits")
    return value


# ---- the end of the process --------------------------------------------------------------------

EXIT_SECONDS = 2.0

cdef object _alive = weakref.WeakSet()
cdef list _orphans = []
cdef bint _watching = False


cdef int _watch_exit() except -1:
    """Register the exit hook with the first communicator: after what the user registered earlier."""
    global _watching
    if not _watching:
        _watching = True
        atexit.register(_at_exit)
    return 0


def _at_exit():
    """End what is still open: quickly, without peers, and without touching the exit status."""
    cdef Communicator comm
    left = [one for one, born in _orphans if born == forks()]   # not the parent's, in a forked child
    for comm in list(_alive):
        if comm.born != forks() or comm.state != OPEN:
            continue
        comm.state = CLOSED
        comm.leave()
        if not comm.at.host:
            left.append(orphan(comm.library, comm.handle, NULL, -1))
        elif not comm.busy:
            comm.api.ncclCommDestroy(comm.handle)
    abort_all(left, EXIT_SECONDS)
