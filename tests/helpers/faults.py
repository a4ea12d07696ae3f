"""One fault in one program: ranks that work, one that is hit, and what the others must make of it.

A `Point` says who is hit, how, at which step of the program and at which moment of it.  `strike` plays it,
as a job of a `Nursery`: it forks the rank processes, gathers a `Report` per rank and returns an `Aftermath`
with everything that was wrong.

The program of a rank: create a communicator, a step or two that must succeed, the step that is hit, then
calls that need every rank and so must fail.  A survivor checks every result that it gets, then that the
broken communicator repeats its error and can be closed, then creates a new one with the other survivors,
and finally that its process holds no more descriptors, mappings or threads than before.
"""

from __future__ import annotations

import contextlib
import os
import queue
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import pynccl
from helpers import data, oracle
from helpers.nursery import fork, no_children_left
from helpers.ranks import new_id

# How a rank is hit. The first group ends its process, the second leaves it alive.
DEADLY = ("kill", "quit", "exit", "crash")
LIVING = ("abort", "leave", "raise")
KINDS = (*DEADLY, "stop", *LIVING)
STATUS = {"kill": -signal.SIGKILL, "stop": -signal.SIGKILL, "quit": 3, "exit": 3, "crash": 1}

SMALL, MEDIUM, LARGE = 5, 7_000, 100_000  # by the line, by slots, through the pipeline


@dataclass(frozen=True)
class Point:
    """One fault.

    ``moment`` is "before" (instead of making the call), "waiting" (inside of it, before the others come) or
    "midway" (a moment after all have begun).
    """

    number: int
    step: str
    kind: str
    moment: str
    nprocs: int
    nlocal: int
    victim: int
    warm_up: tuple[str, ...]
    delay: float
    seed: int

    @property
    def nranks(self) -> int:
        """Ranks in all."""
        return self.nprocs * self.nlocal

    @property
    def hit(self) -> tuple[int, ...]:
        """The ranks that are lost."""
        if self.kind in LIVING:
            return (self.victim,)
        first = self.victim // self.nlocal * self.nlocal
        return tuple(range(first, first + self.nlocal))

    @property
    def survivors(self) -> tuple[int, ...]:
        """The ranks that can be part of a new communicator."""
        lost = () if self.kind in LIVING else self.hit
        return tuple(r for r in range(self.nranks) if r not in lost)

    @property
    def timeout(self) -> float:
        """Of the communicator: short where the timeout is what must be seen."""
        return 1.2 if self.kind == "stop" or self.step == "create" else 30.0

    def __str__(self) -> str:
        form = f"{self.nprocs}x{self.nlocal}" if self.nlocal > 1 else f"{self.nprocs}"
        return f"{self.number}-{self.step}-{self.kind}-{self.moment}-{form}-rank{self.victim}"


@dataclass
class Report:
    """What a rank saw."""

    rank: int
    failed_at: str = ""
    error: str = ""
    code: int = 0
    text: str = ""
    at: float = 0.0
    wrong: list[str] = field(default_factory=list)
    finished: bool = False


@dataclass
class Aftermath:
    """What became of a point: reports by rank (None for a lost one) and what was wrong as a whole."""

    reports: list[Report | None]
    fault_at: float
    pids: list[int]
    wrong: list[str]


def sweep(seed: int) -> list[Point]:
    """Every step hit in every way, the rest of each point drawn from ``seed``."""
    draw = random.Random(seed)
    points = []
    for step in ("create", *STEPS):
        for kind in KINDS:
            if step == "create" and kind in LIVING:
                continue
            nprocs, nlocal = draw.choice([(2, 1), (3, 1), (4, 1), (2, 2), (3, 1)])
            if kind == "crash":
                nlocal = 1  # an exception of a thread does not end the process
            moments = ["before"]
            if kind in ("kill", "stop", "quit") or (kind == "abort" and step != "create"):
                moments += ["waiting"] if step == "create" else ["waiting", "midway"]
            points.append(
                Point(
                    number=len(points),
                    step=step,
                    kind=kind,
                    moment=draw.choice(moments),
                    nprocs=nprocs,
                    nlocal=nlocal,
                    victim=draw.randrange(nprocs * nlocal),
                    warm_up=tuple(draw.choices(list(STEPS), k=draw.randrange(3))),
                    delay=draw.uniform(0, 0.004),
                    seed=draw.randrange(2**32),
                )
            )
    for _ in range(24):  # in the middle of anything
        kind = draw.choice(["kill", "kill", "quit", "stop", "abort"])
        nprocs, nlocal = draw.choice([(2, 1), (3, 1), (4, 1), (2, 2)])
        number, victim = len(points), draw.randrange(nprocs * nlocal)
        delay, seed = draw.uniform(0, 0.1), draw.randrange(2**32)
        points.append(
            Point(number, "stream", kind, "midway", nprocs, nlocal, victim, (), delay, seed)
        )
    return points


