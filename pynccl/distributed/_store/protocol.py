"""The bytes between a `TCPStore` and its server: who may talk, and what a message looks like.

A connection begins with a proof in both directions that the other side knows the secret; the secret itself
is never sent.  All sizes are fixed until both have proved it, so that a stranger costs 57 bytes at most::

    server -> client    magic 8, server's nonce 16
    client -> server    magic 8, client's nonce 16, proof 32:  HMAC(K, "client" + both nonces)
    server -> client    proof 32:                              HMAC(K, "server" + both nonces)
                        or 32 zero bytes: the client's proof is wrong

Then the client sends a request, the server an answer, and so on, each in one frame::

    +-----------+---------------------+--------+
    | length u32| payload             | tag 32 |     tag = HMAC(D, number u64 + length u32 + payload)
    +-----------+---------------------+--------+

    payload = code u8, seconds f64, count u32, then count times: length u32, bytes

K is the hash of the secret.  D is a key for this connection and direction, HMAC(K, label + both nonces), and
`number` counts the frames of the direction.  So a frame that was changed, repeated, dropped, reordered,
reflected, or taken from another connection has a wrong tag, and ends the connection.  All integers are
little-endian.  Frames are authentic, not secret: who can listen on the wire can read them.
"""

from __future__ import annotations

import enum
import hashlib
import hmac
import secrets
import struct
from collections.abc import Sequence

__all__ = [
    "GREETING_SIZE",
    "HELLO_SIZE",
    "JOIN",
    "MAX_PAYLOAD",
    "REFUSED",
    "WELCOME_SIZE",
    "Channel",
    "Greeter",
    "ProtocolError",
    "Status",
    "answer_greeting",
    "key_of",
    "pack",
    "unpack",
]

_MAGIC = b"pyncclS\x01"
_NONCE = 16
_TAG = 32
_LENGTH = struct.Struct("<I")
_HEAD = struct.Struct("<BdI")
_NUMBER = struct.Struct("<QI")

GREETING_SIZE = len(_MAGIC) + _NONCE
HELLO_SIZE = len(_MAGIC) + _NONCE + _TAG
WELCOME_SIZE = _TAG
REFUSED = bytes(_TAG)
MAX_PAYLOAD = 64 << 20
JOIN = 100  # a request beside those of `Op`: one more of the world's processes is there


class ProtocolError(Exception):
    """The other side does not follow the protocol, or does not know the secret."""


class Status(enum.IntEnum):
    """What an answer says."""

    DONE = 0  # the verb's result
    LATE = 1  # the keys still missing
    FAILED = 2  # the text of a StoreError
    GONE = 3  # the server goes; sent unasked, the last frame of a connection


def key_of(secret: bytes) -> bytes:
    """Make the key of all connections of a store from the secret."""
    return hashlib.sha256(b"pynccl store\0" + secret).digest()


class Greeter:
    """The server's side of the beginning of one connection."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._nonce = secrets.token_bytes(_NONCE)
        self.greeting = _MAGIC + self._nonce

    def may_be_hello(self, begun: bytes) -> bool:
        """Say whether these bytes can be the beginning of a client's."""
        return len(begun) <= HELLO_SIZE and begun[: len(_MAGIC)] == _MAGIC[: len(begun)]

    def welcome(self, hello: bytes) -> tuple[bytes, Channel]:
        """Check a client's proof; gives this side's, and the connection's channel."""
        nonces = self._nonce + hello[len(_MAGIC) : len(_MAGIC) + _NONCE]
        if not hmac.compare_digest(hello[-_TAG:], _digest(self._key, b"client", nonces)):
            raise ProtocolError("wrong secret")
        return _digest(self._key, b"server", nonces), _channel(self._key, nonces, server=True)


def answer_greeting(key: bytes, greeting: bytes) -> tuple[bytes, bytes, Channel]:
    """Do the client's side: give its hello, the server's welcome as it must be, and the channel."""
    if greeting[: len(_MAGIC)] != _MAGIC:
        raise ProtocolError("what listens there is not a pynccl store of this version")
    nonce = secrets.token_bytes(_NONCE)
    nonces = greeting[len(_MAGIC) :] + nonce
    hello = _MAGIC + nonce + _digest(key, b"client", nonces)
    return hello, _digest(key, b"server", nonces), _channel(key, nonces, server=False)


def _digest(key: bytes, label: bytes, data: bytes) -> bytes:
    return hmac.digest(key, label + b"\0" + data, "sha256")


def _channel(key: bytes, nonces: bytes, *, server: bool) -> Channel:
    upward = _digest(key, b"frames to the server", nonces)
    downward = _digest(key, b"frames to the client", nonces)
    return Channel(downward, upward) if server else Channel(upward, downward)


class Channel:
    """The frames of one connection, once both sides have proved themselves."""

    def __init__(self, send_key: bytes, receive_key: bytes) -> None:
        self._send_key = send_key
        self._receive_key = receive_key
        self._sent = 0
        self._received = 0

    def seal(self, payload: bytes) -> bytes:
        """Make a payload the next frame."""
        tag = self._tag(self._send_key, self._sent, payload)
        self._sent += 1
        return _LENGTH.pack(len(payload)) + payload + tag

    def wanted(self, buffer: bytearray) -> int:
        """Say how many bytes are missing until the first frame of a buffer is whole."""
        if len(buffer) < _LENGTH.size:
            return _LENGTH.size - len(buffer)
        (length,) = _LENGTH.unpack_from(buffer)
        if not _HEAD.size <= length <= MAX_PAYLOAD:
            raise ProtocolError(f"a frame of {length} bytes")
        return max(0, _LENGTH.size + int(length) + _TAG - len(buffer))

    def open(self, buffer: bytearray) -> bytes:
        """Take the first frame off a buffer that holds it whole; gives its payload."""
        (length,) = _LENGTH.unpack_from(buffer)
        end = _LENGTH.size + length
        payload = bytes(buffer[_LENGTH.size : end])
        tag = bytes(buffer[end : end + _TAG])
        if not hmac.compare_digest(tag, self._tag(self._receive_key, self._received, payload)):
            raise ProtocolError("a frame with a wrong tag")
        self._received += 1
        del buffer[: end + _TAG]
        return payload

    def _tag(self, key: bytes, number: int, payload: bytes) -> bytes:
        return hmac.digest(key, _NUMBER.pack(number, len(payload)) + payload, "sha256")


def pack(code: int, seconds: float, parts: Sequence[bytes]) -> bytes:
    """Write a payload."""
    pieces = [_HEAD.pack(code, seconds, len(parts))]
    for part in parts:
        pieces += [_LENGTH.pack(len(part)), part]
    return b"".join(pieces)


def unpack(payload: bytes) -> tuple[int, float, list[bytes]]:
    """Read a payload: code, seconds, byte strings."""
    code, seconds, count = _HEAD.unpack_from(payload)
    parts = []
    at = _HEAD.size
    for _ in range(count):
        if at + _LENGTH.size > len(payload):
            raise ProtocolError("a frame that ends early")
        (length,) = _LENGTH.unpack_from(payload, at)
        at += _LENGTH.size
        if at + length > len(payload):
            raise ProtocolError("a frame that ends early")
        parts.append(payload[at : at + length])
        at += length
    if at != len(payload):
        raise ProtocolError("a frame with bytes left over")
    return code, seconds, parts
