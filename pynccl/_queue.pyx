"""Streams and events of the host library, as Python objects.

They are handles: the queues are the library's.  What is kept here is what went wrong in a Python function that a
stream ran, until somebody waits for the stream.
"""

from cpython.object cimport PyObject
from cpython.pythread cimport PyThread_get_thread_ident
from cpython.ref cimport Py_DECREF, Py_INCREF
from libc.stdint cimport uintptr_t

from pynccl._call cimport stream_handle
from pynccl._keep cimport drop_returned
from pynccl._nccl cimport (
    cudaEvent_t,
    cudaStream_t,
    load,
    nccl_api,
    ncclInProgress,
    ncclInvalidUsage,
    ncclResult_t,
    ncclSuccess,
    passed,
)

import sys

from pynccl import _config
from pynccl.errors import InvalidUsageError

cdef extern from "Python.h":
    int Py_IsInitialized() noexcept nogil


cdef class Stream:
    """A queue of calls on host memory, which behaves as a CUDA stream does on a GPU.

    Pass it as ``stream=`` to the calls of communicators of the host library.  Such a call is checked and
    returns; it runs when everything before it on the stream, and every earlier call of its communicator, is done.
    Its arrays are kept until then, and hold a result only after a wait.  Wrong code goes wrong as it
    would on a GPU: a result that is read without a wait may be there or not (``PYNCCL_HOST_DELAY`` makes sure
    that it is not).

    Attributes
    ----------
    handle : int
        What stands for a ``cudaStream_t``; also offered by the ``__cuda_stream__`` protocol.

    Raises
    ------
    InvalidArgumentError
        ``PYNCCL_HOST_DELAY`` is not understood.

    Notes
    -----
    A stream is not bound to a thread.  Streams are independent of each other and of the default stream, on which a
    call is complete when it returns; a communicator's calls run in the order in which they were made, whatever
    their streams.  Whoever waits does the waiting work himself where it has not started.  C function:
    ``pyncclHostStreamCreate`` of the host library.

    Examples
    --------
    >>> import array, pynccl, pynccl.host
    >>> x = array.array("d", [1.0, 2.0])
    >>> with pynccl.Communicator(1, pynccl.unique_id("host"), 0) as comm, pynccl.host.Stream() as s:
    ...     y = comm.all_reduce(x, stream=s)
    ...     s.synchronize()
    ...     y
    array('d', [1.0, 2.0])
    """

    cdef const nccl_api *api        # lives as long as the process
    cdef uintptr_t stream           # 0 once closed
    cdef list errors                # of functions, until somebody hears of them
    cdef unsigned long inside       # the thread that runs one of its functions now, or 0
    cdef object __weakref__

    def __cinit__(self):
        self.errors = []

    def __init__(self):
        cdef cudaStream_t stream = NULL
        if self.stream:
            raise ValueError("Stream: __init__ was called twice")
        self.api = load("host").api
        passed(self.api, self.api.pyncclHostStreamCreate(&stream), b"pyncclHostStreamCreate")
        self.stream = <uintptr_t>stream

    cdef cudaStream_t opened(self, str verb) except NULL:
        if not self.stream:
            raise ValueError(f"{verb}: the stream is closed")
        return <cudaStream_t>self.stream

    @property
    def handle(self):
        """int: What stands for a ``cudaStream_t``."""
        return <uintptr_t>self.opened("handle")

    @property
    def closed(self):
        """bool: Whether nothing can be queued any more."""
        return not self.stream

    def __cuda_stream__(self):
        return 0, self.handle

    def synchronize(self, timeout=None):
        """Wait until everything that is on the stream is done.

        Parameters
        ----------
        timeout : float or timedelta, optional
            Seconds; ``PYNCCL_TIMEOUT`` by default.

        Raises
        ------
        NCCLTimeoutError
            Something is not done yet; it goes on.
        NCCLError
            A call on the stream failed: the first one that nobody has heard of.
        Exception
            What a function that the stream ran has raised.
        ValueError
            The stream is closed.
        """
        cdef cudaStream_t stream = self.opened("synchronize")
        cdef double seconds = _config.timeout(timeout)
        cdef ncclResult_t result
        if self.inside == <unsigned long>PyThread_get_thread_ident():
            raise InvalidUsageError(
                <int>ncclInvalidUsage, "synchronize", None,
                "a function on the stream would wait for itself")
        with nogil:
            result = self.api.pyncclHostStreamSynchronize(stream, seconds)
        drop_returned()
        if self.errors:
            raise self.errors.pop(0)
        passed(self.api, result, b"pyncclHostStreamSynchronize")

    def query(self):
        """Tell whether everything that is on the stream is done.

        Returns
        -------
        bool
            True also where something has failed; `synchronize` says so.

        Raises
        ------
        ValueError
            The stream is closed.
        """
        cdef ncclResult_t result = self.api.pyncclHostStreamQuery(self.opened("query"))
        if result == ncclInProgress:
            return False
        passed(self.api, result, b"pyncclHostStreamQuery")
        drop_returned()
        return True

    def record(self, event=None):
        """Mark what is on the stream now.

        Parameters
        ----------
        event : Event, optional
            Event to record; a new one by default.

        Returns
        -------
        Event
            It is done as soon as all that was on the stream is.

        Raises
        ------
        ValueError
            The stream is closed.
        """
        cdef Event it = Event() if event is None else event
        it.record(self)
        return it

    def wait(self, other):
        """Let all that comes later on this stream wait for an event, or for what another stream holds now.

        Parameters
        ----------
        other : Event or Stream or int
            What to wait for.  The caller does not wait.

        Raises
        ------
        InvalidArgumentError
            `other` is the handle of no stream.
        ValueError
            The stream is closed.
        """
        cdef cudaStream_t stream = self.opened("wait"), to
        cdef ncclResult_t result
        if type(other) is Event:
            (<Event>other).wait(self)
            return
        to = <cudaStream_t>stream_handle(b"wait", b"other", other)
        with nogil:
            result = self.api.pyncclHostStreamWaitStream(stream, to)
        passed(self.api, result, b"pyncclHostStreamWaitStream")

    def call(self, function, /, *args, **kwargs):
        """Let the stream call a Python function when everything before it is done.

        Parameters
        ----------
        function : callable
            It runs on the stream's own thread; what comes later on the stream waits for it.  It may make calls on
            other streams, but not wait for its own.
        *args, **kwargs
            Its arguments.

        Raises
        ------
        TypeError
            `function` cannot be called.
        ValueError
            The stream is closed.

        Notes
        -----
        What it returns is dropped.  What it raises is raised by the next `synchronize`; the stream goes
        on.  A function that has not run when the process ends does not run.

        Examples
        --------
        >>> import pynccl.host
        >>> with pynccl.host.Stream() as s:
        ...     s.call(print, "first", end=", ")
        ...     s.call(print, "second")
        first, second
        """
        cdef cudaStream_t stream = self.opened("call")
        cdef ncclResult_t result
        if not callable(function):
            raise TypeError(f"call: function must be callable, not {type(function).__name__!r}")
        job = self, function, args, kwargs
        Py_INCREF(job)
        with nogil:
            result = self.api.pyncclHostStreamCall(stream, run_function, <void *><PyObject *>job)
        if result != ncclSuccess:
            Py_DECREF(job)
        passed(self.api, result, b"pyncclHostStreamCall")

    def close(self):
        """Destroy the stream; what is on it is still done.  Nothing happens if it is closed already.

        Raises
        ------
        NCCLError
            The library reported a failure.
        """
        cdef uintptr_t stream = self.stream
        self.stream = 0
        if stream:
            passed(self.api, self.api.pyncclHostStreamDestroy(<cudaStream_t>stream),
                   b"pyncclHostStreamDestroy")

    def __enter__(self):
        self.opened("with")
        return self

    def __exit__(self, kind, value, traceback):
        # After an error nobody may ever do what the stream waits for.
        try:
            if kind is None and self.stream:
                self.synchronize()
        finally:
            self.close()

    def __del__(self):
        for error in self.errors:       # nobody can hear of them any more
            sys.unraisablehook(Unheard(error))

    def __dealloc__(self):
        if self.stream:
            self.api.pyncclHostStreamDestroy(<cudaStream_t>self.stream)

    def __repr__(self):
        return f"<pynccl.host.Stream {self.stream:#x}>" if self.stream else "<pynccl.host.Stream, closed>"

    def __reduce__(self):
        raise TypeError("a Stream cannot be pickled: it belongs to its process")


