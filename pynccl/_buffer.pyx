"""The only reader of array protocols: any array becomes a BufferView, or an exception that says why not.

Reading order: ``view`` at the end of the first part names the protocols; each has one reader, which says what it
found in a ``Raw``; ``settle`` checks that against the rules which are the same for all.

A protocol is absent if its attribute is (AttributeError); every other exception is the array's own and passes.
All state of this module is written once.
"""

import sys

cimport cython
from cpython.buffer cimport Py_buffer
from cpython.bool cimport PyBool_Check
from cpython.dict cimport PyDict_Next
from cpython.long cimport PyLong_AsSsize_t, PyLong_CheckExact
from cpython.object cimport PyObject, PyTypeObject
from cpython.ref cimport Py_INCREF, Py_XDECREF
from libc.stdint cimport uintptr_t
from libc.string cimport memset, strcmp

from pynccl._device cimport pointer_device
from pynccl._dlpack cimport DL_CUDA, DL_CUDA_MANAGED, DLTensor, Tensor, read_dltype, tensor_of_capsule, tensor_of_table
from pynccl._elem cimport (
    ELEM_INT, OPAQUE, TYPE_NAME, ElemType, Found, copy_name, dtype_name, elem_named, elem_of, read_format,
    read_typestr,
)
from pynccl._ndarray cimport (
    ND_ALIGNED, ND_BEHAVED, ND_BUILTIN, ND_C_CONTIGUOUS, ND_F_CONTIGUOUS, ND_WRITEABLE, NDArray, builtin_elem,
    is_masked, is_ndarray, ndarray_type, read_dtype, struct_agrees,
)

from .errors import LayoutError

cdef extern from *:
    """
    #if PY_VERSION_HEX < 0x030D0000     /* public, under this name, since 3.13 */
    #define PyObject_GetOptionalAttr _PyObject_LookupAttr
    #endif
    #define mul_overflows(a, b, to) __builtin_mul_overflow(a, b, to)
    #define offers_buffer(tp) ((tp)->tp_as_buffer != NULL && (tp)->tp_as_buffer->bf_getbuffer != NULL)
    #define NATIVE_ORDERS(order) ((order) == '=' || (order) == '|')
    """
    int PyObject_GetOptionalAttr(object, object, PyObject **) except -1
    PyObject *_PyType_Lookup(PyTypeObject *, object)
    object PyMemoryView_FromObject(object)
    Py_buffer *PyMemoryView_GET_BUFFER(object) noexcept
    const char *PyUnicode_AsUTF8AndSize(object, Py_ssize_t *) except NULL
    PyTypeObject *Py_TYPE(object) noexcept
    bint PyType_IsSubtype(PyTypeObject *, PyTypeObject *) noexcept
    bint mul_overflows(size_t, size_t, size_t *) noexcept
    bint stride_overflows "mul_overflows"(Py_ssize_t, Py_ssize_t, Py_ssize_t *) noexcept
    bint offers_buffer(PyTypeObject *) noexcept
    bint NATIVE_ORDERS(char) noexcept
    const Py_ssize_t PY_SSIZE_T_MAX
    const uintptr_t UINTPTR_MAX

cdef enum:
    MAX_AXES = 64

# What a protocol says, before anything of it is believed.
cdef struct Raw:
    char *ptr
    int ndim
    Py_ssize_t *shape
    Py_ssize_t *strides         # bytes; NULL = C order
    Found found
    bint readonly

# Keys of the array interfaces.  A literal in a producer's code is interned too, so that the dict's own key is
# usually this very object.
cdef object SHAPE = sys.intern("shape")
cdef object TYPESTR = sys.intern("typestr")
cdef object DATA = sys.intern("data")
cdef object VERSION = sys.intern("version")
cdef object STRIDES = sys.intern("strides")
cdef object STREAM = sys.intern("stream")
cdef object MASK = sys.intern("mask")
cdef object DESCR = sys.intern("descr")
cdef object CUDA_INTERFACE = sys.intern("__cuda_array_interface__")
cdef object EXCHANGE_TABLE = sys.intern("__dlpack_c_exchange_api__")
cdef object EXPORT = sys.intern("__dlpack__")
cdef object ARRAY_INTERFACE = sys.intern("__array_interface__")


