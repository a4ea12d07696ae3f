"""Results in the caller's own array library, when a call was given no ``out``."""

from __future__ import annotations

import sys

from ._buffer import Buffer

TYPE_CHECKING = False  # typing itself is too slow to import for that
if TYPE_CHECKING:
    from typing import Any


def result(verb: str, x: Any, nranks: int, takes_blocks: bool, gives_blocks: bool) -> Any:
    """Allocate what a collective returns for the input `x`.

    Parameters
    ----------
    verb : str
        The calling method, for messages.
    x : array_like
        The input, already known to be readable.
    nranks : int
        Size of the communicator.
    takes_blocks, gives_blocks : bool
        Whether input and output hold one block per rank along axis 0.

    Returns
    -------
    array
        Uninitialised, of `x`'s library, dtype and device.

    Raises
    ------
    ValueError
        `x` holds blocks, but its first axis is not ``nranks``.
    TypeError
        Nothing is known of the library that `x` belongs to.
    """
    kind = type(x)
    while kind is Buffer:
        x = x.obj
        kind = type(x)
    make = _KNOWN.get(kind) or _maker(kind)
    if x is None:
        raise TypeError(f"{verb}: x is raw memory, which says nothing of a result; pass out=")
    if make is None:
        raise TypeError(
            f"{verb}: cannot allocate a result like a {kind.__module__}.{kind.__qualname__}; pass out="
        )
    if not (takes_blocks or gives_blocks):
        return make(x, None)
    shape = x.shape if hasattr(x, "shape") else (len(x),)
    if takes_blocks:
        if not shape or shape[0] != nranks:
            raise ValueError(_first_axis(verb, tuple(shape), nranks))
        return make(x, shape if gives_blocks else shape[1:])
    return make(x, (nranks, *shape))


def _first_axis(verb: str, shape: tuple[int, ...], nranks: int) -> str:
    size = 1
    for extent in shape:
        size *= extent
    said = f"{verb}: x has shape {shape}, and without out its first axis must be nranks={nranks}"
    if size % nranks:
        return f"{said}; {size} elements are not a multiple of {nranks} either"
    return f"{said}; pass x.reshape({nranks}, {size // nranks}), or an out of the right size"


def _maker(kind: type) -> Any:
    """Find the allocator of a type, by the name of the module that defines it or a base."""
    for base in kind.__mro__:
        make = _MAKERS.get((base.__module__.partition(".")[0], base.__name__))
        if make is not None:
            _KNOWN[kind] = make
            return make
    return None


# Each makes an array like `x` of the given shape, or of x's own if that is None.


def _numpy(x: Any, shape: Any) -> Any:
    numpy = sys.modules["numpy"]
    return numpy.empty_like(x, subok=False) if shape is None else numpy.empty(shape, x.dtype)


def _numba(x: Any, shape: Any) -> Any:
    from numba import cuda

    return cuda.device_array(x.shape if shape is None else shape, x.dtype)


def _cupy(x: Any, shape: Any) -> Any:
    cupy = sys.modules["cupy"]
    with x.device:
        return cupy.empty_like(x) if shape is None else cupy.empty(shape, x.dtype)


def _torch(x: Any, shape: Any) -> Any:
    torch = sys.modules["torch"]
    return torch.empty_like(x.detach()) if shape is None else x.new_empty(shape)


def _array(x: Any, shape: Any) -> Any:
    return type(x)(x.typecode, bytes(_product(shape or (len(x),)) * x.itemsize))


def _bytearray(x: Any, shape: Any) -> Any:
    return bytearray(len(x) if shape is None else _product(shape))


def _memoryview(x: Any, shape: Any) -> Any:
    shape = x.shape if shape is None else shape
    flat = memoryview(bytearray(_product(shape) * x.itemsize))
    try:
        return flat.cast(x.format, list(shape)) if shape else flat.cast(x.format)
    except ValueError:
        # Python makes no memoryview of a format that only NumPy and ctypes write, such as complex.
        raise TypeError(
            f"cannot allocate a memoryview of format {x.format!r}; pass out=, or the array behind it"
        ) from None


def _product(shape: tuple[int, ...]) -> int:
    size = 1
    for extent in shape:
        size *= extent
    return size


# By (top-level module, class name): no library is imported to recognise its arrays.
_MAKERS = {
    ("numpy", "ndarray"): _numpy,
    ("numpy", "generic"): _numpy,
    ("numba", "DeviceNDArrayBase"): _numba,
    ("numba", "FakeCUDAArray"): _numba,
    ("cupy", "ndarray"): _cupy,
    ("torch", "Tensor"): _torch,
    ("array", "array"): _array,
    ("builtins", "bytes"): _bytearray,
    ("builtins", "bytearray"): _bytearray,
    ("builtins", "memoryview"): _memoryview,
}
_KNOWN: dict[type, Any] = {}
