"""Ranks as processes of this machine: started, heard, and ended together.

A `Job` promises that when its block is left, no process of it is left: not a rank that hangs, not a
zombie, not what a rank started and forgot.  It keeps the promise in three ways:

- each rank leads a session of its own, so that a signal reaches all that it started;
- a rank that has ended stays unreaped until the end, so that nobody else can get its number; what it
  started and left becomes our child (``PR_SET_CHILD_SUBREAPER``), to be reaped by us as well;
- the kernel kills the ranks if the launcher itself is killed (``PR_SET_PDEATHSIG``).

Everything happens in one thread that sleeps in ``poll``: output of ranks, signals (through the wake-up
descriptor of `signal`; so nothing is done inside handlers), deadlines, and descriptors that a caller adds.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import os
import secrets
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from types import TracebackType

__all__ = ["Job", "bootstrap", "environments"]

_SETTLE_SECONDS = 0.3  # after the first failure: the others may be about to say what went wrong
_PARTIAL_SECONDS = 0.3  # a line without its end, a prompt perhaps, is shown if nothing follows it
_LEFTOVER_SECONDS = 0.5  # what a rank leaves behind may be about to end by itself
_MAX_PENDING = 1 << 20  # bytes of output not yet taken by the terminal; then the ranks have to wait
_MAX_LINE = 1 << 16
_TIMED_OUT = 124  # as timeout(1)

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None)


def bootstrap() -> list[str]:
    """Return the start of the command of a rank; what to run, as for ``python``, follows it."""
    return [
        sys.executable,
        os.path.join(os.path.dirname(os.path.abspath(__file__)), "_bootstrap.py"),
    ]


def environments(nranks: int, library: str | None = None) -> list[dict[str, str]]:
    """Return the environment of each rank: this process's, and where the rank stands in the job.

    Parameters
    ----------
    nranks : int
        Number of ranks.
    library : str, optional
        What ``library="auto"`` shall mean in the ranks.
    """
    # A torchrun further out has an agent whose store is not for our ranks.
    base = {k: v for k, v in os.environ.items() if not k.startswith("TORCHELASTIC_")}
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port = sock.getsockname()[1]  # for what the ranks themselves may want to open there
    base |= {
        "WORLD_SIZE": str(nranks),
        "LOCAL_WORLD_SIZE": str(nranks),
        "ROLE_WORLD_SIZE": str(nranks),
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "PYNCCL_JOB_ID": secrets.token_hex(8),
    }
    if library is not None:
        base["PYNCCL_LIBRARY"] = library
    return [
        base | dict.fromkeys(("RANK", "LOCAL_RANK", "ROLE_RANK"), str(r)) for r in range(nranks)
    ]


class _Rank:
    """One process of the job."""

    def __init__(self, number: int, process: subprocess.Popen[bytes]) -> None:
        self.number = number
        self.process = process
        self.code: int | None = None  # once it has ended; negative: the signal that ended it

    @property
    def end(self) -> str:
        """How it ended, in words."""
        if self.code is None or self.code >= 0:
            return f"exited with code {self.code}"
        hint = " (out of memory?)" if -self.code == signal.SIGKILL else ""
        return f"was killed by {_signal_name(-self.code)}{hint}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


class _Output:
    """One output of one rank, forwarded in whole lines."""

    def __init__(self, fd: int, target: int, prefix: bytes) -> None:
        self.fd = fd
        self.target = target
        self.prefix = prefix
        self.partial = b""
        self.since = 0.0
        self.inside = False  # is the start of the current line shown already?

    def take(self, flush: bool = False) -> bytes:
        """Return what is to be shown now, and keep the rest."""
        # A carriage return ends a line, too: progress bars have no other end.
        cut = max(self.partial.rfind(b"\n"), self.partial.rfind(b"\r")) + 1
        if flush or len(self.partial) - cut > _MAX_LINE:
            cut = len(self.partial)
        shown, self.partial = self.partial[:cut], self.partial[cut:]
        if not shown:
            return b""
        if self.prefix:
            lines = shown.splitlines(keepends=True)
            first = b"" if self.inside else self.prefix
            shown = first + self.prefix.join(lines)
        self.inside = shown[-1:] not in (b"\n", b"\r")
        return shown


class Job:
    """The ranks of one job, for the time of a ``with`` block.

    Parameters
    ----------
    commands : sequence of list of str
        What each rank runs.
    environments : sequence of dict
        The environment of each rank.
    name : str
        What messages begin with.
    prefix : bool
        Whether each line of output starts with its rank.
    grace : float
        Seconds between asking a rank to end and killing it.
    stdout : int
        Descriptor to which the ranks' standard output goes.
    pass_fds : sequence of sequence of int
        Descriptors that each rank inherits.

    Notes
    -----
    Must be used in the main thread, since it handles signals.
    """

    def __init__(
        self,
        commands: Sequence[list[str]],
        environments: Sequence[dict[str, str]],
        *,
        name: str,
        prefix: bool = False,
        grace: float = 5.0,
        stdout: int = 1,
        pass_fds: Sequence[Sequence[int]] = (),
    ) -> None:
        self._commands = commands
        self._environments = environments
        self._name = name
        self._prefix = prefix
        self._grace = grace
        self._stdout = stdout
        self._pass_fds = pass_fds
        self._ranks: list[_Rank] = []
        self._failed: list[_Rank] = []
        self._code = 0
        self._changed = True  # may a rank have ended since we looked?
        self._stopping = False  # has the job's fate been decided, and told?
        self._settled = 0.0
        self._signals: list[tuple[float, int]] = []  # what else to send to the ranks, and when
        self._outputs: dict[int, _Output] = {}
        self._pending: dict[int, bytearray] = {}  # output by target, not yet taken by it
        self._shown: dict[int, _Output] = {}  # whose unfinished line is the last thing at a target
        self._selector = selectors.PollSelector()  # epoll refuses regular files
        self._stack = contextlib.ExitStack()

    # ---- start and end ------------------------------------------------------------------------

    def __enter__(self) -> Job:
        try:
            self._handle_signals()
            _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
            self._stack.callback(_libc.prctl, _PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
            for number in range(len(self._commands)):
                self._start(number)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            if any(rank.code is None for rank in self._ranks):
                self._stop(signal.SIGTERM)
                self._until(lambda: False)
            self._drain()
            self._end_leftovers()
            self._drain()
        finally:
            for rank in self._ranks:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(rank.process.pid, signal.SIGKILL)
                rank.process.wait()
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            for output in self._outputs.values():
                os.close(output.fd)
            self._stack.close()
            self._selector.close()

    def _handle_signals(self) -> None:
        reader, writer = socket.socketpair()
        for sock in (reader, writer):
            self._stack.enter_context(sock)
            sock.setblocking(False)
        previous = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        self._stack.callback(signal.set_wakeup_fd, previous)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
            # Under nohup, or in the background of a script, some are ignored and must stay so.
            if signal.getsignal(number) != signal.SIG_IGN or number == signal.SIGCHLD:
                old = signal.signal(number, lambda number, frame: None)
                self._stack.callback(signal.signal, number, old or signal.SIG_DFL)
        self.watch(reader.fileno(), lambda: self._on_signals(reader))

    def _start(self, number: int) -> None:
        alone = len(self._commands) == 1 and not self._prefix and self._stdout == 1
        channel = None if alone else subprocess.PIPE
        parent = os.getpid()

        def die_with_parent() -> None:
            _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() != parent:  # it died before the call above
                os._exit(1)

        process = subprocess.Popen(
            self._commands[number],
            env=self._environments[number],
            stdin=None if number == 0 and _may_read() else subprocess.DEVNULL,
            stdout=channel,
            stderr=channel,
            start_new_session=True,
            preexec_fn=die_with_parent,
            pass_fds=self._pass_fds[number] if self._pass_fds else (),
        )
        self._ranks.append(_Rank(number, process))
        if alone:
            return
        width = len(str(len(self._commands) - 1))
        prefix = f"[{number:{width}}] ".encode() if self._prefix else b""
        for pipe, target in ((process.stdout, self._stdout), (process.stderr, 2)):
            assert pipe is not None
            fd = os.dup(pipe.fileno())
            pipe.close()
            os.set_blocking(fd, False)
            output = self._outputs[fd] = _Output(fd, target, prefix)
            self.watch(fd, functools.partial(self._read, output))

    # ---- the loop -----------------------------------------------------------------------------

    def watch(self, fd: int, callback: Callable[[], object]) -> None:
        """Call `callback` in `run` whenever `fd` can be read."""
        self._selector.register(fd, selectors.EVENT_READ, callback)

    def unwatch(self, fd: int) -> None:
        """Forget a descriptor given to `watch`."""
        self._selector.unregister(fd)

    def run(
        self,
        until: Callable[[], bool] = lambda: False,
        *,
        wake: float | None = None,
        timeout: float | None = None,
    ) -> int | None:
        """Serve the ranks.

        Parameters
        ----------
        until : callable
            Asked after each event; the job goes on, and `run` returns, when it says True.
        wake : float, optional
            Seconds after which `run` returns in any case; the job goes on.
        timeout : float, optional
            Seconds after which the ranks are stopped.

        Returns
        -------
        int or None
            None if the job goes on.  Else, when all ranks have ended: 0 if all went well; the exit
            code of the first rank that failed, or 128 and its signal; 128 and the signal that this
            process got; 124 after the timeout.
        """
        back = None if wake is None else time.monotonic() + wake

        def enough() -> bool:
            return until() or (back is not None and time.monotonic() >= back)

        if self._until(enough, timeout, back):
            return None
        return self._code

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self._ranks)

    def code_of(self, number: int) -> int | None:
        """Return how a rank ended: its exit code, or minus the signal; None while it runs."""
        return self._ranks[number].code

    def _until(
        self,
        until: Callable[[], bool],
        timeout: float | None = None,
        back: float | None = None,
    ) -> bool:
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            self._collect()
            if until():
                return True
            if all(rank.code is not None for rank in self._ranks):
                self._tell_failures()
                return False
            now = time.monotonic()
            if self._failed and not self._stopping and now >= self._settled:
                self._tell_failures()
                self._stop(signal.SIGTERM)
            if deadline is not None and now >= deadline and not self._stopping:
                alive = ", ".join(str(rank.number) for rank in self._alive())
                self._tell(f"after {timeout:g} s still running: rank {alive}; stopping")
                self._code = _TIMED_OUT
                self._stop(signal.SIGTERM)
            while self._signals and now >= self._signals[0][0]:
                self._send(self._signals.pop(0)[1])
            times = [when for when in (self._next(deadline), back) if when is not None]
            self._turn(min(times, default=None))

    def _next(self, deadline: float | None) -> float | None:
        """Return when something is to be done even if nothing happens."""
        times = [output.since + _PARTIAL_SECONDS for output in self._halted()]
        if self._signals:
            times.append(self._signals[0][0])
        if self._failed and not self._stopping:
            times.append(self._settled)
        if deadline is not None and not self._stopping:
            times.append(deadline)
        return min(times) if times else None

    def _turn(self, wake: float | None) -> None:
        """Sleep until something happens, or until `wake`, and deal with it."""
        seconds = None if wake is None else max(0.0, wake - time.monotonic()) + 0.001
        for key, _ in self._selector.select(seconds):
            key.data()
        now = time.monotonic()
        for output in self._halted():
            if now - output.since >= _PARTIAL_SECONDS:
                self._show(output, flush=True)

    def _halted(self) -> list[_Output]:
        """Return the outputs that may have halted inside a line, and not for want of a reader."""
        outputs = self._outputs.values()
        return [out for out in outputs if out.partial and out.target not in self._pending]

    def _collect(self) -> None:
        """Notice the ranks that have ended."""
        if not self._changed:
            return
        self._changed = False
        ended = []
        for rank in self._alive():
            flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
            status = os.waitid(os.P_PID, rank.process.pid, flags)
            if status is not None:
                exited = status.si_code == os.CLD_EXITED
                rank.code = status.si_status if exited else -status.si_status
                ended.append(rank)
        failed = [rank for rank in ended if rank.code]
        if failed and not self._stopping:
            if not self._failed:
                self._settled = time.monotonic() + _SETTLE_SECONDS
            # Of those that were seen at once, one killed by a signal is the likelier cause.
            self._failed += sorted(failed, key=lambda rank: (rank.code or 0) > 0)

    def _alive(self) -> list[_Rank]:
        return [rank for rank in self._ranks if rank.code is None]

    def _tell_failures(self) -> None:
        if self._stopping or not self._failed:
            return
        self._drain(0.1)  # what the ranks had to say comes first
        first, *others = self._failed
        stopping = "; stopping the others" if self._alive() else ""
        self._tell(f"rank {first.number} (process {first.process.pid}) {first.end}{stopping}")
        for rank in others:
            self._tell(f"then rank {rank.number} {rank.end}")
        code = first.code or 0
        self._code = code if code >= 0 else 128 - code

    # ---- signals ------------------------------------------------------------------------------

    def _on_signals(self, reader: socket.socket) -> None:
        with contextlib.suppress(BlockingIOError):
            for number in reader.recv(4096):
                if number == signal.SIGCHLD:
                    self._changed = True
                    continue
                if self._code > 128 and self._stopping:  # asked again
                    self._signals = [(time.monotonic(), signal.SIGKILL)]
                    continue
                self._tell(f"got {_signal_name(number)}; stopping {len(self._alive())} ranks")
                self._code = 128 + number
                self._stop(number)

    def _stop(self, number: int) -> None:
        """Ask all ranks to end, and see to it that they do."""
        self._stopping = True
        self._send(number)
        self._signals = [(time.monotonic() + self._grace, signal.SIGKILL)]

    def _send(self, number: int) -> None:
        for rank in self._alive():
            if number == signal.SIGKILL:
                self._tell(f"rank {rank.number} did not stop: killed")
            with contextlib.suppress(ProcessLookupError):
                os.killpg(rank.process.pid, number)
                os.killpg(rank.process.pid, signal.SIGCONT)  # a stopped one hears nothing else

    def _end_leftovers(self) -> None:
        """End what the ranks have started and left running."""
        sessions = {rank.process.pid: rank.number for rank in self._ranks}
        for number, seconds in (
            (0, _LEFTOVER_SECONDS),
            (signal.SIGTERM, self._grace),
            (signal.SIGKILL, 2.0),
        ):
            left = _members(sessions)
            if not left:
                return
            for pid, session in left.items():
                if number == signal.SIGTERM:
                    self._tell(f"rank {sessions[session]} left process {pid} running; stopping it")
                if number:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, number)
            deadline = time.monotonic() + seconds
            while _members(sessions) and time.monotonic() < deadline:
                self._turn(time.monotonic() + 0.02)

    # ---- output -------------------------------------------------------------------------------

    def _tell(self, text: str) -> None:
        """Say something ourselves."""
        self._put(2, f"{self._name}: {text}\n".encode(), None)

    def _read(self, output: _Output) -> None:
        if len(self._pending.get(output.target, ())) > _MAX_PENDING:
            time.sleep(0.001)  # the terminal is slower than the ranks
            return
        try:
            data = os.read(output.fd, 1 << 16)
        except BlockingIOError:
            return
        output.since = time.monotonic()
        output.partial += data
        self._show(output, flush=not data)
        if not data:
            self.unwatch(output.fd)
            os.close(output.fd)
            del self._outputs[output.fd]

    def _show(self, output: _Output, flush: bool = False) -> None:
        shown = output.take(flush)
        if shown:
            self._put(output.target, shown, output)

    def _put(self, target: int, data: bytes, output: _Output | None) -> None:
        last = self._shown.pop(target, None)
        if last is not None and last is not output:
            data = b"\n" + data  # after the line that another one has left unfinished
            last.inside = False
        if output is not None and output.inside:
            self._shown[target] = output
        if target not in self._pending:
            self._pending[target] = bytearray()
            try:
                self._selector.register(target, selectors.EVENT_WRITE, lambda: self._write(target))
            except (KeyError, ValueError, OSError):
                return
        self._pending[target] += data

    def _write(self, target: int) -> None:
        """Hand on what the target takes without blocking: a pipe takes a page once it takes anything."""
        data = self._pending[target]
        try:
            count = os.write(target, bytes(data[:4096]))
        except BlockingIOError:
            return
        except OSError as error:
            count = len(data)
            if error.errno == errno.EPIPE and target == self._stdout and not self._stopping:
                self._code = 128 + signal.SIGPIPE  # nobody reads the results: as with plain pipes
                self._stop(signal.SIGTERM)
        del data[:count]
        if not data:
            del self._pending[target]
            self._selector.unregister(target)

    def _drain(self, seconds: float = 1.0) -> None:
        """Forward what the ranks have written so far."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            ready = self._selector.select(0)
            mine = [key for key, _ in ready if key.fd in self._outputs or key.fd in self._pending]
            if not mine:
                if not self._pending:
                    return
                time.sleep(0.005)  # for the one who reads us
            for key in mine:
                key.data()


def _may_read() -> bool:
    """Tell whether standard input can be given to a rank."""
    try:
        # In the background of its terminal, a rank would take what is typed for the shell.
        return os.tcgetpgrp(0) == os.getpgrp()
    except OSError:  # no terminal, or not ours
        return True


def _members(sessions: dict[int, int]) -> dict[int, int]:
    """Find the living processes of some sessions, except their leaders."""
    found = {}
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) not in sessions:
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    # pid (any name) state parent group session ...
                    state, _, _, session = file.read().rpartition(b")")[2].split()[:4]
            except (OSError, ValueError):
                continue
            if int(session) in sessions and state not in b"ZX":
                found[int(name)] = int(session)
    return found
