"""The only reader of array protocols: any array becomes a BufferView, or an exception that says why not.

Reading order: ``view`` names the protocols, in the order in which they are tried; below it is one reader for each.
(The two array interfaces are in _interface.pyx, DLPack in _dlpack.pyx, NumPy's struct in _ndarray.pyx, and what is
special about Torch and Numba in _torch.pyx and _numba.pyx.)

A protocol is absent if its attribute is (AttributeError); every other exception is the array's own and passes.
All state of this module is written once, at import.
"""

import sys
from operator import index

cimport cython
from cpython.buffer cimport Py_buffer
from cpython.object cimport PyObject, PyTypeObject
from cpython.ref cimport Py_INCREF
from libc.stdint cimport uintptr_t
from libc.string cimport memset, strcmp

from pynccl._dlpack cimport tensor_of_capsule, tensor_of_table, view_tensor
from pynccl._elem cimport OPAQUE, ElemType, Found, copy_name, elem_of, read_format
from pynccl._interface cimport view_interface
from pynccl._ndarray cimport (
    ND_C_CONTIGUOUS, ND_F_CONTIGUOUS, ND_WRITEABLE, NDArray, is_masked, is_ndarray, native_elem, ndarray_type,
    read_dtype, struct_agrees,
)
from pynccl._numba cimport device_array, learn_device_array, view_device_array
from pynccl._torch cimport (
    check_lazy, is_tensor, keep_tensor, plain_parameter, plain_tensor, view_torch, without_grad,
)
from pynccl._view cimport PyObject_GetOptionalAttr, Raw, finish, masked, of_jax, settle, take, who

from .errors import LayoutError

cdef extern from *:
    """
    #define offers_buffer(tp) ((tp)->tp_as_buffer != NULL && (tp)->tp_as_buffer->bf_getbuffer != NULL)
    """
    PyObject *_PyType_Lookup(PyTypeObject *, object)
    object PyMemoryView_FromObject(object)
    Py_buffer *PyMemoryView_GET_BUFFER(object) noexcept
    PyTypeObject *Py_TYPE(object) noexcept
    bint offers_buffer(PyTypeObject *) noexcept
    const Py_ssize_t PY_SSIZE_T_MAX
    const uintptr_t UINTPTR_MAX

# Where the protocols are found.
cdef object EXCHANGE_TABLE = sys.intern("__dlpack_c_exchange_api__")
cdef object CUDA_INTERFACE = sys.intern("__cuda_array_interface__")
cdef object EXPORT = sys.intern("__dlpack__")
cdef object ARRAY_INTERFACE = sys.intern("__array_interface__")
cdef object LAZY = sys.intern("is_neg")         # a method that hardly any type but Torch's has


# ---- from any array to a view ------------------------------------------------------------------------------


cdef int view(object obj, BufferView *out, const Ask *ask) except -1:
    """Fill `out` from any array; after an exception it holds nothing."""
    cdef PyTypeObject *tp = Py_TYPE(obj)
    cdef PyObject *said = NULL
    cdef bint exporter
    out.owner = NULL
    out.has_stream = False
    out.device = -1
    if tp == ndarray_type and struct_agrees:
        return view_ndarray(obj, out, ask)
    if tp == <PyTypeObject *>Buffer:
        return view_buffer(<Buffer>obj, out, ask)
    if tp == plain_tensor or tp == plain_parameter:
        return view_torch(obj, out, ask)
    if tp == device_array and view_device_array(obj, out, ask):
        return 0
    exporter = offers_buffer(tp)
    if exporter and is_ndarray(tp):
        return view_subclass(obj, out, ask)
    if _PyType_Lookup(tp, LAZY) != NULL and is_tensor(tp):
        if plain_tensor != NULL:
            return view_torch(obj, out, ask)
        check_lazy(obj, True, ask)
        obj = without_grad(obj)
    said = _PyType_Lookup(tp, EXCHANGE_TABLE)
    if said != NULL and view_tensor(tensor_of_table(obj, said, ask), out, ask):
        return 0
    if exporter and not ask.on_device and view_exporter(obj, out, ask):
        return 0
    if is_simulated(tp):
        return view(obj._ary, out, ask)
    if PyObject_GetOptionalAttr(obj, CUDA_INTERFACE, &said):
        if device_array == NULL and strcmp(tp.tp_name, b"DeviceNDArray") == 0 and isinstance(<object>said, dict):
            learn_device_array(obj, <object>said)
        return view_interface(obj, take(said), out, ask, True)
    if exporter and ask.on_device and view_exporter(obj, out, ask):
        return 0
    if PyObject_GetOptionalAttr(obj, EXPORT, &said):
        return view_tensor(tensor_of_capsule(obj, take(said), ask), out, ask)
    if PyObject_GetOptionalAttr(obj, ARRAY_INTERFACE, &said):
        return view_interface(obj, take(said), out, ask, False)
    raise no_protocol(obj, ask)


