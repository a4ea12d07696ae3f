"""Torch's tensors, recognised and read without importing Torch.

Whoever passes a tensor has imported Torch, so that the type is met in sys.modules and remembered.  A tensor is read
through DLPack's exchange table, whose borrowing export costs the least that there is.  The table shows the memory, and
for most tensors that is all; this module knows the others: lazy conjugates, whose memory holds other numbers than the
tensor, and those that have no memory of their own.

To ask a tensor whether it is lazy costs more than to read the rest of it: its methods give up the GIL and take it back.
The answer is one bit of a word inside of Torch's object.  Which one is found out with tensors of our own making, as for
NumPy's struct; if they show none, the method is called.  Where a tensor's storage is and how large is found out in the
same way: Torch lets a storage be freed or cut under the tensors that use it, and the table shows where they were.

The remembered facts are written once, under the GIL, and are the same whoever writes them.
"""

import sys

from cpython.object cimport PyObject, PyTypeObject
from cpython.ref cimport Py_INCREF
from libc.stdint cimport uint64_t, uintptr_t

from pynccl._dlpack cimport DL_CUDA, DLTensor, Exchange, read_tensor, refuse_device, table_of
from pynccl._view cimport Ask, BufferView, who

cdef extern from *:
    bint PyType_IsSubtype(PyTypeObject *, PyTypeObject *) noexcept
    PyTypeObject *Py_TYPE(object) noexcept
    PyObject *_PyType_Lookup(PyTypeObject *, object)
    # Cython's own declaration makes the result an object, and takes one for the function.
    PyObject *PyObject_CallOneArg(PyObject *, object) except NULL
    void Py_DECREF(PyObject *) noexcept
    PyObject *Py_True

cdef enum:                      # DLPack's type codes
    DL_COMPLEX = 5
    DL_BOOL = 6

plain_tensor = NULL
plain_parameter = NULL
cdef PyTypeObject *tensor_type = NULL           # torch.Tensor
cdef Exchange *api = NULL                       # what its type offers; it lives as long as Torch
cdef PyObject *is_neg = NULL                    # two of its methods
cdef PyObject *is_conj = NULL
# Where a tensor says the same: in the Python object a pointer to Torch's own, in that a word with two bits.
cdef int impl_word = 0
cdef int flags_word = 0                         # 0: not known
cdef uint64_t neg_bit = 0
cdef uint64_t conj_bit = 0
# And another word, a pointer to the tensor's storage, where two words are its address and its size in bytes.
cdef int storage_word = 0                       # 0: not known
cdef int address_word = 0
cdef int size_word = 0

cdef enum:                      # how far is looked; each of them is larger
    OBJECT_WORDS = 5            # the Python object
    IMPL_WORDS = 22             # Torch's tensor
    STORAGE_WORDS = 8           # Torch's storage


cdef bint is_tensor(PyTypeObject *tp) except -1:
    """Whether this is torch.Tensor or a subclass of it; the first one met makes Torch known."""
    cdef object torch, kind
    if tensor_type != NULL:
        return PyType_IsSubtype(tp, tensor_type)
    torch = sys.modules.get("torch")
    kind = getattr(torch, "Tensor", None)
    if not isinstance(kind, type) or not issubclass(<object>tp, kind):
        return False
    learn(torch, kind)
    return True


cdef int learn(object torch, object kind) except -1:
    global api, is_conj, is_neg, plain_parameter, plain_tensor, tensor_type
    cdef object parameter = torch.nn.Parameter
    cdef object neg = kind.is_neg
    cdef object conj = kind.is_conj
    cdef PyObject *offered = _PyType_Lookup(<PyTypeObject *>kind, "__dlpack_c_exchange_api__")
    if offered != NULL:
        api = table_of(offered)
    for held in (kind, parameter, neg, conj):
        Py_INCREF(held)
    is_neg = <PyObject *>neg
    is_conj = <PyObject *>conj
    try:
        study(torch)
    except Exception:           # whatever this Torch is, it is not one that we know
        pass
    # Last: until then, other threads study for themselves.
    if api != NULL and api.borrow != NULL:
        plain_tensor = <PyTypeObject *>kind
        plain_parameter = <PyTypeObject *>parameter
    tensor_type = <PyTypeObject *>kind
    return 0


