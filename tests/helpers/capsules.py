"""DLPack by hand: managed tensors of both layouts, good and malformed, and how often they were given back.

An `Export` owns the struct that a consumer sees, over memory that the test keeps.  Every field may be set;
pointers stay those of memory that exists, so that a consumer which believes a malformed tensor goes wrong in
a way that a test can see.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from helpers.build import STUBS, build_shared

CPU, CUDA, CUDA_HOST, METAL, CUDA_MANAGED = 1, 2, 3, 8, 13
READ_ONLY = 1

CODES = {"i": 0, "u": 1, "f": 2, "c": 5, "b": 6}
NAMED_CODES = {
    "bfloat16": 4,
    "float8_e3m4": 7,
    "float8_e4m3": 8,
    "float8_e4m3b11fnuz": 9,
    "float8_e4m3fn": 10,
    "float8_e4m3fnuz": 11,
    "float8_e5m2": 12,
    "float8_e5m2fnuz": 13,
    "float8_e8m0fnu": 14,
}


class Device(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int32), ("id", ctypes.c_int32)]


class DataType(ctypes.Structure):
    _fields_ = [("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16)]


class Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device", Device),
        ("ndim", ctypes.c_int32),
        ("dtype", DataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


# Python frees tensors: the deleter must hold the GIL.
Deleter = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)


class Managed(ctypes.Structure):
    _fields_ = [("tensor", Tensor), ("context", ctypes.c_void_p), ("deleter", Deleter)]


class ManagedVersioned(ctypes.Structure):
    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", Deleter),
        ("flags", ctypes.c_uint64),
        ("tensor", Tensor),
    ]


_api = ctypes.pythonapi
_Destructor = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)
_api.PyCapsule_New.restype = ctypes.py_object
_api.PyCapsule_New.argtypes = [ctypes.c_void_p, ctypes.c_char_p, _Destructor]
_api.PyCapsule_GetName.restype = ctypes.c_char_p
_api.PyCapsule_GetName.argtypes = [ctypes.py_object]
# The destructor gets a capsule that is going: no reference may be made to it.
_name_of = ctypes.PYFUNCTYPE(ctypes.c_char_p, ctypes.c_void_p)(("PyCapsule_GetName", _api))
_pointer_of = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", _api)
)

# What consumers hold, by address of the struct: it must outlive the Export object too.
_held: dict[int, Export] = {}


@_Destructor
def _forget_capsule(capsule):
    """Do what DLPack asks of a producer: a capsule that nobody consumed gives its tensor back."""
    name = _name_of(capsule)
    if name in (b"dltensor", b"dltensor_versioned"):
        _held[_pointer_of(capsule, name)].deleted_by_capsule()


class Export:
    """One managed tensor over the memory of a NumPy array.

    Parameters
    ----------
    array
        The memory; it is kept until the tensor is given back.
    versioned
        The current struct, or the one from before DLPack 1.0.
    strides
        In elements; None stores a null pointer.  By default those of the array.
    fields
        Other values for the tensor's fields: ``shape``, ``ndim``, ``dtype`` (code, bits, lanes),
        ``device`` (type, number), ``data``, ``byte_offset``; for the struct's: ``flags``, ``version``.
    """

    def __init__(self, array: np.ndarray, versioned: bool = True, **fields: Any) -> None:
        self.array = array
        self.versioned = versioned
        self.deleted = 0
        self.struct = ManagedVersioned() if versioned else Managed()
        shape = tuple(fields.pop("shape", array.shape))
        strides = fields.pop("strides", tuple(s // array.itemsize for s in array.strides))
        code = NAMED_CODES.get(array.dtype.name, CODES.get(array.dtype.kind, 3))
        tensor = self.struct.tensor
        tensor.data = fields.pop("data", array.ctypes.data)
        tensor.device = Device(*fields.pop("device", (CPU, 0)))
        tensor.dtype = DataType(*fields.pop("dtype", (code, array.itemsize * 8, 1)))
        tensor.ndim = fields.pop("ndim", len(shape))
        # At least as many entries as an axis count that a test invents: reading them is no fault of a reader.
        tensor.shape = (ctypes.c_int64 * max(8, len(shape)))(*shape)
        if strides is not None:
            tensor.strides = (ctypes.c_int64 * max(8, len(shape), len(strides)))(*strides)
        tensor.byte_offset = fields.pop("byte_offset", 0)
        if versioned:
            self.struct.major, self.struct.minor = fields.pop("version", (1, 0))
            self.struct.flags = fields.pop("flags", 0 if array.flags.writeable else READ_ONLY)
        if fields.pop("deleter", True):
            self.struct.deleter = Deleter(self._delete)
        assert not fields, f"no such fields: {sorted(fields)}"

    @property
    def address(self) -> int:
        """Address of the struct, handed out once: the export is held until it is given back."""
        address = ctypes.addressof(self.struct)
        _held[address] = self
        return address

    def capsule(self, name: bytes | None = None) -> Any:
        """Return a new capsule that owns the tensor, named as its kind or otherwise."""
        # A capsule does not copy its name.
        self.name = name or (b"dltensor_versioned" if self.versioned else b"dltensor")
        return _api.PyCapsule_New(self.address, self.name, _forget_capsule)

    def deleted_by_capsule(self) -> None:
        """Give the tensor back unused."""
        self._delete(ctypes.addressof(self.struct))

    def _delete(self, address: int) -> None:
        self.deleted += 1
        _held.pop(address, None)


def held() -> int:
    """How many exports somebody still holds."""
    return len(_held)


def name_of(capsule: Any) -> bytes:
    """Name of a capsule; consumers rename what they take."""
    return _api.PyCapsule_GetName(capsule)


def exchange_table(*, major: int = 1, stream: int = 0, older: bool = False) -> Any:
    """Return a ``__dlpack_c_exchange_api__``; its export reads the address in ``obj.exported``.

    `stream` is what it says of every device's current stream.  With `older`, a table of `major` stands in
    front of one of version 1.
    """
    stub = ctypes.PyDLL(str(build_shared("exchange.so", [STUBS / "exchange.c"], options=_python())))
    stub.exchange_table.restype = ctypes.py_object
    stub.exchange_table.argtypes = [ctypes.c_uint32, ctypes.c_void_p, ctypes.c_int]
    return stub.exchange_table(major, stream, older)


def _python():
    import sysconfig

    return (f"-I{sysconfig.get_paths()['include']}",)
