"""The rules that are the same for every array protocol.

A protocol's reader says in a ``Raw`` what it found; ``settle`` believes none of it before it has checked shape, size
and layout, and ``finish`` checks what does not depend on the shape.  No state.
"""

from cpython.object cimport PyObject
from cpython.ref cimport Py_XDECREF
from libc.stdint cimport uintptr_t
from libc.string cimport strcmp

from pynccl._elem cimport ELEM_INT, OPAQUE, ElemType

from .errors import LayoutError

cdef extern from *:
    """
    #define mul_overflows(a, b, to) __builtin_mul_overflow(a, b, to)
    """
    bint mul_overflows(size_t, size_t, size_t *) noexcept
    const Py_ssize_t PY_SSIZE_T_MAX


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
    if raw.found.itemsize == 0:
        raise TypeError(f"{who(ask)} has elements of 0 bytes; there is nothing to move")
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
    if <uintptr_t>raw.ptr + (nbytes - 1) < <uintptr_t>raw.ptr:
        raise ValueError(f"{who(ask)} has {nbytes} bytes at {<uintptr_t>raw.ptr:#x}, beyond the last address there is")
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


cdef int finish(bint foreign, BufferView *out, const Ask *ask) except -1:
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
        f"{who(ask)} starts at {<uintptr_t>out.ptr:#x}, which is not aligned for {out.elem.name.decode()}; "
        "pass a copy, or dtype='uint8' to move its bytes"
    )


cdef object masked(const Ask *ask):
    return ValueError(f"{who(ask)} has a mask, which would be lost; pass its data, or fill the masked elements first")
