"""Device arrays of CuPy, Numba and Torch over pretended device memory.

Real classes where they can be made without a GPU: a DeviceNDArray of Numba's needs none until something
is copied. CuPy and Torch ask the CUDA runtime, so that theirs are stand-ins: with what the real classes
offer to a reader (looked up in CuPy 14 and Torch 2.13), in modules that look like the real ones as far as
results need it.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
import types
from collections.abc import Iterator
from typing import Any

import numpy as np

from helpers import capsules
from helpers.device import BASE, OUT, SPAN, cuda

FRESH = 1 << 30  # where results are "allocated", on each device


def address(place: int, device: int = 0) -> int:
    return BASE + device * SPAN + place


class Allocations:
    """What was allocated: shape, dtype and the device that was current."""

    def __init__(self) -> None:
        self.made: list[dict[str, Any]] = []

    def note(self, **what: Any) -> None:
        self.made.append({**what, "current": cuda().current_device})


# ---- Numba ------------------------------------------------------------------------------------------


class Owner:
    """What Numba's pointers call their context."""


def numba_array(
    shape: Any, dtype: Any = "f4", place: int = OUT, device: int = 0, **words: Any
) -> Any:
    """Return a real DeviceNDArray; only its memory is pretended."""
    return numba_over(address(place, device), shape, dtype, **words)


def numba_over(
    pointer: int, shape: Any, dtype: Any, stream: Any = 0, order: str = "C", strides: Any = None
) -> Any:
    """Return a real DeviceNDArray over an address, without a driver."""
    from numba.cuda.cudadrv import devicearray, driver

    shape = shape if isinstance(shape, tuple) else (shape,)
    strides = strides or _strides(shape, np.dtype(dtype).itemsize, order)
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    owner = Owner()
    memory = driver.MemoryPointer(context=owner, pointer=ctypes.c_void_p(pointer), size=size)
    memory.kept = owner
    return devicearray.DeviceNDArray(
        shape, strides, np.dtype(dtype), stream=stream, gpu_data=memory
    )


def _strides(shape: tuple[int, ...], itemsize: int, order: str) -> tuple[int, ...]:
    strides = []
    for extent in reversed(shape) if order == "C" else shape:
        strides.append(itemsize)
        itemsize *= extent
    return tuple(reversed(strides)) if order == "C" else tuple(strides)


@contextlib.contextmanager
def numba_allocates() -> Iterator[Allocations]:
    """Let ``numba.cuda`` make arrays of pretended memory, in the context that is current."""
    from numba import cuda as numba_cuda

    log = Allocations()

    class Gpus:
        def __getitem__(self, device):
            return current(device)

    def device_array(shape, dtype, order="C", stream=0):
        log.note(shape=shape, dtype=np.dtype(dtype).name, order=order, stream=stream)
        return numba_array(shape, dtype, FRESH, cuda().current_device, stream=stream, order=order)

    saved = numba_cuda.gpus, numba_cuda.device_array
    numba_cuda.gpus, numba_cuda.device_array = Gpus(), device_array
    try:
        yield log
    finally:
        numba_cuda.gpus, numba_cuda.device_array = saved


@contextlib.contextmanager
def current(device: int) -> Iterator[None]:
    """Do what the libraries' own device contexts do."""
    before = cuda().current_context
    cuda().make_current(cuda().primary(device))
    try:
        yield
    finally:
        cuda().make_current(before or None)


# ---- CuPy -------------------------------------------------------------------------------------------


