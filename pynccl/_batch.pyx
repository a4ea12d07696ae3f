"""A batch: the calls of one list call, one per rank, of ranks that this thread drives all at once.

It takes the same way as a single call, once per entry: look at the arrays, find the communicators, fit, run.
Between them the entries are held against each other, which a communicator of its own cannot do: counts,
dtypes, devices, memory that two entries share.  All calls run in one group of the library, or join the group
that is open on this thread; nothing runs if any entry is wrong.
"""

cimport cython
from cpython.mem cimport PyMem_Free, PyMem_Malloc
from libc.stdint cimport uintptr_t
from libc.stdio cimport snprintf
from libc.string cimport strlen

from pynccl._buffer cimport BufferView, release, same_type
from pynccl._call cimport AT_ROOT, Call, Kind, Place, element, fit, look
from pynccl._cliques cimport find
from pynccl._keep cimport Keep, lend, take_back
from pynccl._nccl cimport (
    CommBase,
    Library,
    Step,
    drain,
    failure,
    holding,
    interrupted,
    is_queue,
    ncclInProgress,
    ncclInvalidUsage,
    ncclResult_t,
    ncclSuccess,
    order_call,
    recorder,
    run_steps,
)

import os

from pynccl.errors import InvalidUsageError, LayoutError

cdef Title[TITLES] titles
cdef int titled = 0

# The memory of the last small batch: to ask for it anew would take longer than to fill it.
cdef void *spare = NULL


