"""Programs of rank processes in which something is missing, wrong or too late; jobs of a `Nursery`.

`together` forks the processes of a `Scene` and returns what each of them returned.  A program is called as
``program(index, uids, *args)`` in every process, with three unique ids that all of them share; it checks
what it can see itself, and returns the errors that it met as `Seen`.
"""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

import pynccl
from helpers import data, oracle
from helpers.faults import STEPS, belongings, left_behind
from helpers.nursery import fork
from helpers.ranks import attempt, new_id


@dataclass(frozen=True)
class Scene:
    """A program, how many processes play it, and its arguments."""

    program: str
    nprocs: int
    args: tuple = ()
    statuses: tuple[int, ...] = ()  # expected; zeros if omitted
    uids: tuple[bytes, ...] = ()  # new ones if omitted


@dataclass
class Seen:
    """An error that a program met (or "" if there was none), and how long the call took."""

    error: str
    text: str
    seconds: float


def together(scene: Scene) -> list[Any]:
    """Play a scene; a process that ended before it could say anything is a None."""
    uids = list(scene.uids) or [bytes(new_id()) for _ in range(3)]
    program = globals()[scene.program]
    children = [fork(_play, program, i, uids, scene.args) for i in range(scene.nprocs)]
    values, wrong = [], []
    for child, wanted in zip(children, scene.statuses or [0] * scene.nprocs, strict=True):
        value = child.receive()
        if isinstance(value, Exception):
            if wanted == 0:
                wrong.append(str(value))
            value = None
        values.append(value)
        if child.wait() != wanted:
            wrong.append(f"exit status {child.status}, not {wanted}\n{child.printed()}")
    wrong += left_behind(uids)
    if wrong:
        raise AssertionError("\n".join([str(scene), *wrong]))
    return values


def _play(program: Callable, index: int, uids: list[bytes], args: tuple) -> Any:
    before = belongings()
    value = program(index, uids, *args)
    gc.collect()
    deadline = time.monotonic() + 5
    while belongings() != before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert belongings() == before, f"held {before}, holds {belongings()}"
    return value


def seen(function: Callable[..., Any], *args: Any) -> Seen:
    """Call a function that may raise one of the package's errors."""
    start = time.monotonic()
    try:
        function(*args)
    except (pynccl.PyncclError, ValueError) as error:
        return Seen(type(error).__name__, str(error), time.monotonic() - start)
    return Seen("", "", time.monotonic() - start)


def create(nranks: int, uid: bytes, rank: int, timeout: float = 30.0) -> Any:
    """A communicator of the host library."""
    return pynccl.Communicator(nranks, uid, rank, timeout=timeout, library="host")


def works(nranks: int, uid: bytes, rank: int) -> None:
    """Create, use, close."""
    with create(nranks, uid, rank) as comm:
        STEPS["all_reduce"](comm)
        STEPS["group"](comm)


# --- creation ------------------------------------------------------------------------------------------


def creation(index: int, uids: list[bytes], ranks: list, timeout: float, delays: list) -> Seen:
    """Create with the (nranks, rank) given; then, with all processes, a communicator that works."""
    time.sleep(delays[index] if delays else 0)
    nranks, rank = ranks[index]
    result = seen(lambda: create(nranks, uids[0], rank, timeout).close())
    works(len(ranks), uids[1], index)
    return result


def creation_twice(index: int, uids: list[bytes], keep: bool) -> list[Seen]:
    """A communicator, and then another one with the same id, while the first is kept or after its end."""
    first = create(2, uids[0], index)
    first.barrier()
    if not keep:
        first.close()
        time.sleep(0.1)
    again = seen(lambda: create(2, uids[0], index, 3.0).close())
    if keep:
        STEPS["all_reduce"](first)  # it is none the worse for that
        first.close()
    works(2, uids[1], index)
    return [again]


def stranger_after(index: int, uids: list[bytes]) -> Seen | None:
    """Two ranks communicate; a third process comes with their id, too late."""
    if index < 2:
        with create(2, uids[0], index) as comm:
            STEPS["all_reduce"](comm)
            comm.barrier()
            time.sleep(0.6)
            STEPS["all_reduce"](comm)
        return None
    time.sleep(0.3)
    return seen(lambda: create(2, uids[0], 1, 3.0).close())


def several_with_any_id(index: int, uids: list[bytes]) -> None:
    """Communicators from all the ids given."""
    for uid in uids:
        works(2, uid, index)


# --- peers that are gone -------------------------------------------------------------------------------


def left_alone(index: int, uids: list[bytes], how: str, end: str) -> Seen | None:
    """Rank 1 is gone after a collective; rank 0 ends its communicator, which needs nobody."""
    comm = create(2, uids[0], index)
    STEPS["all_reduce"](comm)
    if index:
        _go(comm, how)
        return None
    time.sleep(0.3)
    start = time.monotonic()
    if end == "collect":
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            del comm
            gc.collect()
        assert [w.category for w in caught] == [ResourceWarning], caught
    else:
        getattr(comm, end)()
    return Seen("", "", time.monotonic() - start)


def _go(comm: Any, how: str) -> None:
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif how == "exit":
        raise SystemExit(3)
    elif how == "quit":
        os._exit(3)
    getattr(comm, how)()


def needs_nothing_more(index: int, uids: list[bytes], how: str) -> Seen | None:
    """Rank 1 sends its part and is gone; rank 0, which comes later, still gets everything."""
    comm = create(2, uids[0], index)
    x = data.values("int64", 6, 1)
    if index:
        comm.barrier()
        _send_and_go(comm, x, how)
        return None
    out = data.Guarded("int64", (6,))
    comm.barrier()
    comm.recv(out.array, 1)
    out.check_holds(x)
    time.sleep(0.3)
    result = seen(lambda: comm.recv(out.array, 1))
    out.check_holds(x)
    comm.close()
    return result