class Unheard:
    """What `sys.unraisablehook` wants to know of an error."""

    def __init__(self, error):
        self.exc_type = type(error)
        self.exc_value = error
        self.exc_traceback = error.__traceback__
        self.err_msg = "Exception ignored in a function of a stream that nobody waited for"
        self.object = None


cdef void run_function(void *argument) noexcept nogil:
    """On the stream's thread; at the end of the process there is nobody left to run it for."""
    if Py_IsInitialized():
        run_with_gil(argument)


cdef void run_with_gil(void *argument) noexcept with gil:
    cdef Stream stream
    job = <object>argument
    Py_DECREF(job)
    stream, function, args, kwargs = job
    stream.inside = <unsigned long>PyThread_get_thread_ident()
    try:
        function(*args, **kwargs)
    except BaseException as error:
        stream.errors.append(error)
    stream.inside = 0


cdef class Event:
    """A mark on a stream of the host library: done when all that was before it is.

    Attributes
    ----------
    handle : int
        What stands for a ``cudaEvent_t``, for one in ``CollConfig(launch_completion_event=…)``.

    Notes
    -----
    One that was never recorded is done.  C function: ``pyncclHostEventCreate`` of the host library.

    Examples
    --------
    >>> import pynccl.host
    >>> first, second = pynccl.host.Stream(), pynccl.host.Stream()
    >>> first.call(print, "before")
    >>> second.wait(first.record())
    >>> second.call(print, "after")
    >>> second.synchronize()
    before
    after
    """

    cdef const nccl_api *api
    cdef uintptr_t event
    cdef object __weakref__

    def __cinit__(self):
        cdef cudaEvent_t event = NULL
        self.api = load("host").api
        passed(self.api, self.api.pyncclHostEventCreate(&event), b"pyncclHostEventCreate")
        self.event = <uintptr_t>event

    def __dealloc__(self):
        if self.event:
            self.api.pyncclHostEventDestroy(<cudaEvent_t>self.event)

    @property
    def handle(self):
        """int: What stands for a ``cudaEvent_t``."""
        return self.event

    def record(self, stream=0):
        """Mark what is on a stream now; a mark that was set before is forgotten.

        Parameters
        ----------
        stream : int or stream object, default: 0
            Stream of the host library.

        Raises
        ------
        InvalidArgumentError
            There is no such stream.
        """
        cdef cudaStream_t on = <cudaStream_t>stream_handle(b"record", b"stream", stream)
        cdef ncclResult_t result = self.api.pyncclHostEventRecord(<cudaEvent_t>self.event, on)
        passed(self.api, result, b"pyncclHostEventRecord")

    def wait(self, stream=0):
        """Let all that comes later on a stream wait for the event; on the default stream, the caller waits.

        Parameters
        ----------
        stream : int or stream object, default: 0
            Stream of the host library.

        Raises
        ------
        InvalidArgumentError
            There is no such stream.
        NCCLTimeoutError
            The caller has waited for ``PYNCCL_TIMEOUT``.
        """
        cdef cudaStream_t on = <cudaStream_t>stream_handle(b"wait", b"stream", stream)
        cdef ncclResult_t result
        with nogil:
            result = self.api.pyncclHostStreamWaitEvent(on, <cudaEvent_t>self.event)
        passed(self.api, result, b"pyncclHostStreamWaitEvent")

    def query(self):
        """Tell whether all that was on the stream before the event is done.

        Returns
        -------
        bool
            True also where something has failed; `synchronize` says so.
        """
        cdef ncclResult_t result = self.api.pyncclHostEventQuery(<cudaEvent_t>self.event)
        if result == ncclInProgress:
            return False
        passed(self.api, result, b"pyncclHostEventQuery")
        drop_returned()
        return True

    def synchronize(self, timeout=None):
        """Wait until all that was on the stream before the event is done.

        Parameters
        ----------
        timeout : float or timedelta, optional
            Seconds; ``PYNCCL_TIMEOUT`` by default.

        Raises
        ------
        NCCLTimeoutError
            Something is not done yet; it goes on.
        NCCLError
            The call before the event failed, or one before it of which nobody has heard.
        """
        cdef double seconds = _config.timeout(timeout)
        cdef ncclResult_t result
        with nogil:
            result = self.api.pyncclHostEventSynchronize(<cudaEvent_t>self.event, seconds)
        drop_returned()
        passed(self.api, result, b"pyncclHostEventSynchronize")

    def elapsed_time(self, end):
        """Tell how long after this event another one came.

        Parameters
        ----------
        end : Event
            The later event.

        Returns
        -------
        float
            Milliseconds from this event to `end`.

        Raises
        ------
        InProgressError
            One of them is not done.
        InvalidArgumentError
            One of them was never recorded.
        """
        cdef float milliseconds = 0
        cdef Event other = end
        cdef ncclResult_t result
        if other is None:
            raise TypeError("elapsed_time: end must be an Event, not None")
        result = self.api.pyncclHostEventElapsed(
            &milliseconds, <cudaEvent_t>self.event, <cudaEvent_t>other.event)
        passed(self.api, result, b"pyncclHostEventElapsed")
        return milliseconds

    def __repr__(self):
        return f"<pynccl.host.Event {self.event:#x}>"

    def __reduce__(self):
        raise TypeError("an Event cannot be pickled: it belongs to its process")
