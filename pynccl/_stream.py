"""Integer handles of the stream objects of Numba, CuPy, PyTorch and cuda-python."""

from __future__ import annotations

import operator
import sys

TYPE_CHECKING = False  # typing itself is too slow to import for that
if TYPE_CHECKING:
    from typing import Any


def handle_of(stream: Any, verb: str, name: str = "stream") -> int:
    """Return a stream object's handle as a plain int.

    Parameters
    ----------
    stream : object
        An int-like, or an object with ``__cuda_stream__``, ``handle`` (Numba), ``ptr`` (CuPy) or
        ``cuda_stream`` (PyTorch), or a ``ctypes.c_void_p`` or ``CUstream``.
    verb : str
        The calling method, for messages.
    name : str
        What its caller calls the stream.

    Returns
    -------
    int
        The handle; not yet checked for its range.

    Raises
    ------
    TypeError
        `stream` is none of these.
    """
    if isinstance(stream, bool):
        raise TypeError(f"{verb}: {name} must be a handle or a stream object, not a bool")
    if isinstance(stream, int):
        return int(stream)
    ctypes = sys.modules.get("ctypes")  # imported by whoever made such an object
    if ctypes is not None and isinstance(stream, ctypes.c_void_p):
        return stream.value or 0
    protocol = getattr(stream, "__cuda_stream__", None)
    if protocol is not None:
        # The protocol gives (version, handle); a method by the specification, a tuple in early forms.
        pair = protocol() if callable(protocol) else protocol
        try:
            _, handle = pair
            return operator.index(handle)
        except (TypeError, ValueError):
            raise TypeError(
                f"{verb}: the __cuda_stream__ of {name} gave {pair!r}, not a pair (version, handle)"
            ) from None
    for attribute in ("handle", "ptr", "cuda_stream"):
        inner = getattr(stream, attribute, None)
        if inner is not None:
            return handle_of(inner, verb, name)
    kind = type(stream)
    if kind.__module__.startswith("numba.cuda.simulator"):
        return 0  # the simulator has one stream, which is never asynchronous
    if kind.__name__ == "CUstream":
        return int(stream)
    try:
        return operator.index(stream)
    except TypeError:
        raise TypeError(
            f"{verb}: {name} must be an int, None, or an object with __cuda_stream__, handle, ptr "
            f"or cuda_stream, not {kind.__name__!r}"
        ) from None
