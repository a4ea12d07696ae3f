"""A store in a file, for processes that share a file system.

The file is a log.  Whoever changes a key locks the file, reads what others have added, and appends one
record; whoever reads a key replays what has been added since the last look::

    header    8 bytes, magic and version
    record    length u32, CRC-32 of the payload u32, payload           little-endian, back to back
    payload   0x00, then per change: key length u32, value length + 1 u32 (0: removed), key, value
              0x01: one process has left

A record is one step: it counts as a whole or not at all.  A process that dies while it writes leaves the
beginning of a record at the end of the file; its lock goes with it.  Readers stop before such an end, and
the next writer cuts it off.  Nothing is forced to the disk: the file outlives processes, not the machine.

The lock is ``flock``, which belongs to the open file: every store opens the file for itself, and a forked
child opens it anew, so that threads, processes and forks all exclude each other.
"""

from __future__ import annotations

import fcntl
import os
import struct
import threading
import time
import weakref
import zlib
from collections.abc import Sequence

from ...errors import StoreError
from .base import DEFAULT_SECONDS, Seconds, Store
from .table import WAITS, Changes, Op, Table

__all__ = ["FileStore"]

_MAGIC = b"pyncclF\x01"
_RECORD = struct.Struct("<II")
_ENTRY = struct.Struct("<II")
_CHANGES, _LEFT = b"\0", b"\1"
_MAX_RECORD = 1 << 30
_FIRST_PAUSE, _LAST_PAUSE = 0.0005, 0.02
_LEAVE_SECONDS = 5.0


class _Late(Exception):
    """The lock was not to be had in time."""


class FileStore(Store):
    """A store for processes that share a file.

    Parameters
    ----------
    path : str or path-like
        The file; made where it is missing. Use one that no earlier job has left behind.
    world_size : int, optional
        How many processes open the store. With it, the last one that closes it, or ends, removes the file.
        Without it, or if a process was killed, the file stays.
    timeout : float or timedelta, default: 300
        How long a verb waits, unless its call says otherwise.

    Examples
    --------
    >>> import os, tempfile
    >>> from pynccl.distributed import FileStore
    >>> path = os.path.join(tempfile.mkdtemp(), "store")
    >>> with FileStore(path, world_size=1) as store:
    ...     store.add("count", 2)
    2
    >>> os.path.exists(path)
    False
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        world_size: int | None = None,
        timeout: Seconds = DEFAULT_SECONDS,
    ) -> None:
        super().__init__(timeout)
        if world_size is not None and (
            not isinstance(world_size, int) or isinstance(world_size, bool)
        ):
            raise TypeError(f"FileStore: world_size is {type(world_size).__name__}; expected int")
        self._path = os.path.abspath(os.fspath(path))
        # c10d's -1 says the same as None.
        size = world_size if world_size is not None and world_size > 0 else 0
        try:
            self._log = _Log(self._path, size, time.monotonic() + self._timeout)
        except _Late:
            raise StoreError(
                f"FileStore: no lock on {self._path} within {self._timeout:g} s"
            ) from None
        except OSError as error:
            raise StoreError(f"FileStore: cannot open {self._path}: {error}") from error
        self._finalizer = weakref.finalize(self, _Log.leave, self._log)

    @property
    def path(self) -> str:
        """The file's absolute path."""
        return self._path

    def _do(self, op: Op, parts: Sequence[bytes], seconds: float) -> list[bytes]:
        deadline = time.monotonic() + seconds
        pause = _FIRST_PAUSE
        missing: list[bytes] = []
        while True:
            try:
                if op in WAITS or op in (Op.CHECK, Op.COUNT, Op.KEYS):
                    missing, result = self._log.read(op, parts, deadline)
                else:
                    missing, result = [], self._log.write(op, parts, deadline)
            except _Late:
                raise self._late_lock(op, seconds) from None
            except OSError as error:
                if self._log.fd < 0:
                    raise self._closed(op) from None
                raise StoreError(f"{op.name.lower()}: {self._where()}: {error}") from error
            if not missing:
                return result
            left = deadline - time.monotonic()
            if left <= 0:
                raise self._too_late(op, missing, seconds)
            time.sleep(min(pause, left))
            pause = min(pause * 1.5, _LAST_PAUSE)

    def _late_lock(self, op: Op, seconds: float) -> StoreError:
        error = self._too_late(op, [], seconds)
        return type(error)(f"{error}: another process holds the file's lock")

    def close(self) -> None:
        """Leave the store; the last of `world_size` processes removes the file."""
        self._finalizer()

    def _where(self) -> str:
        return f"FileStore {self._path}"