cdef object keep(object obj):
    """What must live so that the memory does, where the array itself is not enough; else None.

    A tensor can be given other memory (``x.data = y``).  A call need not fear that; who reads now and uses later has to
    hold the memory that was read.
    """
    if _PyType_Lookup(Py_TYPE(obj), LAZY) == NULL or not is_tensor(Py_TYPE(obj)):
        return None
    return keep_tensor(obj)


# ---- Buffer and NumPy --------------------------------------------------------------------------------------


cdef int view_buffer(Buffer buffer, BufferView *out, const Ask *ask) except -1:
    if buffer.view.elem == NULL:
        raise ValueError(f"{who(ask)} is a Buffer that was never initialised")
    out[0] = buffer.view
    return finish(False, out, ask)


cdef int view_subclass(object obj, BufferView *out, const Ask *ask) except -1:
    """Read an array of a subclass of NumPy's, or of a NumPy whose struct is not the one that we know."""
    cdef PyObject *said = NULL
    # Numba's mapped arrays are NumPy arrays; to NCCL they are device memory.
    if ask.on_device and PyObject_GetOptionalAttr(obj, CUDA_INTERFACE, &said):
        return view_interface(obj, take(said), out, ask, True)
    if is_masked(obj):
        raise masked(ask)
    if struct_agrees:
        return view_ndarray(obj, out, ask)
    return view_interface(obj, obj.__array_interface__, out, ask, False)


cdef int view_ndarray(object obj, BufferView *out, const Ask *ask) except -1:
    """Read the struct behind a NumPy array."""
    cdef NDArray *nd = <NDArray *><PyObject *>obj
    cdef const ElemType *elem = native_elem(nd.descr)
    cdef int order = nd.flags & (ND_C_CONTIGUOUS | ND_F_CONTIGUOUS)
    cdef size_t count = 1
    cdef Raw raw
    cdef int i
    if elem == NULL or not order:
        # Everything unusual: other dtypes, and what the messages need.
        raw.ptr = nd.data
        raw.ndim = nd.nd
        raw.shape = nd.dimensions
        raw.strides = nd.strides
        raw.readonly = not nd.flags & ND_WRITEABLE
        if not read_dtype(<object><PyObject *>nd.descr, &raw.found, out.type_name):
            raise TypeError(f"{who(ask)} has dtype {obj.dtype}, whose elements are references, not data")
        return settle(&raw, out, ask)
    for i in range(nd.nd):
        count *= <size_t>nd.dimensions[i]
    out.elem = elem
    out.itemsize = <size_t>elem.itemsize
    out.count = count
    out.nbytes = count * out.itemsize
    out.ptr = nd.data if count else NULL
    out.readonly = not nd.flags & ND_WRITEABLE
    if order == ND_C_CONTIGUOUS | ND_F_CONTIGUOUS:
        out.order = ORDER_BOTH
    else:
        out.order = ORDER_C if order == ND_C_CONTIGUOUS else ORDER_F
    return finish(False, out, ask)


cdef inline bint is_simulated(PyTypeObject *tp) except -1:
    """Whether this is the device array of Numba's CUDA simulator: a NumPy array under a cover."""
    if tp.tp_name[0] != c"F" or strcmp(tp.tp_name, b"FakeCUDAArray") != 0:
        return False
    return ".simulator." in (<object>tp).__module__


# ---- PEP 3118 ----------------------------------------------------------------------------------------------