# --- steps ---------------------------------------------------------------------------------------------


def collective(name: str, size: int, dtype: str = "float64", root: int = 1) -> Callable:
    """A step that makes one collective call into guarded memory and checks what it got."""
    spec = oracle.COLLECTIVES[name]
    op = "sum" if spec.op else None

    def step(comm: Any) -> None:
        n, rank = comm.nranks, comm.rank
        mine = data.inputs(name, dtype, n, size)[rank]
        x = data.Guarded.holding(mine)
        out = data.Guarded(dtype, (size * (n if spec.recv_blocks else 1),))
        words = ({"op": op} if spec.op else {}) | ({"root": root} if spec.root else {})
        receives = spec.at(spec.receives, rank, root)
        try:
            getattr(comm, name)(x.array, out=out.array, **words)
        except pynccl.NCCLError:
            out.check_guards(name)
            if not receives:
                out.check_poisoned(name)
            raise
        finally:
            x.check_holds(mine, f"input of {name}")
        if receives:
            out.check_holds(data.expected(name, dtype, n, size, op, root)[rank], name)
        else:
            out.check_poisoned(name)

    step.wanted = (name, dtype, size, op, root)
    return step


def ring(size: int) -> Callable:
    """A step that passes arrays around all ranks."""

    def step(comm: Any) -> None:
        n, rank = comm.nranks, comm.rank
        out = data.Guarded("int64", (size,))
        source = (rank - 1) % n
        comm.send_recv(data.values("int64", size, rank), (rank + 1) % n, out.array, source)
        out.check_holds(data.values("int64", size, source), "ring")

    return step


def chain(size: int) -> Callable:
    """A step in which every rank receives, and then sends, outside of a group."""

    def step(comm: Any) -> None:
        n, rank = comm.nranks, comm.rank
        out = data.Guarded("int64", (size,))
        if rank:
            comm.recv(out.array, rank - 1)
            out.check_holds(data.values("int64", size, 0), "chain")
        if rank < n - 1:
            comm.send(data.values("int64", size, 0), rank + 1)

    return step


def group(comm: Any) -> None:
    """A step with collectives and messages in one group."""
    n, rank = comm.nranks, comm.rank
    total = data.Guarded("int64", (MEDIUM,))
    root = data.Guarded("int64", (SMALL,))
    mine = data.values("int64", MEDIUM, rank)
    boxes = [data.Guarded("int64", (MEDIUM,)) for _ in range(n)]
    first = data.Guarded.holding(data.values("int64", SMALL, rank))
    with pynccl.group():
        comm.all_reduce(mine, out=total.array)
        comm.broadcast(first.array, 0, out=root.array)
        for peer in range(n):
            comm.send(mine, peer)
            comm.recv(boxes[peer].array, peer)
    wanted = data.expected("all_reduce", "int64", n, MEDIUM, "sum")
    total.check_holds(wanted[rank], "group")
    root.check_holds(data.values("int64", SMALL, 0), "group")
    for peer, box in enumerate(boxes):
        box.check_holds(data.values("int64", MEDIUM, peer), "group")


def split(comm: Any) -> None:
    """A step that divides the communicator and uses the part."""
    with comm.split(comm.rank % 2, timeout=comm.timeout) as part:
        total = part.all_reduce(np.array([comm.rank]))
    assert total.tolist() == [sum(range(comm.rank % 2, comm.nranks, 2))], total


def barrier(comm: Any) -> None:
    """A step without data."""
    comm.barrier()


STEPS: dict[str, Callable[[Any], None]] = {
    "all_reduce": collective("all_reduce", SMALL),
    "all_reduce_medium": collective("all_reduce", MEDIUM, "float16"),
    "all_reduce_large": collective("all_reduce", LARGE),
    "reduce": collective("reduce", MEDIUM),
    "reduce_large": collective("reduce", LARGE, "int32"),
    "broadcast": collective("broadcast", SMALL),
    "broadcast_large": collective("broadcast", LARGE),
    "all_gather": collective("all_gather", MEDIUM),
    "all_gather_large": collective("all_gather", LARGE, root=0),
    "reduce_scatter": collective("reduce_scatter", SMALL, "int8"),
    "reduce_scatter_large": collective("reduce_scatter", LARGE),
    "all_to_all": collective("all_to_all", LARGE),
    "gather": collective("gather", LARGE),
    "scatter": collective("scatter", LARGE, root=0),
    "ring": ring(LARGE),
    "chain": chain(MEDIUM),
    "group": group,
    "split": split,
    "barrier": barrier,
    "close": lambda comm: None,  # all calls have been made: only closing is left
}