# ---- from any array to a view -----------------------------------------------------------------------------


cdef int view(object obj, BufferView *out, const Ask *ask) except -1:
    """Fill `out` from any array; on an exception it holds nothing."""
    cdef PyTypeObject *tp = Py_TYPE(obj)
    cdef PyObject *said = NULL
    cdef bint numpy_array
    out.owner = NULL
    out.has_stream = False
    out.device = -1
    if tp == ndarray_type and struct_agrees:
        return view_ndarray(obj, out, ask)
    if tp == <PyTypeObject *>Buffer:
        return view_buffer(<Buffer>obj, out, ask)
    numpy_array = offers_buffer(tp) and is_ndarray(tp)
    if not numpy_array:
        said = _PyType_Lookup(tp, EXCHANGE_TABLE)
        if said != NULL and view_tensor(tensor_of_table(obj, said), out, ask):
            return 0
        if tp.tp_name[0] == c"F" and is_simulated(tp):
            return view(obj._ary, out, ask)
    # Numba's mapped arrays are NumPy arrays too; to NCCL they are device memory.
    if not numpy_array or (ask.on_device and tp != ndarray_type):
        if not ask.on_device and offers_buffer(tp):
            return view_exporter(obj, out, ask)
        if PyObject_GetOptionalAttr(obj, CUDA_INTERFACE, &said):
            return view_interface(obj, take(said), out, ask, True)
    if numpy_array:
        if is_masked(obj):
            raise masked(ask)
        if struct_agrees:
            return view_ndarray(obj, out, ask)
    elif offers_buffer(tp):
        return view_exporter(obj, out, ask)
    elif PyObject_GetOptionalAttr(obj, EXPORT, &said):
        return view_tensor(tensor_of_capsule(obj, take(said)), out, ask)
    if PyObject_GetOptionalAttr(obj, ARRAY_INTERFACE, &said):
        return view_interface(obj, take(said), out, ask, False)
    raise no_protocol(obj, ask)


cdef inline object take(PyObject *owned):
    """Make an owned reference that came as a pointer an ordinary one."""
    cdef object it = <object>owned
    Py_XDECREF(owned)
    return it


cdef void release(BufferView *v) noexcept:
    """Give back what the view holds of the array; doing it again is harmless."""
    cdef PyObject *owner = v.owner
    v.owner = NULL
    Py_XDECREF(owner)


cdef const char *type_name(const BufferView *v) noexcept:
    """The name of the view's element type, for messages."""
    if v.elem == OPAQUE:
        return v.type_name
    return v.elem.name


cdef bint same_type(const BufferView *a, const BufferView *b) noexcept:
    """Whether two views hold the same kind of element."""
    return a.elem == b.elem and a.itemsize == b.itemsize and (a.elem != OPAQUE or strcmp(a.type_name, b.type_name) == 0)


# ---- the rules that are the same for every protocol --------------------------------------------------------


cdef int settle(Raw *raw, BufferView *out, const Ask *ask) except -1:
    """Check shape, size and layout, and fill in what follows from them."""
    cdef size_t count = 1
    cdef size_t nbytes
    cdef bint empty = False
    cdef bint too_large = False
    cdef int long_axes = 0
    cdef int i
    for i in range(raw.ndim):
        if raw.shape[i] == 1:
            continue
        if raw.shape[i] < 0:
            raise ValueError(f"{who(ask)} has a negative length in its shape {shape_of(raw)}")
        long_axes += 1
        if raw.shape[i] == 0:
            empty = True
        elif mul_overflows(count, <size_t>raw.shape[i], &count):
            too_large = True
    out.elem = raw.found.elem
    out.itemsize = raw.found.itemsize
    out.readonly = raw.readonly
    out.order = ORDER_BOTH
    if empty:
        # An empty array has no address: 0, None and garbage are all fine.
        out.ptr = NULL
        out.count = 0
        out.nbytes = 0
        return finish(raw.found.foreign, out, ask)
    if too_large or mul_overflows(count, out.itemsize, &nbytes) or nbytes > <size_t>PY_SSIZE_T_MAX:
        raise ValueError(
            f"{who(ask)} has shape {shape_of(raw)} and itemsize {out.itemsize}: more bytes than there are addresses"
        )
    if raw.ptr == NULL:
        raise ValueError(f"{who(ask)} has {count} elements, but its data pointer is 0")
    out.ptr = raw.ptr
    out.count = count
    out.nbytes = nbytes
    if long_axes > 1:
        out.order = ORDER_C
    if raw.strides != NULL and not dense(raw, False):
        if long_axes < 2 or not dense(raw, True):
            raise not_contiguous(raw, ask)
        out.order = ORDER_F
    return finish(raw.found.foreign, out, ask)


