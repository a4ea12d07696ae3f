"""How the ranks of one job find each other: who am I, and what is the unique id.

`from_environ` reads what a launcher put into the environment.  `share` carries one small secret, the
unique id, from rank 0 to the others, and is a barrier: it returns on every rank or raises on every rank.

Rank 0 listens, the others connect; each side has a deadline.  On one machine the listener is an
abstract unix socket: no file to clean up, and the kernel says whose process is at the other end.
Across machines it is TCP on ``MASTER_ADDR``.  The exchange, all sizes fixed::

    rank 0 -> peer    magic, nonce                           the listener speaks first, so that a peer
                                                             which reached something else sends nothing
    peer -> rank 0    magic, rank, nranks, time left, HMAC of all that under the job's name
    rank 0 -> peer    "welcome", at once
    rank 0 -> peer    result code, length, then the id or the text of the error: when all are there

Whoever does not follow it is hung up on at once and costs the job nothing.  The key of the HMAC is
made of the launcher's own variables: it keeps apart jobs that share a machine or a port, it is not
a defence against an attacker on the network.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import hmac
import os
import re
import secrets
import selectors
import socket
import struct
import time
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from ._environ import Layout, env_int, from_environ, job_name, one_machine, process_at
from .enums import Result
from .errors import NCCLError, error_for

__all__ = ["Layout", "from_environ", "share"]

_FUNCTION = "pynccl.init"
_MAGIC = b"pynccl\x00\x01"
_GREETING = struct.Struct("<8s16s")
_HELLO = struct.Struct("<8sIId32s")
_ANSWER = struct.Struct("<II")
_MAX_ANSWER = 1 << 13  # fits any socket's empty send buffer, so that telling a peer never blocks
_WELCOME = 1 << 16  # in place of a result code
_HELLO_SECONDS = 5.0  # a connection that has not introduced itself by then is a stranger
_LINGER_SECONDS = 2.0  # how long a failed rank 0 stays to tell the ranks that come late
_SLACK_SECONDS = 1.0  # a peer waits this much longer than it said, for rank 0's account
_TCP_PORTS = 8  # MASTER_PORT and the ports after it: torch may hold MASTER_PORT itself


# How many exchanges each rank of each job has begun in this process.  Ranks number their calls alike,
# so that the second init() of one rank cannot meet the first of another.
_begun: dict[tuple[str, int], int] = {}


def share(
    rank: int,
    nranks: int,
    make: Callable[[], bytes],
    *,
    timeout: float,
    env: Mapping[str, str] = os.environ,
) -> bytes:
    """Hand the bytes that rank 0 makes to every rank of the job.

    Parameters
    ----------
    rank, nranks : int
        This process's rank, and the number of ranks.
    make : callable
        Called on rank 0 only; returns the bytes.
    timeout : float
        Seconds that this rank waits for the others.
    env : mapping of str to str
        Where the job's address and identity are read from.

    Returns
    -------
    bytes
        What `make` returned, once every rank is there.

    Raises
    ------
    NCCLTimeoutError
        Not every rank came in time; the text names the missing ones.
    InvalidUsageError
        Two processes claim one rank, or the ranks disagree on their number.
    RemoteError
        A rank went away while the others waited, or `make` failed on rank 0 (whose own error is
        raised unchanged there, and told to the others).
    """
    if nranks == 1:
        return make()
    local = one_machine(nranks, env)
    job = job_name(env, local=local)
    generation = _begun[job, rank] = _begun.get((job, rank), 0) + 1
    name = f"{job}/{generation}"
    meeting = _Local(name) if local else _Remote(name, env)
    here = _Here(meeting, rank, nranks, timeout, time.monotonic() + timeout)
    if rank:
        return _ask(here)
    try:
        payload = make()
        if len(payload) > _MAX_ANSWER:
            raise ValueError(f"share: {len(payload)} bytes; expected at most {_MAX_ANSWER}")
    except Exception as error:
        code = error.result if isinstance(error, NCCLError) else Result.REMOTE_ERROR
        # Whether or not the others can still be told, this rank's own error is the one to raise.
        with contextlib.suppress(OSError, NCCLError):
            _serve(here, _Verdict(code, f"rank 0 failed: {type(error).__name__}: {error}"))
        raise
    verdict = _serve(here, _Verdict(Result.SUCCESS, payload))
    if verdict.code:
        raise error_for(verdict.code, _FUNCTION, 0, str(verdict.what))
    return payload


class _Here(NamedTuple):
    """What one rank knows of the exchange."""

    meeting: _Local | _Remote
    rank: int
    nranks: int
    timeout: float
    deadline: float


class _Local:
    """Where the ranks of one machine meet: a name in the abstract namespace."""

    def __init__(self, name: str) -> None:
        self.key = name.encode()
        digest = hashlib.sha256(self.key).hexdigest()[:24]
        self.address = f"\0pynccl-{os.geteuid()}-{digest}"
        self.where = "this machine"

    def listen(self, deadline: float) -> socket.socket | None:
        # A previous attempt of the same job may be on its way out, so the name gets a second to come free.
        patience = min(deadline, time.monotonic() + 1.0)
        while True:
            sock = socket.socket(socket.AF_UNIX)
            try:
                sock.bind(self.address)
                sock.listen(4096)
                return sock
            except OSError as error:
                sock.close()
                if error.errno != errno.EADDRINUSE:
                    raise
            if time.monotonic() > patience:
                return None
            time.sleep(0.02)

    def connections(self, deadline: float) -> Iterator[socket.socket]:
        sock = socket.socket(socket.AF_UNIX)
        try:
            sock.settimeout(max(0.01, deadline - time.monotonic()))
            sock.connect(self.address)
        except OSError:
            sock.close()
            raise
        yield sock

    def whose(self, sock: socket.socket) -> str | None:
        """Say who is at the other end; None for another user's process."""
        pid, uid = process_at(sock)
        return f" (process {pid})" if uid == os.geteuid() else None