def stream(seed: int) -> Callable:
    """A step that goes on with any steps, the same on every rank, until something happens."""

    def step(comm: Any) -> None:
        draw = random.Random(seed)
        until = time.monotonic() + 60
        while time.monotonic() < until:
            draw.choice(list(STEPS.values()))(comm)

    return step


def prepare() -> None:
    """Compute once, in the server, what all the processes that it forks need to know."""
    for step in STEPS.values():
        if hasattr(step, "wanted"):
            name, dtype, size, op, root = step.wanted
            for nranks in (2, 3, 4):
                data.expected(name, dtype, nranks, size, op, root)
    for rank in range(4):
        data.values("int64", LARGE, rank), data.values("int64", MEDIUM, rank)


# --- the victim ----------------------------------------------------------------------------------------


class Raised(Exception):
    """What the victim of kind "raise" raises."""


class Crash(Exception):
    """What ends the process of a victim of kind "crash"."""


class Victim:
    """How the rank that is hit is hit; ``die`` reaches the process's main thread."""

    def __init__(self, point: Point, tell: Callable[[float], None], die: Callable[[str], None]):
        self.point, self.tell, self.die = point, tell, die

    def strike(self, comm: Any) -> None:
        """Do it, now."""
        kind = self.point.kind
        self.tell(time.monotonic())
        if kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif kind == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif kind == "quit":
            os._exit(3)
        elif kind in ("exit", "crash"):
            self.die(kind)
        elif kind == "abort":
            comm.abort()
        elif kind == "leave":
            comm.close()
        else:
            raise Raised

    def step(self, comm: Any, step: Callable[[Any], None]) -> None:
        """Make the call that is hit, or do not come to it."""
        if self.point.moment == "before":
            self.strike(comm)
        else:
            wait = 0.05 if self.point.moment == "waiting" else self.point.delay
            threading.Timer(wait, self.strike, [comm]).start()
            with contextlib.suppress(pynccl.NCCLError, ValueError):
                step(comm)
        if self.point.kind not in LIVING:
            time.sleep(60)  # the end is near
        elif self.point.moment != "before":
            for _ in range(1000):
                if comm.closed:
                    break
                time.sleep(0.002)


# --- a rank --------------------------------------------------------------------------------------------


def play(point: Point, rank: int, uids: list[bytes], victim: Victim | None) -> Report:
    """The life of one rank."""
    report = Report(rank)
    comm = None
    try:
        comm = _create(point, rank, uids[0], victim)
        with comm if point.kind == "raise" and victim else contextlib.nullcontext():
            _work(point, comm, report, victim)
    except Raised:
        if not comm.closed:
            report.wrong.append("an exception left the with-block and the communicator is open")
    except pynccl.NCCLError as error:
        report.at = time.monotonic()
        report.error, report.code, report.text = type(error).__name__, int(error.result), str(error)
    except (SystemExit, Crash):
        raise
    except BaseException as error:
        report.wrong.append(f"{report.failed_at}: {type(error).__name__}: {error}")
    if comm is not None:
        _end(comm, report, victim is not None)
    _anew(point, rank, uids[1], report)
    report.finished = True
    return report


def _create(point, rank, uid, victim):
    hit = point.step == "create"
    if victim and hit:
        if point.moment == "before":
            victim.strike(None)
            time.sleep(60)
        threading.Timer(0.1, victim.strike, [None]).start()
    elif hit and point.moment == "waiting" and rank % 2:
        time.sleep(0.2)  # some come before it happens, some after
    return pynccl.Communicator(point.nranks, uid, rank, timeout=point.timeout, library="host")


def _work(point: Point, comm: Any, report: Report, victim: Victim | None) -> None:
    for name in point.warm_up:
        report.failed_at = name
        STEPS[name](comm)
    report.failed_at = point.step
    step = stream(point.seed) if point.step == "stream" else STEPS.get(point.step)
    if victim and step:
        victim.step(comm, step)
        return
    if victim:
        time.sleep(60)
    if point.moment == "waiting":
        time.sleep(0.15)
    if step:
        step(comm)
    for turn in range(2):
        report.failed_at = f"{point.step}, and then all_reduce {turn + 1}"
        STEPS["all_reduce"](comm)
    report.wrong.append("it noticed nothing")


