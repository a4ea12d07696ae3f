"""What every collective must deliver, computed with NumPy alone.

The arithmetic is NCCL's: parts are combined in rank order, each combination rounded once to the element
type.  Integers wrap; their average is the wrapped sum divided by the number of ranks, toward zero.
Floating averages multiply each part by ``1/n`` (rounded to the type) before they add.  The 8-bit floats
are combined as halves and converted back with saturation: no infinity comes out.  Minimum and maximum
prefer numbers to NaN.  Booleans combine as logical or / and; complex numbers as pairs of reals.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

OPS = ("sum", "prod", "max", "min", "avg")

INTEGERS = ("int8", "uint8", "int32", "uint32", "int64", "uint64")
FLOATS = ("float16", "float32", "float64", "bfloat16", "float8_e4m3fn", "float8_e5m2")
NCCL_DTYPES = INTEGERS + FLOATS
COMPLEX = ("complex64", "complex128")

_ML_DTYPES = ("bfloat16", "float8_e4m3fn", "float8_e5m2")


@dataclass(frozen=True)
class Spec:
    """Which buffers of a collective matter where, and which hold one block per rank."""

    name: str
    op: bool = False
    root: bool = False
    send_blocks: bool = False
    recv_blocks: bool = False
    sends: str = "everywhere"  # or "root"
    receives: str = "everywhere"

    def at(self, where: str, rank: int, root: int) -> bool:
        """Whether a buffer that matters ``where`` matters on this rank."""
        return where == "everywhere" or rank == root


COLLECTIVES = {
    spec.name: spec
    for spec in (
        Spec("all_reduce", op=True),
        Spec("reduce", op=True, root=True, receives="root"),
        Spec("broadcast", root=True, sends="root"),
        Spec("all_gather", recv_blocks=True),
        Spec("reduce_scatter", op=True, send_blocks=True),
        Spec("all_to_all", send_blocks=True, recv_blocks=True),
        Spec("gather", root=True, recv_blocks=True, receives="root"),
        Spec("scatter", root=True, send_blocks=True, sends="root"),
    )
}


def np_dtype(name: Any) -> np.dtype:
    """The NumPy dtype of a name, ml_dtypes' names included."""
    return np.dtype(getattr(ml_dtypes, name) if name in _ML_DTYPES else name)


def ops_for(dtype: str) -> tuple[str, ...]:
    """The reductions that a dtype allows."""
    if dtype in NCCL_DTYPES:
        return OPS
    if dtype == "bool":
        return ("sum", "prod", "max", "min")
    return ("sum", "avg") if dtype in COMPLEX else ()


def expected(
    name: str, parts: list[np.ndarray], op: Any = None, root: int = 0
) -> list[np.ndarray | None]:
    """What each rank receives from a collective; None where nothing may be written.

    ``parts`` are the flat inputs of all ranks (off the root they are not looked at where only the
    root sends).
    """
    nranks = len(parts)
    if name in ("all_reduce", "reduce", "reduce_scatter"):
        total = reduced(parts, op)
        if name == "reduce_scatter":
            return np.split(total, nranks)
        return [total if name == "all_reduce" or rank == root else None for rank in range(nranks)]
    if name == "broadcast":
        return [parts[root]] * nranks
    if name == "scatter":
        return np.split(parts[root], nranks)
    if name == "all_to_all":
        blocks = [np.split(part, nranks) for part in parts]
        return [np.concatenate([blocks[i][rank] for i in range(nranks)]) for rank in range(nranks)]
    together = np.concatenate(parts)
    return [together if name == "all_gather" or rank == root else None for rank in range(nranks)]