class _Remote:
    """Where the ranks of several machines meet: a port of rank 0's machine."""

    def __init__(self, name: str, env: Mapping[str, str]) -> None:
        self.key = name.encode()
        host, port = env.get("MASTER_ADDR"), env.get("MASTER_PORT")
        nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST")
        if not host and nodes:
            node = re.match(r"([^\[,]+)(?:\[(\d+))?", nodes)  # "node[01-04,7],big1"
            host = node[1] + (node[2] or "") if node else None
        if not host:
            raise ValueError(
                "init: the ranks are on several machines and MASTER_ADDR is not set: "
                "export MASTER_ADDR (rank 0's machine) and MASTER_PORT to all ranks"
            )
        self.host = host
        # Derived from the job's own number where no port is given: alike on all its machines.
        base = env_int(env, "MASTER_PORT", 1, 65536) if port else 20000 + _checksum(name) % 10000
        # torchrun's agent holds MASTER_PORT for torch's own store.
        skip = 1 if env.get("TORCHELASTIC_USE_AGENT_STORE") == "True" else 0
        first = base + skip if base + skip + _TCP_PORTS <= 65536 else base - _TCP_PORTS
        self.ports = range(first, first + _TCP_PORTS)
        self.where = f"{host}:{self.ports[0]}-{self.ports[-1]}"

    def listen(self, deadline: float) -> socket.socket | None:
        last: OSError | None = None
        for port in self.ports:
            # MASTER_ADDR may be an address that only others see this machine by.
            for host in (self.host, ""):
                try:
                    return _tcp_listener(host, port)
                except OSError as error:
                    last = error
                    if error.errno == errno.EADDRINUSE:
                        break
        raise error_for(
            Result.SYSTEM_ERROR, _FUNCTION, 0, f"no port to listen on at {self.where}: {last}"
        )

    def connections(self, deadline: float) -> Iterator[socket.socket]:
        last: OSError | None = None
        reached = False
        for port in self.ports:
            try:
                left = max(0.01, min(2.0, deadline - time.monotonic()))
                sock = socket.create_connection((self.host, port), timeout=left)
            except OSError as error:
                last = error
            else:
                reached = True
                yield sock
        if not reached and last is not None:
            raise last

    def whose(self, sock: socket.socket) -> str | None:
        return f" ({sock.getpeername()[0]})"


def _checksum(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "little")


