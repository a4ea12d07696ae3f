"""Results in the caller's own array library, when a call was given no ``out``."""

from __future__ import annotations

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
    x = getattr(x, "obj", x) if type(x).__module__ == "pynccl._buffer" else x
    shape = _shape(x)
    if takes_blocks:
        if not shape or shape[0] != nranks:
            raise ValueError(_first_axis(verb, shape, nranks))
        if not gives_blocks:
            shape = shape[1:]
    elif gives_blocks:
        shape = (nranks, *shape)
    make = _maker(type(x))
    if make is None:
        raise TypeError(
            f"{verb}: cannot allocate a result like a {type(x).__module__}."
            f"{type(x).__qualname__}; pass out="
        )
    return make(x, shape)


def _shape(x: Any) -> tuple[int, ...]:
    shape = getattr(x, "shape", None)
    if shape is None:
        return (len(x),)
    return tuple(int(extent) for extent in shape)


def _first_axis(verb: str, shape: tuple[int, ...], nranks: int) -> str:
    size = 1
    for extent in shape:
        size *= extent
    said = f"{verb}: x has shape {shape}, and without out its first axis must be nranks={nranks}"
    if size % nranks:
        return f"{said}; {size} elements are not a multiple of {nranks} either"
    return f"{said}; pass x.reshape({nranks}, {size // nranks}), or an out of the right size"


def _maker(kind: type) -> Any:
    """Find the allocator for a type, by the name of the module that defines it or a base."""
    for base in kind.__mro__:
        make = _MAKERS.get((base.__module__.partition(".")[0], base.__name__))
        if make is not None:
            return make
    return None


def _numpy(x: Any, shape: tuple[int, ...]) -> Any:
    import numpy

    order = "F" if x.flags.f_contiguous and not x.flags.c_contiguous else "C"
    return numpy.empty(shape, x.dtype, order=order if shape == x.shape else "C")


def _numba(x: Any, shape: tuple[int, ...]) -> Any:
    from numba import cuda

    return cuda.device_array(shape, x.dtype)


def _cupy(x: Any, shape: tuple[int, ...]) -> Any:
    import cupy

    with x.device:
        return cupy.empty(shape, x.dtype)


def _torch(x: Any, shape: tuple[int, ...]) -> Any:
    return x.new_empty(shape)


def _array(x: Any, shape: tuple[int, ...]) -> Any:
    return type(x)(x.typecode, bytes(_product(shape) * x.itemsize))


def _bytearray(x: Any, shape: tuple[int, ...]) -> Any:
    return bytearray(_product(shape))


def _memoryview(x: Any, shape: tuple[int, ...]) -> Any:
    flat = memoryview(bytearray(_product(shape) * x.itemsize))
    return flat.cast(x.format, list(shape)) if shape else flat.cast(x.format)


def _product(shape: tuple[int, ...]) -> int:
    size = 1
    for extent in shape:
        size *= extent
    return size


# By (top-level module, class name): no library is imported to recognise its arrays.
_MAKERS = {
    ("numpy", "ndarray"): _numpy,
    ("numpy", "generic"): lambda x, shape: __import__("numpy").empty(shape, x.dtype),
    ("numba", "DeviceNDArrayBase"): _numba,
    ("numba", "FakeCUDAArray"): _numba,
    ("cupy", "ndarray"): _cupy,
    ("torch", "Tensor"): _torch,
    ("array", "array"): _array,
    ("builtins", "bytes"): _bytearray,
    ("builtins", "bytearray"): _bytearray,
    ("builtins", "memoryview"): _memoryview,
}
