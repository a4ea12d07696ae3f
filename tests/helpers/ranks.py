"""Worlds of ranks: one function runs on every rank, and nothing a rank does can hang the test run.

Kinds of worlds, by what a rank is:

* `ThreadWorld`: a thread of this process; kept over a whole test module.
* `ProcessWorld`: a process, or one of several threads of a process, or (``grouped``) one of several
  communicators that a single thread of a process drives inside groups; kept over the whole session.
* `GroupWorld`: one of several communicators that the calling thread drives inside groups.

Every world has the same two ways in::

    world.run(function, *args)        what function(comm, *args) returned on each rank, in rank order;
                                      if a rank failed: RankFailed, caused by the first failure
    world.outcomes(function, *args)   an `Outcome` per rank, for tests in which ranks are meant to fail

A world whose ranks failed gets new communicators before it is used again.  Limits: each wait of a
communicator has a deadline of its own (`TIMEOUT`); a whole call has one (`LIMIT`), after which the stacks
of all ranks are written into the error; and once a rank has failed, `run` gives the others `RESCUE`
seconds before it takes their communicators away.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import os
import pathlib
import pickle
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing import connection as mp_connection
from typing import Any

import pynccl

TIMEOUT = 20.0
LIMIT = 60.0
RESCUE = 2.0
TESTS = pathlib.Path(__file__).resolve().parent.parent


class RankFailed(Exception):
    """A rank raised where none should; the cause is what it raised."""


class RanksStuck(Exception):
    """Ranks did not come back within the limit; the text holds their stacks."""


class RankDied(Exception):
    """The process of a rank ended or was killed."""


@dataclass
class Outcome:
    """What one rank's function returned or raised, and when it was done (`time.monotonic`)."""

    rank: int
    value: Any = None
    error: BaseException | None = None
    trace: str = ""
    seconds: float = 0.0
    finished: float = 0.0

    def __str__(self) -> str:
        if self.error is None:
            return f"rank {self.rank}: returned {self.value!r:.80}"
        return f"rank {self.rank}: {type(self.error).__name__}: {self.error}"


def attempt(rank: int, function: Callable[..., Any], *args: Any) -> Outcome:
    """Run a function and catch whatever it raises."""
    outcome = Outcome(rank)
    start = time.monotonic()
    try:
        outcome.value = function(*args)
    except BaseException as error:
        outcome.error = error
        outcome.trace = traceback.format_exc()
    outcome.finished = time.monotonic()
    outcome.seconds = outcome.finished - start
    return outcome


def stacks() -> str:
    """The stacks of all threads of this process, as faulthandler writes them."""
    with tempfile.TemporaryFile() as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return file.read().decode(errors="replace")


class Crew:
    """Threads that each run one function at a time, at the same time.

    The threads are daemons: one that never comes back must not keep the test run from ending.
    """

    def __init__(self, size: int, first_rank: int = 0) -> None:
        self.size = size
        self._first = first_rank
        self._jobs: list[queue.SimpleQueue] = [queue.SimpleQueue() for _ in range(size)]
        self._done: queue.SimpleQueue[Outcome] = queue.SimpleQueue()
        for index in range(size):
            name = f"rank {first_rank + index}"
            threading.Thread(target=self._work, args=(index,), name=name, daemon=True).start()

    def _work(self, index: int) -> None:
        while (job := self._jobs[index].get()) is not None:
            self._done.put(attempt(self._first + index, job, index))
            del job  # what it refers to must not live until the next one comes

    def run(
        self,
        job: Callable[[int], Any],
        limit: float,
        rescue: float | None = None,
        cut_off: Callable[[], None] = lambda: None,
    ) -> list[Outcome]:
        """Run ``job(index)`` in every thread and gather the outcomes, ordered by rank."""
        self.start(job)
        return self.gather(limit, rescue, cut_off)

    def start(self, job: Callable[[int], Any]) -> None:
        """Let every thread run ``job(index)``; `gather` must be called for it."""
        for jobs in self._jobs:
            jobs.put(job)

    def gather(
        self,
        limit: float,
        rescue: float | None = None,
        cut_off: Callable[[], None] = lambda: None,
    ) -> list[Outcome]:
        """Wait for what `start` has started; returns the outcomes, ordered by rank.

        Once a thread has failed, the others have ``rescue`` seconds before ``cut_off`` is called,
        which should make them come back.
        """
        outcomes: list[Outcome] = []
        deadline, rescued = time.monotonic() + limit, False
        while len(outcomes) < self.size:
            try:
                outcomes.append(self._done.get(timeout=max(0.0, deadline - time.monotonic())))
            except queue.Empty:
                if rescued or rescue is None or not any(o.error for o in outcomes):
                    missing = sorted(
                        {self._first + i for i in range(self.size)} - {o.rank for o in outcomes}
                    )
                    text = stacks()
                    cut_off()
                    raise RanksStuck(
                        f"ranks {missing} are not back; {'; '.join(map(str, outcomes))}\n{text}"
                    ) from None
                rescued = True
                cut_off()
                deadline = time.monotonic() + 5.0
                continue
            if rescue is not None and outcomes[-1].error is not None and not rescued:
                deadline = min(deadline, time.monotonic() + rescue)
        return sorted(outcomes, key=lambda o: o.rank)

    def stop(self) -> None:
        """Let the threads end once they are idle."""
        for jobs in self._jobs:
            jobs.put(None)


