"""The server of a `TCPStore`: one thread, one selector, every socket nonblocking.

A connection is a stranger until it has proved that it knows the secret: it may send 56 bytes, has five
seconds, and at most a thousand strangers are kept.  Then it is a client: its requests are answered one by
one, and nothing is read from it while an answer is on its way, so that a client which does not read costs
one answer.

The server outlives the store that made it: it ends when told to leave and no client is left, or, as the
process ends, a little later, and then tells those that are still there.
"""

from __future__ import annotations

import contextlib
import errno
import heapq
import math
import os
import selectors
import socket
import threading
import time
import weakref
from collections import OrderedDict
from itertools import count

from ...errors import StoreError
from .protocol import (
    HELLO_SIZE,
    JOIN,
    MAX_PAYLOAD,
    REFUSED,
    Channel,
    Greeter,
    ProtocolError,
    Status,
    pack,
    unpack,
)
from .table import WAITS, Op, Table

__all__ = ["Server", "end_all", "keep_alive"]

_HELLO_SECONDS = 5.0
_MAX_STRANGERS = 1024
_CHUNK = 1 << 18
_BACKLOG = 4096
# Without descriptors the listener rests this long, or its readiness would keep the thread spinning.
_REST_SECONDS = 0.1


def keep_alive(sock: socket.socket) -> None:
    """Notice within half a minute that the other machine is gone; send small frames at once."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4)


class _Peer:
    """One connection."""

    __slots__ = ("born", "channel", "deadline", "greeter", "keys", "op", "out", "received", "sock")

    def __init__(self, sock: socket.socket, greeter: Greeter) -> None:
        self.sock = sock
        self.greeter = greeter
        self.born = time.monotonic()
        self.channel: Channel | None = None
        self.received = bytearray()
        self.out = bytearray()
        # A request that waits for keys: the verb, all its keys, and until when.
        self.op: Op | None = None
        self.keys: list[bytes] = []
        self.deadline = math.inf


class Server:
    """The table of a `TCPStore`, and the thread that serves it."""

    def __init__(self, host: str, port: int, key: bytes, world_size: int, linger: float) -> None:
        self._key = key
        self._pid = os.getpid()
        self._world_size = world_size
        self._linger = linger
        self._table = Table()
        self._peers: set[_Peer] = set()
        self._strangers: OrderedDict[_Peer, None] = OrderedDict()
        self._waiting: dict[bytes, set[_Peer]] = {}
        self._timers: list[tuple[float, int, _Peer]] = []
        self._ticket = count()
        self._rest_until = 0.0
        # Shared with other threads, under the condition: how many have joined, and when to go.
        self._state = threading.Condition()
        self._joined = 0
        self._leaving = False
        self._go_at = math.inf
        self._patience = math.inf

        self._listener = _listen(host, port)
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        self._waker, self._wakee = socket.socketpair()
        self._wakee.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ, None)
        self._selector.register(self._wakee, selectors.EVENT_READ, None)
        _servers.add(self)
        self._thread = threading.Thread(target=self._serve, name="pynccl store", daemon=True)
        self._thread.start()

    # ---- for other threads --------------------------------------------------------------------------

    def wait_for_workers(self, seconds: float) -> int:
        """Wait until the whole world has joined; gives how many have."""
        with self._state:
            self._state.wait_for(lambda: self._joined >= self._world_size, seconds)
            return self._joined

    def leave(self, patience: float) -> None:
        """Go when no client is left, and the whole world was there or `patience` is over."""
        if self._pid != os.getpid():
            return
        with self._state:
            self._leaving = True
            self._patience = min(self._patience, time.monotonic() + patience)
        self._wake()

    def go(self) -> None:
        """Go within `linger` seconds, however many clients are left."""
        if self._pid != os.getpid():
            return
        with self._state:
            self._leaving = True
            self._go_at = min(self._go_at, time.monotonic() + self._linger)
        self._wake()

    def end(self) -> None:
        """Go within `linger` seconds; returns when gone."""
        if self._pid == os.getpid():
            self.go()
            self._thread.join(self._linger + 1.0)

    def _wake(self) -> None:
        with contextlib.suppress(OSError):
            self._waker.send(b"\0", socket.MSG_DONTWAIT)

    def abandon(self) -> None:
        """Close this process's copies of the sockets, in a forked child; says nothing to the clients."""
        # Not by the selector's unregister: its set is the parent's too.
        for sock in [self._listener, self._waker, self._wakee, *(p.sock for p in self._peers)]:
            sock.close()
        self._selector.close()

    # ---- the thread ---------------------------------------------------------------------------------

    def _serve(self) -> None:
        try:
            while not self._is_over():
                for key, events in self._selector.select(self._next_event()):
                    if key.fileobj is self._listener:
                        self._accept()
                    elif key.fileobj is self._wakee:
                        with contextlib.suppress(BlockingIOError):
                            self._wakee.recv(4096)
                    elif key.data in self._peers:
                        self._turn(key.data, events)
                self._expire()
        finally:
            self._finish()

    def _is_over(self) -> bool:
        with self._state:
            if not self._leaving:
                return False
            now = time.monotonic()
            if now >= self._go_at:
                return True
            complete = self._joined >= self._world_size or now >= self._patience
            return complete and len(self._peers) == len(self._strangers)

    def _next_event(self) -> float | None:
        ends = [self._timers[0][0]] if self._timers else []
        if self._strangers:
            ends.append(next(iter(self._strangers)).born + _HELLO_SECONDS)
        if self._rest_until:
            ends.append(self._rest_until)
        with self._state:
            if self._leaving:
                now = time.monotonic()
                ends += [end for end in (self._go_at, self._patience) if end > now]
        end = min(ends, default=math.inf)
        return None if end == math.inf else min(max(0.0, end - time.monotonic()), 3600.0)

    def _expire(self) -> None:
        now = time.monotonic()
        while self._strangers:
            oldest = next(iter(self._strangers))
            if now < oldest.born + _HELLO_SECONDS:
                break
            self._drop(oldest)
        while self._timers and self._timers[0][0] <= now:
            end, _, peer = heapq.heappop(self._timers)
            if peer in self._peers and peer.op is not None and peer.deadline == end:
                missing = self._table.missing(peer.keys)
                self._stop_waiting(peer)
                self._answer(peer, Status.LATE, missing)
        if self._rest_until and now >= self._rest_until:
            self._rest_until = 0.0
            self._selector.register(self._listener, selectors.EVENT_READ, None)

    def _accept(self) -> None:
        # As many as there are, but not for ever: clients want answers too.
        for _ in range(64):
            try:
                sock, _ = self._listener.accept()
            except (BlockingIOError, ConnectionError):
                return
            except OSError as error:
                if error.errno not in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    return
                if self._strangers:
                    self._drop(next(iter(self._strangers)))
                else:
                    self._selector.unregister(self._listener)
                    self._rest_until = time.monotonic() + _REST_SECONDS
                return
            peer = _Peer(sock, Greeter(self._key))
            try:
                sock.setblocking(False)
                keep_alive(sock)
                sock.send(peer.greeter.greeting)
            except OSError:
                sock.close()
                continue
            self._peers.add(peer)
            self._strangers[peer] = None
            self._selector.register(sock, selectors.EVENT_READ, peer)
            if len(self._strangers) > _MAX_STRANGERS:
                self._drop(next(iter(self._strangers)))

    def _turn(self, peer: _Peer, events: int) -> None:
        try:
            if events & selectors.EVENT_WRITE:
                self._flush(peer)
            if events & selectors.EVENT_READ:
                self._read(peer)
        except (OSError, ProtocolError):
            self._drop(peer)

    def _read(self, peer: _Peer) -> None:
        if peer.channel is None:
            room = HELLO_SIZE + 1 - len(peer.received)
        elif peer.op is not None:
            room = 1  # it waits for an answer, so that all it can say is that it goes
        else:
            room = min(_CHUNK, max(1, peer.channel.wanted(peer.received)))
        try:
            data = peer.sock.recv(room)
        except BlockingIOError:
            return
        if not data or peer.op is not None:
            raise ProtocolError("it went, or spoke out of turn")
        peer.received += data
        if peer.channel is None:
            self._greet(peer)
        elif not peer.channel.wanted(peer.received):
            self._request(peer, *unpack(peer.channel.open(peer.received)))

    def _greet(self, peer: _Peer) -> None:
        if not peer.greeter.may_be_hello(bytes(peer.received)):
            raise ProtocolError("not a client")
        if len(peer.received) < HELLO_SIZE:
            return
        try:
            welcome, peer.channel = peer.greeter.welcome(bytes(peer.received))
        except ProtocolError:
            peer.sock.send(REFUSED)
            raise
        peer.received.clear()
        del self._strangers[peer]
        self._send(peer, welcome)

    def _request(self, peer: _Peer, code: int, seconds: float, parts: list[bytes]) -> None:
        if code == JOIN:
            with self._state:
                self._joined += 1
                self._state.notify_all()
            self._answer(peer, Status.DONE, [])
            return
        try:
            op = Op(code)
        except ValueError:
            raise ProtocolError(f"no verb {code}") from None
        missing = self._table.missing(parts) if op in WAITS else []
        if not missing:
            self._carry_out(peer, op, parts)
        elif not 0 < seconds < 1e9:
            self._answer(peer, Status.LATE, missing)
        else:
            peer.op, peer.keys = op, parts
            peer.deadline = time.monotonic() + seconds
            heapq.heappush(self._timers, (peer.deadline, next(self._ticket), peer))
            for key in missing:
                self._waiting.setdefault(key, set()).add(peer)

    def _carry_out(self, peer: _Peer, op: Op, parts: list[bytes]) -> None:
        try:
            result, changes = self._table.plan(op, parts)
        except StoreError as error:
            self._answer(peer, Status.FAILED, [str(error).encode()])
            return
        except (ValueError, IndexError) as error:
            raise ProtocolError("a request with wrong arguments") from error
        self._table.commit(changes)
        self._answer(peer, Status.DONE, result)
        for key, value in changes:
            if value is not None and key in self._waiting:
                self._look_again(key)

    def _look_again(self, key: bytes) -> None:
        """Answer those whose last key has come; all their keys must be there at one time."""
        for peer in list(self._waiting.get(key, ())):
            op, keys = peer.op, peer.keys
            if op is None or self._table.missing(keys):
                continue
            self._stop_waiting(peer)
            try:
                self._answer(peer, Status.DONE, self._table.plan(op, keys)[0])
            except OSError:
                self._drop(peer)

    def _stop_waiting(self, peer: _Peer) -> None:
        for key in peer.keys:
            peers = self._waiting.get(key)
            if peers is not None:
                peers.discard(peer)
                if not peers:
                    del self._waiting[key]
        peer.op, peer.keys, peer.deadline = None, [], math.inf

    def _answer(self, peer: _Peer, status: Status, parts: list[bytes]) -> None:
        payload = pack(status, 0.0, parts)
        if len(payload) > MAX_PAYLOAD:
            text = f"the answer has {len(payload)} bytes; at most {MAX_PAYLOAD} fit into a frame"
            payload = pack(Status.FAILED, 0.0, [text.encode()])
        assert peer.channel is not None
        with contextlib.suppress(OSError):  # its end shows when it is read from next
            self._send(peer, peer.channel.seal(payload))

    def _send(self, peer: _Peer, data: bytes) -> None:
        peer.out += data
        self._flush(peer)

    def _flush(self, peer: _Peer) -> None:
        with contextlib.suppress(BlockingIOError):
            sent = peer.sock.send(peer.out)
            del peer.out[:sent]
        # What is not sent yet keeps its reader from asking more.
        events = selectors.EVENT_WRITE if peer.out else selectors.EVENT_READ
        if self._selector.get_key(peer.sock).events != events:
            self._selector.modify(peer.sock, events, peer)

    def _drop(self, peer: _Peer) -> None:
        if peer not in self._peers:
            return
        self._stop_waiting(peer)
        self._peers.discard(peer)
        self._strangers.pop(peer, None)
        self._selector.unregister(peer.sock)
        peer.sock.close()

    def _finish(self) -> None:
        self._listener.close()
        text = b"the process that holds the server has left"
        for peer in list(self._peers):
            if peer.channel is not None and not peer.out:
                with contextlib.suppress(OSError):
                    peer.sock.send(peer.channel.seal(pack(Status.GONE, 0.0, [text])))
            self._drop(peer)
        self._selector.close()
        self._wakee.close()
        self._waker.close()


def _listen(host: str, port: int) -> socket.socket:
    family, _, _, _, address = socket.getaddrinfo(
        host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    listener = socket.create_server(address[:2], family=family, backlog=_BACKLOG)
    listener.setblocking(False)
    return listener


_servers: weakref.WeakSet[Server] = weakref.WeakSet()


def end_all() -> None:
    """End this process's servers, as the process ends."""
    servers = list(_servers)
    for server in servers:
        server.go()
    for server in servers:
        server.end()


def _abandon_all() -> None:
    for server in list(_servers):
        server.abandon()
    _servers.clear()


os.register_at_fork(after_in_child=_abandon_all)