cdef inline bint dense(Raw *raw, bint first_fastest) noexcept:
    """Whether the strides of the axes longer than 1 are those of C, or of Fortran order."""
    cdef Py_ssize_t expected = <Py_ssize_t>raw.found.itemsize
    cdef int i, axis
    for i in range(raw.ndim):
        axis = i if first_fastest else raw.ndim - 1 - i
        if raw.shape[axis] != 1:
            if raw.strides[axis] != expected:
                return False
            expected *= raw.shape[axis]
    return True


cdef inline int finish(bint foreign, BufferView *out, const Ask *ask) except -1:
    """Check what does not depend on the shape; apply dtype=."""
    if ask.writable and out.readonly:
        raise BufferError(f"{who(ask)} is read-only; pass an array that may be written to")
    if ask.as_elem != NULL:
        reinterpret(foreign, out, ask)
    elif foreign:
        raise TypeError(
            f"{who(ask)} holds {type_name(out).decode()} in foreign byte order; convert it first, "
            "e.g. x.astype(x.dtype.newbyteorder('='))"
        )
    # An NCCL type is read element by element.  What is moved only is moved as bytes.
    if out.elem.nccl >= 0 and <uintptr_t>out.ptr & <uintptr_t>((out.elem.itemsize >> (out.elem.width - 1)) - 1):
        raise misaligned(out, ask)
    return 0


cdef int reinterpret(bint foreign, BufferView *out, const Ask *ask) except -1:
    """See the bytes as another element type, where that is no slip: it converts nothing."""
    cdef const ElemType *elem = ask.as_elem
    cdef bint as_bytes = elem.itemsize == 1 and elem.kind == ELEM_INT
    cdef bint from_bytes = out.elem == OPAQUE or (out.itemsize == 1 and out.elem.kind == ELEM_INT)
    cdef bint same_size = out.itemsize == <size_t>elem.itemsize
    cdef bint complex_parts = elem.nccl >= 0 and elem.nccl == out.elem.nccl
    if not (as_bytes or ((from_bytes or same_size or complex_parts) and not foreign)):
        raise TypeError(
            f"{who(ask)} holds {type_name(out).decode()}, which dtype={elem.name.decode()!r} does not fit: dtype= says "
            "how the bytes are to be read and converts nothing; convert the array, e.g. with its astype()"
        )
    if out.nbytes % <size_t>elem.itemsize:
        raise ValueError(
            f"{who(ask)} has {out.nbytes} bytes, not a multiple of {elem.itemsize}, the size of "
            f"dtype={elem.name.decode()!r}"
        )
    out.elem = elem
    out.itemsize = <size_t>elem.itemsize
    out.count = out.nbytes // out.itemsize
    return 0


# ---- Buffer and NumPy --------------------------------------------------------------------------------------


cdef int view_buffer(Buffer buffer, BufferView *out, const Ask *ask) except -1:
    if buffer.view.elem == NULL:
        raise ValueError(f"{who(ask)} is a Buffer that was never initialised")
    out[0] = buffer.view
    return finish(False, out, ask)


cdef int view_ndarray(object obj, BufferView *out, const Ask *ask) except -1:
    """Read the struct behind a NumPy array."""
    cdef NDArray *nd = <NDArray *><PyObject *>obj
    cdef const ElemType *elem = NULL
    cdef size_t count = 1
    cdef Raw raw
    cdef int i
    if 0 <= nd.descr.num < ND_BUILTIN and NATIVE_ORDERS(nd.descr.byteorder):
        elem = builtin_elem[nd.descr.num]
    if elem == NULL or not nd.flags & (ND_C_CONTIGUOUS | ND_F_CONTIGUOUS):
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
    if nd.flags & (ND_C_CONTIGUOUS | ND_F_CONTIGUOUS) == ND_C_CONTIGUOUS | ND_F_CONTIGUOUS:
        out.order = ORDER_BOTH
    else:
        out.order = ORDER_C if nd.flags & ND_C_CONTIGUOUS else ORDER_F
    return finish(False, out, ask)