@cython.final
@cython.freelist(4)
cdef class Batch:
    """The calls of one list call, from the first look at an array to the library's answer."""

    def __dealloc__(self):
        cdef Py_ssize_t i
        for i in range(self.count):
            release(&self.entries[i].views[0])
            release(&self.entries[i].views[1])
        if self.room == FEW and spare is NULL:
            keep(self.entries)
        else:
            PyMem_Free(self.entries)

    cdef int reserve(self, Py_ssize_t room) except -1:
        cdef char *memory
        self.arrays = []
        self.group = recorder()
        room = max(room, FEW)
        memory = <char *>(take_spare() if room == FEW else NULL)
        if memory is NULL:
            memory = <char *>PyMem_Malloc(room * (sizeof(Entry) + sizeof(Step)))
        if memory is NULL:
            raise MemoryError(f"{self.verb.decode()}: no memory for {room} calls")
        self.entries = <Entry *>memory
        self.steps = <Step *>(memory + room * sizeof(Entry))
        self.room = room
        return 0

    cdef int use(self, tuple comms, Library library) except -1:
        """Run on these communicators, one per entry, or (None) on those of the library for the devices."""
        cdef CommBase comm
        self.comms = comms
        self.library = library
        if comms is not None:
            comm = comms[0]
            self.library = comm.library
            self.some = comm.at.nranks != self.n
        self.host = self.library.api.is_host
        self.at = Place(-1, <int>self.n, -1, self.library.version, self.host, NULL)
        return 0

    cdef const Place *place(self, Py_ssize_t index):
        """Where an entry's call will run, as far as it is known before the arrays were seen.

        Ranks are places in the lists, so that a root is one, unless the lists are not all ranks.
        """
        if self.some:
            return &(<CommBase>self.comms[index]).at
        self.at.rank = <int>index
        return &self.at

    cdef Entry *add(self, Kind kind, Py_ssize_t index, const Place *at, object x, object out,
                    object root, Title *x_title, Title *out_title) except NULL:
        """Look at the arrays of one more call."""
        cdef Entry *entry = &self.entries[self.count]
        entry.views[0].owner = NULL
        entry.views[1].owner = NULL
        entry.index = <int>index
        entry.names.x = name_of(x_title, index, entry.x)
        entry.names.out = name_of(out_title, index, entry.out)
        self.count += 1
        if self.group is not None or self.host:
            self.arrays.append((x, out))
        look(&self.steps[self.count - 1].call, entry.views, kind, at, x, out, root, None, &entry.names)
        return entry

    cdef const BufferView *given(self, Py_ssize_t i) noexcept:
        """The array that says what call `i` moves."""
        return &self.entries[i].views[0 if self.steps[i].call.sends else 1]

    cdef str name(self, Py_ssize_t i, bint recv):
        cdef const Call *call = &self.steps[i].call
        if not recv or call.shared and (call.sends or call.spec.send == AT_ROOT):
            return self.entries[i].names.x.decode()
        return self.entries[i].names.out.decode()

    cdef str title(self, Py_ssize_t i):
        return self.name(i, not self.steps[i].call.sends)

    # ---- the entries against each other

    cdef int alike(self) except -1:
        """All entries must have one dtype and one memory order; their counts are compared when they fit."""
        cdef Py_ssize_t i
        cdef const BufferView *first = self.given(0)
        cdef const BufferView *v
        for i in range(1, self.count):
            v = self.given(i)
            if v.elem != first.elem or v.order != first.order or v.itemsize != first.itemsize:
                if not same_type(first, v):
                    raise TypeError(
                        f"{self.verb.decode()}: {self.title(i)} is {element(v)} and {self.title(0)} is "
                        f"{element(first)}; all entries must have one dtype"
                    )
                # 0 is both orders at once: at most one axis is longer than 1.
                if v.order != first.order and v.order and first.order:
                    raise LayoutError(
                        f"{self.verb.decode()}: {self.title(i)} and {self.title(0)} are in different memory "
                        f"orders (C and Fortran); the elements would end up transposed; use one order for all"
                    )
        return 0

    cdef int as_many(self) except -1:
        """All entries must move as many elements."""
        cdef Py_ssize_t i
        cdef const Call *first = &self.steps[0].call
        cdef const Call *call
        for i in range(1, self.count):
            call = &self.steps[i].call
            if call.count != first.count:
                # Where only one entry sends blocks, its array is as long as all the others together.
                dealt = first.spec.send_blocks and call.sends != first.sends
                raise ValueError(
                    f"{self.verb.decode()}: {self.title(i)} has {self.given(i).count} elements and "
                    f"{self.title(0)} has {self.given(0).count}; "
                    + (f"one must be {self.n} times the other" if dealt else "all entries must have as many")
                )
        return 0

    cdef int disjoint(self) except -1:
        """No array that an entry receives into may share memory with another entry's."""
        cdef Py_ssize_t i, j
        cdef const Call *a
        cdef const Call *b
        for i in range(self.count):
            a = &self.steps[i].call
            for j in range(i):
                b = &self.steps[j].call
                if a.receives and b.receives and self.touch(i, 1, j, 1):
                    raise ValueError(
                        f"{self.verb.decode()}: {self.name(j, True)} and {self.name(i, True)} share memory; "
                        f"each entry needs its own to receive into"
                    )
                if a.receives and b.sends and not (b.shared and b.receives) and self.touch(i, 1, j, 0):
                    self.overwrites(i, j)
                if b.receives and a.sends and not (a.shared and a.receives) and self.touch(j, 1, i, 0):
                    self.overwrites(j, i)
        return 0

    cdef bint touch(self, Py_ssize_t i, int a, Py_ssize_t j, int b) noexcept:
        cdef const BufferView *one = &self.entries[i].views[a]
        cdef const BufferView *other = &self.entries[j].views[b]
        return (<uintptr_t>one.ptr < <uintptr_t>other.ptr + other.nbytes
                and <uintptr_t>other.ptr < <uintptr_t>one.ptr + one.nbytes
                and one.nbytes != 0 and other.nbytes != 0)

    cdef int overwrites(self, Py_ssize_t i, Py_ssize_t j) except -1:
        raise ValueError(
            f"{self.verb.decode()}: {self.name(i, True)} and {self.name(j, False)} share memory; "
            f"what one entry receives would overwrite what another sends"
        )

    # ---- communicators

    cdef bint locate(self) except -1:
        """Find the communicators of the arrays' devices; False if nothing is to be done."""
        cdef Py_ssize_t i
        cdef Entry *entry
        cdef const BufferView *v
        cdef list devices = None
        cdef int index
        if self.comms is not None:
            return True
        if not self.host:
            devices = [None] * self.n
            for i in range(self.count):
                entry = &self.entries[i]
                index = entry.index
                v = self.given(i)
                if v.nbytes == 0 or devices[index] is not None:
                    continue
                if v.device < 0:
                    raise ValueError(
                        f"{self.verb.decode()}: {self.title(i)} is in host memory, and the library is "
                        f"{self.library.path}, which works on GPUs; copy the array to a GPU, or pass "
                        f"library='host'"
                    )
                if v.device in devices and os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") != "1":
                    raise InvalidUsageError(
                        <int>ncclInvalidUsage, self.verb.decode(), None,
                        f"entries {devices.index(v.device)} and {index} of the lists are both on device "
                        f"{v.device}; each entry needs a device of its own (NCCL_MULTI_RANK_GPU_ENABLE=1 "
                        f"allows it)"
                    )
                devices[index] = v.device
            if devices.count(None) == self.n:
                return False            # nothing but empty arrays, which need no partner
            if None in devices:
                raise ValueError(
                    f"{self.verb.decode()}: nothing says which device entry {devices.index(None)} of the lists "
                    f"is on; pass comms"
                )
        self.clique = find(self.library, self.n, devices)
        self.comms = self.clique.comms
        return True

    cdef int settle(self) except -1:
        """Check every call against its communicator."""
        cdef Py_ssize_t i, index
        cdef CommBase comm
        cdef Step *step
        for i in range(self.count):
            step = &self.steps[i]
            index = self.entries[i].index
            comm = self.comms[index]
            step.comm = &comm.handle
            step.at = &comm.at
            fit(&step.call, self.entries[i].views, &comm.at,
                self.ops[index] if type(self.ops) is tuple else self.ops,
                None if self.streams is None else self.streams[index], &self.entries[i].names)
            if step.call.spec.root is not NULL and not self.some:
                # From a place in the lists to the rank there.
                step.call.root = (<CommBase>self.comms[step.call.root]).at.rank
        return 0

    # ---- the run

    cdef int run(self) except -1:
        """Make the calls now, or leave them to the group that is open on this thread."""
        cdef Py_ssize_t i
        cdef CommBase comm
        if self.group is not None:
            for i in range(self.n):
                comm = self.comms[i]
                if self.clique is None:     # others may be in a call on these until the group launches
                    comm.ready(self.verb)
            for i in range(self.count):
                comm = self.comms[self.entries[i].index]
                x, out = self.arrays[i]
                self.group.record(comm, &self.steps[i].call, self.entries[i].views, x, out, self.ops)
            return 0
        if self.clique is None:
            return self.launch()
        self.clique.enter()
        while self.clique.broken:       # ended by another thread since it was found
            self.clique.leave(False)
            self.comms = None
            self.locate()
            self.settle()
            self.clique.enter()
        well = False
        try:
            self.launch()
            well = True
        finally:
            # What failed before the library was called has not hurt the communicators.
            self.clique.leave(well or not self.began)
        return 0

    cdef int launch(self) except -1:
        cdef ncclResult_t result
        cdef Py_ssize_t failed = -1
        cdef Py_ssize_t i
        cdef CommBase comm
        cdef bint queued = False
        for i in range(self.n):
            comm = (<CommBase>self.comms[i])
            comm.ready(self.verb)
        for i in range(self.count):
            if self.steps[i].call.n_after:
                order_call(self.library.api, &self.steps[i].call)
            queued = queued or is_queue(self.library.api, &self.steps[i].call)
        if queued:
            lend(<Keep>self.library.api.pyncclHostKeep, self.held())
        self.began = True
        self.occupy(1)
        with nogil:
            result = run_steps(self.library.api, self.steps, self.count, &failed)
        self.occupy(-1)
        if queued:
            take_back(<Keep>self.library.api.pyncclHostKeep)
        if result != ncclSuccess:
            self.report(result, failed)
        return 0

    cdef object held(self):
        """What must live until the calls are done."""
        cdef Py_ssize_t i
        cdef list all_of_them = []
        for i in range(self.count):
            x, out = self.arrays[i]
            all_of_them.append(holding(&self.entries[i].views[0], &self.entries[i].views[1], x, out))
        return all_of_them

    cdef int finish(self) except -1:
        """Wait for streams of the host library, where results must be complete to be given to the user."""
        cdef Py_ssize_t i
        for i in range(self.count):
            if is_queue(self.library.api, &self.steps[i].call) and self.group is None:
                drain(self.library.api, self.steps[i].call.stream, (<CommBase>self.comms[0]).patience)
        return 0

    cdef void occupy(self, int by) noexcept:
        cdef Py_ssize_t i
        for i in range(self.n):
            (<CommBase>self.comms[i]).busy += by

    cdef int report(self, ncclResult_t result, Py_ssize_t failed) except -1:
        """Wait for nonblocking communicators, or raise what the library reported."""
        cdef const char *function = b"ncclGroupEnd"
        cdef CommBase comm
        interrupted()
        if result == ncclInProgress:
            for comm in self.comms:
                if comm.nonblocking:
                    comm.wait(function)
            return 0
        if failed < 0:
            raise failure(result, function, self.library.api, NULL, None)
        error = failure(result, self.steps[failed].call.spec.function, self.library.api, NULL,
                        self.steps[failed].at.rank)
        if hasattr(error, "add_note"):
            error.add_note(f"It was entry {self.entries[failed].index} of the lists.")
        raise error


# ---- names in messages -----------------------------------------------------------------------------

cdef Title *title_of(const char *prefix) noexcept:
    """Prepare a name; called at import only, once for each of them."""
    global titled
    cdef Title *title = &titles[titled]
    cdef Py_ssize_t i
    titled += 1
    title.prefix = prefix
    for i in range(FEW):
        write_name(title.few[i], prefix, i)
    return title


cdef const char *name_of(Title *title, Py_ssize_t index, char *room) noexcept:
    """What messages call the entry; longer lists write it into `room`."""
    if index < FEW:
        return title.few[index]
    write_name(room, title.prefix, index)
    return room


cdef void write_name(char *to, const char *prefix, Py_ssize_t index) noexcept:
    """Complete a prefix that ends in a bracket by the index."""
    snprintf(to, NAME, b"%s%d]" if prefix[strlen(prefix) - 1] == c"[" else b"%s", prefix, <int>index)


cdef void *take_spare() noexcept:
    global spare
    cdef void *memory = spare
    spare = NULL
    return memory


cdef void keep(void *memory) noexcept:
    global spare
    spare = memory