cdef int study(object torch) except -1:
    """Find the words, in tensors that differ by them."""
    global impl_word
    # On the CPU whatever the default device is: nothing is to be queued on a GPU.
    cdef object real = torch.ones(3, dtype=torch.float32, device="cpu")
    cdef object whole = torch.ones(3, dtype=torch.complex64, device="cpu")
    cdef object foreign = torch.frombuffer(bytearray(40), dtype=torch.int32)
    cdef object freed = torch.ones(9, dtype=torch.int32, device="cpu")
    cdef list tensors = [real, whole, real[1:], torch.nn.Parameter(real), foreign[2:], freed]
    cdef int at
    freed.untyped_storage().resize_(0)
    for at in range(2, OBJECT_WORDS):
        if all([(<uintptr_t *><PyObject *>each)[at] == each._cdata for each in tensors]):
            impl_word = at
            study_storage(tensors)
            study_flags(torch, real, whole)
            break
    return 0


cdef int study_storage(list tensors) except -1:
    """Find the storage of a tensor, and in it what it says of itself."""
    global address_word, size_word, storage_word
    cdef list storages = [each.untyped_storage() for each in tensors]
    cdef int word, address, size
    for word in range(1, IMPL_WORDS):
        if not all([word_of(each, word) == its._cdata for each, its in zip(tensors, storages)]):
            continue
        for address in range(1, STORAGE_WORDS):
            if all([of_storage(each, word, address) == its.data_ptr() for each, its in zip(tensors, storages)]):
                break
        else:
            return 0
        for size in range(1, STORAGE_WORDS):
            if all([of_storage(each, word, size) == its.nbytes() for each, its in zip(tensors, storages)]):
                address_word, size_word, storage_word = address, size, word
                return 0
    return 0


cdef int study_flags(object torch, object real, object whole) except -1:
    """Find the two bits, in tensors of every kind that differs by them."""
    global conj_bit, flags_word, neg_bit
    cdef list samples = [                       # tensor, is_neg, is_conj
        (real, False, False), (whole, False, False), (torch._neg_view(real), True, False),
        (whole.conj(), False, True), (torch._neg_view(whole.conj()), True, True), (whole.conj().imag, True, False),
        (whole.conj().real, False, False), (whole.conj().conj(), False, False), (real[1:], False, False),
        (torch.nn.Parameter(real), False, False), (torch._neg_view(real)[1:], True, False),
        (whole.conj()[1:], False, True),
    ]
    cdef uint64_t neg, conj
    cdef int word
    for tensor, is_negative, is_conjugate in samples:
        if (tensor.is_neg(), tensor.is_conj()) != (is_negative, is_conjugate):
            return 0
    for word in range(1, IMPL_WORDS):
        neg = word_of(real, word) ^ word_of(samples[2][0], word)
        conj = word_of(whole, word) ^ word_of(samples[3][0], word)
        if not neg or not conj or neg & (neg - 1) or conj & (conj - 1):     # of each, one bit
            continue
        if all([
            (word_of(each, word) & neg != 0) == is_negative and (word_of(each, word) & conj != 0) == is_conjugate
            for each, is_negative, is_conjugate in samples
        ]):
            neg_bit, conj_bit, flags_word = neg, conj, word
            return 0
    return 0


cdef inline uint64_t word_of(object tensor, int word) noexcept:
    return (<uint64_t **><PyObject *>tensor)[impl_word][word]


cdef inline uint64_t of_storage(object tensor, int word, int which) noexcept:
    return (<uint64_t ***><PyObject *>tensor)[impl_word][word][which]


cdef int view_torch(object obj, BufferView *out, const Ask *ask) except -1:
    """Read a tensor; it is the caller who keeps it alive."""
    cdef DLTensor dl
    cdef void *stream = NULL
    try:
        api.borrow(<PyObject *>obj, &dl)
    except RuntimeError as error:       # Torch's own way to say that there is nothing to point to
        raise TypeError(f"{who(ask)} {why_not(obj, error)}") from error
    refuse_device(dl.device.type, ask)
    if dl.data == NULL and holds_nothing(&dl):
        raise TypeError(f"{who(ask)} {why_not(obj, None)}")
    read_tensor(&dl, False, out, ask)
    if out.count:
        if storage_word:
            check_storage(obj, out, ask)
        if dl.dtype.code != DL_BOOL:
            check_lazy(obj, dl.dtype.code == DL_COMPLEX, ask)
    elif Py_TYPE(obj) != plain_tensor and Py_TYPE(obj) != plain_parameter:
        check_made(obj, ask)
    if dl.device.type == DL_CUDA and api.current_stream != NULL:
        api.current_stream(dl.device.type, dl.device.id, &stream)
        out.stream = <uintptr_t>stream
        out.has_stream = True
    return 0


