"""A store behind a port: the client, and in one of the processes the server.

A call takes a connection, sends its request, and puts the connection back when it has the answer.  A thread
that waits for a key therefore keeps no other thread from setting it: that one opens a connection of its own.
A connection whose call did not end as it should (a timeout of this side, Ctrl-C) is closed, never reused.
"""

from __future__ import annotations

import atexit
import contextlib
import ipaddress
import math
import os
import socket
import threading
import time
import weakref
from collections.abc import Sequence

from ...errors import StoreError, StoreTimeoutError
from .base import DEFAULT_SECONDS, Seconds, Store, seconds_of
from .protocol import (
    GREETING_SIZE,
    JOIN,
    MAX_PAYLOAD,
    REFUSED,
    WELCOME_SIZE,
    Channel,
    ProtocolError,
    Status,
    answer_greeting,
    key_of,
    pack,
    unpack,
)
from .server import Server, end_all, keep_alive
from .table import WAITS, Op, describe

__all__ = ["TCPStore"]

# The server ends a wait; this side waits a little longer for its word, then takes it for dead.
_GRACE_SECONDS = 0.5
_LINGER_SECONDS = 3.0
_MAX_IDLE = 4


class _Gone(Exception):
    """The connection ended, or never came to be; the text says how."""


class TCPStore(Store):
    """A store for processes that reach one port: one of them holds the server.

    Messages are authenticated with `secret`, which all processes must be given; nothing is encrypted.
    The server listens on the loopback interface unless `host` or `bind` say otherwise, and then a secret is
    required. When the process that holds it leaves, the server goes on until all clients have left; when that
    process ends, at most `linger` seconds more, and clients that are still there get a `StoreError`.

    Parameters
    ----------
    host : str, default: "127.0.0.1"
        Where the server is, and unless `bind` says otherwise, the address that it listens on.
    port : int, default: 0
        Its port; 0, for the server only, lets the system choose: see the attribute `port`.
    world_size : int, optional
        How many processes make this store. The server's waits for them.
    is_master : bool, default: False
        Whether this process holds the server.
    timeout : float or timedelta, default: 300
        How long this call tries to reach the server, and how long a verb waits.
    wait_for_workers : bool, default: True
        Whether the server's process waits here until `world_size` processes are there.
    secret : bytes or str, optional
        What proves that a process belongs to the job.
    bind : str, optional
        The address to listen on where it is not `host`; "" is every interface.
    linger : float, default: 3
        Seconds that the server stays for its clients when its process ends.

    Examples
    --------
    >>> from pynccl.distributed import TCPStore
    >>> server = TCPStore(is_master=True, secret="one for this job")
    >>> client = TCPStore(port=server.port, secret="one for this job")
    >>> client.set("key", b"value")
    >>> server.get("key")
    b'value'
    >>> client.close()
    >>> server.close()
    """

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = 0,
        world_size: int | None = None,
        is_master: bool = False,
        timeout: Seconds = DEFAULT_SECONDS,
        wait_for_workers: bool = True,
        *,
        secret: bytes | str | None = None,
        bind: str | None = None,
        linger: Seconds = _LINGER_SECONDS,
    ) -> None:
        super().__init__(timeout)
        if not isinstance(host, str):
            raise TypeError(f"TCPStore: host is {type(host).__name__}; expected str")
        if not isinstance(port, int) or isinstance(port, bool):
            raise TypeError(f"TCPStore: port is {type(port).__name__}; expected int")
        if not 0 <= port < 65536 or not (port or is_master):
            raise ValueError(
                f"TCPStore: port is {port}; expected 1 to 65535, or 0 where is_master is true"
            )
        if secret is not None and not isinstance(secret, (bytes, str)):
            raise TypeError(f"TCPStore: secret is {type(secret).__name__}; expected bytes or str")
        proof = secret.encode() if isinstance(secret, str) else secret or b""
        self._deadline = time.monotonic() + self._timeout
        workers = world_size if world_size is not None and world_size > 0 else 0
        key = key_of(proof)
        self._server: Server | None = None
        if is_master:
            address = host if bind is None else bind
            if not proof and not _is_loopback(address):
                raise ValueError(
                    f"TCPStore: to listen on {address or 'every interface'!r}, beyond this machine, "
                    "give a secret"
                )
            try:
                self._server = Server(address, port, key, workers, seconds_of("TCPStore", linger))
            except OSError as error:
                raise StoreError(f"TCPStore: cannot listen on {address}:{port}: {error}") from error
            port = self._server.address[1]
        self._links = _Links(host, port, key, self._server)
        self._finalizer = weakref.finalize(self, _Links.leave, self._links, self._timeout)
        try:
            self._begin(workers, wait_for_workers)
        except BaseException:
            self.close()
            if self._server is not None:
                self._server.leave(0.0)
            raise

    def _begin(self, workers: int, wait_for_workers: bool) -> None:
        """Reach the server, and where this is its process, wait for the others."""
        link = self._links.connect(self._deadline, self._timeout, patient=True)
        self._links.give_back(link)
        if not workers:
            return
        self._call("TCPStore", JOIN, [], self._timeout)
        if self._server is not None and wait_for_workers:
            joined = self._server.wait_for_workers(self._deadline - time.monotonic())
            if joined < workers:
                raise StoreTimeoutError(
                    f"TCPStore: {joined} of {workers} processes came to {self._links.where} "
                    f"within {self._timeout:g} s"
                )

    @property
    def host(self) -> str:
        """Where the server is."""
        return self._links.host

    @property
    def port(self) -> int:
        """The server's port."""
        return self._links.port

    def clone(self) -> TCPStore:
        """Give another client of the same server, with connections of its own.

        Returns
        -------
        TCPStore
            The client; does not count as one of `world_size`.
        """
        other = object.__new__(TCPStore)
        Store.__init__(other, self._timeout)
        other._server = None
        other._links = _Links(self.host, self.port, self._links.key, self._links.server)
        other._links.server = None
        other._links.address = self._links.address
        other._finalizer = weakref.finalize(other, _Links.leave, other._links, self._timeout)
        other._links.give_back(
            other._links.connect(time.monotonic() + self._timeout, self._timeout, patient=False)
        )
        return other

    def _do(self, op: Op, parts: Sequence[bytes], seconds: float) -> list[bytes]:
        keys = parts if op in WAITS else parts[:1]
        verb = op.name.lower()
        status, answer = self._call(verb, op, parts, seconds, keys)
        if status == Status.DONE:
            return answer
        if status == Status.LATE:
            raise self._too_late(op, answer, seconds)
        raise StoreError(f"{answer[0].decode()} ({self._where()})")

    def _call(
        self,
        verb: str,
        code: int,
        parts: Sequence[bytes],
        seconds: float,
        keys: Sequence[bytes] = (),
    ) -> tuple[int, list[bytes]]:
        payload = pack(code, seconds, parts)
        if len(payload) > MAX_PAYLOAD:
            raise ValueError(
                f"{verb}: {len(payload)} bytes in one call; at most {MAX_PAYLOAD} are allowed"
            )
        deadline = time.monotonic() + seconds + _GRACE_SECONDS
        about = f" ({describe(keys)})" if keys and keys[0] else ""
        link: _Link | None = None
        try:
            link = self._links.take(deadline, seconds)
            status, answer = link.ask(payload, deadline)
        except BaseException as error:
            self._links.discard(link)
            if self._links.closed and isinstance(error, Exception):
                raise StoreError(f"{verb}: {self._where()} is closed") from None
            if isinstance(error, TimeoutError) and not isinstance(error, StoreError):
                raise StoreTimeoutError(
                    f"{verb}: no answer within {seconds:g} s in {self._where()}{about}"
                ) from None
            if isinstance(error, (_Gone, OSError, ProtocolError)):
                raise StoreError(
                    f"{verb}: the server at {self._links.where} is gone: {error}{about}"
                ) from None
            raise
        self._links.give_back(link)
        return status, answer

    def close(self) -> None:
        """Leave the store; the server, where it is here, goes on until all clients have left."""
        self._finalizer()

    def _where(self) -> str:
        return f"TCPStore {self._links.where}"