def _end(comm: Any, report: Report, was_hit: bool) -> None:
    """A broken communicator repeats its error at once, answers queries and closes."""
    start = time.monotonic()
    if not was_hit:
        try:
            comm.all_reduce(np.arange(3))
            report.wrong.append("a call on the broken communicator succeeded")
        except pynccl.NCCLError as error:
            if int(error.result) != report.code:
                report.wrong.append(f"it then said {error}")
        if comm.rank != report.rank or "rank" not in repr(comm):
            report.wrong.append("queries do not work")
    comm.close()
    if time.monotonic() - start > 1.0:
        report.wrong.append(f"closing took {time.monotonic() - start:.1f} s")


def _anew(point: Point, rank: int, uid: bytes, report: Report) -> None:
    """The survivors make a new communicator."""
    ranks = point.survivors
    try:
        with pynccl.Communicator(
            len(ranks), uid, ranks.index(rank), timeout=20, library="host"
        ) as comm:
            for name in ("all_reduce", "all_reduce_large", "barrier"):
                STEPS[name](comm)
    except BaseException as error:
        report.wrong.append(f"a new communicator: {type(error).__name__}: {error}")


# --- a process of ranks --------------------------------------------------------------------------------


def belongings() -> dict[str, Any]:
    """What a process holds: descriptors and what they are, shared mappings, threads."""
    files = {}
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            files[int(number)] = os.readlink(f"/proc/self/fd/{number}")
    files = {n: name for n, name in files.items() if not name.endswith("/fd")}
    with open("/proc/self/maps") as maps:
        shared = [line.split()[-1] for line in maps if "memfd:" in line]
    return {"descriptors": files, "mappings": shared, "threads": threading.active_count()}


def rank_process(point: Point, index: int, uids: list[bytes], pipe: Any) -> list[Report]:
    """The life of one process; main thread and ranks are one if there is one rank."""
    before = belongings()
    main: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def tell(when: float) -> None:
        os.write(pipe, repr(when).encode())

    def die(kind: str) -> None:
        if kind == "crash":
            raise Crash("the victim's own mistake")
        if threading.current_thread() is threading.main_thread():
            sys.exit(3)
        main.put(kind)

    first = index * point.nlocal
    ranks = range(first, first + point.nlocal)
    victims = {point.victim: Victim(point, tell, die)}
    if point.nlocal == 1:
        reports = [play(point, first, uids, victims.get(first))]
    else:
        for rank in ranks:
            arguments = (main, point, rank, uids, victims.get(rank))
            threading.Thread(target=_thread, args=arguments, daemon=True).start()
        reports = []
        while len(reports) < point.nlocal:
            got = main.get()
            if got == "exit":
                sys.exit(3)  # while the other threads are in their calls
            reports.append(got)
    deadline = time.monotonic() + 5
    while belongings() != before and time.monotonic() < deadline:
        time.sleep(0.01)  # threads that have done their work need a moment to be gone
    after = belongings()
    if after != before:
        reports[0].wrong.append(f"the process held {before} and now holds {after}")
    return reports


def _thread(main, point, rank, uids, victim):
    main.put(play(point, rank, uids, victim))


# --- jobs -------------------------------------------------------------------------------------------


def left_behind(uids: list[bytes]) -> list[str]:
    """What the processes of a job have left: processes of their own, sockets of communicators."""
    with open("/proc/net/unix") as sockets:
        names = sockets.read()
    wrong = [f"a socket is left: {uid[:16].hex()}" for uid in uids if uid[:16].hex() in names]
    return wrong + [text for text in [no_children_left()] if text]


def strike(point: Point) -> Aftermath:
    """Play a point; a job of a `Nursery`."""
    uids = [bytes(new_id()), bytes(new_id())]
    told, tell = os.pipe()
    reports: list[Report | None] = [None] * point.nranks
    wrong: list[str] = []
    children = [fork(rank_process, point, i, uids, tell) for i in range(point.nprocs)]
    lost = children[point.victim // point.nlocal] if point.kind not in LIVING else None
    for child in children:
        if child is lost:
            continue
        got = child.receive()
        if isinstance(got, Exception):
            wrong.append(str(got))
            continue
        for report in got:
            reports[report.rank] = report
    if lost is not None and point.kind == "stop":
        lost.kill()
    for child in children:
        status, wanted = child.wait(), STATUS[point.kind] if child is lost else 0
        if status != wanted:
            wrong.append(f"exit status {status}, not {wanted}\n{child.printed()}")
    wrong += left_behind(uids)
    os.close(tell)
    fault_at = float(os.read(told, 100) or 0)
    os.close(told)
    return Aftermath(reports, fault_at, [child.pid for child in children], wrong)
