"""What `perf` can measure: its collectives, element types and ops, and where data is before and after.

Adding a collective is one row in `COLLECTIVES` and, unless it follows from the row, a line in `_result`.
Nothing here needs NumPy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

__all__ = [
    "ARRAYS",
    "COLLECTIVES",
    "DTYPES",
    "OPS",
    "REDUCED",
    "Area",
    "Case",
    "Collective",
    "DType",
    "Layout",
    "Segment",
    "call_of",
    "lay_out",
]

ARRAYS = ("numpy", "numba", "cupy")
OPS = ("sum", "prod", "max", "min", "avg", "premul")


class DType(NamedTuple):
    """An element type: size in bytes, and the integers up to which it has all (0: an integer type)."""

    itemsize: int
    exact: int
    package: str = "numpy"


DTYPES = {
    "int8": DType(1, 0),
    "uint8": DType(1, 0),
    "int32": DType(4, 0),
    "uint32": DType(4, 0),
    "int64": DType(8, 0),
    "uint64": DType(8, 0),
    "float16": DType(2, 1 << 11),
    "float32": DType(4, 1 << 24),
    "float64": DType(8, 1 << 53),
    "bfloat16": DType(2, 1 << 8, "ml_dtypes"),
    "float8_e4m3fn": DType(1, 1 << 4, "ml_dtypes"),
    "float8_e5m2": DType(1, 1 << 3, "ml_dtypes"),
}


class Case(NamedTuple):
    """One row of the table: a call, and how much data it is about."""

    collective: str
    arrays: str
    dtype: str
    op: str
    root: int
    block: int  # elements of a block, or of the buffer where there are no blocks
    size: int  # bytes of the larger buffer of a rank


REDUCED = -1  # in place of a rank: the result of the reduction


class Segment(NamedTuple):
    """Part of a buffer: `size` elements of a rank's data (or of the result) from position `start` on."""

    source: int
    start: int
    size: int


@dataclass(frozen=True)
class Collective:
    """One row of the table.

    Attributes
    ----------
    name : str
        The method of `Communicator`.
    factor : callable
        By what the bandwidth of the algorithm is multiplied, given the number of ranks, to get what the
        busiest link or memory has to move: nccl-tests' factors.
    op, root : bool
        Whether it reduces, and whether one rank is special.
    send_blocks, recv_blocks : bool
        Whether the input, or the output, holds one block per rank.
    in_place : bool
        Whether NCCL has a form of it in place.
    """

    name: str
    factor: Callable[[int], float]
    op: bool = False
    root: bool = False
    send_blocks: bool = False
    recv_blocks: bool = False
    in_place: bool = True

    @property
    def blocks(self) -> bool:
        """Whether the larger buffer holds one block per rank."""
        return self.send_blocks or self.recv_blocks


def _all_but_own(nranks: int) -> float:
    return (nranks - 1) / nranks


COLLECTIVES = {
    row.name: row
    for row in (
        Collective("all_reduce", lambda n: 2 * _all_but_own(n), op=True),
        Collective("reduce", lambda n: 1.0, op=True, root=True),
        Collective("broadcast", lambda n: 1.0, root=True),
        Collective("all_gather", _all_but_own, recv_blocks=True),
        Collective("reduce_scatter", _all_but_own, op=True, send_blocks=True),
        Collective("all_to_all", _all_but_own, send_blocks=True, recv_blocks=True, in_place=False),
        Collective("gather", _all_but_own, root=True, recv_blocks=True),
        Collective("scatter", _all_but_own, root=True, send_blocks=True),
        Collective("send_recv", lambda n: 1.0, in_place=False),
    )
}


@dataclass
class Area:
    """One buffer of one rank: what it holds before and after.

    What `before` leaves out is poisoned: it holds the complement of what it must hold afterwards.
    """

    after: list[Segment]
    before: list[tuple[int, Segment]] = field(default_factory=list)  # offset in the buffer, what

    @property
    def size(self) -> int:
        """Number of elements."""
        return sum(segment.size for segment in self.after)


@dataclass
class Layout:
    """The buffers of one rank for one call; `x` and `out` are (area, first element, size), or None."""

    areas: list[Area]
    x: tuple[int, int, int] | None
    out: tuple[int, int, int] | None


def lay_out(
    row: Collective, rank: int, nranks: int, block: int, root: int, in_place: bool
) -> Layout:
    """Say where a rank's data is.

    Parameters
    ----------
    row : Collective
        What is called.
    rank, nranks, root : int
        Who calls.
    block : int
        Elements of a block, or of the whole buffer where it has no blocks.
    in_place : bool
        Whether input and output share a buffer.
    """
    sends = row.name != "scatter" or rank == root
    receives = row.name not in ("reduce", "gather") or rank == root
    send = [Segment(rank, 0, block * nranks if row.send_blocks else block)] if sends else []
    recv = _result(row, rank, nranks, block, root) if receives else []
    if not in_place:
        areas: list[Area] = []
        x = out = None
        if sends:
            x = (len(areas), 0, send[0].size)
            areas.append(Area(after=send, before=[(0, send[0])]))
        if receives:
            area = Area(after=recv)
            out = (len(areas), 0, area.size)
            areas.append(area)
        return Layout(areas, x, out)
    if not (sends and receives):  # there is one buffer only
        area = Area(after=send or recv, before=[(0, segment) for segment in send])
        whole = (0, 0, area.size)
        return Layout([area], whole if sends else None, whole if receives else None)
    if row.send_blocks:  # the output is this rank's block of the input
        own = rank * block
        parts = (
            Segment(rank, 0, own),
            *recv,
            Segment(rank, own + block, (nranks - rank - 1) * block),
        )
        area = Area(after=[part for part in parts if part.size], before=[(0, send[0])])
        return Layout([area], (0, 0, nranks * block), (0, own, block))
    if row.recv_blocks:  # the input is this rank's block of the output
        own = rank * block
        area = Area(after=recv, before=[(own, send[0])])
        return Layout([area], (0, own, block), (0, 0, nranks * block))
    area = Area(after=recv, before=[(0, send[0])])
    return Layout([area], (0, 0, block), (0, 0, block))


def _result(row: Collective, rank: int, nranks: int, block: int, root: int) -> list[Segment]:
    """Return what a rank must have received."""
    own = rank * block if row.send_blocks else 0
    if row.op:
        return [Segment(REDUCED, own, block)]
    if row.recv_blocks:
        return [Segment(source, own, block) for source in range(nranks)]
    if row.root:
        return [Segment(root, own, block)]
    return [Segment((rank - 1) % nranks, 0, block)]  # send_recv: from the left neighbour


def call_of(
    row: Collective, comm: Any, x: Any, out: Any, op: Any, root: int
) -> tuple[Callable[..., object], tuple[Any, ...], dict[str, Any]]:
    """Return method and arguments of the call."""
    method = getattr(comm, row.name)
    if row.name == "send_recv":
        right, left = (comm.rank + 1) % comm.nranks, (comm.rank - 1) % comm.nranks
        return method, (x, right, out, left), {}
    if row.name == "broadcast":
        return method, (x, root), {"out": out}
    return method, (x, out, *([op] * row.op), *([root] * row.root)), {}