def _tcp_listener(host: str, port: int) -> socket.socket:
    family, _, _, _, address = socket.getaddrinfo(
        host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    return socket.create_server(address[:2], family=family, backlog=4096)


class _Verdict(NamedTuple):
    """What rank 0 tells everyone: the payload (code 0), or a result code and why."""

    code: int
    what: bytes | str

    def frame(self) -> bytes:
        data = self.what if isinstance(self.what, bytes) else self.what.encode()[:4096]
        return _ANSWER.pack(self.code, len(data)) + data


class _Guest:
    """One connection to rank 0, a stranger until `rank` is set."""

    def __init__(self, sock: socket.socket, who: str) -> None:
        self.sock = sock
        self.who = who
        self.nonce = secrets.token_bytes(16)
        self.received = b""
        self.rank: int | None = None
        self.patience = time.monotonic() + _HELLO_SECONDS


def _serve(here: _Here, verdict: _Verdict) -> _Verdict:
    """Be rank 0: gather the others, tell them all, and say what they were told."""
    listener = here.meeting.listen(here.deadline)
    if listener is None:
        _ask(here)  # someone is rank 0 already, and says so to everyone, us included
        raise AssertionError("two ranks 0 and no error")
    with _Host(listener, here, verdict) as host:
        return host.run()


class _Host:
    """Rank 0's work: one thread, one selector, every socket nonblocking."""

    def __init__(self, listener: socket.socket, here: _Here, verdict: _Verdict) -> None:
        self.meeting = here.meeting
        self.nranks = here.nranks
        self.timeout = here.timeout
        self.deadline = here.deadline
        self.verdict = verdict
        self.present: dict[int, _Guest] = {}
        self.guests: set[_Guest] = set()
        self.told = {0}
        self.listener = listener
        listener.setblocking(False)
        self.selector = selectors.DefaultSelector()
        self.selector.register(listener, selectors.EVENT_READ)
        if verdict.code:
            self.deadline = min(self.deadline, time.monotonic() + _LINGER_SECONDS)

    def __enter__(self) -> _Host:
        return self

    def __exit__(self, *exc: object) -> None:
        for guest in list(self.guests):
            self._drop(guest)
        self.selector.close()
        self.listener.close()

    def run(self) -> _Verdict:
        """Serve until everyone was told, or nobody else can be waited for."""
        while len(self.told) < self.nranks:
            if not self.verdict.code and len(self.present) == self.nranks - 1:
                self._tell_all()
                break
            now = time.monotonic()
            if now >= self.deadline:
                if not self.verdict.code:
                    self._fail(Result.TIMEOUT, self._missing(), linger=False)
                break
            for guest in [g for g in self.guests if g.rank is None and now >= g.patience]:
                self._drop(guest)
            self._serve(
                min([self.deadline, *(g.patience for g in self.guests if g.rank is None)]) - now
            )
        return self.verdict

    def _serve(self, seconds: float) -> None:
        for key, _ in self.selector.select(max(0.0, min(seconds, 3600.0))):
            if key.data is None:
                self._accept()
            elif key.data in self.guests:
                self._read(key.data)

    def _accept(self) -> None:
        try:
            sock, _ = self.listener.accept()
        except (BlockingIOError, ConnectionError):
            return
        try:
            sock.setblocking(False)
            who = self.meeting.whose(sock)
            if who is None:
                raise PermissionError("another user's process")
            guest = _Guest(sock, who)
            sock.send(_GREETING.pack(_MAGIC, guest.nonce))
        except OSError:
            sock.close()
            return
        self.guests.add(guest)
        self.selector.register(sock, selectors.EVENT_READ, guest)

    def _read(self, guest: _Guest) -> None:
        try:
            data = guest.sock.recv(_HELLO.size + 1 - len(guest.received))
        except BlockingIOError:
            return
        except OSError:
            data = b""
        guest.received += data
        if guest.rank is not None:  # it has nothing more to say, so this is its end
            self._left(guest)
        elif not data or guest.received[:8] != _MAGIC[: len(guest.received)]:
            self._drop(guest)
        elif len(guest.received) >= _HELLO.size:
            self._hello(guest)

    def _hello(self, guest: _Guest) -> None:
        _, rank, nranks, left, digest = _HELLO.unpack(guest.received[: _HELLO.size])
        if len(guest.received) > _HELLO.size or not hmac.compare_digest(
            digest, _digest(self.meeting.key, guest.nonce, rank, nranks, left)
        ):
            self._drop(guest)  # of another job
            return
        if self.verdict.code:
            self._tell(guest, rank)
            return
        other = self.present.get(rank)
        if nranks != self.nranks:
            problem = (
                f"rank {rank}{guest.who} has {nranks} ranks in its job, rank 0 has {self.nranks}"
            )
        elif rank == 0:
            problem = f"rank 0 came twice: (process {os.getpid()}) and{guest.who}"
        elif other is not None:
            problem = f"rank {rank} came twice:{other.who} and{guest.who}"
        elif not 0 < rank < nranks:
            problem = f"rank {rank}{guest.who} is not one of the {nranks} ranks"
        else:
            guest.rank = rank
            self.present[rank] = guest
            # The first deadline ends it for all, so that everyone gets the same account.
            self.deadline = min(self.deadline, time.monotonic() + left)
            guest.sock.send(_ANSWER.pack(_WELCOME, 0))
            return
        self._tell(guest, rank, _Verdict(Result.INVALID_USAGE, problem))
        self._fail(Result.INVALID_USAGE, problem)

    def _left(self, guest: _Guest) -> None:
        rank = guest.rank
        self._drop(guest)
        if rank is not None and self.present.pop(rank, None) is not None:
            self._fail(
                Result.REMOTE_ERROR,
                f"rank {rank}{guest.who} went away while it waited for the others",
            )

    def _missing(self) -> str:
        missing = [r for r in range(1, self.nranks) if r not in self.present]
        shown = ", ".join(map(str, missing[:16])) + (", ..." if len(missing) > 16 else "")
        return (
            f"rank{'s' * (len(missing) > 1)} {shown} of {self.nranks} did not come within "
            f"{self.timeout:g} s ({len(self.present) + 1} came)"
        )

    def _fail(self, code: int, text: str, *, linger: bool = True) -> None:
        self.verdict = _Verdict(code, text)
        self._tell_all()
        if linger:
            self.deadline = min(self.deadline, time.monotonic() + _LINGER_SECONDS)

    def _tell_all(self) -> None:
        for rank, guest in list(self.present.items()):
            self._tell(guest, rank)
        self.present.clear()

    def _tell(self, guest: _Guest, rank: int, verdict: _Verdict | None = None) -> None:
        with contextlib.suppress(OSError):
            guest.sock.send((verdict or self.verdict).frame())
        self.told.add(rank)
        self._drop(guest)

    def _drop(self, guest: _Guest) -> None:
        self.guests.discard(guest)
        self.selector.unregister(guest.sock)
        guest.sock.close()


def _digest(key: bytes, nonce: bytes, rank: int, nranks: int, left: float) -> bytes:
    return hmac.digest(key, nonce + struct.pack("<IId", rank, nranks, left), "sha256")


def _ask(here: _Here) -> bytes:
    """Be any other rank: find rank 0 and wait for its answer."""
    pause = 0.005
    problem = "nobody listens"
    while time.monotonic() < here.deadline:
        try:
            for sock in here.meeting.connections(here.deadline):
                with sock:
                    answer = _talk(here, sock)
                if answer is not None:
                    return answer
                problem = "what listens there is not rank 0 of this job"
        except OSError as error:
            if isinstance(error, NCCLError):
                raise
            problem = str(error)
        time.sleep(max(0.0, min(pause, here.deadline - time.monotonic())))
        pause = min(pause * 1.5, 0.25)
    raise error_for(
        Result.TIMEOUT,
        _FUNCTION,
        here.rank,
        f"rank 0 did not come within {here.timeout:g} s; at {here.meeting.where}: {problem}",
    )


def _talk(here: _Here, sock: socket.socket) -> bytes | None:
    """Exchange with whoever listens; None if that is not this job's rank 0."""
    if here.meeting.whose(sock) is None:
        return None
    try:
        sock.settimeout(max(0.01, min(1.0, here.deadline - time.monotonic())))
        magic, nonce = _GREETING.unpack(_read_exactly(sock, _GREETING.size))
        if magic != _MAGIC:
            return None
        left = max(0.0, here.deadline - time.monotonic())
        digest = _digest(here.meeting.key, nonce, here.rank, here.nranks, left)
        sock.sendall(_HELLO.pack(_MAGIC, here.rank, here.nranks, left, digest))
        code, data = _read_frame(sock)
    except (OSError, EOFError):
        # Silent, or hung up on us: not our rank 0, or ours and gone.  The next look tells them apart.
        return None
    if code == _WELCOME:
        code, data = _await_verdict(here, sock, left)
    if code:
        raise error_for(code, _FUNCTION, here.rank, data.decode(errors="replace"))
    return data


def _await_verdict(here: _Here, sock: socket.socket, left: float) -> tuple[int, bytes]:
    sock.settimeout(left + _SLACK_SECONDS)
    try:
        return _read_frame(sock)
    except TimeoutError:
        return Result.TIMEOUT, f"rank 0 did not answer within {here.timeout:g} s".encode()
    except (OSError, EOFError):
        return Result.REMOTE_ERROR, b"rank 0 went away while it waited for the others"


def _read_frame(sock: socket.socket) -> tuple[int, bytes]:
    code, length = _ANSWER.unpack(_read_exactly(sock, _ANSWER.size))
    if length > _MAX_ANSWER:
        raise EOFError("not an answer")
    return code, _read_exactly(sock, length)


def _read_exactly(sock: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = sock.recv(size - len(data))
        if not part:
            raise EOFError("connection closed")
        data += part
    return data