# ---- PEP 3118 ----------------------------------------------------------------------------------------------


cdef int view_exporter(object obj, BufferView *out, const Ask *ask) except -1:
    """Read a PEP 3118 buffer.  The export is held until release, so that a bytearray cannot move meanwhile."""
    cdef object held = PyMemoryView_FromObject(obj)
    cdef Py_buffer *buffer = PyMemoryView_GET_BUFFER(held)
    cdef Raw raw
    raw.ptr = <char *>buffer.buf
    raw.ndim = buffer.ndim
    raw.shape = buffer.shape
    raw.strides = buffer.strides
    raw.readonly = buffer.readonly
    if buffer.suboffsets != NULL:
        raise LayoutError(f"{who(ask)} is an array of pointers to its rows (PEP 3118 suboffsets), not one block")
    if buffer.itemsize <= 0:
        raise TypeError(f"{who(ask)} has elements of {buffer.itemsize} bytes; there is nothing to move")
    if read_format(buffer.format, buffer.itemsize, &raw.found) < 0:
        raise TypeError(f"{who(ask)} has format {buffer.format.decode()!r}, whose elements are references, not data")
    if raw.found.elem == OPAQUE:
        copy_name(out.type_name, buffer.format.decode("utf-8", "replace") if buffer.format != NULL else "B")
    settle(&raw, out, ask)
    Py_INCREF(held)
    out.owner = <PyObject *>held
    return 0


# ---- __cuda_array_interface__ and __array_interface__ ------------------------------------------------------


cdef int view_interface(object obj, object said, BufferView *out, const Ask *ask, bint cuda) except -1:
    """Read an array interface of either kind: the two differ in where the memory is and in the stream."""
    cdef Py_ssize_t shape[MAX_AXES]
    cdef Py_ssize_t strides[MAX_AXES]
    cdef object a_shape = None, a_typestr = None, a_data = None, a_version = None, a_strides = None
    cdef object a_stream = None, a_mask = None
    cdef bint strange = False
    cdef PyObject *key
    cdef PyObject *value
    cdef Py_ssize_t at = 0
    cdef const char *text
    cdef Py_ssize_t length
    cdef Raw raw
    if not isinstance(said, dict):
        raise TypeError(f"{who(ask)}: its array interface is a {type(said).__name__}, not a dict")
    while PyDict_Next(said, &at, &key, &value):
        if key == <PyObject *>SHAPE:
            a_shape = <object>value
        elif key == <PyObject *>TYPESTR:
            a_typestr = <object>value
        elif key == <PyObject *>DATA:
            a_data = <object>value
        elif key == <PyObject *>VERSION:
            a_version = <object>value
        elif key == <PyObject *>STRIDES:
            a_strides = <object>value
        elif key == <PyObject *>STREAM:
            a_stream = <object>value
        elif key == <PyObject *>MASK:
            a_mask = <object>value
        elif key != <PyObject *>DESCR:
            strange = True
    if strange:             # equal keys need not be identical ones
        a_shape = said.get(SHAPE)
        a_typestr = said.get(TYPESTR)
        a_data = said.get(DATA)
        a_version = said.get(VERSION)
        a_strides = said.get(STRIDES)
        a_stream = said.get(STREAM)
        a_mask = said.get(MASK)

    if a_mask is not None:
        raise masked(ask)
    if a_version is not None:
        read_version(a_version, ask)
    if not isinstance(a_typestr, str):
        raise TypeError(f"{who(ask)}: its typestr is {a_typestr!r}, not a string such as '<f4'")
    text = PyUnicode_AsUTF8AndSize(a_typestr, &length)
    if read_typestr(text, length, &raw.found) < 0:
        raise TypeError(f"{who(ask)}: its typestr {a_typestr!r} names no type of data; expected one such as '<f4'")
    if raw.found.elem == OPAQUE:
        name_opaque(obj, a_typestr, &raw.found, out.type_name)

    raw.ndim = read_lengths(a_shape, shape, SHAPE, ask)
    raw.shape = shape
    raw.strides = NULL
    if a_strides is not None:
        if read_lengths(a_strides, strides, STRIDES, ask) != raw.ndim:
            raise ValueError(f"{who(ask)}: its strides {a_strides} and shape {a_shape} differ in length")
        raw.strides = strides
    read_data(a_data, &raw, ask)
    settle(&raw, out, ask)

    if cuda:
        if a_stream is not None:
            out.stream = read_stream(a_stream, ask)
            out.has_stream = True
        if out.count:
            out.device = pointer_device(out.ptr)
    return 0


