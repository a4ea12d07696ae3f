"""Many short lives of processes, quickly: a server that has imported everything once and forks.

A `Nursery` is one process, started as ranks are (the uncompiled tree off the path).  It runs *jobs*, several
at a time, each in a child of its own; a job may fork further processes (`fork`), which is how tests get
ranks that can be killed without paying half a second of imports for each.

What keeps a test run from hanging or littering: every job has a limit, after which its whole process group
is killed and its log, with the stacks of its processes, becomes the error; and a job adopts whatever its
processes leave behind (`no_children_left`).
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import faulthandler
import importlib
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing import Pipe
from multiprocessing import connection as mp_connection
from multiprocessing.connection import Connection
from typing import Any

from helpers.ranks import TESTS

PR_SET_CHILD_SUBREAPER = 36

BOOT = (
    "import sys; sys.path[:] = [sys.argv[1], *filter(None, sys.path)]; "
    "import helpers.nursery as n; n.serve(int(sys.argv[2]))"
)


class JobFailed(Exception):
    """A job raised, died or did not come back; the text holds its log."""


class Nursery:
    """The server, seen from the tests.  Functions for it are sent by name: they must be importable."""

    def __init__(self) -> None:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (close() closes it)
        self._pipe, theirs = Pipe()
        # Arithmetic libraries start threads when imported, and threads do not survive a fork.
        env = os.environ | {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-c", BOOT, str(TESTS), str(theirs.fileno())],
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            pass_fds=[theirs.fileno()],
            env=env,
        )
        theirs.close()

    def run(
        self,
        function: Callable[[Any], Any],
        jobs: list[Any],
        width: int = 6,
        limit: float = 60.0,
    ) -> Iterator[tuple[int, Any]]:
        """Run ``function(job)`` for every job, ``width`` at a time; yields (index, value) as they end.

        A value that is an exception is what went wrong with the job.
        """
        self._pipe.send((function.__module__, function.__qualname__, jobs, width, limit))
        for _ in jobs:
            if not self._pipe.poll(limit + 30):
                raise JobFailed(f"the nursery is silent\n{self.printed()}")
            try:
                yield pickle.loads(self._pipe.recv_bytes())
            except EOFError:
                raise JobFailed(f"the nursery has ended\n{self.printed()}") from None

    def one(self, function: Callable[[Any], Any], job: Any, limit: float = 60.0) -> Any:
        """Run one job; returns its value or raises what went wrong."""
        ((_, value),) = self.run(function, [job], limit=limit)
        if isinstance(value, Exception):
            raise value
        return value

    def ask(self, function: Callable[[], Any]) -> Any:
        """Run a function in the server itself."""
        self._pipe.send((function.__module__, function.__qualname__, None, 0, 0))
        if not self._pipe.poll(30):
            raise JobFailed(f"the nursery is silent\n{self.printed()}")
        return pickle.loads(self._pipe.recv_bytes())

    def printed(self) -> str:
        """The end of what the server and everything it forked have printed."""
        self._log.seek(max(0, self._log.seek(0, os.SEEK_END) - 8000))
        return self._log.read().decode(errors="replace")

    def close(self) -> int:
        """End the server; returns its exit status."""
        self._pipe.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(10)
        self._log.close()
        return self._process.returncode


# --- in the server -------------------------------------------------------------------------------------


def serve(descriptor: int) -> None:
    """Be the server until the pipe closes."""
    pipe = Connection(descriptor)
    while True:
        try:
            module, name, items, width, limit = pipe.recv()
        except EOFError:
            return
        function = getattr(importlib.import_module(module), name)
        if items is None:
            pipe.send_bytes(pickle.dumps(function()))
            continue
        # Nothing on the stack between here and the child's function may catch what the child raises:
        # its SystemExit has to end it the way a script ends.
        waiting = list(enumerate(items))[::-1]
        running: dict[Connection, _Child] = {}
        while waiting or running:
            while waiting and len(running) < width:
                index, item = waiting.pop()
                child = fork(_job, function, item)
                child.index, child.deadline = index, time.monotonic() + limit
                running[child.pipe] = child
            for result in _ended(running):
                pipe.send_bytes(pickle.dumps(result))


def _ended(running: dict[Connection, _Child]) -> Iterator[tuple[int, Any]]:
    soonest = min(child.deadline for child in running.values()) - time.monotonic()
    for ready in mp_connection.wait(list(running), max(0.0, soonest)):
        child = running.pop(ready)
        value = child.receive()
        child.wait()
        child.close()
        yield child.index, value
    for child in [c for c in running.values() if time.monotonic() > c.deadline]:
        del running[child.pipe]
        value = JobFailed(f"not done in time\n{child.end()}")
        child.close()
        yield child.index, value


def _job(function: Callable[[Any], Any], item: Any) -> Any:
    os.setpgid(0, 0)
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    return function(item)


class _Child:
    """A forked process: the pipe over which it sends one value, and the file it prints into."""

    index: int
    deadline: float

    def __init__(self, pid: int, pipe: Connection, log: Any) -> None:
        self.pid, self.pipe, self.log = pid, pipe, log
        self.status: int | None = None

    def receive(self) -> Any:
        """What it sent; an exception if it ended without."""
        try:
            return pickle.loads(self.pipe.recv_bytes())
        except (EOFError, OSError):
            self.wait()
            return JobFailed(f"process ended with status {self.status}\n{self.printed()}")

    def printed(self) -> str:
        self.log.seek(0)
        return self.log.read()[-6000:].decode(errors="replace")

    def wait(self, limit: float = 10.0) -> int:
        """Wait for its end; returns its exit status, negative for a signal."""
        deadline = time.monotonic() + limit
        while self.status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.status = os.waitstatus_to_exitcode(status)
            elif time.monotonic() > deadline:
                self.kill()
            else:
                time.sleep(0.002)
        return self.status

    def close(self) -> None:
        self.pipe.close()
        self.log.close()

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    def end(self) -> str:
        """Kill its whole process group; returns what it printed, with stacks."""
        for number in (signal.SIGCONT, signal.SIGUSR1, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, number)
            time.sleep(0.2)
        self.wait()
        return self.printed()


def fork(function: Callable[..., Any], *args: Any) -> _Child:
    """Run a function in a forked process, which sends what it returns and then ends normally.

    The process ends as a script would: with the value of a SystemExit, or with status 1 and a traceback.
    """
    log = tempfile.TemporaryFile()  # noqa: SIM115 (shared with the child, closed with the last owner)
    theirs, ours = Pipe(duplex=False)
    pid = os.fork()
    if pid:
        ours.close()
        return _Child(pid, theirs, log)
    theirs.close()
    for number in (1, 2):
        os.dup2(log.fileno(), number)
    faulthandler.enable(log.fileno())
    faulthandler.register(signal.SIGUSR1, log.fileno(), all_threads=True)
    value = function(*args)
    try:
        data = pickle.dumps(value)
    except Exception:
        data = pickle.dumps(JobFailed(traceback.format_exc()))
    ours.send_bytes(data)
    ours.close()
    raise SystemExit(0)


def no_children_left() -> str:
    """Nothing, or what is wrong: call it at the end of a job, when its processes have been waited for."""
    try:
        pid, status = os.waitpid(-1, os.WNOHANG)
    except OSError as error:
        return "" if error.errno == errno.ECHILD else str(error)
    return f"a process was left behind: pid {pid}, status {status} (pid 0: it still runs)"
