"""The collectives as methods: each is its docstring and one line.

What is checked, and the words of every message, follow from the row of the table in `_call`.
"""

from pynccl._call cimport (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    BROADCAST,
    GATHER,
    RECV,
    REDUCE,
    REDUCE_SCATTER,
    SCATTER,
    SEND,
    UserOp,
)
from pynccl._elem cimport ELEM_FLOAT, ELEM_INT, ElemType, elem_of
from pynccl._nccl cimport (
    CommBase,
    ncclDataType_t,
    ncclRedOp_t,
    ncclResult_t,
    ncclScalarHostImmediate,
    ncclSuccess,
)

import weakref

from pynccl import _scalar
from pynccl.enums import ReduceOp

cdef object SUM = ReduceOp.SUM


cdef class Collectives(CommBase):
    """The communication calls of `pynccl.Communicator`.

    In the shapes below, ``n`` is ``nranks`` and axis 0 is the rank axis.  Arrays may be of any
    library that offers ``__cuda_array_interface__``, DLPack, the buffer protocol or
    ``__array_interface__``; they must be contiguous.  With `out` given, only sizes count.
    """

    def __cinit__(self):
        self.ops = weakref.WeakSet()
        self.retired = []

    def all_reduce(self, x, out=None, op=SUM, *, stream=None, dtype=None, config=None):
        """Reduce across ranks and leave the result on all of them.

        Parameters
        ----------
        x : array_like, shape (...)
            This rank's contribution; read only.
        out : array_like, as many elements as `x`, optional
            Receives the result; allocated in the library of `x` when omitted.
        op : ReduceOp or str or ufunc, default: SUM
            The reduction; also the result of `premul_sum`.
        stream : int or stream object, optional
            Stream that orders the call; the arrays' own stream when omitted.
        dtype : DataType or dtype_like, optional
            Read the memory of `x` and `out` as this type.
        config : CollConfig, optional
            Settings of this call, NCCL 2.31.

        Returns
        -------
        array
            `out`.  On a GPU it is ready when the stream gets there, on the host library at return.

        Raises
        ------
        TypeError
            An argument is no array, its dtype cannot be reduced so, or the dtypes differ.
        ValueError
            The sizes differ, the arrays overlap in part, or `op` is unknown.
        BufferError
            An array is not contiguous, or `out` is read-only.
        NCCLError
            The library reported a failure.

        Notes
        -----
        C function: ``ncclAllReduce``, NCCL 2.0.  In place with ``out=x``.

        Examples
        --------
        >>> import array, pynccl
        >>> with pynccl.Communicator(1, pynccl.unique_id("host"), 0) as comm:
        ...     comm.all_reduce(array.array("d", [1.0, 2.0]))
        array('d', [1.0, 2.0])
        """
        return self.run(ALL_REDUCE, x, out, op, None, stream, dtype, config)

    def reduce(self, x, out=None, op=SUM, root=0, *, stream=None, dtype=None, config=None):
        """Reduce across ranks and leave the result on the root.

        Parameters
        ----------
        x : array_like, shape (...)
            This rank's contribution; read only.
        out : array_like, as many elements as `x`, optional
            Receives the result on the root, where it is allocated when omitted; ignored elsewhere.
        op : ReduceOp or str or ufunc, default: SUM
            The reduction; also the result of `premul_sum`.
        root : int, default: 0
            Rank that receives.
        stream, dtype, config
            As for `all_reduce`.

        Returns
        -------
        array or None
            `out` on the root, None elsewhere.

        Raises
        ------
        TypeError, ValueError, BufferError, NCCLError
            As for `all_reduce`; ``ValueError`` also when `root` is not a rank.

        Notes
        -----
        C function: ``ncclReduce``, NCCL 2.0.  In place with ``out=x`` on the root.

        Examples
        --------
        >>> import array, pynccl
        >>> with pynccl.Communicator(1, pynccl.unique_id("host"), 0) as comm:
        ...     comm.reduce(array.array("i", [3, 4]), op="max", root=0)
        array('i', [3, 4])
        """
        return self.run(REDUCE, x, out, op, root, stream, dtype, config)

    def broadcast(self, x, root=0, *, out=None, stream=None, dtype=None, config=None):
        """Send the root's array to all ranks, in place.

        Parameters
        ----------
        x : array_like, shape (...)
            Sent on the root, overwritten elsewhere.  With `out` it is read on the root and ignored
            elsewhere (pass None).  Any dtype; it is moved as bytes.
        root : int, default: 0
            Rank that sends.
        out : array_like, as many elements as `x`, optional
            Receives on every rank, the root too.
        stream, dtype, config
            As for `all_reduce`.

        Returns
        -------
        array
            `x`, or `out` where it was given.  JAX arrays never change: `x` then only says what is
            received, and the result is a new array.

        Raises
        ------
        TypeError, ValueError, BufferError, NCCLError
            As for `all_reduce`; ``ValueError`` also when `root` is not a rank.

        Notes
        -----
        C function: ``ncclBroadcast``, NCCL 2.0.  In place unless `out` is given.

        Examples
        --------
        >>> import array, pynccl
        >>> with pynccl.Communicator(1, pynccl.unique_id("host"), 0) as comm:
        ...     comm.broadcast(array.array("i", [7]), root=0)
        array('i', [7])
        """
        return self.run(BROADCAST, x, out, None, root, stream, dtype, config)

    def all_gather(self, x, out=None, *, stream=None, dtype=None, config=None):
        """Collect every rank's array on all ranks.

        Parameters
        ----------
        x : array_like, shape (...)
            This rank's block; read only.  Any dtype; it is moved as bytes.
        out : array_like, shape (n, ...) or flat with n times the elements of `x`, optional
            Receives the blocks in rank order; allocated in the library of `x` when omitted.
        stream, dtype, config
            As for `all_reduce`.

        Returns
        -------
        array, shape (n, ...)
            `out`.

        Raises
        ------
        TypeError, ValueError, BufferError, NCCLError
            As for `all_reduce`.

        Notes
        -----
        C function: ``ncclAllGather``, NCCL 2.0.  In place when `x` is ``out[rank]``.

        Examples
        --------
        >>> import array, pynccl
        >>> with pynccl.Communicator(1, pynccl.unique_id("host"), 0) as comm:
        ...     comm.all_gather(array.array("i", [1, 2]))
        array('i', [1, 2])
        """
        return self.run(ALL_GATHER, x, out, None, None, stream, dtype, config)

    def reduce_scatter(self, x, out=None, op=SUM, *, stream=None, dtype=None, config=None):
        """Reduce blocks across ranks and leave block `rank` here.

        Rank r receives `op` over all ranks of ``x[r]``.

        Parameters
        ----------
        x : array_like, shape (n, ...) or flat with a multiple of n elements
            One block per rank; read only.
        out : array_like, shape (...), optional
            Receives this rank's block; allocated in the library of `x` when omitted, which needs
            ``x.shape[0] == n``.
        op : ReduceOp or str or ufunc, default: SUM
            The reduction; also the result of `premul_sum`.
        stream, dtype, config
            As for `all_reduce`.

        Returns
        -------
        array, shape (...)
            `out`.

        Raises
        ------
        TypeError, ValueError, BufferError, NCCLError
            As for `all_reduce`; ``ValueError`` also when `x` is not n blocks.

        Notes
        -----
        C function: ``ncclReduceScatter``, NCCL 2.0.  In place when `out` is ``x[rank]``.

        Examples
        --------
        >>> import array, pynccl
        >>> with pynccl.Communicator(1, pynccl.unique_id("host"), 0) as comm:
        ...     comm.reduce_scatter(array.array("i", [5]))
        array('i', [5])
        """
        return self.run(REDUCE_SCATTER, x, out, op, None, stream, dtype, config)

    def all_to_all(self, x, out=None, *, stream=None, dtype=None, config=None):
        """Send block r of `x` to rank r, and receive one block from every rank.

        Parameters
        ----------
        x : array_like, shape (n, ...) or flat with a multiple of n elements
            One block per rank; read only.  Any dtype; it is moved as bytes.
        out : array_like, as many elements as `x`, optional
            Block r comes from rank r; allocated in the library of `x` when omitted, which needs
            ``x.shape[0] == n``.
        stream, dtype, config
            As for `all_reduce`.

        Returns
        -------
        array, shape (n, ...)
            `out`.

        Raises
        ------
        TypeError, ValueError, BufferError, NCCLError
            As for `all_reduce`; ``ValueError`` also when `x` is not n blocks.

        Notes
        -----
        C function: ``ncclAlltoAll``, NCCL 2.28; grouped sends and receives before.  Never in place.

        Examples
        --------
        >>> import array, pynccl
        >>> with pynccl.Communicator(1, pynccl.unique_id("host"), 0) as comm:
        ...     comm.all_to_all(array.array("i", [5]))
        array('i', [5])
        """
        return self.run(ALL_TO_ALL, x, out, None, None, stream, dtype, config)

    def gather(self, x, out=None, root=0, *, stream=None, dtype=None, config=None):
        """Collect every rank's array on the root.

        Parameters
        ----------
        x : array_like, shape (...)
            This rank's block; read only.  Any dtype; it is moved as bytes.
        out : array_like, shape (n, ...) or flat with n times the elements of `x`, optional
            Receives the blocks in rank order on the root, where it is allocated when omitted;
            ignored elsewhere.
        root : int, default: 0
            Rank that receives.
        stream, dtype, config
            As for `all_reduce`.

        Returns
        -------
        array, shape (n, ...), or None
            `out` on the root, None elsewhere.

        Raises
        ------
        TypeError, ValueError, BufferError, NCCLError
            As for `all_reduce`; ``ValueError`` also when `root` is not a rank.

        Notes
        -----
        C function: ``ncclGather``, NCCL 2.28; grouped sends and receives before.  In place when
        `x` is ``out[root]`` on the root.

        Examples
        --------
        >>> import array, pynccl
        >>> with pynccl.Communicator(1, pynccl.unique_id("host"), 0) as comm:
        ...     comm.gather(array.array("i", [1, 2]), root=0)
        array('i', [1, 2])
        """
        return self.run(GATHER, x, out, None, root, stream, dtype, config)

    def scatter(self, x, out=None, root=0, *, stream=None, dtype=None, config=None):
        """Send block r of the root's array to rank r.

        Parameters
        ----------
        x : array_like, shape (n, ...) or flat with a multiple of n elements
            One block per rank, read on the root; ignored elsewhere (pass None).  Any dtype; it is
            moved as bytes.
        out : array_like, shape (...), optional
            Receives this rank's block.  May be omitted only on the root, and there needs
            ``x.shape[0] == n``.
        root : int, default: 0
            Rank that sends.
        stream, dtype, config
            As for `all_reduce`.

        Returns
        -------
        array, shape (...)
            `out`.

        Raises
        ------
        TypeError, ValueError, BufferError, NCCLError
            As for `all_reduce`; ``ValueError`` also when `root` is not a rank, or `out` is missing.

        Notes
        -----
        C function: ``ncclScatter``, NCCL 2.28; grouped sends and receives before.  In place when
        `out` is ``x[root]`` on the root.

        Examples
        --------
        >>> import array, pynccl
        >>> with pynccl.Communicator(1, pynccl.unique_id("host"), 0) as comm:
        ...     comm.scatter(array.array("i", [8]), root=0)
        array('i', [8])
        """
        return self.run(SCATTER, x, out, None, root, stream, dtype, config)

    def send(self, x, peer, *, stream=None, dtype=None):
        """Send an array to one rank.

        A send outside a group is done only when the peer receives; two ranks that both send first
        need a `pynccl.group`, or `send_recv`.

        Parameters
        ----------
        x : array_like, shape (...)
            What to send; read only.  Any dtype; it is moved as bytes.
        peer : int
            Rank that receives.
        stream, dtype
            As for `all_reduce`.

        Raises
        ------
        TypeError, ValueError, BufferError, NCCLError
            As for `all_reduce`; ``ValueError`` also when `peer` is not a rank.

        Notes
        -----
        C function: ``ncclSend``, NCCL 2.7.

        Examples
        --------
        >>> import array, pynccl
        >>> with pynccl.Communicator(1, pynccl.unique_id("host"), 0) as comm:
        ...     out = array.array("i", [0])
        ...     with pynccl.group():
        ...         comm.send(array.array("i", [4]), peer=0)
        ...         comm.recv(out, peer=0) is out
        ...     out
        True
        array('i', [4])
        """
        self.run(SEND, x, x, None, peer, stream, dtype, None)

    def recv(self, out, peer, *, stream=None, dtype=None):
        """Receive an array from one rank.

        Parameters
        ----------
        out : array_like, shape (...)
            Receives as many elements as the peer sends.
        peer : int
            Rank that sends.
        stream, dtype
            As for `all_reduce`.

        Returns
        -------
        array
            `out`.

        Raises
        ------
        TypeError, ValueError, BufferError, NCCLError
            As for `all_reduce`; ``ValueError`` also when `peer` is not a rank.

        Notes
        -----
        C function: ``ncclRecv``, NCCL 2.7.

        Examples
        --------
        >>> import array, pynccl
        >>> with pynccl.Communicator(1, pynccl.unique_id("host"), 0) as comm:
        ...     out = array.array("i", [0])
        ...     with pynccl.group():
        ...         comm.send(array.array("i", [4]), peer=0)
        ...         _ = comm.recv(out, peer=0)
        ...     out
        array('i', [4])
        """
        return self.run(RECV, None, out, None, peer, stream, dtype, None)

    def send_recv(self, x, dest, out=None, source=None, *, stream=None, dtype=None):
        """Send to one rank and receive from another at the same time.

        Parameters
        ----------
        x : array_like, shape (...)
            What to send; read only.  Any dtype; it is moved as bytes.
        dest : int
            Rank that receives `x`.
        out : array_like, optional
            Receives as many elements as `source` sends; allocated like `x` when omitted.
        source : int, default: `dest`
            Rank to receive from.
        stream, dtype
            As for `all_reduce`.

        Returns
        -------
        array
            `out`.

        Raises
        ------
        TypeError, ValueError, BufferError, NCCLError
            As for `all_reduce`; ``ValueError`` also when `dest` or `source` is not a rank.

        Notes
        -----
        C functions: ``ncclSend`` and ``ncclRecv`` inside ``ncclGroupStart`` and ``ncclGroupEnd``,
        NCCL 2.7.  Never in place.

        Examples
        --------
        >>> import array, pynccl
        >>> with pynccl.Communicator(1, pynccl.unique_id("host"), 0) as comm:
        ...     comm.send_recv(array.array("i", [4]), dest=0)
        array('i', [4])
        """
        return self.exchange(x, dest, out, dest if source is None else source, stream, dtype)

    def barrier(self, *, stream=None):
        """Wait until every rank has called it.

        Parameters
        ----------
        stream : int or stream object, optional
            Stream whose earlier work is waited for too, on a GPU.

        Raises
        ------
        ValueError
            Called inside a group.
        NCCLError
            The library reported a failure.

        Notes
        -----
        C function: ``ncclAllReduce`` of one element of the communicator's own, then a wait for the
        stream.

        Examples
        --------
        >>> import pynccl
        >>> with pynccl.Communicator(1, pynccl.unique_id("host"), 0) as comm:
        ...     comm.barrier()
        """
        self.meet(stream)

    def premul_sum(self, scalar, dtype):
        """Make an op that multiplies this rank's input by a scalar and sums the products.

        Parameters
        ----------
        scalar : int or float
            The factor; it may differ between ranks.
        dtype : DataType or dtype_like
            Type of the arrays; the scalar is rounded to it once.

        Returns
        -------
        UserOp
            For `op` of `all_reduce`, `reduce` and `reduce_scatter` of this communicator.

        Raises
        ------
        TypeError
            `dtype` is not one that NCCL reduces, or `scalar` is not a real number.
        OverflowError
            `scalar` does not fit in `dtype`.

        Notes
        -----
        C function: ``ncclRedOpCreatePreMulSum``, NCCL 2.11.

        Examples
        --------
        >>> import array, pynccl
        >>> with pynccl.Communicator(1, pynccl.unique_id("host"), 0) as comm:
        ...     half = comm.premul_sum(0.5, "float64")
        ...     comm.all_reduce(array.array("d", [4.0]), op=half)
        array('d', [2.0])
        """
        cdef const ElemType *elem = elem_of(dtype)
        cdef ncclRedOp_t code
        cdef ncclResult_t result
        cdef bytes raw
        cdef char *data
        cdef UserOp op
        self.ready(b"premul_sum")
        if elem.kind != ELEM_INT and elem.kind != ELEM_FLOAT or elem.nccl < 0:
            raise TypeError(f"premul_sum: {elem.name.decode()} cannot be multiplied and summed")
        raw = _scalar.pack(scalar, elem.name.decode())
        data = raw
        self.destroy_retired()
        with nogil:
            result = self.api.ncclRedOpCreatePreMulSum(
                &code, data, <ncclDataType_t>elem.nccl, ncclScalarHostImmediate, self.handle)
        if result != ncclSuccess:
            self.settle(result, b"ncclRedOpCreatePreMulSum")
        op = UserOp.__new__(UserOp)
        op.code = <int>code
        op.comm = <void *>self
        op.elem = elem
        op.scalar = scalar
        op.retired = self.retired
        self.ops.add(op)
        return op

    cdef int destroy_retired(self) except -1:
        # An op's finaliser may run on any thread at any time; the C call must not.
        while self.retired:
            self.api.ncclRedOpDestroy(<ncclRedOp_t><int>self.retired.pop(), self.handle)
        return 0
