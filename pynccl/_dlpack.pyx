"""DLPack tensors, from a type's C exchange table or from a capsule.

A producer hands over a struct with a deleter.  Whatever happens afterwards, the deleter runs exactly once: from
the moment that the struct is ours, a `Tensor` holds it.  No state beside.
"""

cimport cython
from cpython.object cimport PyObject
from cpython.pycapsule cimport PyCapsule_CheckExact, PyCapsule_GetPointer, PyCapsule_IsValid, PyCapsule_SetName
from cpython.ref cimport Py_INCREF
from libc.stdint cimport uintptr_t

from pynccl._device cimport pointer_device
from pynccl._elem cimport OPAQUE, Found, copy_name, elem_by_kind, elem_named
from pynccl._view cimport MAX_AXES, Ask, BufferView, Raw, of_jax, settle, who

cdef extern from *:
    """
    #define mul_overflows(a, b, to) __builtin_mul_overflow(a, b, to)
    """
    bint mul_overflows(Py_ssize_t, Py_ssize_t, Py_ssize_t *) noexcept
    const Py_ssize_t PY_SSIZE_T_MAX

cdef enum:
    MAJOR = 1                   # the only layout there is
    READ_ONLY = 1               # bit of DLManagedTensorVersioned.flags

cdef struct Managed:            # DLManagedTensor, capsules named "dltensor"
    DLTensor tensor
    void *context
    void (*deleter)(Managed *self) noexcept

cdef dict DEVICES = {
    1: "CPU", 2: "CUDA", 3: "pinned CUDA host", 4: "OpenCL", 7: "Vulkan", 8: "Metal", 9: "VPI", 10: "ROCm",
    11: "pinned ROCm host", 12: "extension", 13: "managed CUDA", 14: "oneAPI", 15: "WebGPU", 16: "Hexagon",
    17: "MAIA", 18: "Trainium",
}

# Type codes of 8-bit floats, in order from code 7 on.
cdef tuple FLOAT8 = (
    "float8_e3m4", "float8_e4m3", "float8_e4m3b11fnuz", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2",
    "float8_e5m2fnuz", "float8_e8m0fnu",
)


@cython.final
@cython.freelist(16)
cdef class Tensor:
    def __dealloc__(self):
        cdef Managed *old
        cdef ManagedVersioned *new
        if self.managed == NULL:
            return
        if self.versioned:
            new = <ManagedVersioned *>self.managed
            if new.deleter != NULL:
                new.deleter(new)
        else:
            old = <Managed *>self.managed
            if old.deleter != NULL:
                old.deleter(old)


cdef Tensor own(void *managed, bint versioned, const Ask *ask):
    """Take over a managed tensor, and refuse one that cannot be read or used."""
    cdef ManagedVersioned *current
    cdef Tensor t = Tensor.__new__(Tensor)
    t.managed = managed
    t.versioned = versioned
    if versioned:
        current = <ManagedVersioned *>managed
        if current.version.major != MAJOR:      # only the deleter stands where we know it
            raise BufferError(
                f"{who(ask)} exports version {current.version.major}.{current.version.minor} of DLPack; "
                f"version {MAJOR}.x is known"
            )
        t.tensor = &current.tensor
        t.readonly = (current.flags & READ_ONLY) != 0
    else:
        t.tensor = &(<Managed *>managed).tensor
    refuse_device(t.tensor.device.type, ask)
    return t


cdef Exchange *table_of(PyObject *capsule) except? NULL:
    """The table that a type's attribute holds, in the version that we know; NULL if there is none."""
    cdef Exchange *api
    if not PyCapsule_IsValid(<object>capsule, b"dlpack_exchange_api"):
        return NULL
    api = <Exchange *>PyCapsule_GetPointer(<object>capsule, b"dlpack_exchange_api")
    while api != NULL and api.version.major != MAJOR:
        api = api.previous
    return api


cdef Tensor tensor_of_table(object obj, PyObject *table, const Ask *ask):
    """Export through the C table that `obj`'s type offers; None if the table is none that we know."""
    cdef Exchange *api = table_of(table)
    cdef ManagedVersioned *managed = NULL
    cdef void *stream = NULL
    cdef Tensor t
    if api == NULL or api.export == NULL:
        return None
    # The table also has a cheaper, borrowing export, but that one does not say whether the data is read-only.
    api.export(<PyObject *>obj, &managed)
    if managed == NULL:
        raise BufferError(f"{who(ask)}: its DLPack exchange table gave neither a tensor nor an error")
    t = own(managed, True, ask)
    if t.tensor.device.type == DL_CUDA and api.current_stream != NULL:
        api.current_stream(t.tensor.device.type, t.tensor.device.id, &stream)
        t.stream = <uintptr_t>stream
        t.has_stream = True
    return t


