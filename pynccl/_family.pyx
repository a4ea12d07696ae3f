r"""Communicators made from others, and the states between creation and end.

    CREATING -> OPEN -> FINALIZED -> CLOSED, ABORTED
        \--> PENDING --^                               PENDING: created in the background (blocking=False)

`Communicator` is a `Family`; creation from nothing, and the end, are its own (_comm).
"""

from libc.stdlib cimport free, malloc

from pynccl._fields cimport integer
from pynccl._nccl cimport (
    FINALIZED,
    OPEN,
    PENDING,
    NCCL_CONFIG_DEFAULT,
    NCCL_SPLIT_NOCOLOR,
    NCCL_SHRINK_ABORT,
    NCCL_SHRINK_DEFAULT,
    begin_call,
    end_call,
    failure,
    forks,
    ncclComm_t,
    ncclInProgress,
    ncclResult_t,
    ncclSuccess,
    ncclUniqueId,
    recorder,
)
from pynccl._settings cimport Config

from pynccl._config import timeout as seconds_of
from pynccl._uid import UNIQUE_ID_BYTES, UniqueId
from pynccl.enums import Result
from pynccl.errors import NCCLError


cdef class Family(Memory):
    """The relations of `pynccl.Communicator`: its children, and what it becomes."""

    def __cinit__(self):
        self.device_index = -1
        self.config = NCCL_CONFIG_DEFAULT

    def __dealloc__(self):
        free(self.excluded)

    # ---- birth

    cdef int set_ids(self, bytes uids) except -1:
        self.uids = uids
        self.ids = <const ncclUniqueId *><const char *>uids
        self.n_ids = <int>(len(uids) // UNIQUE_ID_BYTES)
        return 0

    cdef int set_config(self, object config) except -1:
        """Take a `Config`, before the library is known to fit it."""
        if config is None:
            return 0
        if not isinstance(config, Config):
            raise TypeError(f"config must be a pynccl.Config, not {type(config).__name__!r}")
        self.settings = config
        self.config = self.settings.c
        return 0

    cdef ncclResult_t call(self) noexcept nogil:
        """Make the C call that creates it."""
        cdef ncclConfig_t *config = &self.config
        if self.settings is None and not self.nonblocking:
            config = NULL
        if self.birth == SPLIT:
            return self.api.ncclCommSplit(
                self.parent.handle, self.color, self.key, &self.handle, config)
        if self.birth == SHRINK:
            return self.api.ncclCommShrink(
                self.parent.handle, self.excluded, self.n_excluded, &self.handle, config, self.flags)
        if self.birth == GROW:
            return self.api.ncclCommGrow(
                self.parent.handle, self.at.nranks, self.ids, -1, &self.handle, config)
        if self.birth == JOIN:
            return self.api.ncclCommGrow(
                NULL, self.at.nranks, self.ids, self.at.rank, &self.handle, config)
        if self.n_ids > 1:
            return self.api.ncclCommInitRankScalable(
                &self.handle, self.at.nranks, self.at.rank, self.n_ids, <ncclUniqueId *>self.ids, config)
        if config is NULL:
            return self.api.ncclCommInitRank(
                &self.handle, self.at.nranks, self.ids[0], self.at.rank)
        return self.api.ncclCommInitRankConfig(
            &self.handle, self.at.nranks, self.ids[0], self.at.rank, config)

    cdef const char *function(self) noexcept:
        """Name the C function that creates it."""
        if self.birth == SPLIT:
            return b"ncclCommSplit"
        if self.birth == SHRINK:
            return b"ncclCommShrink"
        if self.birth != INIT:
            return b"ncclCommGrow"
        return b"ncclCommInitRankScalable" if self.n_ids > 1 else b"ncclCommInitRank"

    cdef Family sibling(self):
        raise NotImplementedError

    cdef int born_now(self) except -1:
        raise NotImplementedError

    cdef int opened(self) except -1:
        raise NotImplementedError

    cdef int give_up(self) except -1:
        raise NotImplementedError

    cdef Family child(self, Birth birth, object timeout, object config):
        """Begin a child; its maker adds what the call needs and lets it be born."""
        cdef Family child = self.sibling()
        child.birth = birth
        child.set_config(config)
        if child.settings is not None:
            child.settings.fits(self.library)
        child.patience = self.patience if timeout is None else seconds_of(timeout)
        child.library = self.library
        child.parent = self
        child.device_index = self.at.device
        child.at.rank = self.at.rank        # until it has one of its own: errors name this one
        child.nonblocking = self.nonblocking
        if child.settings is not None and "blocking" in child.settings.values:
            child.nonblocking = child.config.blocking == 0
        elif self.nonblocking:
            child.config.blocking = 0
        return child

    def split(self, color, key=0, *, timeout=None, config=None):
        """Divide the ranks into new communicators; every rank must call it.

        Parameters
        ----------
        color : int or None
            Ranks of one color form one communicator; None joins none.
        key : int, default: 0
            Orders the ranks of a color, ties by rank here.
        timeout : float or timedelta, optional
            As for `Communicator`; the default is this communicator's.
        config : Config, optional
            Settings of the new one; the default is this communicator's.

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
        cdef Family child
        self.ready(b"split")
        child = self.child(SPLIT, timeout, config)
        child.color = NCCL_SPLIT_NOCOLOR if color is None else integer("color", color)
        child.key = integer("key", key)
        if color is not None and child.color < 0:
            raise ValueError(
                f"split: color {color} is negative; use 0 or more, or None to join no communicator"
            )
        child.born_now()
        return None if color is None else child

    def shrink(self, exclude, *, abort=False, timeout=None, config=None):
        """Make a communicator of all ranks but some; only those that stay may call it.

        Parameters
        ----------
        exclude : iterable of int
            Ranks to leave out, the same on every rank that calls.
        abort : bool, default: False
            End first whatever is under way here, also another thread's call, and go on although this
            communicator has failed: the way out when a rank has died.
        timeout : float or timedelta, optional
            As for `Communicator`; the default is this communicator's.
        config : Config, optional
            Settings of the new one; the default is this communicator's.

        Returns
        -------
        Communicator
            The new one; the remaining ranks keep their order.  This one stays the caller's to close.

        Raises
        ------
        TypeError, ValueError
            `exclude` is empty, names this rank, one that does not exist, or one twice.
        NCCLError
            The library reported a failure; `RemoteError` when one of those that should stay is gone.

        Notes
        -----
        C function: ``ncclCommShrink``, NCCL 2.27.

        Examples
        --------
        >>> import pynccl
        >>> first, second = pynccl.init_all(2, library="host")
        >>> with first.shrink([1]) as less:
        ...     less.nranks
        1
        >>> first.close()
        >>> second.close()
        """
        cdef Family child
        cdef int i
        if not abort:
            self.ready(b"shrink")
        else:
            self.alive(b"shrink")
        ranks = sorted(integer("exclude", rank) for rank in exclude)
        if not ranks:
            raise ValueError("shrink: exclude is empty; there is no rank to leave out")
        for rank in ranks:
            if not 0 <= rank < self.at.nranks:
                raise ValueError(
                    f"shrink: rank {rank} is not in 0 to {self.at.nranks - 1} (nranks is {self.at.nranks})"
                )
        if self.at.rank in ranks:
            raise ValueError(
                f"shrink: rank {self.at.rank} is to be left out itself; only the other ranks call it"
            )
        if len(set(ranks)) != len(ranks):
            raise ValueError(f"shrink: exclude names a rank twice: {ranks}")
        child = self.child(SHRINK, timeout, config)
        child.excluded = <int *>malloc(len(ranks) * sizeof(int))
        if child.excluded is NULL:
            raise MemoryError
        for i, rank in enumerate(ranks):
            child.excluded[i] = rank
        child.n_excluded = len(ranks)
        child.flags = NCCL_SHRINK_ABORT if abort else NCCL_SHRINK_DEFAULT
        child.born_now()
        return child

    def unique_id(self):
        """Get the id under which new ranks join this communicator's ranks: see `grow`.

        Returns
        -------
        UniqueId
            For one growth.  One rank gets it, and gives it to the new ranks.

        Raises
        ------
        NCCLError
            The library reported a failure.

        Notes
        -----
        C function: ``ncclCommGetUniqueId``, NCCL 2.29.
        """
        cdef ncclUniqueId made
        cdef ncclResult_t result
        cdef ncclComm_t handle = begin_call(self, b"unique_id")
        with nogil:
            result = self.api.ncclCommGetUniqueId(handle, &made)
        end_call(self, result, b"ncclCommGetUniqueId")
        return UniqueId((<char *>&made)[:UNIQUE_ID_BYTES])

    def grow(self, nranks, uid=None, *, timeout=None, config=None):
        """Make a larger communicator of these ranks and new ones; every rank here must call it.

        Each new rank calls `Communicator.join` with the same `nranks` and the id.

        Parameters
        ----------
        nranks : int
            Ranks that there will be, more than now.
        uid : bytes, optional
            The id, on the rank that got it from `unique_id`; the others need none.
        timeout : float or timedelta, optional
            As for `Communicator`; the default is this communicator's.
        config : Config, optional
            Settings of the new one; the default is this communicator's.

        Returns
        -------
        Communicator
            The new one, in which these ranks keep their numbers.  This one stays the caller's to close.

        Raises
        ------
        TypeError, ValueError
            `nranks` is not larger than now, or `uid` is not an id of this library.
        NCCLError
            The library reported a failure; `NCCLTimeoutError` when a rank did not come.

        Notes
        -----
        C function: ``ncclCommGrow``, NCCL 2.29.

        Examples
        --------
        >>> import pynccl
        >>> comm = pynccl.Communicator(1, pynccl.unique_id("host"), 0)
        >>> uid = comm.unique_id()
        >>> with pynccl.group():
        ...     first = comm.grow(2, uid)
        ...     second = pynccl.Communicator.join(2, uid, 1)
        >>> first.nranks, second.rank
        (2, 1)
        >>> for one in (comm, first, second):
        ...     one.close()
        """
        cdef Family child
        self.ready(b"grow")
        number = integer("nranks", nranks)
        if number <= self.at.nranks:
            raise ValueError(
                f"grow: nranks is {number}, and there are {self.at.nranks} already; it must be larger"
            )
        child = self.child(GROW, timeout, config)
        child.at.nranks = number
        if uid is not None:
            uid = UniqueId(uid)
            if uid.kind != self.library.kind:
                raise ValueError(
                    f"grow: the unique id was made by the {uid.kind} library, and this communicator "
                    f"is of {self.library!r}"
                )
            child.set_ids(bytes(uid))
        child.born_now()
        return child

    @classmethod
    def join(cls, nranks, uid, rank, *, device=None, timeout=None, config=None, library="auto"):
        """Join the ranks of a communicator that grows, as one of the new ranks.

        Parameters
        ----------
        nranks : int
            Ranks that there will be.
        uid : bytes
            The id that one of the existing ranks got from its `unique_id` method.
        rank : int
            This rank, from the old number of ranks to ``nranks - 1``.
        device : int, optional
            As for `Communicator`.
        timeout : float or timedelta, optional
            As for `Communicator`.
        config : Config, optional
            As for `Communicator`.
        library : {"auto", "nccl", "host"} or path, default: "auto"
            As for `Communicator`.

        Returns
        -------
        Communicator
            The grown one; the existing ranks get theirs from `grow`.

        Raises
        ------
        TypeError, ValueError
            An argument is wrong; nothing was created.
        NCCLError
            The library reported a failure; `InvalidUsageError` when the rank is taken.

        Notes
        -----
        C function: ``ncclCommGrow``, NCCL 2.29.  `grow` has an example.
        """
        cdef Family comm = cls.__new__(cls)
        comm.birth = JOIN
        comm.__init__(nranks, uid, rank, device=device, timeout=timeout, config=config, library=library)
        return comm

    # ---- what it becomes

    cdef bint is_whole(self) noexcept:
        """Whether the library holds a communicator for it in this process."""
        return PENDING <= self.state <= FINALIZED and self.born == forks()

    cdef int alive(self, const char *verb) except -1:
        """Pass unless it has ended or never began; also in another thread's call."""
        if self.is_whole():
            return 0
        return self.refuse(verb)

    def revoke(self):
        """Give up what is under way, here and at the peers; splits and shrinks remain possible.

        A call that another thread has in it ends with an error.  Later calls raise
        `InvalidUsageError`; every rank should revoke, and then `split`, `shrink` or `close`.

        Raises
        ------
        NCCLError
            The library reported a failure: it was revoked or finalized already.

        Notes
        -----
        C function: ``ncclCommRevoke``, NCCL 2.28.

        Examples
        --------
        >>> import pynccl
        >>> with pynccl.Communicator(1, pynccl.unique_id("host"), 0) as comm:
        ...     comm.revoke()
        ...     comm.split(color=0).close()
        """
        cdef ncclResult_t result
        self.alive(b"revoke")
        if recorder() is not None:
            raise ValueError("revoke: a group is open, whose calls run at its end; call it after")
        with nogil:
            result = self.api.ncclCommRevoke(self.handle, 0)
        if result != ncclSuccess and result != ncclInProgress:
            raise failure(result, b"ncclCommRevoke", self.api, self.handle, self.at.rank)

    def finalize(self):
        """Finish what was queued; afterwards only questions, `close` and `abort` are possible.

        Raises
        ------
        NCCLError
            The library reported a failure.

        Notes
        -----
        C function: ``ncclCommFinalize``, NCCL 2.14.  `close` does without it.

        Examples
        --------
        >>> import pynccl
        >>> comm = pynccl.Communicator(1, pynccl.unique_id("host"), 0)
        >>> comm.finalize()
        >>> comm.close()
        """
        cdef ncclResult_t result
        cdef ncclComm_t handle = begin_call(self, b"finalize")
        with nogil:
            result = self.api.ncclCommFinalize(handle)
        end_call(self, result, b"ncclCommFinalize")
        if self.state == OPEN:
            self.state = FINALIZED

    @property
    def async_error(self):
        """Result: What went wrong outside of a call, ``SUCCESS``, or ``IN_PROGRESS`` while it works.

        A nonblocking communicator keeps its first error.  C function: ``ncclCommGetAsyncError``, NCCL 2.4.
        """
        cdef ncclResult_t state = ncclSuccess
        cdef ncclResult_t result
        self.alive(b"async_error")
        result = self.api.ncclCommGetAsyncError(self.handle, &state)
        if result != ncclSuccess:
            raise failure(result, b"ncclCommGetAsyncError", self.api, self.handle, self.at.rank)
        if state == ncclSuccess and self.state == PENDING:
            self.opened()
        return Result(<int>state)

    def wait_ready(self, timeout=None):
        """Wait until a communicator that is created in the background can be used.

        Parameters
        ----------
        timeout : float or timedelta, optional
            Seconds to wait; the default is the communicator's own.  The creation goes on after it.

        Raises
        ------
        NCCLTimeoutError
            It is not ready yet, or a rank did not come in the communicator's own time.
        NCCLError
            The creation failed; the communicator is aborted.

        Notes
        -----
        C function: ``ncclCommGetAsyncError``, NCCL 2.4.  Returns at once where nothing is under way.

        Examples
        --------
        >>> import pynccl
        >>> config = pynccl.Config(blocking=False)
        >>> comm = pynccl.Communicator(1, pynccl.unique_id("host"), 0, config=config)
        >>> comm.wait_ready(timeout=5)
        >>> comm.nranks
        1
        >>> comm.close()
        """
        cdef ncclResult_t state = ncclSuccess
        self.alive(b"wait_ready")
        try:
            self.wait(self.function(), -1 if timeout is None else seconds_of(timeout))
        except NCCLError:
            # Late, or failed?  Only what failed is given up.
            if self.state == PENDING and (
                self.api.ncclCommGetAsyncError(self.handle, &state) != ncclSuccess or state != ncclInProgress
            ):
                self.give_up()
            raise
        if self.state == PENDING:
            self.opened()
