/* What the call path keeps about threads: the open group of each, and how often the process has forked; and what
 * the host library asks while it sleeps.
 *
 * Included by _nccl.pyx alone, behind Python's own header, which so owns the state here. Everything but the hook needs
 * the GIL.
 */
#ifndef PYNCCL_THREADS_H
#define PYNCCL_THREADS_H

#include <pthread.h>

#include "nccl_abi.h"

/* The open group of this thread; it holds a reference to itself while it is open. */
static _Thread_local PyObject *pynccl_recorder;
static int pynccl_recording; /* threads that have one; with none, nobody need look it up */
static PyObject *pynccl_open(void) { return pynccl_recording ? pynccl_recorder : NULL; }

/* How often this process or an ancestor has forked: no communicator or open group survives that. */
static unsigned int pynccl_forks;
static void pynccl_after_fork(void) { pynccl_forks++; pynccl_recorder = NULL; pynccl_recording = 0; }
static int pynccl_watch_forks(void) {
    return pthread_atfork(NULL, NULL, pynccl_after_fork);
}

/* Whether the calling thread is the only one that runs Python.  Libraries have worker threads
   of their own, so that the number of the process's threads says nothing. */
static int pynccl_alone(void) {
    int threads = 0;
    PyInterpreterState *interpreter = PyInterpreterState_Head();
    for (; interpreter; interpreter = PyInterpreterState_Next(interpreter)) {
        PyThreadState *thread = PyInterpreterState_ThreadHead(interpreter);
        for (; thread; thread = PyThreadState_Next(thread)) threads++;
    }
    return threads == 1;
}

/* Asked by a host-library call every few ms while it sleeps.  The exception that a signal
   handler raises stays in the thread's state, where the returning call finds it. */
static int pynccl_interrupt_hook(void) {
    PyGILState_STATE state;
    int answer;
    if (!Py_IsInitialized()) return 0;
    state = PyGILState_Ensure();
    answer = PyErr_CheckSignals() != 0 ? PYNCCL_HOST_STOP : 0;
    if (pynccl_alone()) answer |= PYNCCL_HOST_ALONE;
    PyGILState_Release(state);
    return answer;
}

#endif
