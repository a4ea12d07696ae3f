"""What the ranks of `perf` send, and what must come out: with NumPy alone, exact to the last bit.

Every rank's data is periodic: `PERIOD` elements that depend on the rank and on the position, repeated.
One period of inputs and results is computed; buffers of any size are filled from it and compared with
it.  The period is a prime number, so that no shift by a block, a chunk or a slot looks right.

The data is chosen so that there is exactly one right answer, in whatever order a library combines the
ranks and wherever it rounds: each partial result is a number that the element type has.

========  ===========================  ==============================================================
op        integers                     floats
========  ===========================  ==============================================================
none      any bits                     any bits
sum       any; they wrap               integers so small that each partial sum is exact
prod      any; they wrap               ±1, and so few ±2 and ±3 that each partial product is exact
max, min  any                          integers that the type has
avg       any: the sum wraps, then is  for 2, 4, 8, ... ranks as for sum; for others ±1, ±2 or ±4 on
          divided toward zero          one rank and zeros: the result is that times the rounded 1/n
premul    any; factors 1, 2, 3         as for sum, with the factors 1 and 2
========  ===========================  ==============================================================
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ._perf_cases import DTYPES, REDUCED, Segment

__all__ = ["PERIOD", "Data", "bits_of", "dtype_of", "make_data"]

PERIOD = 16381


@dataclass(frozen=True)
class Data:
    """One period of all that may stand in a buffer.

    Attributes
    ----------
    inputs : ndarray, shape (nranks, PERIOD)
        What each rank sends, as unsigned integers of the element's size.
    reduced : ndarray, shape (PERIOD,)
        The result of the reduction, likewise.
    factors : tuple of int
        Each rank's factor, for premul.
    """

    inputs: Any
    reduced: Any
    factors: tuple[int, ...]

    def period(self, source: int, start: int) -> Any:
        """Return the period of a rank's data, or of the result, that begins at position `start`."""
        period = self.reduced if source == REDUCED else self.inputs[source]
        return np.roll(period, -start) if start % PERIOD else period

    def write(self, buffer: Any, segments: list[Segment], *, poison: bool = False) -> None:
        """Fill a buffer.

        Parameters
        ----------
        buffer : ndarray
            Flat, of unsigned integers.
        segments : list of Segment
            What to write, one after the other.
        poison : bool
            Write the complement instead: then no element is right by accident.
        """
        for part, segment in _parts(buffer, segments):
            period = self.period(segment.source, segment.start)
            if poison:
                period = ~period
            whole, rest = divmod(segment.size, PERIOD)
            part[: whole * PERIOD].reshape(whole, PERIOD)[:] = period
            part[whole * PERIOD :] = period[:rest]

    def wrong(self, buffer: Any, segments: list[Segment]) -> int:
        """Count the elements that are not what they should be; every one is compared, bit by bit."""
        wrong = 0
        for part, segment in _parts(buffer, segments):
            period = self.period(segment.source, segment.start)
            whole, rest = divmod(segment.size, PERIOD)
            periods = part[: whole * PERIOD].reshape(whole, PERIOD)
            step = max(
                1, (1 << 20) // period.nbytes
            )  # the comparison's own result stays in the cache
            for first in range(0, whole, step):
                wrong += int(np.count_nonzero(periods[first : first + step] != period))
            wrong += int(np.count_nonzero(part[whole * PERIOD :] != period[:rest]))
        return wrong


def _parts(buffer: Any, segments: list[Segment]) -> list[tuple[Any, Segment]]:
    parts, first = [], 0
    for segment in segments:
        parts.append((buffer[first : first + segment.size], segment))
        first += segment.size
    return parts


def dtype_of(name: str) -> Any:
    """Return the NumPy dtype of an element type, from ml_dtypes where NumPy has none."""
    if DTYPES[name].package == "ml_dtypes":
        import ml_dtypes

        return np.dtype(getattr(ml_dtypes, name))
    return np.dtype(name)


def bits_of(dtype: Any) -> Any:
    """Return the unsigned integer type of the same size."""
    return np.dtype(f"u{dtype.itemsize}")