cdef int read_version(object version, const Ask *ask) except -1:
    if not isinstance(version, int):
        raise TypeError(f"{who(ask)}: the version of its array interface is {version!r}, not a number")
    if not 0 <= version <= 3:
        raise ValueError(f"{who(ask)}: its array interface has version {version}; versions 0 to 3 are known")
    return 0


cdef int read_lengths(object values, Py_ssize_t *to, str what, const Ask *ask) except -1:
    """Read a shape or strides; return how many axes."""
    cdef Py_ssize_t n, i
    cdef object value
    if not isinstance(values, tuple):
        if not isinstance(values, list):
            raise TypeError(f"{who(ask)}: its {what} is {values!r}, not a tuple of integers")
        values = tuple(values)
    n = len(<tuple>values)
    if n > MAX_AXES:
        raise ValueError(f"{who(ask)}: its {what} has {n} axes; {MAX_AXES} are the limit")
    for i in range(n):
        value = (<tuple>values)[i]
        try:
            to[i] = PyLong_AsSsize_t(value) if PyLong_CheckExact(value) else value
        except OverflowError:
            raise ValueError(f"{who(ask)}: its {what} {values} holds a number beyond 64 bits") from None
        except TypeError:
            raise TypeError(f"{who(ask)}: its {what} {values} holds {value!r}, not an integer") from None
    return <int>n


cdef int read_data(object data, Raw *raw, const Ask *ask) except -1:
    """Read the pointer and the read-only flag; the pointer of an empty array is not looked at."""
    cdef int i
    cdef object address
    raw.ptr = NULL
    raw.readonly = False
    if isinstance(data, (tuple, list)) and len(data) == 2:
        raw.readonly = data[1]
        address = data[0]
    else:
        address = NotImplemented
    for i in range(raw.ndim):
        if raw.shape[i] == 0:
            return 0
    if address is NotImplemented:
        raise TypeError(f"{who(ask)}: its data is {data!r}, not a pair (pointer, readonly)")
    try:
        raw.ptr = <char *><uintptr_t>address
    except OverflowError:
        raise ValueError(f"{who(ask)}: the pointer in its data {data} is not an address") from None
    except TypeError:
        raise TypeError(f"{who(ask)}: the pointer in its data {data} is not an integer") from None
    if raw.ptr == NULL:
        raise ValueError(f"{who(ask)}: its shape is {shape_of(raw)}, but the pointer in its data is 0")
    return 0


cdef uintptr_t read_stream(object stream, const Ask *ask) except? 0:
    """Read the stream key: 1 is the legacy default, 2 the per-thread default, else a handle."""
    if PyBool_Check(stream) or not isinstance(stream, int):
        raise TypeError(f"{who(ask)}: the stream in its CUDA array interface is {stream!r}, not an integer or None")
    if stream == 0:
        raise ValueError(
            f"{who(ask)}: the stream in its CUDA array interface is 0, which the protocol forbids as ambiguous; "
            "1 is the legacy default stream, 2 the per-thread one"
        )
    if not 0 < stream < UINTPTR_MAX:
        raise ValueError(f"{who(ask)}: the stream in its CUDA array interface, {stream}, is not a handle")
    return stream


cdef int name_opaque(object obj, str typestr, Found *found, char *name) except -1:
    """Where the type string gives no more than a size, the array's own dtype may say what it is."""
    cdef PyObject *dtype = NULL
    cdef object own = None
    cdef const ElemType *elem
    if found.vague and PyObject_GetOptionalAttr(obj, "dtype", &dtype):
        own = dtype_name(take(dtype))
        if own is not None:
            elem = elem_named(own.encode())
            if elem != NULL and <size_t>elem.itemsize == found.itemsize:
                found.elem = elem
                found.vague = False
                return 0
    copy_name(name, typestr)
    return 0


