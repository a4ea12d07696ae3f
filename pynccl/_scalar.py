"""A Python number as the bytes of one NCCL element, rounded once."""

from __future__ import annotations

import math
import operator
import struct

# By dtype name: bits of the exponent and of the mantissa, and whether there is an infinity.
_FLOATS = {
    "float16": (5, 10, True),
    "bfloat16": (8, 7, True),
    "float32": (8, 23, True),
    "float64": (11, 52, True),
    "float8_e4m3fn": (4, 3, False),
    "float8_e5m2": (5, 2, True),
}
_INTS = {"int8": "b", "uint8": "B", "int32": "i", "uint32": "I", "int64": "q", "uint64": "Q"}


def pack(scalar: object, dtype: str) -> bytes:
    """Encode a scalar as one element of `dtype`.

    Parameters
    ----------
    scalar : int or float
        The value; also a NumPy scalar or anything with ``__index__`` or ``__float__``.
    dtype : str
        Name of one of NCCL's element types.

    Returns
    -------
    bytes
        In the machine's byte order; floats rounded to nearest, ties to even.

    Raises
    ------
    TypeError
        `scalar` is not a real number, or has a fraction and `dtype` is an integer type.
    OverflowError
        The value does not fit in `dtype`.
    """
    # What NumPy's scalars and 0-d arrays say of themselves; float() would drop an imaginary part.
    kind = getattr(getattr(scalar, "dtype", None), "kind", "f")
    if (
        isinstance(scalar, (bool, str, bytes, complex))
        or kind in "bcSU"
        or getattr(scalar, "shape", None)
    ):
        raise _not_real(scalar)
    if dtype in _INTS:
        return _pack_int(scalar, dtype)
    value = _real(scalar)
    exponent_bits, mantissa_bits, has_inf = _FLOATS[dtype]
    bits = _encode(value, exponent_bits, mantissa_bits, has_inf)
    if bits is None:
        raise OverflowError(f"premul_sum: {scalar!r} does not fit in {dtype}")
    size = (1 + exponent_bits + mantissa_bits) // 8
    return struct.pack("=" + {1: "B", 2: "H", 4: "I", 8: "Q"}[size], bits)


def _real(scalar: object) -> float:
    try:
        return float(scalar)  # type: ignore[arg-type]
    except TypeError:
        raise _not_real(scalar) from None
    except OverflowError:
        raise OverflowError("premul_sum: scalar is beyond the range of a double") from None


def _not_real(scalar: object) -> TypeError:
    return TypeError(f"premul_sum: scalar must be a real number, not {type(scalar).__name__!r}")


def _pack_int(scalar: object, dtype: str) -> bytes:
    try:
        value = operator.index(scalar)  # type: ignore[arg-type]
    except TypeError:
        real = _real(scalar)
        if not real.is_integer():
            raise TypeError(
                f"premul_sum: {scalar!r} is not a whole number, and dtype is {dtype}"
            ) from None
        value = int(real)
    try:
        return struct.pack("=" + _INTS[dtype], value)
    except struct.error:
        raise OverflowError(f"premul_sum: {scalar!r} does not fit in {dtype}") from None


def _encode(value: float, exponent_bits: int, mantissa_bits: int, has_inf: bool) -> int | None:
    """Round a float64 to a smaller format; None when it is beyond the largest finite value."""
    sign = 1 if math.copysign(1.0, value) < 0 else 0
    top = sign << (exponent_bits + mantissa_bits)
    all_ones = (1 << exponent_bits) - 1
    if math.isnan(value):
        # The quiet NaN; where there is no infinity, all bits set is the only NaN.
        mantissa = 1 << (mantissa_bits - 1) if has_inf else (1 << mantissa_bits) - 1
        return top | all_ones << mantissa_bits | mantissa
    if math.isinf(value):
        return top | all_ones << mantissa_bits if has_inf else None
    bias = (1 << (exponent_bits - 1)) - 1
    # value = fraction * 2**exponent with 0.5 <= fraction < 1, so its leading bit is exponent - 1.
    exponent = math.frexp(value)[1] - 1 if value else -bias
    exponent = max(exponent, 1 - bias)  # denormals share the smallest exponent
    # round() is exact here and rounds ties to even.
    steps = round(math.ldexp(abs(value), mantissa_bits - exponent))
    # Adding lets a carry out of the mantissa move into the exponent by itself.
    bits = ((exponent + bias - 1) << mantissa_bits) + steps
    largest = (all_ones << mantissa_bits) - (1 if has_inf else -((1 << mantissa_bits) - 2))
    return top | bits if bits <= largest else None