cdef Tensor tensor_of_capsule(object obj, object export, const Ask *ask):
    """Export through ``obj.__dlpack__``, which is `export`."""
    cdef object get_device = getattr(obj, "__dlpack_device__", None)
    cdef object device, capsule
    cdef dict arguments = {}
    cdef void *managed = NULL
    cdef bint versioned = False
    cdef Tensor t
    cdef int where = DL_CPU
    if get_device is not None:
        device = get_device()
        try:
            where = device[0]
        except (TypeError, ValueError, IndexError, KeyError, OverflowError):
            raise TypeError(
                f"{who(ask)}: its __dlpack_device__ returned {device!r}, not (device type, device number)"
            ) from None
        refuse_device(where, ask)
    if where == DL_CUDA or where == DL_CUDA_MANAGED:
        arguments["stream"] = 1         # make the data safe to use on the legacy default stream
    try:
        capsule = export(max_version=(MAJOR, 3), **arguments)
    except TypeError:                   # a producer from before DLPack 1.0
        capsule = export(**arguments)
    if PyCapsule_IsValid(capsule, b"dltensor_versioned"):
        managed = PyCapsule_GetPointer(capsule, b"dltensor_versioned")
        versioned = True
        PyCapsule_SetName(capsule, b"used_dltensor_versioned")
    elif PyCapsule_IsValid(capsule, b"dltensor"):
        managed = PyCapsule_GetPointer(capsule, b"dltensor")
        PyCapsule_SetName(capsule, b"used_dltensor")
    elif not PyCapsule_CheckExact(capsule):
        raise TypeError(f"{who(ask)}: its __dlpack__ returned a {type(capsule).__name__!r}, not a capsule")
    # The capsule goes before anything is raised: its destructor is the producer's, and need not spare our exception.
    capsule = None
    if managed == NULL:
        raise BufferError(
            f"{who(ask)}: its __dlpack__ returned a capsule that was used before, or that holds no tensor"
        )
    t = own(managed, versioned, ask)
    # A capsule of the old kind has no flag for it.
    t.readonly = t.readonly or of_jax(obj)
    if "stream" in arguments:
        t.stream = 1
        t.has_stream = True
    return t


cdef int view_tensor(Tensor t, BufferView *out, const Ask *ask) except -1:
    """Read a managed tensor; the view keeps it.  1, or 0 if there is none to read."""
    if t is None:
        return 0
    read_tensor(t.tensor, t.readonly, out, ask)
    out.has_stream = t.has_stream
    out.stream = t.stream
    Py_INCREF(t)
    out.owner = <PyObject *>t
    return 1


cdef int read_tensor(DLTensor *dl, bint readonly, BufferView *out, const Ask *ask) except -1:
    """Read what a tensor says of itself; nothing of it is needed afterwards."""
    cdef Py_ssize_t shape[MAX_AXES]
    cdef Py_ssize_t strides[MAX_AXES]
    cdef Raw raw
    cdef int i
    if not 0 <= dl.ndim <= MAX_AXES:
        raise ValueError(f"{who(ask)}: its DLPack tensor has {dl.ndim} axes; 0 to {MAX_AXES} are possible")
    if dl.ndim and dl.shape == NULL:
        raise ValueError(f"{who(ask)}: its DLPack tensor has {dl.ndim} axes but no shape")
    read_dltype(dl.dtype, &raw.found, out.type_name, ask)
    raw.ndim = dl.ndim
    raw.shape = shape
    raw.strides = strides if dl.strides != NULL else NULL
    for i in range(dl.ndim):
        shape[i] = dl.shape[i]
        # What does not fit is the stride of no contiguous array.
        if dl.strides != NULL and mul_overflows(dl.strides[i], <Py_ssize_t>raw.found.itemsize, &strides[i]):
            strides[i] = PY_SSIZE_T_MAX
    raw.ptr = <char *>dl.data + dl.byte_offset if dl.data != NULL else NULL
    raw.readonly = readonly
    settle(&raw, out, ask)
    if dl.device.type == DL_CUDA:
        out.device = dl.device.id
    elif dl.device.type == DL_CUDA_MANAGED and out.count:
        out.device = pointer_device(out.ptr)
    return 0


cdef int refuse_device(int where, const Ask *ask) except -1:
    if where not in (DL_CPU, DL_CUDA, DL_CUDA_HOST, DL_CUDA_MANAGED):
        raise BufferError(
            f"{who(ask)} is in {DEVICES.get(where, f'unknown ({where})')} memory; NCCL moves CUDA memory, the host "
            "library CPU memory"
        )
    return 0


cdef int read_dltype(DLDataType dtype, Found *out, char *name, const Ask *ask) except -1:
    """Find the row of a DLPack type; TypeError if its elements are no whole bytes of data."""
    cdef int bits = dtype.bits * dtype.lanes
    cdef str own
    out.foreign = False
    out.vague = False
    out.itemsize = <size_t>(bits // 8)
    out.elem = NULL
    if dtype.code < 3 and dtype.lanes == 1 and bits % 8 == 0:
        out.elem = elem_by_kind(b"iuf"[dtype.code], out.itemsize)
        if out.elem != NULL:
            return 0
    if dtype.code == 3:
        raise TypeError(f"{who(ask)} has elements that are handles, not data")
    if bits % 8 or bits == 0:
        raise TypeError(f"{who(ask)} has elements of {bits} bits; only whole bytes can be moved")
    if dtype.code < 3:
        own = ("int", "uint", "float")[dtype.code] + str(dtype.bits)
    elif dtype.code == 4:
        own = f"bfloat{dtype.bits}"
    elif dtype.code == 5:
        own = f"complex{dtype.bits}"
    elif dtype.code == 6 and dtype.bits == 8:
        own = "bool"
    elif 7 <= dtype.code < 7 + len(FLOAT8) and dtype.bits == 8:
        own = FLOAT8[dtype.code - 7]
    else:
        own = f"dlpack{dtype.code}_{dtype.bits}"
    if dtype.lanes == 1:
        out.elem = elem_named(own.encode())
    else:
        own = f"{own}x{dtype.lanes}"
    if out.elem == NULL:
        out.elem = OPAQUE
        copy_name(name, own)
    return 0
