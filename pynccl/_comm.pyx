"""Communicators: how they come to be, are divided, and end.

Nothing here depends on the garbage collector doing the right thing at the right time: destroying a
communicator is a collective act in NCCL, so that only `close` does it.  An object that is collected
while open gives a warning; at exit the exit hook ends what is left, within a limit of time.
"""

from libc.stdint cimport uintptr_t

from pynccl._device cimport current_device, enter_device, leave_device
from pynccl._call cimport UserOp
from pynccl._end cimport abort_all, destroy_all, orphan
from pynccl._family cimport Family
from pynccl._fields cimport integer
from pynccl._nccl cimport (
    ABORTED,
    CLOSED,
    CREATING,
    FINALIZED,
    GIVEN_UP,
    OPEN,
    PENDING,
    UNBORN,
    failure,
    forks,
    ncclComm_t,
    load,
    ncclInProgress,
    ncclInvalidUsage,
    ncclResult_t,
    ncclSuccess,
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
from pynccl._uid import UniqueId
from pynccl.errors import InvalidUsageError, NCCLError, NCCLTimeoutError

cdef class Communicator(Family):
    """A set of ranks that communicate; this object is one of them.

    Creation is collective: it returns when all `nranks` ranks have called it with the same `uid`.

    Parameters
    ----------
    nranks : int
        How many ranks there are.
    uid : bytes, or list of bytes
        The id that one of them got from `unique_id`.  Several, the same on all ranks, share the
        work of meeting among them.
    rank : int
        This rank, from 0 to ``nranks - 1``.
    device : int, optional
        CUDA device on NCCL, where the default is the current one; a mere number on the host library.
    timeout : float or timedelta, optional
        Seconds that the creation and every later wait may take; 30 minutes by default, or
        ``PYNCCL_TIMEOUT``.  On NCCL it makes the communicator nonblocking, which costs a thread
        inside NCCL for each call.
    config : Config, optional
        Settings.  With ``blocking=False`` this returns at once; see `wait_ready`.
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
    C functions: ``ncclCommInitRank``, ``ncclCommInitRankConfig`` and ``ncclCommInitRankScalable``,
    NCCL 2.0, 2.14 and 2.23.

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
        self.at.comm = <void *>self

    def __init__(self, nranks, uid, rank, *, device=None, timeout=None, config=None, library="auto"):
        if self.state != UNBORN:
            raise ValueError("Communicator: __init__ was called twice")
        self.at.nranks = integer("nranks", nranks)
        self.at.rank = integer("rank", rank)
        if self.at.nranks < 1:
            raise ValueError(f"Communicator: nranks is {nranks}; it must be at least 1")
        if not 0 <= self.at.rank < self.at.nranks:
            raise ValueError(
                f"Communicator: rank {rank} is not in 0 to {nranks - 1} (nranks is {nranks})"
            )
        if device is not None:
            self.device_index = integer("device", device)
            if self.device_index < 0:
                raise ValueError(f"Communicator: device {device} is negative")
        self.patience = _config.timeout(timeout)
        self.set_config(config)
        self.meet_under(uid, library)
        # A blocking call of NCCL cannot be left: only a nonblocking communicator can keep a deadline.
        if self.settings is not None and "blocking" in self.settings.values:
            self.nonblocking = self.deferred = self.config.blocking == 0
        elif self.library.kind == "nccl" and timeout is not None:
            self.nonblocking = True
            self.config.blocking = 0
        self.born_now()

    cdef int meet_under(self, object uid, object library) except -1:
        """Take the ids, and the library that they belong to."""
        if isinstance(uid, (list, tuple)) and all(isinstance(one, bytes) for one in uid):
            uids = [UniqueId(one) for one in uid]
        else:
            uids = [UniqueId(uid)]
        if not 1 <= len(uids) <= self.at.nranks:
            raise ValueError(
                f"Communicator: {len(uids)} unique ids for nranks={self.at.nranks}; there must be at "
                f"least one, and at most one a rank"
            )
        if (library is None or library == "auto") and uids[0].kind == "host":
            library = "host"
        self.library = load(library)
        for one in uids:
            if one.kind != self.library.kind:
                raise ValueError(
                    f"Communicator: the unique id was made by the {one.kind} library, and "
                    f"{self.library!r} was chosen; use one library for both"
                )
        self.set_ids(b"".join(uids))
        if self.settings is not None:
            self.settings.fits(self.library)
        return 0

    cdef Family sibling(self):
        return Communicator.__new__(Communicator)

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
        cdef bint elsewhere = not self.at.host and self.device_index >= 0
        cdef void *before = NULL
        if self.at.host:
            self.api.pyncclHostSetInitTimeout(self.patience)
        elif elsewhere and enter_device(self.device_index, &before) != 0:
            raise ValueError(f"Communicator: device {self.device_index} cannot be made current")
        if self.parent is not None:
            self.parent.busy += 1
        with nogil:
            result = self.call()
            if elsewhere:
                leave_device(before)
        if self.parent is not None:
            self.parent.busy -= 1
        return result

    cdef int created(self, ncclResult_t result) except -1:
        """Take the result of the creation: open, or as if it had never been."""
        cdef CommBase asked = self if self.parent is None else self.parent
        self.state = UNBORN
        if result == <ncclResult_t>GIVEN_UP:
            self.parent = None
            return 0
        if result == ncclInProgress:        # NCCL_COMM_BLOCKING may have made it so
            self.nonblocking = True
        try:
            if result == ncclInProgress and self.deferred and self.parent is None:
                self.state = PENDING
            elif result == ncclInProgress and asked.handle is not NULL:
                self.wait_for(asked)
            elif result != ncclSuccess and result != ncclInProgress:
                self.settle(result, self.function())
            if self.handle is NULL:
                self.state = CLOSED     # a split without a color: this rank is in no part
                return 0
            if self.state != PENDING:
                self.opened()
        except BaseException:
            if went(result) and self.handle is not NULL:
                self.give_up()          # the library has it, the user will not
            self.state = UNBORN
            self.handle = NULL
            raise
        finally:
            self.parent = None
        _alive.add(self)
        _watch_exit()
        return 0

    cdef int wait_for(self, CommBase asked) except -1:
        """Wait for a nonblocking creation; `asked` knows how it goes."""
        try:
            return asked.wait(self.function())
        except BaseException:
            if asked is not self:
                _unfinished.append(self)        # the library may still write its handle here
            raise

    cdef int opened(self) except -1:
        self.read_back()
        self.state = OPEN
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
        comm.nonblocking = True     # it may be; a blocking one is never in progress
        comm.foreign = True
        comm.handle = <ncclComm_t><uintptr_t>handle
        comm.read_back()
        comm.state = OPEN
        return comm

    cdef int give_up(self) except -1:
        abort_all([orphan(self.library, self.handle, NULL, -1)], EXIT_SECONDS)
        self.handle = NULL
        self.state = ABORTED
        self.leave()
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
        return not self.is_whole()

    @property
    def handle(self):
        """int: The ``ncclComm_t`` for other code; it stays this object's."""
        self.ready(b"handle")
        return <uintptr_t>self.handle

    def __repr__(self):
        state = {UNBORN: "not created", CREATING: "being created", PENDING: "being created", OPEN: "open",
                 FINALIZED: "finalized", CLOSED: "closed", ABORTED: "aborted"}[self.state]
        if PENDING <= self.state <= FINALIZED and not self.is_whole():
            state = "of the process before the fork"
        where = f" of {self.library.kind}" if self.library is not None else ""
        return f"<Communicator rank {self.at.rank} of {self.at.nranks}{where}, {state}>"

    def __reduce__(self):
        raise TypeError("a Communicator cannot be pickled: share a unique_id and create it on each rank")

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
        if not self.is_whole():
            self.leave()
            return
        if self.state == PENDING:
            self.abort()        # there is nothing to finish
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
        if not self.is_whole():
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
        if self.state != CREATING and self.state != PENDING:
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
        if not self.is_whole() or self.foreign:
            return
        rank, nranks = self.at.rank, self.at.nranks
        self.leave()
        if self.at.host:
            # Local on the host library: peers see that this rank has left, once what it has queued is done.
            if self.state == PENDING:
                self.api.ncclCommAbort(self.handle)
            else:
                destroy_all([orphan(self.library, self.handle, NULL, -1)], EXIT_SECONDS)
        else:
            # Collective on NCCL, so not from here: the exit hook aborts it.
            _orphans.append((orphan(self.library, self.handle, NULL, -1), self.born))
        self.state = CLOSED
        self.handle = NULL
        warnings.warn(
            f"communicator (rank {rank} of {nranks}) was never closed; use it in a with-block",
            ResourceWarning,
            source=None,
            stacklevel=1,
        )


# ---- the end of the process --------------------------------------------------------------------

EXIT_SECONDS = 2.0

cdef object _alive = weakref.WeakSet()
cdef list _orphans = []
cdef list _unfinished = []      # never freed
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
    whole = []
    for comm in list(_alive):
        if not comm.is_whole():
            continue
        comm.leave()
        if not comm.at.host or comm.state == PENDING:       # which can only be aborted
            left.append(orphan(comm.library, comm.handle, NULL, -1))
        elif not comm.busy:
            whole.append(orphan(comm.library, comm.handle, NULL, -1))
        comm.state = CLOSED
    destroy_all(whole, EXIT_SECONDS)
    abort_all(left, EXIT_SECONDS)