def new_id() -> bytes:
    """The id for one new communicator of the host library."""
    return pynccl.unique_id(library="host")


def create(nranks: int, uid: bytes, rank: int, timeout: float = TIMEOUT, **words: Any) -> Any:
    """Create a communicator of the host library, with a deadline that suits a test."""
    return pynccl.Communicator(nranks, uid, rank, timeout=timeout, library="host", **words)


class World:
    """What the worlds have in common; see the module's text."""

    def __init__(self, nranks: int) -> None:
        self.nranks = nranks
        self._stale = True

    def run(self, function: Callable[..., Any], *args: Any, limit: float = LIMIT) -> list[Any]:
        """Run ``function(comm, *args)`` on every rank; return the values or raise `RankFailed`."""
        outcomes = self.outcomes(function, *args, limit=limit, rescue=RESCUE)
        failed = [o for o in outcomes if o.error is not None]
        if failed:
            first = min(failed, key=lambda o: o.finished)
            lines = [f"{first}", *(f"  then {o}" for o in failed if o is not first)]
            if first.error.__traceback__ is None:  # it comes from another process
                lines.append(first.trace)
            raise RankFailed("\n".join(lines)) from first.error
        return [o.value for o in outcomes]

    def outcomes(
        self,
        function: Callable[..., Any],
        *args: Any,
        limit: float = LIMIT,
        rescue: float | None = None,
    ) -> list[Outcome]:
        """Run ``function(comm, *args)`` on every rank; return an `Outcome` per rank."""
        if self._stale:
            self.renew()
        self._stale = True
        outcomes = self._run(function, args, limit, rescue)
        self._stale = any(o.error is not None for o in outcomes)
        return outcomes

    def renew(self) -> None:
        """Give every rank a new communicator."""
        raise NotImplementedError

    def _run(
        self, function: Callable[..., Any], args: tuple, limit: float, rescue: float | None
    ) -> list[Outcome]:
        raise NotImplementedError

    def __enter__(self) -> World:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the communicators and end what runs the ranks."""
        raise NotImplementedError


def check_created(outcomes: list[Outcome]) -> None:
    """Raise if a rank could not create its communicator."""
    for outcome in outcomes:
        if outcome.error is not None:
            raise RankFailed(f"creating a communicator: {outcome}") from outcome.error


class ThreadWorld(World):
    """Ranks that are threads of this process."""

    def __init__(self, nranks: int, timeout: float = TIMEOUT) -> None:
        super().__init__(nranks)
        self.timeout = timeout
        self.comms: list[Any] = []
        self._crew = Crew(nranks)

    def renew(self) -> None:
        self._abort()
        uid = new_id()
        outcomes = self._crew.run(
            lambda rank: create(self.nranks, uid, rank, self.timeout),
            limit=self.timeout + 10.0,
        )
        check_created(outcomes)
        self.comms = [o.value for o in outcomes]
        self._stale = False

    def _run(self, function, args, limit, rescue):
        def job(rank: int) -> Any:
            return function(self.comms[rank], *args)

        try:
            return self._crew.run(job, limit, rescue, self._abort)
        except RanksStuck:
            self._crew = Crew(self.nranks)  # the old one's threads may never be idle again
            raise

    def _abort(self) -> None:
        for comm in self.comms:
            if not comm.closed:
                comm.abort()

    def close(self) -> None:
        if self.comms and not self._stale:
            self._crew.run(lambda rank: self.comms[rank].close(), limit=self.timeout + 10.0)
        else:
            self._abort()
        self._crew.stop()


class GroupWorld(World):
    """Ranks that are communicators of the calling thread; functions run inside one group.

    A function that returns something callable is asked for its value after the group has ended: that is
    where it can look at what arrived.
    """

    def __init__(self, nranks: int) -> None:
        super().__init__(nranks)
        self.comms: list[Any] = []

    def renew(self) -> None:
        for comm in self.comms:
            comm.abort()
        self.comms = pynccl.init_all(self.nranks, timeout=TIMEOUT, library="host")
        self._stale = False

    def _run(self, function, args, limit, rescue):
        return run_grouped(self.comms, function, args)

    def close(self) -> None:
        for comm in self.comms:
            comm.abort() if self._stale else comm.close()


def run_grouped(comms: list[Any], function: Callable[..., Any], args: tuple) -> list[Outcome]:
    """Run a function for each communicator inside one group of the calling thread."""
    try:
        with pynccl.group():
            outcomes = [attempt(comm.rank, function, comm, *args) for comm in comms]
    except Exception as error:
        return [Outcome(comm.rank, error=error, trace=traceback.format_exc()) for comm in comms]
    return [
        attempt(o.rank, o.value) if o.error is None and callable(o.value) else o for o in outcomes
    ]


# --- processes -----------------------------------------------------------------------------------------


# The uncompiled pynccl/ lies in the directory that tests are started from: it must not be found first.
BOOT = (
    "import sys; sys.path[:] = [sys.argv[1], *filter(None, sys.path)]; "
    "from helpers.ranks import serve; serve(*map(int, sys.argv[2:]))"
)


class Worker:
    """One process of a `ProcessWorld`, seen from the test run; alone, it runs functions by `call`."""

    def __init__(
        self,
        first_rank: int = 0,
        nlocal: int = 1,
        grouped: bool = False,
        env: dict[str, str] | None = None,
    ) -> None:
        self.ranks = range(first_rank, first_rank + nlocal)
        self.printed = ""
        self.log = tempfile.TemporaryFile()  # noqa: SIM115 (kill() closes it)
        self.pipe, theirs = Pipe()
        arguments = [theirs.fileno(), first_rank, nlocal, int(grouped)]
        self.process = subprocess.Popen(
            [sys.executable, "-c", BOOT, str(TESTS), *map(str, arguments)],
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=self.log,
            stderr=self.log,
            pass_fds=[theirs.fileno()],
            env=env,
        )
        theirs.close()

    def dead(self, why: str) -> list[Outcome]:
        """Outcomes for the ranks of a process that will not answer any more; it is killed if need be."""
        self.kill()
        text = f"{why} (exit status {self.process.returncode}); it printed:\n{self.printed}"
        return [
            Outcome(rank, error=RankDied(text), finished=time.monotonic()) for rank in self.ranks
        ]

    def call(self, module: str, name: str, *args: Any, limit: float = LIMIT) -> Any:
        """Run a function of the process, without a communicator; returns its value or raises."""
        self.pipe.send(("call", module, name, args))
        try:
            if not self.pipe.poll(limit):
                raise RanksStuck(str(self.dead("it did not come back in time")[0]))
            (outcome,) = self.pipe.recv()
        except (EOFError, OSError):
            (outcome,) = self.dead("the process ended")
        if outcome.error is not None:
            raise RankFailed(f"{outcome}\n{outcome.trace}") from outcome.error
        return outcome.value

    def kill(self) -> None:
        """End the process and keep the end of what it printed; it is asked for its stacks first."""
        if self.log.closed:
            return
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGUSR1)
            time.sleep(0.2)
            self.process.kill()
        self.process.wait(10)
        self.pipe.close()
        self.log.seek(max(0, self.log.seek(0, os.SEEK_END) - 8000))
        self.printed = self.log.read().decode(errors="replace")
        self.log.close()


class ProcessWorld(World):
    """Ranks in processes: one each, or ``nlocal`` threads each, or ``nlocal`` in one thread in groups.

    Functions are sent by name: they must be importable, and arguments and results must pickle.
    """

    def __init__(self, nprocs: int, nlocal: int = 1, grouped: bool = False) -> None:
        super().__init__(nprocs * nlocal)
        self.nprocs, self.nlocal, self.grouped = nprocs, nlocal, grouped
        self.workers: list[Worker] = []

    def renew(self) -> None:
        if any(worker.process.poll() is not None for worker in self.workers):  # one died
            self._kill()
        if not self.workers:
            self.workers = [
                Worker(i * self.nlocal, self.nlocal, self.grouped) for i in range(self.nprocs)
            ]
        uid = bytes(new_id())
        check_created(self._ask(("open", self.nranks, uid, TIMEOUT), TIMEOUT + 30.0, RESCUE))
        self._stale = False

    def _run(self, function, args, limit, rescue):
        if "<locals>" in function.__qualname__ or "<lambda>" in function.__qualname__:
            raise TypeError(f"{function.__qualname__} cannot be found by name in another process")
        # pytest calls a test's module tests.test_x; to the processes it is test_x.
        module = function.__module__.removeprefix("tests.")
        return self._ask(("run", module, function.__qualname__, args), limit, rescue)

    def _ask(self, message: tuple, limit: float, rescue: float | None) -> list[Outcome]:
        """Send a request to every process and gather the outcomes; who does not answer is killed."""
        waiting = {}
        outcomes: list[Outcome] = []
        for worker in self.workers:
            try:
                worker.pipe.send(message)
                waiting[worker.pipe] = worker
            except OSError:
                outcomes += worker.dead("the process is gone")
        deadline, rescuing = time.monotonic() + limit, False
        while waiting:
            ready = mp_connection.wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                for worker in waiting.values():
                    outcomes += worker.dead("killed: it did not come back in time")
                self._kill()
                if not rescuing:
                    raise RanksStuck("\n".join(map(str, outcomes)))
                break
            for pipe in ready:
                worker = waiting.pop(pipe)
                try:
                    outcomes += pipe.recv()
                except (EOFError, OSError):
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        worker.process.wait(10)
                    outcomes += worker.dead("the process ended")
            if rescue is not None and not rescuing and any(o.error for o in outcomes):
                rescuing = True
                deadline = min(deadline, time.monotonic() + rescue)
        return sorted(outcomes, key=lambda o: o.rank)

    def _kill(self) -> None:
        for worker in self.workers:
            worker.kill()
        self.workers = []

    def close(self) -> None:
        if self.workers and not self._stale:
            self._ask(("leave",), TIMEOUT + 10.0, None)
            for worker in self.workers:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    worker.process.wait(10)
        self._kill()


def serve(descriptor: int, first_rank: int, nlocal: int, grouped: int) -> None:
    """Be the process of a `ProcessWorld`: take requests until told to leave or the pipe closes."""
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    pipe = mp_connection.Connection(descriptor)
    crew = Crew(nlocal, first_rank) if nlocal > 1 and not grouped else None
    comms: list[Any] = []
    while True:
        try:
            name, *rest = pipe.recv()
        except EOFError:
            return
        if name == "open":
            for comm in comms:
                comm.abort()
            outcomes = _open(crew, first_rank, nlocal, *rest)
            comms = [o.value for o in outcomes]
            for outcome in outcomes:
                outcome.value = None
        elif name == "run":
            outcomes = _run_here(crew, comms, *rest)
        elif name == "call":
            outcomes = [attempt(0, lambda: _find(*rest[:2])(*rest[2]))]  # noqa: B023 (run at once)
        else:
            outcomes = _each(crew, comms, lambda comm: comm.close(), LIMIT)
        pipe.send_bytes(_pickled(outcomes))
        if name == "leave":
            return


def _open(crew, first_rank, nlocal, nranks, uid, timeout):
    def create(index: int) -> Any:
        return pynccl.Communicator(nranks, uid, first_rank + index, timeout=timeout, library="host")

    if crew:
        return crew.run(create, LIMIT)
    if nlocal == 1:
        return [attempt(first_rank, create, 0)]
    with pynccl.group():
        return [attempt(first_rank + index, create, index) for index in range(nlocal)]


def _find(module: str, name: str) -> Callable[..., Any]:
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    return found


def _run_here(crew, comms, module, name, args):
    if crew is None and len(comms) > 1:
        return run_grouped(comms, _find(module, name), args)
    return _each(crew, comms, lambda comm: _find(module, name)(comm, *args), 10 * LIMIT)


def _each(crew, comms, function, limit):
    if crew:
        return crew.run(lambda index: function(comms[index]), limit)
    return [attempt(comm.rank, function, comm) for comm in comms]


def _pickled(outcomes: list[Outcome]) -> bytes:
    """Pickle outcomes; what cannot be pickled is replaced by its text."""
    for outcome in outcomes:
        for field in ("value", "error"):
            try:
                pickle.loads(pickle.dumps(getattr(outcome, field)))
            except Exception:
                text = f"{type(getattr(outcome, field)).__name__}: {getattr(outcome, field)}"
                setattr(outcome, field, RuntimeError(text) if field == "error" else text)
    return pickle.dumps(outcomes)
