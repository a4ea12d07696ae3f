"""Readers of ``__cuda_array_interface__`` and ``__array_interface__``."""

from pynccl._view cimport Ask, BufferView

cdef int view_interface(object obj, object said, BufferView *out, const Ask *ask, bint cuda) except -1
