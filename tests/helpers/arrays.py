"""Every kind of array that people pass, over host memory that a test can look into.

`KINDS` is the registry.  ``kind.make(values)`` gives an object of that kind which holds `values`, and a NumPy
array of the very same memory, so that a result can be read whatever the kind is.
"""

from __future__ import annotations

import array
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from helpers import capsules

NUMBERS = (
    "int8", "uint8", "int32", "uint32", "int64", "uint64", "float16", "float32", "float64", "bool",
    "complex64", "complex128",
)  # fmt: skip
ML_NUMBERS = ("bfloat16", "float8_e4m3fn", "float8_e5m2")
MOVED = ("int16", "uint16", "datetime64[ns]", "S5", "U3", "V6", "float8_e4m3fnuz", "int4")
ALL = NUMBERS + ML_NUMBERS


def dtype(name: Any) -> np.dtype:
    """Return a NumPy dtype, also of those names that ml_dtypes adds."""
    import ml_dtypes

    return np.dtype(getattr(ml_dtypes, name, name) if isinstance(name, str) else name)


class CaiArray:
    """An object with nothing but ``__cuda_array_interface__``, in its instance; every field can be set.

    A field given as `ABSENT` is left out.
    """

    def __init__(self, values: np.ndarray, **fields: Any) -> None:
        self.values = values
        self.__cuda_array_interface__ = interface(values, **fields)


class CaiProperty(CaiArray):
    """The same through a property, as Numba and CuPy have it: a new dict every time."""

    def __init__(self, values: np.ndarray, **fields: Any) -> None:
        self.values = values
        self.fields = fields

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return interface(self.values, **self.fields)


class InterfaceArray:
    """An object with nothing but NumPy's ``__array_interface__``."""

    def __init__(self, values: np.ndarray, **fields: Any) -> None:
        self.values = values
        self.__array_interface__ = interface(values, **fields)


class NamedArray(CaiArray):
    """With a dtype of its own beside the interface, whose type string does not say bfloat16."""

    @property
    def dtype(self) -> np.dtype:
        return self.values.dtype


ABSENT = object()


def interface(values: np.ndarray, **fields: Any) -> dict[str, Any]:
    """Return the array interface of a NumPy array, with changes."""
    said = {
        "shape": values.shape,
        "typestr": values.dtype.str,
        "data": (values.ctypes.data, not values.flags.writeable),
        "strides": None if values.flags.c_contiguous else values.strides,
        "version": 3,
        **fields,
    }
    return {key: value for key, value in said.items() if value is not ABSENT}


class DlpackArray:
    """An object with DLPack's two methods; `fields` go to `capsules.Export`.

    ``exports`` are all tensors that it gave away.
    """

    def __init__(self, values: np.ndarray, **fields: Any) -> None:
        self.values = values
        self.fields = fields
        self.exports: list[capsules.Export] = []
        self.asked: list[dict[str, Any]] = []

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.fields.get("device", (capsules.CPU, 0))

    def __dlpack__(self, **asked: Any) -> Any:
        self.asked.append(asked)
        return self.export()

    def export(self) -> Any:
        export = capsules.Export(self.values, **self.fields)
        self.exports.append(export)
        return export.capsule()


class OldDlpackArray(DlpackArray):
    """The same as it was before DLPack 1.0, which knows no ``max_version``."""

    def __init__(self, values: np.ndarray, **fields: Any) -> None:
        super().__init__(values, versioned=False, **fields)

    def __dlpack__(self, stream: Any = None) -> Any:
        self.asked.append({} if stream is None else {"stream": stream})
        return self.export()


@dataclass(frozen=True)
class Kind:
    """One kind of array.

    Attributes
    ----------
    name
        For test ids.
    make
        From values to (object, NumPy array of its memory).
    dtypes
        What it can hold, by name.
    axes
        The most axes that it can have.
    """

    name: str
    make: Callable[[np.ndarray], tuple[Any, np.ndarray]]
    dtypes: tuple[str, ...] = NUMBERS
    axes: int = 8

    def __repr__(self) -> str:
        return self.name


def _over(wrap: Callable[[np.ndarray], Any]) -> Callable[[np.ndarray], tuple[Any, np.ndarray]]:
    def make(values):
        memory = np.array(values, order="A" if values.ndim < 2 else "K")
        return wrap(memory), memory

    return make


def _subclass(memory):
    return memory.view(_Subclass)


class _Subclass(np.ndarray):
    pass


def _bytearray(values):
    it = bytearray(values.tobytes())
    return it, np.frombuffer(it, values.dtype)


def _array(values):
    it = array.array(values.dtype.char, values.tobytes())
    return it, np.frombuffer(it, values.dtype)


def _ctypes(values):
    it = (np.ctypeslib.as_ctypes_type(values.dtype) * values.size).from_buffer_copy(
        values.tobytes()
    )
    return it, np.frombuffer(it, values.dtype)


def _buffer(memory):
    from pynccl._buffer import Buffer

    return Buffer(memory)


def simulated(memory: np.ndarray) -> Any:
    """Return a device array of Numba's CUDA simulator; no process-wide simulation is needed for one."""
    from numba.cuda.simulator.cudadrv.devicearray import FakeCUDAArray

    return FakeCUDAArray(memory)


_PLAIN = ("int8", "uint8", "int32", "uint32", "int64", "uint64", "float32", "float64")

KINDS = {
    kind.name: kind
    for kind in (
        Kind("numpy", _over(lambda memory: memory), ALL + MOVED),
        Kind("subclass", _over(_subclass), ALL + MOVED),
        Kind("memoryview", _over(memoryview), NUMBERS),
        Kind("bytearray", _bytearray, ("uint8",), axes=1),
        Kind("array", _array, _PLAIN, axes=1),
        Kind("ctypes", _ctypes, (*_PLAIN, "bool"), axes=1),
        Kind("cai", _over(CaiArray), NUMBERS),
        Kind("cai-property", _over(CaiProperty), NUMBERS),
        Kind("cai-named", _over(NamedArray), ALL),
        Kind("dlpack", _over(DlpackArray), ALL),
        Kind("dlpack-old", _over(OldDlpackArray), ALL),
        Kind("array-interface", _over(InterfaceArray), NUMBERS),
        Kind("simulator", _over(simulated), ALL),
        Kind("buffer", _over(_buffer), ALL + MOVED),
    )
}


def made() -> list[tuple[Kind, str]]:
    """Every kind with every dtype that it can hold, for a parametrised test."""
    return [(kind, name) for kind in KINDS.values() for name in kind.dtypes]
