"""Ends that must not hold anybody up: C calls that may never return, on a thread of their own.

The thread is a plain one that runs no Python: Python 3.12 starts no thread once the interpreter is on its way
out, which is when the exit hook aborts what is left.  A thread that is not back in time is left to itself, and
ends with the process.
"""

from cpython.exc cimport PyErr_CheckSignals
from libc.stdlib cimport calloc, free
from posix.time cimport nanosleep, timespec

from pynccl._device cimport use_device
from pynccl._nccl cimport Library, nccl_api, ncclComm_t, ncclResult_t, ncclSuccess

import time


cdef extern from "pthread.h" nogil:
    ctypedef struct pthread_t:
        pass
    int pthread_create(pthread_t *thread, void *attr, void *(*start)(void *) noexcept nogil, void *arg)
    int pthread_detach(pthread_t thread)
    # Of the GNU library and of musl: join without waiting.
    int pthread_tryjoin_np(pthread_t thread, void **value)


UNSEEN = 0.02       # seconds


cdef struct Item:
    const nccl_api *api
    ncclComm_t handle
    void *token
    int device


cdef struct Job:
    bint destroy                    # or abort
    int count
    Item *items
    ncclResult_t result             # the first that is not success


cdef void *work(void *arg) noexcept nogil:
    cdef Job *job = <Job *>arg
    cdef const Item *item
    cdef ncclResult_t result
    cdef int i
    for i in range(job.count):
        item = &job.items[i]
        if job.destroy:
            use_device(item.device)
            if item.token is not NULL:
                item.api.ncclMemFree(item.token)
            result = item.api.ncclCommDestroy(item.handle)
        else:
            result = item.api.ncclCommAbort(item.handle)
        if job.result == ncclSuccess:
            job.result = result
    return NULL


cdef bint run(list orphans, bint destroy, double seconds, bint interruptible,
              ncclResult_t *result) except -1:
    """Whether all is done after so many seconds."""
    cdef Job *job = <Job *>calloc(1, sizeof(Job))
    cdef Orphan orphan
    cdef pthread_t thread
    cdef timespec pause
    cdef bint done = False
    cdef double begin = time.monotonic()
    cdef double deadline = begin + seconds
    # Nearly every end without peers is immediate: then no other thread gets to see that it has come.
    cdef double unseen = begin if interruptible else begin + UNSEEN
    if job is not NULL:
        job.items = <Item *>calloc(len(orphans), sizeof(Item))
    if job is NULL or job.items is NULL:
        free(job)
        raise MemoryError
    job.destroy = destroy
    for orphan in orphans:
        job.items[job.count] = Item(
            orphan.library.api, orphan.handle, orphan.token, orphan.device)
        job.count += 1
    if pthread_create(&thread, NULL, work, job) != 0:
        free(job.items)
        free(job)
        raise MemoryError("no thread could be started")
    pause.tv_sec = 0
    pause.tv_nsec = 20_000
    try:
        while True:
            if time.monotonic() < unseen:
                done = pthread_tryjoin_np(thread, NULL) == 0
                if not done:
                    nanosleep(&pause, NULL)
            else:
                with nogil:
                    done = pthread_tryjoin_np(thread, NULL) == 0
                    if not done:
                        nanosleep(&pause, NULL)
            if done or time.monotonic() > deadline:
                break
            pause.tv_nsec = min(2 * pause.tv_nsec, 2_000_000)
            if interruptible:
                PyErr_CheckSignals()
    finally:
        if done:
            result[0] = job.result
            free(job.items)
            free(job)
        else:
            pthread_detach(thread)          # which goes on using the job
    return done


cdef class Orphan:
    """What the library has to be told to end a communicator."""

    cdef int destroy(self, double seconds, ncclResult_t *result) except -1:
        """Destroy it; 0 if that is not done in time."""
        return run([self], True, seconds, True, result)


cdef Orphan orphan(Library library, ncclComm_t handle, void *token, int device):
    cdef Orphan made = Orphan.__new__(Orphan)
    made.library = library
    made.handle = handle
    made.token = token
    made.device = device
    return made


cdef bint destroy_all(list orphans, double seconds) except -1:
    """Destroy communicators one after the other; what is not done in so many seconds goes on without the caller."""
    cdef ncclResult_t result = ncclSuccess
    return run(orphans, True, seconds, False, &result) if orphans else True


cdef bint abort_all(list orphans, double seconds) except -1:
    """Abort communicators one after the other; whether that is done in so many seconds in total."""
    cdef ncclResult_t result = ncclSuccess
    return run(orphans, False, seconds, False, &result) if orphans else True