@contextlib.contextmanager
def cupy_module(stream: int = 0) -> Iterator[Any]:
    """Put a stand-in for CuPy in its place: ``cupy.log`` is what it allocated, ``cupy.stream`` is current."""
    cupy = types.ModuleType("cupy")
    cupy.log, cupy.stream = Allocations(), stream

    class ndarray:
        def __init__(self, shape, dtype="f4", place=OUT, device=0, order="C"):
            self.shape = shape if isinstance(shape, tuple) else (shape,)
            self.dtype = np.dtype(dtype)
            self.pointer = address(place, device)
            self.device = _Device(device)
            self.strides = _strides(self.shape, self.dtype.itemsize, order)
            self.order = order

        @property
        def __cuda_array_interface__(self):
            return {
                "shape": self.shape,
                "typestr": self.dtype.str,
                "descr": self.dtype.descr,
                "stream": cupy.stream or 1,
                "version": 3,
                "strides": None if self.order == "C" else self.strides,
                "data": (self.pointer if 0 not in self.shape else 0, False),
            }

        def __dlpack__(self, **_):
            raise AssertionError("the interface comes first")

        def __dlpack_device__(self):
            raise AssertionError("the interface comes first")

    class _Device:
        def __init__(self, number):
            self.id = number

        def __enter__(self):
            self.stack = contextlib.ExitStack()
            self.stack.enter_context(current(self.id))

        def __exit__(self, *_):
            self.stack.close()

    def empty(shape, dtype=float, order="C"):
        cupy.log.note(shape=shape, dtype=np.dtype(dtype).name, order=order)
        return ndarray(shape, dtype, FRESH, cuda().current_device, order)

    ndarray.__module__ = "cupy"
    ndarray.__qualname__ = "ndarray"
    cupy.ndarray, cupy.empty = ndarray, empty
    cupy.empty_like = lambda x: empty(x.shape, x.dtype, x.order)
    saved = sys.modules.get("cupy")
    sys.modules["cupy"] = cupy
    try:
        yield cupy
    finally:
        if saved is None:
            del sys.modules["cupy"]
        else:
            sys.modules["cupy"] = saved


# ---- Torch ------------------------------------------------------------------------------------------


def install_torch(stream: int = 0) -> Any:
    """Put a stand-in for a Torch with CUDA in its place, for good: in a process of its own.

    Its tensors have Torch's exchange table with both exports, the questions for lazy views, and an
    interface with the errors of the real one. There is nothing in its objects where the real ones keep
    their bits, so that the questions are asked.
    """
    torch = types.ModuleType("torch")
    torch.made = []

    class Tensor:
        __dlpack_c_exchange_api__ = capsules.exchange_table(stream=stream)

        def __init__(self, shape, dtype="float32", place=OUT, device=0, **said):
            self.shape = shape if isinstance(shape, tuple) else (shape,)
            self.dtype = f"torch.{dtype}"
            self.device = f"cuda:{device}"
            self.requires_grad = said.get("requires_grad", False)
            self.neg, self.conj = said.get("neg", False), said.get("conj", False)
            kind = arrays_dtype(dtype)
            model = np.empty(1, kind)
            self.itemsize = model.itemsize
            strides = [s // self.itemsize for s in _strides(self.shape, self.itemsize, "C")]
            self.export = capsules.Export(
                model, shape=self.shape, strides=tuple(said.get("strides", strides)),
                device=(capsules.CUDA, device), data=address(place, device),
            )  # fmt: skip

        @property
        def borrowed(self):
            return ctypes.addressof(self.export.struct.tensor)

        @property
        def exported(self):
            raise AssertionError("a call borrows")

        def is_neg(self):
            return self.neg

        def is_conj(self):
            return self.conj

        def detach(self):
            return self

        def stride(self):
            return tuple(self.export.struct.tensor.strides[i] for i in range(len(self.shape)))

        @property
        def __cuda_array_interface__(self):
            if self.requires_grad:
                raise RuntimeError(
                    "Can't get __cuda_array_interface__ on Variable that requires grad."
                )
            raise KeyError(self.dtype)

        def __dlpack__(self, **_):
            raise AssertionError("the table comes first")

    class Parameter(Tensor):
        pass

    def empty(shape, *, dtype, device):
        torch.made.append((tuple(shape), dtype, device))
        number = int(str(device).partition(":")[2])
        return Tensor(tuple(shape), str(dtype).removeprefix("torch."), FRESH, number)

    Tensor.__module__, Tensor.__qualname__ = "torch", "Tensor"
    torch.Tensor, torch.nn = Tensor, types.SimpleNamespace(Parameter=Parameter)
    torch.empty = empty
    torch.empty_strided = lambda shape, strides, **words: empty(shape, **words)
    sys.modules["torch"] = torch
    return torch


def arrays_dtype(name: str) -> np.dtype:
    from helpers import arrays

    return arrays.dtype(name)