def _is_loopback(address: str) -> bool:
    if not address:
        return False
    try:
        found = socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)
    except OSError:
        return False
    return all(ipaddress.ip_address(str(entry[4][0]).split("%")[0]).is_loopback for entry in found)


class _Link:
    """One connection to the server."""

    def __init__(self, sock: socket.socket, channel: Channel) -> None:
        self.sock = sock
        self.channel = channel
        self.received = bytearray()

    def ask(self, payload: bytes, deadline: float) -> tuple[int, list[bytes]]:
        """Send a request and wait for the answer; the GIL is free meanwhile."""
        self.sock.settimeout(max(0.001, deadline - time.monotonic()))
        with contextlib.suppress(
            ConnectionError
        ):  # what it said before it went is still to be read
            self.sock.sendall(self.channel.seal(payload))
        while missing := self.channel.wanted(self.received):
            self.received += _receive(self.sock, missing, deadline)
        status, _, parts = unpack(self.channel.open(self.received))
        if status == Status.GONE:
            raise _Gone(parts[0].decode())
        return status, parts


def _receive(sock: socket.socket, most: int, deadline: float) -> bytes:
    sock.settimeout(max(0.001, deadline - time.monotonic()))
    data = sock.recv(min(most, 1 << 20))
    if not data:
        raise _Gone("it closed the connection")
    return data