def reduced(parts: list[np.ndarray], op: str, scalars: list[Any] | None = None) -> np.ndarray:
    """Combine the parts of all ranks; ``scalars`` are the ranks' factors of ``premul_sum``."""
    dtype = parts[0].dtype
    with np.errstate(all="ignore"):
        if dtype == np.bool_:
            both = np.logical_and if op in ("prod", "min") else np.logical_or
            return both.reduce(parts)
        if dtype.kind == "c":
            halves = [part.view(part.real.dtype) for part in parts]
            return reduced(halves, op).view(dtype)
        if op == "avg" and dtype.kind in "iu":
            return _divided(_combined(parts, _add), len(parts))
        if op == "avg":
            scalars = [_reciprocal(len(parts), dtype)] * len(parts)
        if scalars is not None:
            factors = [np.full_like(parts[0], scalar) for scalar in scalars]
            parts = [_multiply(part, factor) for part, factor in zip(parts, factors)]
        combine = {"prod": _multiply, "max": _maximum, "min": _minimum}.get(op, _add)
        return _combined(parts, combine)


def _combined(parts, combine):
    total = parts[0].copy()
    for part in parts[1:]:
        total = combine(total, part)
        assert total.dtype == part.dtype
    return total


def _is_fp8(dtype) -> bool:
    return dtype in (np_dtype("float8_e4m3fn"), np_dtype("float8_e5m2"))


def saturated(values: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Convert to an 8-bit float; what is too large becomes the largest finite number."""
    top = values.dtype.type(ml_dtypes.finfo(dtype).max)
    return np.clip(values, -top, top).astype(dtype)


def _through_half(function, a, b):
    """Apply a function in the type of the parts, which for 8-bit floats means as halves."""
    if not _is_fp8(a.dtype):
        return function(a, b)
    return saturated(function(a.astype(np.float16), b.astype(np.float16)), a.dtype)


def _add(a, b):
    return _through_half(np.add, a, b)


def _multiply(a, b):
    return _through_half(np.multiply, a, b)


def _pick(function, a, b):
    """Minimum or maximum; bfloat16 goes through float, where it is exact."""
    if a.dtype == np_dtype("bfloat16"):
        return function(a.astype(np.float32), b.astype(np.float32)).astype(a.dtype)
    return _through_half(function, a, b)


def _maximum(a, b):
    return _pick(np.fmax, a, b)


def _minimum(a, b):
    return _pick(np.fmin, a, b)


def _divided(total, nranks):
    """Divide integers toward zero."""
    quotient, remainder = np.divmod(total, total.dtype.type(nranks))
    return quotient + ((remainder != 0) & (total < 0)).astype(total.dtype)


def _reciprocal(nranks, dtype):
    if dtype == np.float64:
        return np.float64(1.0) / nranks
    single = np.float32(np.float64(1.0) / nranks)
    return saturated(single, dtype) if _is_fp8(dtype) else single.astype(dtype)


# --- comparison ----------------------------------------------------------------------------------------


def differences(actual: np.ndarray, wanted: np.ndarray) -> str:
    """Say where two flat arrays differ; "" where they do not.

    Equal means equal values of the same dtype, any NaN equal to any other, -0 equal to +0; for bools,
    of which there are two, and dtypes that do not compare, equal bytes.
    """
    if actual.dtype != wanted.dtype or actual.shape != wanted.shape:
        return f"{actual.dtype}{actual.shape} instead of {wanted.dtype}{wanted.shape}"
    same = (_bytes(actual) == _bytes(wanted)).all(axis=1)
    if same.all():
        return ""
    if wanted.dtype.kind in "iufc" or wanted.dtype.name in _ML_DTYPES:
        a, b = _comparable(actual), _comparable(wanted)
        same |= (a == b) | ((a != a) & (b != b))
    wrong = np.flatnonzero(~same)
    if not len(wrong):
        return ""
    first = wrong[0]
    return f"{len(wrong)} of {len(same)} wrong, first [{first}]: {actual[first]} instead of {wanted[first]}"


def _bytes(array):
    return np.ascontiguousarray(array).view(np.uint8).reshape(array.size, array.itemsize)


def _comparable(array):
    return array.astype(np.float32) if array.dtype.name in _ML_DTYPES else array


def assert_same(actual: Any, wanted: np.ndarray, what: object = "") -> None:
    """Fail unless an array holds exactly the wanted elements, in C order of its shape."""
    text = differences(np.asarray(actual).reshape(-1), wanted.reshape(-1))
    assert not text, f"{what}: {text}"
