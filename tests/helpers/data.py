"""Inputs that betray mistakes, and memory that betrays stray writes.

Elements differ from each other and between ranks; outputs are poisoned before use; every buffer lies
between guard bytes.
"""

from __future__ import annotations

import functools
import zlib
from typing import Any

import numpy as np

from helpers import oracle

GUARD = 64
GUARD_BYTE = 0xC5
POISON_BYTE = 0xA7


@functools.lru_cache(maxsize=512)
def values(dtype: Any, size: int, rank: int, seed: int = 0) -> np.ndarray:
    """A rank's input: random, reproducible, read-only; the first element differs between any 16 ranks.

    Integers span their whole range, so that sums wrap; floats span magnitudes, so that the order of
    additions shows; 8-bit floats take every finite pattern, so that sums saturate.
    """
    dtype = oracle.np_dtype(dtype) if isinstance(dtype, str) else np.dtype(dtype)
    rng = np.random.default_rng([rank, seed, size, zlib.crc32(dtype.name.encode())])
    array = _random(rng, dtype, size)
    if size:
        array[:1] = _first(dtype, rank)
    array.setflags(write=False)
    return array


def _random(rng, dtype, size):
    if dtype.kind == "b":
        return rng.integers(0, 2, size).astype(bool)
    if dtype.kind in "iu" and dtype.itemsize <= 8:
        return rng.integers(0, 256, size * dtype.itemsize, np.uint8).view(dtype)
    if dtype.itemsize == 1 and dtype.name.startswith("float8"):
        array = rng.integers(0, 256, size, np.uint8).view(dtype)
        finite = np.isfinite(array.astype(np.float32))
        return np.where(finite, array, np.zeros(1, dtype))
    if dtype.kind == "f" or dtype.name == "bfloat16":
        wide = rng.standard_normal(size) * 2.0 ** rng.integers(-5, 6, size)
        return wide.astype(dtype)
    if dtype.kind == "c":
        return _random(rng, np.zeros(0, dtype).real.dtype, 2 * size).view(dtype)
    return np.frombuffer(
        rng.integers(0, 256, size * dtype.itemsize, np.uint8).tobytes(), dtype
    ).copy()


def _first(dtype, rank):
    if dtype.kind == "b":
        return np.array([rank % 2 == 1])
    if dtype.kind in "iufc" or dtype.name.startswith(("bfloat", "float8")):
        return np.array([rank + 1]).astype(dtype)
    return np.frombuffer(bytes([rank + 1]) * dtype.itemsize, dtype)


def inputs(name: str, dtype: Any, nranks: int, size: int, seed: int = 0) -> list[np.ndarray]:
    """The inputs of all ranks of a collective whose blocks have ``size`` elements."""
    blocks = nranks if oracle.COLLECTIVES[name].send_blocks else 1
    return [values(dtype, size * blocks, rank, seed) for rank in range(nranks)]


@functools.lru_cache(maxsize=128)
def _expected(name, dtype, nranks, size, op, root, seed):
    return oracle.expected(name, inputs(name, dtype, nranks, size, seed), op, root)


def expected(
    name: str, dtype: Any, nranks: int, size: int, op: Any = None, root: int = 0, seed: int = 0
) -> list[np.ndarray | None]:
    """The results of all ranks for `inputs`; kept, because every rank of this process asks for them."""
    return _expected(name, dtype, nranks, size, op, root, seed)


class Guarded:
    """An array between guard bytes.

    Parameters
    ----------
    dtype, shape
        As NumPy's.
    content : array, optional
        What the array holds at first; poison if omitted.
    offset : int
        Bytes by which the array is shifted from 64-byte alignment.
    order : str
        ``"C"`` or ``"F"``.
    """

    def __init__(
        self,
        dtype: Any,
        shape: Any,
        content: np.ndarray | None = None,
        offset: int = 0,
        order: str = "C",
    ) -> None:
        dtype = oracle.np_dtype(dtype) if isinstance(dtype, str) else np.dtype(dtype)
        count = int(np.prod(shape, dtype=np.int64))
        nbytes = count * dtype.itemsize
        memory = np.empty(nbytes + 4 * GUARD, np.uint8)
        start = GUARD + -memory.ctypes.data % GUARD + offset
        memory[:] = GUARD_BYTE
        self._memory, self._start, self._end = memory, start, start + nbytes
        memory[start : self._end] = POISON_BYTE
        self.array = memory[start : self._end].view(dtype).reshape(shape, order=order)
        if content is not None:
            self.array[...] = content.reshape(shape)

    @classmethod
    def holding(cls, content: np.ndarray, **how: Any) -> Guarded:
        """A guarded copy of an array."""
        return cls(content.dtype, content.shape, content, **how)

    def check_guards(self, what: object = "") -> None:
        """Fail if a byte outside of the array has changed."""
        before, after = self._memory[: self._start], self._memory[self._end :]
        assert (before == GUARD_BYTE).all(), f"{what}: written before the buffer"
        assert (after == GUARD_BYTE).all(), f"{what}: written behind the buffer"

    def check_holds(self, wanted: np.ndarray, what: object = "") -> None:
        """Fail unless the array holds ``wanted`` and the guards are whole."""
        oracle.assert_same(self.array, wanted, what)
        self.check_guards(what)

    def check_poisoned(self, what: object = "") -> None:
        """Fail if anything has been written, in the array or around it."""
        assert (self._memory[self._start : self._end] == POISON_BYTE).all(), f"{what}: was written"
        self.check_guards(what)
