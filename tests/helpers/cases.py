"""One checked collective call, for whatever kind of rank runs it.

`issue` makes the call and returns a function that checks everything about its result; the two are
separate because inside a group nothing has happened yet when the call returns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from helpers import data, oracle

FORMS = ("out", "new", "in place")


@dataclass(frozen=True)
class Case:
    """One call: which collective, on what, and where its result goes.

    ``size`` counts the elements of one block.  ``form`` is "out" (into a given, poisoned array), "new"
    (the result is allocated) or "in place".
    """

    name: str
    dtype: Any
    size: int
    op: str | None = None
    root: int = 0
    form: str = "out"
    seed: int = 0
    offset: int = 0

    @property
    def spec(self) -> oracle.Spec:
        """The row of the oracle's table."""
        return oracle.COLLECTIVES[self.name]

    def keywords(self) -> dict[str, Any]:
        """The call's op and root, as far as they apply."""
        words: dict[str, Any] = {}
        if self.spec.op:
            words["op"] = self.op
        if self.spec.root:
            words["root"] = self.root
        return words


def issue(comm: Any, case: Case) -> Callable[[], None]:
    """Make the call on this rank; the returned function raises unless its result is right."""
    spec, rank, nranks = case.spec, comm.rank, comm.nranks
    if case.form == "in place":
        return _issue_in_place(comm, case)
    content = data.inputs(case.name, case.dtype, nranks, case.size, case.seed)[rank]
    wanted = data.expected(case.name, case.dtype, nranks, case.size, case.op, case.root, case.seed)[
        rank
    ]
    sends = spec.at(spec.sends, rank, case.root)
    shape = (nranks, case.size) if spec.send_blocks else (case.size,)
    x = data.Guarded.holding(content.reshape(shape), offset=case.offset * content.itemsize)
    call = getattr(comm, case.name)
    # Off the root, what is given must be left alone: give it something to leave alone.
    out_blocks = nranks if spec.recv_blocks else 1
    out = data.Guarded(
        content.dtype, (out_blocks * case.size,), offset=case.offset * content.itemsize
    )
    given = x.array if sends else None
    if case.form == "out":
        result = call(given, out=out.array, **case.keywords())
    elif case.name in ("broadcast", "scatter") and not sends:
        result = call(None, out=out.array, **case.keywords())  # the size is known to the root alone
    elif case.name == "broadcast":
        result = call(x.array, **case.keywords())
    else:
        result = call(given, **case.keywords())

    def check() -> None:
        what = f"{case} on rank {rank} of {nranks}"
        x.check_holds(content.reshape(shape), f"input of {what}")
        if wanted is None:
            assert result is None, f"{what}: returned {result!r}"
            out.check_poisoned(what)
            return
        oracle.assert_same(result, wanted, what)
        out.check_guards(what)
        if case.form == "out":
            assert result is out.array, what
        elif case.name != "broadcast" and not (case.name == "scatter" and not sends):
            assert result.shape == _new_shape(case, nranks), what

    return check


def _new_shape(case, nranks):
    """The documented shape of an allocated result: axis 0 is the rank axis."""
    return (nranks, case.size) if case.spec.recv_blocks else (case.size,)


def _issue_in_place(comm, case):
    """Call with input and output in one buffer, the way that NCCL allows it for this collective."""
    spec, rank, nranks, size = case.spec, comm.rank, comm.nranks, case.size
    content = data.inputs(case.name, case.dtype, nranks, size, case.seed)[rank]
    wanted = data.expected(case.name, case.dtype, nranks, size, case.op, case.root, case.seed)[rank]
    sends, receives = (spec.at(w, rank, case.root) for w in (spec.sends, spec.receives))
    blocks = nranks if spec.send_blocks or spec.recv_blocks else 1
    memory = data.Guarded(content.dtype, (blocks, size), offset=case.offset * content.itemsize)
    own = memory.array[rank] if blocks > 1 else memory.array[0]
    x = memory.array if spec.send_blocks else own
    out = memory.array if spec.recv_blocks else own
    if spec.send_blocks == spec.recv_blocks:
        x = out = memory.array[0]
    if sends:
        x[...] = content.reshape(x.shape)
    before = memory.array.copy()
    result = getattr(comm, case.name)(
        x if sends else None, out=out if receives else None, **case.keywords()
    )

    def check() -> None:
        what = f"{case} on rank {rank} of {nranks}"
        after = before
        if receives:
            assert result is out, what
            if spec.recv_blocks or not spec.send_blocks:
                after = wanted.reshape(before.shape)
            else:  # the other ranks' blocks of the input keep their values
                after[rank if blocks > 1 else 0] = wanted
        memory.check_holds(after, what)

    return check


def play(comm: Any, cases: Iterable[Case]) -> int:
    """Make calls one after the other, each checked at once; returns how many there were."""
    done = 0
    for case in cases:
        issue(comm, case)()
        done += 1
    return done


def issue_all(comm: Any, cases: Iterable[Case]) -> Callable[[], int]:
    """Make calls and check them all afterwards: for use inside of a group."""
    checks = [issue(comm, case) for case in cases]

    def check() -> int:
        for each in checks:
            each()
        return len(checks)

    return check


def grid(
    names: Iterable[str],
    dtypes: Iterable[Any],
    nranks: int,
    sizes: Iterable[int],
    forms: Iterable[str] = FORMS,
) -> list[Case]:
    """Every op that each dtype allows, every root, every size and form of some collectives."""
    found = []
    for name in names:
        spec = oracle.COLLECTIVES[name]
        roots = range(nranks) if spec.root else (0,)
        for dtype in dtypes:
            ops: tuple[Any, ...] = oracle.ops_for(dtype) if spec.op else (None,)
            found += [
                Case(name, dtype, size, op, root, form)
                for size in sizes
                for op in ops
                for root in roots
                for form in forms
                if not (form == "in place" and name == "all_to_all")
            ]
    return found


def warm(cases: Iterable[Case], nranks: int) -> None:
    """Compute the expected results once, before threads would each do it."""
    for case in cases:
        data.expected(case.name, case.dtype, nranks, case.size, case.op, case.root, case.seed)


def sum_of_ranks(comm: Any) -> None:
    """A small call that proves a communicator in working order."""
    total = comm.all_reduce(np.array([comm.rank + 1, 10], np.int64))
    assert total.tolist() == [comm.nranks * (comm.nranks + 1) // 2, 10 * comm.nranks]