cdef int view_exporter(object obj, BufferView *out, const Ask *ask) except -1:
    """Read a PEP 3118 buffer; 1, or 0 if it has no word for the elements and DLPack may have one.

    The export is held until release, so that a bytearray cannot move meanwhile.
    """
    cdef object held
    cdef Py_buffer *buffer
    cdef Raw raw
    try:
        held = PyMemoryView_FromObject(obj)
    except BufferError:                         # JAX's bfloat16
        if _PyType_Lookup(Py_TYPE(obj), EXPORT) == NULL:
            raise
        if of_jax(obj):
            if obj.is_deleted():
                raise ValueError(f"{who(ask)} is a JAX array that was deleted, or donated to a function") from None
            if len(obj.devices()) > 1:
                raise ValueError(
                    f"{who(ask)} is a JAX array on {len(obj.devices())} devices, which is not one block; pass the data "
                    "of one of its addressable_shards"
                ) from None
        return 0
    buffer = PyMemoryView_GET_BUFFER(held)
    raw.ptr = <char *>buffer.buf
    raw.ndim = buffer.ndim
    raw.shape = buffer.shape
    raw.strides = buffer.strides
    raw.readonly = buffer.readonly
    if buffer.suboffsets != NULL:
        raise LayoutError(f"{who(ask)} is an array of pointers to its rows (PEP 3118 suboffsets), not one block")
    if read_format(buffer.format, buffer.itemsize, &raw.found) < 0:
        raise TypeError(f"{who(ask)} has format {buffer.format.decode()!r}, whose elements are references, not data")
    if raw.found.elem == OPAQUE:
        copy_name(out.type_name, buffer.format.decode("utf-8", "replace") if buffer.format != NULL else "B")
    settle(&raw, out, ask)
    Py_INCREF(held)
    out.owner = <PyObject *>held
    return 1


# ---- what is no array --------------------------------------------------------------------------------------


cdef object no_protocol(object obj, const Ask *ask):
    """A TypeError that says what was looked for; its cause, where a property said AttributeError."""
    cdef object error, advice
    if isinstance(obj, int):
        advice = "for a raw address there is pynccl.Buffer(ptr=, count=, dtype=)"
    elif isinstance(obj, (list, tuple, float, complex)):
        advice = "pass an array, e.g. numpy.asarray(...)"
    else:
        advice = "pass an array"
    error = TypeError(
        f"{who(ask)} is a {type(obj).__name__!r}, which offers none of DLPack, the buffer protocol, "
        f"__cuda_array_interface__, __array_interface__; {advice}"
    )
    for name in (CUDA_INTERFACE, ARRAY_INTERFACE):
        if _PyType_Lookup(Py_TYPE(obj), name) != NULL:
            try:
                getattr(obj, name)
            except AttributeError as cause:
                error.__cause__ = cause
    return error


# ---- Buffer ------------------------------------------------------------------------------------------------


