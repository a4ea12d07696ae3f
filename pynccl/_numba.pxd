"""Numba's device arrays, recognised and read without importing Numba, and without asking for their interface."""

from cpython.object cimport PyTypeObject

from pynccl._view cimport Ask, BufferView

cdef PyTypeObject *device_array                 # Numba's DeviceNDArray; NULL until one was met that reads as it says

cdef int view_device_array(object obj, BufferView *out, const Ask *ask) except -1
cdef int learn_device_array(object obj, dict said) except -1