# ---- DLPack and Numba's simulator --------------------------------------------------------------------------


cdef int view_tensor(Tensor t, BufferView *out, const Ask *ask) except -1:
    """Read a DLPack tensor; the view keeps it.  1, or 0 if there is none to read."""
    cdef Py_ssize_t shape[MAX_AXES]
    cdef Py_ssize_t strides[MAX_AXES]
    cdef DLTensor *dl
    cdef Raw raw
    cdef int i
    if t is None:
        return 0
    dl = t.tensor
    if not 0 <= dl.ndim <= MAX_AXES:
        raise ValueError(f"{who(ask)}: its DLPack tensor has {dl.ndim} axes; 0 to {MAX_AXES} are possible")
    if dl.ndim and dl.shape == NULL:
        raise ValueError(f"{who(ask)}: its DLPack tensor has {dl.ndim} axes but no shape")
    read_dltype(dl.dtype, &raw.found, out.type_name)
    raw.ndim = dl.ndim
    raw.shape = shape
    raw.strides = strides if dl.strides != NULL else NULL
    for i in range(dl.ndim):
        shape[i] = dl.shape[i]
        # What does not fit is the stride of no contiguous array.
        if dl.strides != NULL and stride_overflows(dl.strides[i], <Py_ssize_t>raw.found.itemsize, &strides[i]):
            strides[i] = PY_SSIZE_T_MAX
    raw.ptr = <char *>dl.data + dl.byte_offset if dl.data != NULL else NULL
    raw.readonly = t.readonly
    settle(&raw, out, ask)
    if dl.device.type == DL_CUDA:
        out.device = dl.device.id
    elif dl.device.type == DL_CUDA_MANAGED and out.count:
        out.device = pointer_device(out.ptr)
    out.has_stream = t.has_stream
    out.stream = t.stream
    Py_INCREF(t)
    out.owner = <PyObject *>t
    return 1


cdef bint is_simulated(PyTypeObject *tp) except -1:
    """Whether this is the device array of Numba's CUDA simulator: a NumPy array under a cover."""
    return strcmp(tp.tp_name, b"FakeCUDAArray") == 0 and ".simulator." in (<object>tp).__module__


# ---- messages ----------------------------------------------------------------------------------------------


cdef str who(const Ask *ask):
    return f"{ask.verb.decode()}: {ask.arg.decode()}"


cdef tuple shape_of(Raw *raw):
    return tuple([raw.shape[i] for i in range(raw.ndim)])


cdef object not_contiguous(Raw *raw, const Ask *ask):
    cdef tuple strides = tuple([raw.strides[i] for i in range(raw.ndim)])
    return LayoutError(
        f"{who(ask)} is not contiguous: shape {shape_of(raw)}, strides {strides}, itemsize {raw.found.itemsize}; "
        "pass a contiguous copy"
    )


cdef object misaligned(BufferView *out, const Ask *ask):
    return ValueError(
        f"{who(ask)} starts at {<uintptr_t>out.ptr:#x}, which is not aligned for {out.elem.name.decode()}; pass a copy, "
        "or dtype='uint8' to move its bytes"
    )


cdef object masked(const Ask *ask):
    return ValueError(f"{who(ask)} has a mask, which would be lost; pass its data, or fill the masked elements first")


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
                raise TypeError("Buffer: count=, device= and readonly= describe raw memory at ptr=; an array x has its own")
            view(x, &fresh, &ask)
            if fresh.owner != NULL:
                base = (x, <object>fresh.owner)
                release(&fresh)
        self.view = fresh
        self.base = base

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


cdef int raw_memory(BufferView *out, object ptr, object count, const ElemType *elem, object device, object readonly) except -1:
    """Check the arguments of Buffer(ptr=...)."""
    cdef Ask ask = Ask(b"Buffer", b"ptr", False, False, NULL)
    cdef Raw raw
    cdef Py_ssize_t length
    if elem == NULL or count is None:
        raise TypeError("Buffer: ptr= needs count= and dtype=")
    for name, value in (("ptr", ptr), ("count", count), ("device", device)):
        if isinstance(value, bool) or not hasattr(value, "__index__"):
            raise TypeError(f"Buffer: {name} is {value!r}, not an integer")
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
