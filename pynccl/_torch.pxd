"""Torch's tensors, recognised and read without importing Torch."""

from cpython.object cimport PyObject, PyTypeObject

from pynccl._view cimport Ask, BufferView

# torch.Tensor and torch.nn.Parameter; NULL until a tensor was met, and for ever if this Torch has no exchange table.
cdef PyTypeObject *plain_tensor
cdef PyTypeObject *plain_parameter

cdef bint is_tensor(PyTypeObject *tp) except -1
cdef int view_torch(object obj, BufferView *out, const Ask *ask) except -1
cdef int check_lazy(object obj, bint may_be_complex, const Ask *ask) except -1
cdef object keep_tensor(object obj)
cdef object without_grad(object obj)
