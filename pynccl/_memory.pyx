"""What a communicator holds in memory: statistics, and giving it back for a while."""

from libc.stdint cimport uint64_t

from pynccl._nccl cimport (
    NCCL_SUSPEND_MEM,
    begin_call,
    end_call,
    ncclCommMemStat_t,
    ncclComm_t,
    ncclResult_t,
    ncclStatGpuMemPersist,
    ncclStatGpuMemSuspend,
    ncclStatGpuMemSuspended,
    ncclStatGpuMemTotal,
)


cdef class Memory(Collectives):
    """The memory of `pynccl.Communicator`: a communicator that waits for its turn need not hold any."""

    def suspend(self):
        """Give memory back until `resume`; all other calls but queries and the end are refused meanwhile.

        Every rank should suspend, with no call under way.

        Raises
        ------
        InvalidUsageError
            It is suspended already.
        ValueError
            Called inside a group.
        UnsupportedError
            The library is older than NCCL 2.29.
        NCCLError
            The library reported a failure, for one because NCCL's memory manager is disabled.

        Notes
        -----
        C function: ``ncclCommSuspend``, NCCL 2.29.  The host library never waits here: its memory goes when
        the last rank suspends.

        Examples
        --------
        >>> import pynccl
        >>> with pynccl.Communicator(1, pynccl.unique_id("host"), 0) as comm:
        ...     comm.suspend()
        ...     comm.memory_stats()["suspended"]
        ...     comm.resume()
        True
        """
        cdef ncclResult_t result
        cdef ncclComm_t handle
        self.library.needs(b"ncclCommSuspend")
        handle = begin_call(self, b"suspend")
        with nogil:
            result = self.api.ncclCommSuspend(handle, NCCL_SUSPEND_MEM)
        end_call(self, result, b"ncclCommSuspend")

    def resume(self):
        """Take back the memory that `suspend` gave away, and be usable again.

        Raises
        ------
        InvalidUsageError
            It is not suspended.
        ValueError
            Called inside a group.
        UnsupportedError
            The library is older than NCCL 2.29.
        NCCLError
            The library reported a failure; there may not be enough memory.

        Notes
        -----
        C function: ``ncclCommResume``, NCCL 2.29.
        """
        cdef ncclResult_t result
        cdef ncclComm_t handle
        self.library.needs(b"ncclCommResume")
        handle = begin_call(self, b"resume")
        with nogil:
            result = self.api.ncclCommResume(handle)
        end_call(self, result, b"ncclCommResume")

    def memory_stats(self):
        """Return how much memory the communicator holds.

        Returns
        -------
        dict
            ``suspendable``: bytes that `suspend` can give back; ``suspended``: whether it has;
            ``persistent``: bytes that it cannot; ``total``: bytes in all.  On NCCL they are the GPU's.

        Raises
        ------
        UnsupportedError
            The library is older than NCCL 2.29.
        NCCLError
            The library reported a failure, for one because NCCL's memory manager is disabled.

        Notes
        -----
        C function: ``ncclCommMemStats``, NCCL 2.29.

        Examples
        --------
        >>> import pynccl
        >>> with pynccl.Communicator(1, pynccl.unique_id("host"), 0) as comm:
        ...     sorted(comm.memory_stats())
        ['persistent', 'suspendable', 'suspended', 'total']
        """
        cdef uint64_t value = 0
        cdef ncclComm_t handle
        cdef dict told = {}
        self.library.needs(b"ncclCommMemStats")
        for name, stat in (
            ("suspendable", <int>ncclStatGpuMemSuspend),
            ("suspended", <int>ncclStatGpuMemSuspended),
            ("persistent", <int>ncclStatGpuMemPersist),
            ("total", <int>ncclStatGpuMemTotal),
        ):
            handle = begin_call(self, b"memory_stats")
            end_call(self, self.api.ncclCommMemStats(handle, <ncclCommMemStat_t><int>stat, &value),
                     b"ncclCommMemStats")
            told[name] = bool(value) if name == "suspended" else value
        return told
