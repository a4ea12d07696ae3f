"""Results in the caller's own array library, when a call was given no ``out``."""

from __future__ import annotations

import sys

from ._buffer import Buffer

TYPE_CHECKING = False  # typing itself is too slow to import for that
if TYPE_CHECKING:
    from typing import Any


def result(
    verb: str,
    x: Any,
    nranks: int,
    takes_blocks: bool,
    gives_blocks: bool,
    device: int,
    in_group: bool,
) -> Any:
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
    device : int
        The CUDA device that holds `x`, or -1.
    in_group : bool
        Whether the call runs only when a group ends.

    Returns
    -------
    array
        Uninitialised, of `x`'s library, dtype and device; what `finished` makes it, where that library's
        arrays cannot be written to.

    Raises
    ------
    ValueError
        `x` holds blocks, but its first axis is not ``nranks``.
    TypeError
        Nothing is known of the library that `x` belongs to, or its results cannot be made here.
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
    if make is _jax:
        _check_jax(verb, device, in_group)
    if not (takes_blocks or gives_blocks):
        return make(x, None, device)
    shape = x.shape if hasattr(x, "shape") else (len(x),)
    if takes_blocks:
        if not shape or shape[0] != nranks:
            raise ValueError(_first_axis(verb, tuple(shape), nranks))
        return make(x, shape if gives_blocks else shape[1:], device)
    return make(x, (nranks, *shape), device)


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


def finished(x: Any, out: Any) -> Any:
    """Return a result as the user gets it, after the call.

    Parameters
    ----------
    x : array_like
        The input of the call.
    out : array
        What `result` made for it; None where this rank has no result.

    Returns
    -------
    array
        `out`, or a JAX array of the same memory.
    """
    while type(x) is Buffer:
        x = x.obj
    if out is not None and _KNOWN.get(type(x)) is _jax:
        return _into_jax(x, out)
    return out


# Each makes an array like `x`, which is on `device`, of the given shape, or of x's own if that is None.


def _numpy(x: Any, shape: Any, device: int) -> Any:
    numpy = sys.modules["numpy"]
    return numpy.empty_like(x, subok=False) if shape is None else numpy.empty(shape, x.dtype)


def _numba(x: Any, shape: Any, device: int) -> Any:
    from numba import cuda

    order = "C"
    if shape is None:
        shape = x.shape
        order = "C" if x.flags["C_CONTIGUOUS"] else "F"
    stream = getattr(x, "stream", 0)
    if device < 0:
        return cuda.device_array(shape, x.dtype, order=order, stream=stream)
    with cuda.gpus[device]:
        return cuda.device_array(shape, x.dtype, order=order, stream=stream)


def _cupy(x: Any, shape: Any, device: int) -> Any:
    cupy = sys.modules["cupy"]
    with x.device:
        return cupy.empty_like(x) if shape is None else cupy.empty(shape, x.dtype)


def _torch(x: Any, shape: Any, device: int) -> Any:
    # Of no subclass, with no history: what a collective gives is nobody's parameter.
    torch = sys.modules["torch"]
    if shape is None:
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
    return torch.empty(shape, dtype=x.dtype, device=x.device)


def _jax(x: Any, shape: Any, device: int) -> Any:
    # NumPy's, where JAX can take it over as it lies.
    numpy = sys.modules["numpy"]
    shape = x.shape if shape is None else shape
    nbytes = _product(shape) * x.dtype.itemsize
    raw = numpy.empty(nbytes + _JAX_ALIGNMENT, "u1")
    begin = -raw.__array_interface__["data"][0] % _JAX_ALIGNMENT
    return raw[begin : begin + nbytes].view(x.dtype).reshape(shape)


_JAX_ALIGNMENT = 64


def _check_jax(verb: str, device: int, in_group: bool) -> None:
    if in_group:
        raise TypeError(
            f"{verb}: x is a JAX array, and so would be the result; JAX arrays never change, and in a "
            "group nothing runs before it ends; pass out=, e.g. a NumPy array, and give it to "
            "jax.device_put afterwards"
        )
    if device >= 0:
        raise TypeError(
            f"{verb}: cannot allocate a JAX array on GPU {device}, because JAX arrays never change; "
            "pass out=, e.g. a CuPy array"
        )


def _into_jax(x: Any, out: Any) -> Any:
    jax = sys.modules["jax"]
    (device,) = x.devices()
    place = None
    if x.committed:
        place = x.sharding
        if out.ndim != x.ndim:  # a sharding of named axes may name more than the result has
            kind = place.memory_kind
            place = jax.sharding.SingleDeviceSharding(device, memory_kind=kind)
    with jax.default_device(device):  # where None is
        array = jax.device_put(out, place, may_alias=True)
        if array.dtype != x.dtype:  # x is of a time when JAX was told to use 64 bits
            with jax.enable_x64(True):
                array = jax.device_put(out, place, may_alias=True)
    return array


def _array(x: Any, shape: Any, device: int) -> Any:
    return type(x)(x.typecode, bytes(_product(shape or (len(x),)) * x.itemsize))


def _bytearray(x: Any, shape: Any, device: int) -> Any:
    return bytearray(len(x) if shape is None else _product(shape))


def _memoryview(x: Any, shape: Any, device: int) -> Any:
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
    ("jaxlib", "ArrayImpl"): _jax,
    ("array", "array"): _array,
    ("builtins", "bytes"): _bytearray,
    ("builtins", "bytearray"): _bytearray,
    ("builtins", "memoryview"): _memoryview,
}
_KNOWN: dict[type, Any] = {}