def _receive_all(sock: socket.socket, size: int, deadline: float) -> bytes:
    data = b""
    while len(data) < size:
        data += _receive(sock, size - len(data), deadline)
    return data


class _Links:
    """The connections of one store in this process, idle and in use."""

    def __init__(self, host: str, port: int, key: bytes, server: Server | None) -> None:
        self.host = host
        self.port = port
        self.key = key
        self.server = server
        # A server that listens elsewhere than at `host` is reached where it listens.
        self.address = host
        if server is not None:
            bound = server.address[0]
            unspecified = ipaddress.ip_address(bound.split("%")[0]).is_unspecified
            self.address = ("::1" if ":" in bound else "127.0.0.1") if unspecified else bound
        self.where = f"{host or self.address}:{port}"
        self.closed = False
        self.lock = threading.Lock()
        self.idle: list[_Link] = []
        self.busy: set[_Link] = set()
        _all_links.add(self)

    def take(self, deadline: float, seconds: float) -> _Link:
        with self.lock:
            if self.closed:
                raise _Gone("closed")
            if self.idle:
                link = self.idle.pop()
                self.busy.add(link)
                return link
        return self.connect(deadline, seconds, patient=False)

    def give_back(self, link: _Link) -> None:
        with self.lock:
            self.busy.discard(link)
            if not self.closed and len(self.idle) < _MAX_IDLE:
                self.idle.append(link)
                return
        link.sock.close()

    def discard(self, link: _Link | None) -> None:
        if link is not None:
            with self.lock:
                self.busy.discard(link)
            link.sock.close()

    def connect(self, deadline: float, seconds: float, *, patient: bool) -> _Link:
        """Make a connection; a patient caller waits for a server that is not there yet."""
        pause = 0.005
        while True:
            try:
                link = self.attempt(deadline)
            except ProtocolError as error:
                raise StoreError(f"TCPStore: refused at {self.where}: {error}") from None
            except (OSError, _Gone) as error:
                if not patient:
                    raise
                left = deadline - time.monotonic()
                if left <= 0:
                    raise StoreTimeoutError(
                        f"TCPStore: no server at {self.where} within {seconds:g} s: {error}"
                    ) from None
                time.sleep(min(pause, left))
                pause = min(pause * 1.5, 0.1)
            else:
                with self.lock:
                    self.busy.add(link)
                return link

    def attempt(self, deadline: float) -> _Link:
        sock = socket.create_connection(
            (self.address, self.port), timeout=max(0.001, deadline - time.monotonic())
        )
        try:
            # Who asks a free port often enough meets its own call.
            if sock.getsockname() == sock.getpeername():
                raise ConnectionRefusedError("nobody listens")
            keep_alive(sock)
            greeting = _receive_all(sock, GREETING_SIZE, deadline)
            hello, expected, channel = answer_greeting(self.key, greeting)
            sock.sendall(hello)
            welcome = _receive_all(sock, WELCOME_SIZE, deadline)
            if welcome == REFUSED:
                raise ProtocolError("the server has another secret")
            if welcome != expected:
                raise ProtocolError("the server does not know the secret")
        except BaseException:
            sock.close()
            raise
        return _Link(sock, channel)

    def leave(self, patience: float) -> None:
        with self.lock:
            if self.closed:
                return
            self.closed = True
            idle, self.idle = self.idle, []
            busy = list(self.busy)
        for link in idle:
            link.sock.close()
        for link in busy:  # its thread wakes up, and closes it
            with contextlib.suppress(OSError):
                link.sock.shutdown(socket.SHUT_RDWR)
        if self.server is not None:
            self.server.leave(patience)

    def forked(self) -> None:
        """Let go of the parent's connections, in a forked child; the next call makes new ones."""
        self.lock = threading.Lock()
        for link in [*self.idle, *self.busy]:
            link.sock.close()
        self.idle, self.busy = [], set()
        self.server = None


_all_links: weakref.WeakSet[_Links] = weakref.WeakSet()


def _forked() -> None:
    for links in list(_all_links):
        links.forked()


def _exit() -> None:
    # First our own clients, or the servers would wait for them. How long the servers then stay for a world
    # that is not complete yet is theirs to say.
    for links in list(_all_links):
        links.leave(math.inf)
    end_all()


atexit.register(_exit)
os.register_at_fork(after_in_child=_forked)