@cython.final
@cython.freelist(16)
cdef class Buffer:
    """Buffer(x=None, dtype=None, *, ptr=None, count=None, device=-1, readonly=False)
--

    An array resolved once, or raw memory: the cheapest argument of every call.

    A call that is given an array asks it where its data is.  A `Buffer` has asked already: it remembers the
    address, the count and the element type, and keeps the array alive.

    Parameters
    ----------
    x : array-like, optional
        Anything that a call accepts: an object with ``__cuda_array_interface__``, DLPack, the buffer protocol or
        ``__array_interface__``.
    dtype : dtype-like, optional
        With `x`, how its bytes are to be read, for arrays whose own type says too little (bfloat16 shows up as
        ``'<V2'`` in some libraries); nothing is converted.  With `ptr`, the element type.
    ptr : int, optional
        Address of raw memory, which the caller keeps alive.
    count : int, optional
        How many elements are at `ptr`.
    device : int, optional
        The CUDA device that the memory at `ptr` belongs to; -1 is host memory.
    readonly : bool, optional
        Whether the memory at `ptr` may only be read.

    Raises
    ------
    TypeError
        `x` offers no array protocol, or holds references, or `dtype` does not fit.
    ValueError
        A size, an address or an alignment is impossible, or `x` has a mask.
    LayoutError
        `x` is not contiguous.

    Notes
    -----
    A Buffer holds what it saw: an array that is given other memory later (``resize``, ``set_``) needs a new one.

    Examples
    --------
    >>> import array, pynccl
    >>> pynccl.Buffer(array.array("f", [1, 2, 3]))
    <Buffer of 3 x float32 on host>
    """

    def __init__(self, x=None, dtype=None, *, ptr=None, count=None, device=-1, readonly=False):
        cdef BufferView fresh
        cdef Ask ask = Ask(b"Buffer", b"x", False, False, NULL)
        cdef object base = x
        if self.view.elem != NULL:
            raise TypeError("Buffer: it is initialised already, and a call may be using it")
        if (x is None) == (ptr is None):
            raise TypeError("Buffer: pass either an array x, or ptr= with count= and dtype=")
        memset(&fresh, 0, sizeof(fresh))
        if dtype is not None:
            ask.as_elem = elem_of(dtype)
        if x is None:
            raw_memory(&fresh, ptr, count, ask.as_elem, device, readonly)
        else:
            if count is not None or device != -1 or readonly is not False:
                raise TypeError(
                    "Buffer: count=, device= and readonly= describe raw memory at ptr=; an array x has its own"
                )
            view(x, &fresh, &ask)
            if fresh.owner != NULL:
                base = (x, <object>fresh.owner)
                release(&fresh)
            else:
                kept = keep(x)
                if kept is not None:
                    base = (x, kept)
        self.view = fresh
        self.base = base
        self.said = dtype

    @property
    def obj(self):
        """The array that it was made of; None for raw memory."""
        return self.base[0] if type(self.base) is tuple else self.base

    @property
    def ptr(self):
        """Address of the first element; 0 if there is none."""
        return <uintptr_t>self.view.ptr

    @property
    def count(self):
        """Number of elements."""
        return self.view.count

    @property
    def dtype(self):
        """Name of the element type, e.g. ``'float32'``."""
        return type_name(&self.view).decode() if self.view.elem != NULL else None

    @property
    def itemsize(self):
        """Size of one element in bytes."""
        return self.view.itemsize

    @property
    def nbytes(self):
        """Size of the whole in bytes."""
        return self.view.nbytes

    @property
    def device(self):
        """The CUDA device that holds the data; -1 is host memory."""
        return self.view.device

    @property
    def readonly(self):
        """Whether the data may only be read."""
        return self.view.readonly

    @property
    def order(self):
        """``'C'`` or ``'F'``; ``'A'`` where both are the same, with at most one axis longer than 1."""
        return "ACF"[self.view.order]

    @property
    def stream(self):
        """The stream that the array's producer named, or None."""
        return self.view.stream if self.view.has_stream else None

    def __len__(self):
        return self.view.count

    def __repr__(self):
        if self.view.elem == NULL:
            return "<Buffer, not initialised>"
        where = "host" if self.view.device < 0 else f"device {self.view.device}"
        return f"<Buffer of {self.view.count} x {self.dtype} on {where}{', read-only' if self.view.readonly else ''}>"

    def __reduce__(self):
        raise TypeError("a Buffer holds an address of this process and cannot be pickled")


cdef int raw_memory(
    BufferView *out, object ptr, object count, const ElemType *elem, object device, object readonly,
) except -1:
    """Check the arguments of Buffer(ptr=...)."""
    cdef Ask ask = Ask(b"Buffer", b"ptr", False, False, NULL)
    cdef Raw raw
    cdef Py_ssize_t length
    if elem == NULL or count is None:
        raise TypeError("Buffer: ptr= needs count= and dtype=")
    ptr = integer("ptr", ptr)
    count = integer("count", count)
    device = integer("device", device)
    if not 0 <= ptr <= UINTPTR_MAX or not 0 <= count <= PY_SSIZE_T_MAX:
        raise ValueError(f"Buffer: ptr={ptr}, count={count}: not an address and a number of elements")
    if not -1 <= device <= 0x7FFFFFFF:
        raise ValueError(f"Buffer: device={device}; a device has a number from 0 on, and -1 is host memory")
    length = count
    raw.ptr = <char *><uintptr_t>ptr
    raw.ndim = 1
    raw.shape = &length
    raw.strides = NULL
    raw.readonly = bool(readonly)
    raw.found = Found(elem, <size_t>elem.itemsize, False, False)
    settle(&raw, out, &ask)
    out.device = device
    return 0


cdef object integer(str name, object value):
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"Buffer: {name} is {value!r}, not an integer")
    return index(value)