class _Log:
    """The open file, and the table as far as the file has been read."""

    def __init__(self, path: str, world_size: int, deadline: float) -> None:
        self.path = path
        self.world_size = world_size
        self.pid = self.owner = os.getpid()
        self.mutex = threading.Lock()
        self.reset()
        while True:
            self.fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                self.lock(fcntl.LOCK_EX, deadline)
                # Between open and lock the last process of a job may have removed the file.
                if os.fstat(self.fd).st_nlink:
                    self.begin()
                    self.unlock()
                    return
            except BaseException:
                os.close(self.fd)
                raise
            os.close(self.fd)

    def reset(self) -> None:
        self.table = Table()
        self.offset = len(_MAGIC)
        self.left = 0

    def begin(self) -> None:
        head = os.pread(self.fd, len(_MAGIC), 0)
        if head == _MAGIC:
            return
        if not _MAGIC.startswith(head):
            raise StoreError(f"FileStore: {self.path} is a file of another kind")
        # New, or its maker died at its first bytes.
        os.ftruncate(self.fd, 0)
        self.put(_MAGIC, 0)

    # ---- locks --------------------------------------------------------------------------------------

    def lock(self, kind: int, deadline: float) -> None:
        """Lock the file by polling: flock itself knows no deadline, and its holder may be stopped."""
        pause = 0.0001
        while True:
            try:
                fcntl.flock(self.fd, kind | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise _Late from None
            time.sleep(min(pause, left))
            pause = min(pause * 2, 0.005)

    def unlock(self) -> None:
        fcntl.flock(self.fd, fcntl.LOCK_UN)

    def enter(self, deadline: float) -> None:
        """Take the mutex of this process's threads."""
        if self.pid != os.getpid():
            self.forked()
        if not self.mutex.acquire(timeout=max(0.0, deadline - time.monotonic()) + 0.001):
            raise _Late
        if self.fd < 0:
            self.mutex.release()
            raise OSError("closed")

    def forked(self) -> None:
        """Open the file anew in a forked child: the parent's open file carries the parent's lock."""
        # Another thread of the parent may have held the mutex, or been halfway through the log.
        self.mutex, self.pid = threading.Lock(), os.getpid()
        self.reset()
        if self.fd >= 0:
            # By the descriptor, since the name may be gone.
            fresh = os.open(f"/proc/self/fd/{self.fd}", os.O_RDWR | os.O_CLOEXEC)
            os.close(self.fd)
            self.fd = fresh

    # ---- reading and writing ------------------------------------------------------------------------

    def read(
        self, op: Op, parts: Sequence[bytes], deadline: float
    ) -> tuple[list[bytes], list[bytes]]:
        """Give what is missing, and if nothing is, the answer."""
        self.enter(deadline)
        try:
            if os.fstat(self.fd).st_size != self.offset:
                self.lock(fcntl.LOCK_SH, deadline)
                try:
                    self.catch_up()
                finally:
                    self.unlock()
            missing = self.table.missing(parts) if op in WAITS else []
            return missing, [] if missing else self.table.plan(op, parts)[0]
        finally:
            self.mutex.release()

    def write(self, op: Op, parts: Sequence[bytes], deadline: float) -> list[bytes]:
        """Do a verb that may change something."""
        self.enter(deadline)
        try:
            self.lock(fcntl.LOCK_EX, deadline)
            try:
                self.catch_up()
                result, changes = self.table.plan(op, parts)
                if changes:
                    self.append(_CHANGES + _pack(changes))
                    self.table.commit(changes)
                return result
            finally:
                self.unlock()
        finally:
            self.mutex.release()

    def catch_up(self) -> None:
        """Replay what has been added; stops before a record that its writer did not finish."""
        size = os.fstat(self.fd).st_size
        if size < self.offset:
            raise StoreError(f"FileStore: {self.path} has shrunk; who else writes to it?")
        data = b""
        while len(data) < size - self.offset:
            part = os.pread(self.fd, size - self.offset - len(data), self.offset + len(data))
            if not part:
                break
            data += part
        at = 0
        while at + _RECORD.size <= len(data):
            length, checksum = _RECORD.unpack_from(data, at)
            payload = data[at + _RECORD.size : at + _RECORD.size + length]
            if len(payload) < length:
                break
            if not length or zlib.crc32(payload) != checksum:
                if at + _RECORD.size + length == len(data) or not data[at:].strip(b"\0"):
                    break  # the last one: its bytes did not all reach the file
                raise StoreError(
                    f"FileStore: {self.path} is damaged at byte {self.offset}: wrong checksum"
                )
            if payload[:1] == _LEFT:
                self.left += 1
            else:
                self.table.commit(_unpack(payload[1:]))
            at += _RECORD.size + length
            self.offset += _RECORD.size + length

    def append(self, payload: bytes) -> None:
        """Add one record where the last whole one ends; holds the lock, and is caught up."""
        if len(payload) > _MAX_RECORD:
            raise StoreError(f"FileStore: {len(payload)} bytes in one call; at most {_MAX_RECORD}")
        if os.fstat(self.fd).st_size != self.offset:
            os.ftruncate(self.fd, self.offset)
        record = _RECORD.pack(len(payload), zlib.crc32(payload)) + payload
        self.put(record, self.offset)
        self.offset += len(record)

    def put(self, data: bytes, offset: int) -> None:
        done = 0
        try:
            while done < len(data):
                done += os.pwrite(self.fd, data[done:], offset + done)
        except BaseException:
            # No space, or Ctrl-C: nobody may take the beginning for the whole.
            os.ftruncate(self.fd, offset)
            raise

    def leave(self) -> None:
        """Say that this process has left, and remove the file if it is the last."""
        try:
            self.enter(time.monotonic() + _LEAVE_SECONDS)
        except (_Late, OSError):
            return
        try:
            # A forked child is no member of its own.
            if self.world_size and self.pid == self.owner:
                self.lock(fcntl.LOCK_EX, time.monotonic() + _LEAVE_SECONDS)
                self.catch_up()
                self.append(_LEFT)
                self.left += 1
                if self.left >= self.world_size and os.fstat(self.fd).st_nlink:
                    os.unlink(self.path)
        except (_Late, OSError, StoreError):
            pass  # the file stays, as after a crash
        finally:
            os.close(self.fd)  # and with it the lock
            self.fd = -1
            self.mutex.release()


def _pack(changes: Changes) -> bytes:
    parts = []
    for key, value in changes:
        parts += [_ENTRY.pack(len(key), 0 if value is None else len(value) + 1), key, value or b""]
    return b"".join(parts)


def _unpack(data: bytes) -> Changes:
    changes: Changes = []
    at = 0
    while at < len(data):
        key_length, value_length = _ENTRY.unpack_from(data, at)
        at += _ENTRY.size
        key = data[at : at + key_length]
        at += key_length
        if value_length:
            changes.append((key, data[at : at + value_length - 1]))
            at += value_length - 1
        else:
            changes.append((key, None))
    return changes