def make_data(name: str, op: str, nranks: int) -> Data:
    """Make the data of all ranks, and the result.

    Parameters
    ----------
    name : str
        The element type, of `DTYPES`.
    op : str
        The reduction, of `OPS`; or ``"none"``.
    nranks : int
        How many ranks there are.
    """
    dtype = dtype_of(name)
    bits = bits_of(dtype)
    noise = _noise(nranks)
    limit = DTYPES[name].exact
    factors = tuple(1 + rank % (2 if limit else 3) for rank in range(nranks))
    if op == "none":
        inputs = noise.astype(bits)
        return Data(inputs, inputs[0], factors)
    if limit:
        inputs, reduced = _floats(noise, op, dtype, limit, factors)
    else:
        inputs = noise.astype(bits).view(dtype)
        reduced = _reduce_integers(inputs, op, factors)
    return Data(inputs.view(bits), reduced.view(bits), factors)


def _noise(nranks: int) -> Any:
    """Return 64 bits for each rank and position, by the finaliser of splitmix64."""
    count = nranks * PERIOD
    x = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (x ^ (x >> np.uint64(31))).reshape(nranks, PERIOD)


def _reduce_integers(inputs: Any, op: str, factors: tuple[int, ...]) -> Any:
    dtype = inputs.dtype
    if op == "max":
        return inputs.max(axis=0)
    if op == "min":
        return inputs.min(axis=0)
    if op == "prod":
        return np.multiply.reduce(inputs, axis=0, dtype=dtype)
    if op == "premul":
        inputs = inputs * np.array(factors, dtype)[:, None]
    total = np.add.reduce(inputs, axis=0, dtype=dtype)
    if op != "avg":
        return total
    wide = total.astype(np.uint64 if dtype.kind == "u" else np.int64)
    nranks = wide.dtype.type(len(factors))
    quotient = wide // nranks
    # NumPy divides toward minus infinity, NCCL toward zero.
    quotient += ((wide % nranks != 0) & (wide < 0)).astype(quotient.dtype)
    return quotient.astype(dtype)


def _floats(
    noise: Any, op: str, dtype: Any, limit: int, factors: tuple[int, ...]
) -> tuple[Any, Any]:
    """Return inputs and result for a floating type that has all integers up to `limit`."""
    nranks = len(noise)
    # How far each rank is from having its turn, at each position.
    turn = (np.arange(nranks)[:, None] + np.arange(PERIOD)) % nranks
    if op in ("max", "min"):
        values = (noise % np.uint64(2 * limit + 1)).astype(np.int64) - limit
        result = values.max(axis=0) if op == "max" else values.min(axis=0)
    elif op == "prod":
        few = max(k for k in range(1, 40) if 3**k <= limit)
        values = np.where(turn < few, 1 + noise % np.uint64(3), 1).astype(np.int64)
        values = np.where(noise >> np.uint64(63), -values, values)
        result = np.multiply.reduce(values, axis=0)
    elif op == "avg" and nranks & (nranks - 1):
        values = np.where(turn == 0, 1 << (noise % np.uint64(3)).astype(np.int64), 0)
        values = np.where(noise >> np.uint64(63), -values, values)
        # As NCCL: 1/n in single precision (double for float64), rounded to the type.
        part = 1 / nranks if dtype.itemsize == 8 else np.float32(1 / nranks)
        result = values.sum(axis=0) * np.array(part).astype(dtype).astype(np.float64)
    else:
        weight = 2 if op == "premul" else 1
        stride = -(-nranks * weight // limit)  # every so many ranks have something to add
        most = limit // (weight * -(-nranks // stride))
        values = (noise % np.uint64(2 * most + 1)).astype(np.int64) - most
        values = np.where(turn % stride == 0, values, 0)
        scaled = values * np.array(factors)[:, None] if op == "premul" else values
        result = scaled.sum(axis=0) / nranks if op == "avg" else scaled.sum(axis=0)
    return values.astype(np.float64).astype(dtype), result.astype(np.float64).astype(dtype)
