"""What the layers above may use of arrays: one function that reads any of them, and the class Buffer.

A view borrows: whoever made it keeps the array itself alive while the view is in use, and gives the view back with
``release``.  Code outside of pynccl may use ``view``, ``release``, ``Ask``, ``BufferView``, ``Buffer``: docs/cython.md.
"""

from pynccl._device cimport (
    current_device, device_alloc, device_free, enter_device, leave_device, order_streams, sync_stream, use_device,
)
from pynccl._elem cimport (
    ELEM_BOOL, ELEM_COMPLEX, ELEM_FLOAT, ELEM_INT, ELEM_OPAQUE, OPAQUE, TYPE_NAME, ElemType, elem_of,
)
from pynccl._view cimport (
    ORDER_BOTH, ORDER_C, ORDER_F, Ask, BufferView, of_jax, release, same_type, type_name,
)

cdef int view(object obj, BufferView *out, const Ask *ask) except -1
cdef object keep(object obj)

cdef class Buffer:
    cdef BufferView view        # view.owner is NULL: base holds it
    cdef object base            # the array, kept alive with its exports
    cdef object said            # the dtype= that it was given
