"""Communicators that `pynccl.multi` creates by itself, kept by library and devices.

A `Clique` is all ranks of one communicator, in one process.  Threads that use the same devices share it, so
that only one of them may be in a call on it: whoever is holds its lock.  A group takes the locks of all
cliques that it uses in one order (`_group`).
"""

cimport cython

from pynccl._nccl cimport CommBase, Library, forks, recorder

import os
import threading

from pynccl._group import outside, share
from pynccl._init import init_all

cdef dict _kept = {}
cdef object _creating = threading.Lock()
cdef Clique _recent = None      # most programs have one


@cython.final
cdef class Clique:
    """All ranks of one communicator, and the lock of whoever is in a call on it."""

    cdef int enter(self) except -1:
        """Wait until no other thread is in a call."""
        cdef CommBase comm = self.comms[0]
        if comm.born != forks():
            comm.refuse(b"group")       # only a plan of the parent's; whoever held the lock is not here
        self.lock.acquire()
        return 0

    cdef int leave(self, bint well) except -1:
        """Let the next thread in; after a failure, the next call gets communicators of its own."""
        if not well:
            self.broken = True
        self.lock.release()
        return 0


class Gate:
    """A clique as a group sees it."""

    __slots__ = ("enter", "leave")

    def __init__(self, clique):
        self.enter = lambda: (<Clique>clique).enter()
        self.leave = lambda well: (<Clique>clique).leave(well)


cdef Clique find(Library library, Py_ssize_t n, list devices):
    """Find the communicators of these devices, of n numbered slots where it is None; create them if need be.

    A creation that fails leaves nothing behind.
    """
    global _recent
    cdef Clique clique = _recent
    cdef tuple key
    if clique is not None and not clique.broken and devices is None:
        if clique.key[0] is library and clique.key[1] is None and len(clique.comms) == n:
            return clique
    key = (library, None if devices is None else tuple(devices), n)
    clique = _kept.get(key)
    if clique is None or clique.broken:
        with _creating:
            clique = _kept.get(key)
            if clique is None or clique.broken:
                if clique is not None:
                    del _kept[key]
                    end(clique, "abort")
                clique = create(key)
                _kept[key] = clique
    _recent = clique
    return clique


cdef Clique create(tuple key):
    cdef Clique clique = Clique.__new__(Clique)
    library, devices, n = key
    clique.key = key
    clique.lock = threading.Lock()
    clique.comms = tuple(outside(init_all, n if devices is None else devices, library=library.path))
    share(clique.comms, Gate(clique))
    return clique


cdef int end(Clique clique, str how) except -1:
    cdef list errors = []
    clique.enter()
    try:
        for comm in clique.comms:
            try:
                getattr(comm, how)()
            except Exception as error:
                errors.append(error)
    finally:
        clique.leave(False)
    if errors and how == "close":
        raise errors[0]
    return 0


def clear():
    """Close all communicators that are kept, each when no call is on it any more."""
    global _recent
    cdef Clique clique
    if recorder() is not None:
        raise ValueError("clear_cache: the group's calls have not run yet; clear after it ends")
    _recent = None
    with _creating:
        while _kept:
            _, clique = _kept.popitem()
            end(clique, "abort" if clique.broken else "close")


def _forget():
    """After a fork: what was kept is the parent's, and its locks may be held by threads that are not here."""
    global _creating, _recent
    _recent = None
    _kept.clear()
    _creating = threading.Lock()


os.register_at_fork(after_in_child=_forget)
