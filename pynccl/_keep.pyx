"""Arrays of queued calls: held from the call until the host library has done it.

`lend` before a call and `take_back` after it: in between the library may have queued the call, and then gives
the arrays back from whatever thread does it.  That thread has no GIL and must not wait for it; what comes back lies
in a list until a thread that has the GIL drops it.  That is the main thread, soon, or whoever waits for a stream or
queues the next call, if it is sooner.
"""

from cpython.object cimport PyObject
from cpython.ref cimport Py_DECREF, Py_INCREF
from libc.stdlib cimport free, malloc

import atexit

cdef extern from *:
    """
    #include <pthread.h>

    struct pynccl_held { struct pynccl_held *next; PyObject *object; };

    /* Guards what follows, is never held while Python code runs, and is free in a forked child. */
    static pthread_mutex_t pynccl_held_lock = PTHREAD_MUTEX_INITIALIZER;
    static struct pynccl_held *pynccl_returned;
    static int pynccl_over; /* the interpreter is about to end: what comes back now is left to the system */

    static void pynccl_held_before_fork(void) { pthread_mutex_lock(&pynccl_held_lock); }
    static void pynccl_held_after_fork(void) { pthread_mutex_unlock(&pynccl_held_lock); }
    static int pynccl_held_watch_forks(void) {
        return pthread_atfork(pynccl_held_before_fork, pynccl_held_after_fork, pynccl_held_after_fork);
    }

    static struct pynccl_held *pynccl_take_returned(void) {
        pthread_mutex_lock(&pynccl_held_lock);
        struct pynccl_held *list = pynccl_returned;
        pynccl_returned = NULL;
        pthread_mutex_unlock(&pynccl_held_lock);
        return list;
    }

    static int pynccl_drop_returned(void *unused) {
        struct pynccl_held *list = pynccl_take_returned();
        (void)unused;
        while (list) {
            struct pynccl_held *held = list;
            list = held->next;
            Py_DECREF(held->object);
            free(held);
        }
        return 0;
    }

    /* By any thread, without the GIL.  Asked for again only when the list was empty: Python's list of pending
       calls is short, and where it is full the next call or wait drops what lies here. */
    static void pynccl_give_back(void *owner) {
        struct pynccl_held *held = (struct pynccl_held *)owner;
        pthread_mutex_lock(&pynccl_held_lock);
        held->next = pynccl_returned;
        if (!pynccl_returned && !pynccl_over) Py_AddPendingCall(pynccl_drop_returned, NULL);
        pynccl_returned = held;
        pthread_mutex_unlock(&pynccl_held_lock);
    }

    static void pynccl_hold_no_more(void) {
        pthread_mutex_lock(&pynccl_held_lock);
        pynccl_over = 1;
        pthread_mutex_unlock(&pynccl_held_lock);
    }
    """
    struct pynccl_held:
        PyObject *object
    pynccl_held *pynccl_returned
    int pynccl_held_watch_forks()
    int pynccl_drop_returned(void *unused)
    void pynccl_give_back(void *owner) noexcept nogil
    void pynccl_hold_no_more()


pynccl_held_watch_forks()
atexit.register(lambda: pynccl_hold_no_more())


cdef int lend(Keep keep, object held) except -1:
    """Let the next item that this thread queues hold an object; `take_back` must follow."""
    cdef pynccl_held *node = <pynccl_held *>malloc(sizeof(pynccl_held))
    if node is NULL:
        raise MemoryError("no memory for a call on a stream")
    drop_returned()
    Py_INCREF(held)
    node.object = <PyObject *>held
    keep(node, pynccl_give_back)
    return 0


cdef void take_back(Keep keep) noexcept:
    """What no item has taken, because the call was done at once or has failed, is nobody's any more."""
    cdef pynccl_held *node = <pynccl_held *>keep(NULL, NULL)
    if node is not NULL:
        held = <object>node.object
        Py_DECREF(held)
        free(node)


cdef void drop_returned() noexcept:
    """Drop what is done with, in a thread that is about to queue or has waited."""
    if pynccl_returned is not NULL:         # a stale look only leaves it to the pending call
        pynccl_drop_returned(NULL)