cdef bint holds_nothing(DLTensor *dl) noexcept:
    """Whether a tensor without memory should have some."""
    cdef int i
    for i in range(dl.ndim):
        if dl.shape[i] == 0:
            return False
    return True


cdef inline int check_storage(object obj, BufferView *out, const Ask *ask) except -1:
    """Refuse a tensor that reaches out of its storage, which somebody made smaller: so FSDP frees weights."""
    cdef uintptr_t begin = of_storage(obj, storage_word, address_word)
    cdef uintptr_t size = of_storage(obj, storage_word, size_word)
    cdef uintptr_t offset = <uintptr_t>out.ptr - begin
    if offset <= size and out.nbytes <= size - offset:
        return 0
    if size == 0:
        raise TypeError(f"{who(ask)} {why_not(obj, None)}")
    raise ValueError(
        f"{who(ask)} has {out.nbytes} bytes from {offset} on in its storage, which was made smaller and has {size}; "
        "resize the storage, or pass the part that is left"
    )


cdef int check_made(object obj, const Ask *ask) except -1:
    """Refuse the parameter of a lazy module before it has a shape: it would pass for an empty tensor."""
    cdef object lazy = getattr(sys.modules["torch"].nn, "parameter", None)
    lazy = getattr(lazy, "UninitializedTensorMixin", None)
    if isinstance(lazy, type) and isinstance(obj, lazy):
        raise TypeError(
            f"{who(ask)} is a parameter that has no shape yet; run its module once, or call materialize()"
        )
    return 0


cdef int check_lazy(object obj, bint may_be_complex, const Ask *ask) except -1:
    """Refuse a tensor whose memory holds other numbers than the tensor: Torch conjugates and negates lazily."""
    if flags_word and not word_of(obj, flags_word) & (neg_bit | conj_bit):
        return 0
    if says(is_neg, obj):
        raise ValueError(
            f"{who(ask)} is a lazy negative view: its memory holds the numbers before the change of sign; pass "
            "x.resolve_neg()"
        )
    if may_be_complex and says(is_conj, obj):
        raise ValueError(
            f"{who(ask)} is a lazy conjugate: its memory holds the numbers before conjugation; pass x.resolve_conj()"
        )
    return 0


cdef inline bint says(PyObject *method, object obj) except -1:
    cdef PyObject *answer = PyObject_CallOneArg(method, obj)
    Py_DECREF(answer)
    return answer == Py_True


cdef object keep_tensor(object obj):
    """A tensor of the memory which this one has now: to give it other memory leaves the new one alone."""
    return obj.detach()


cdef object without_grad(object obj):
    """The same memory without the history; the older ways out of Torch refuse a tensor that has one."""
    return obj.detach() if obj.requires_grad else obj


cdef str why_not(object obj, object error):
    """Why this tensor's memory cannot be read, and what to pass instead."""
    cdef object torch = sys.modules["torch"]
    cdef str kind = f"{type(obj).__module__}.{type(obj).__qualname__}"
    cdef object layout, dtype
    if type(obj) not in (torch.Tensor, torch.nn.Parameter):
        return f"is a {kind}, which holds no memory of its own; pass the tensor inside of it"
    try:
        if torch._C._functorch.is_functorch_wrapped_tensor(obj):
            return "is a tensor inside of vmap, grad or the like; no collective can be transformed so"
    except AttributeError:
        pass
    if obj.is_nested:
        return "is a nested tensor, which is not one block; pass its values() or its parts"
    layout = obj.layout
    if layout is not torch.strided:
        return f"has the layout {layout}, which is not one block; pass x.to_dense(), or its indices and values"
    dtype = obj.dtype
    if obj.is_quantized:
        return f"is quantised ({dtype}), with a scale that would be lost; pass x.int_repr() or x.dequantize()"
    if obj.is_meta:
        return "is on the device meta, which has no memory"
    if "bits" in str(dtype):
        return f"has the dtype {dtype}, for which DLPack has no word; pass x.view(torch.uint8)"
    if error is None:
        return f"has {obj.numel()} elements and no memory: its storage was freed, or holds no numbers yet"
    return f"is a tensor whose memory Torch does not show: {str(error).partition(chr(10))[0]}"