def _send_and_go(comm: Any, x: np.ndarray, how: str) -> None:
    comm.send(x, 0)
    _go(comm, how)


def one_after_the_other(index: int, uids: list[bytes]) -> list[Seen]:
    """Four ranks become three, two and one; what is left goes on each time."""
    found, ranks = [], [0, 1, 2, 3]
    for uid in uids:
        comm = create(len(ranks), uid, ranks.index(index))
        STEPS["all_reduce_large"](comm)
        if index == ranks[-1]:
            os.kill(os.getpid(), signal.SIGKILL)
        result = seen(_until_it_fails, comm)
        found.append(result)
        comm.close()
        ranks.pop()
    return found


def _until_it_fails(comm: Any) -> None:
    for _ in range(5):
        STEPS["ring"](comm)
        STEPS["all_reduce"](comm)


def grouped_ranks(index: int, uids: list[bytes], how: str) -> list[Seen]:
    """Two processes, each with two ranks of one thread; the second process is gone."""
    with pynccl.group():
        comms = [create(4, uids[0], 2 * index + i) for i in range(2)]
    _sums(comms)
    if index:
        _go(comms[0], how)
    found = [seen(_sums, comms), *[seen(comm.barrier) for comm in comms]]
    for comm in comms:
        comm.close()
    return found


def _sums(comms: list[Any]) -> None:
    outs = [data.Guarded("int64", (3,)) for _ in comms]
    with pynccl.group():
        for comm, out in zip(comms, outs, strict=True):
            comm.all_reduce(np.full(3, comm.rank), out=out.array)
    for out in outs:
        out.check_holds(np.full(3, 6))


# --- calls that nobody answers -------------------------------------------------------------------------


def unanswered(index: int, uids: list[bytes], call: str, other: str) -> list[Seen]:
    """Rank 0 makes a call that does not come about; rank 1 does something else, or nothing."""
    comm = create(2, uids[0], index, 1.0)
    comm.barrier()
    found = [seen(CALLS[other if index else call], comm)]
    if index and not other:
        time.sleep(1.5)
    else:
        found.append(seen(comm.barrier))  # repeats it at once
    comm.close()
    works(2, uids[1], index)
    return found


def _grouped(*calls: Callable[[Any], Any]) -> Callable[[Any], None]:
    def run(comm: Any) -> None:
        with pynccl.group():
            for call in calls:
                call(comm)

    return run


def _sum(comm: Any) -> None:
    out = data.Guarded("float64", (4,))
    try:
        comm.all_reduce(np.ones(4), out=out.array)
    finally:
        # In a group nothing has happened yet; outside, it must have failed.
        out.check_poisoned()


def _receive(comm: Any) -> None:
    out = data.Guarded("int64", (9,))
    try:
        comm.recv(out.array, 1 - comm.rank)
    finally:
        out.check_poisoned()


CALLS: dict[str, Callable[[Any], Any]] = {
    "": lambda comm: None,
    "recv": _receive,
    "send": lambda comm: comm.send(np.arange(9), 1 - comm.rank),
    "large send": lambda comm: comm.send(np.arange(100_000), 1 - comm.rank),
    "all_reduce": _sum,
    "barrier": lambda comm: comm.barrier(),
    "recv in a group": _grouped(_receive),
    "send in a group": _grouped(lambda comm: comm.send(np.arange(9), 1 - comm.rank)),
    "all_reduce and recv in a group": _grouped(_sum, _receive),
    "split": lambda comm: comm.split(0),
}


# --- calls that do not match ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Call:
    """One collective call; ``dtype``, ``op`` and ``root`` as its arguments, ``size`` of a block."""

    name: str
    size: int = 4
    dtype: str = "float32"
    op: str = "sum"
    root: int = 0


def mismatches(index: int, uids: list[bytes], nlocal: int, rounds: list[list[Call]]) -> list:
    """For each round a communicator on which every rank makes its own call; errors by rank and round."""
    count = len(rounds[0])
    if nlocal == 1:
        return [_rounds(count, index, uids, rounds)]
    found: list[Any] = [None] * nlocal

    def work(i: int) -> None:
        found[i] = attempt(i, _rounds, count, index * nlocal + i, uids, rounds)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(nlocal)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for outcome in found:
        assert outcome.error is None, outcome.trace
    return [outcome.value for outcome in found]


def _rounds(nranks, rank, uids, rounds):
    return [
        _deviate(nranks, rank, uid, calls[rank]) for uid, calls in zip(uids, rounds, strict=True)
    ]


def _deviate(nranks: int, rank: int, uid: bytes, call: Call) -> list[Seen]:
    spec = oracle.COLLECTIVES[call.name]
    comm = create(nranks, uid, rank)
    STEPS["barrier"](comm)
    blocks = nranks if spec.send_blocks else 1
    content = data.values(call.dtype, call.size * blocks, rank)
    x = data.Guarded.holding(content)
    out = data.Guarded(call.dtype, (call.size * (nranks if spec.recv_blocks else 1),))
    words: dict[str, Any] = {}
    if spec.op:
        words["op"] = comm.premul_sum(2.0, call.dtype) if call.op == "premul" else call.op
    if spec.root:
        words["root"] = call.root
    found = [seen(lambda: getattr(comm, call.name)(x.array, out=out.array, **words))]
    found.append(seen(comm.barrier))
    x.check_holds(content, f"input of {call}")
    out.check_poisoned(f"output of {call} on rank {rank}")
    comm.close()
    return found
