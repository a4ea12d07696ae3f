"""A store in the memory of one process, for its threads."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence

from .base import DEFAULT_SECONDS, Seconds, Store
from .table import WAITS, Op, Table

__all__ = ["HashStore"]


class HashStore(Store):
    """A store for the threads of one process.

    A forked child goes on with a copy of its own.

    Parameters
    ----------
    timeout : float or timedelta, default: 300
        How long a verb waits, unless its call says otherwise.

    Examples
    --------
    >>> import threading
    >>> from pynccl.distributed import HashStore
    >>> store = HashStore(timeout=10)
    >>> threading.Timer(0.05, store.set, ["go", b"now"]).start()
    >>> store.get("go")
    b'now'
    """

    def __init__(self, timeout: Seconds = DEFAULT_SECONDS) -> None:
        super().__init__(timeout)
        self._table = Table()
        self._changed = threading.Condition()
        self._pid = os.getpid()
        self._open = True

    def _do(self, op: Op, parts: Sequence[bytes], seconds: float) -> list[bytes]:
        if self._pid != os.getpid():
            # Another thread may have held the lock when this process was forked off.
            self._changed, self._pid = threading.Condition(), os.getpid()
        deadline = time.monotonic() + seconds
        with self._changed:
            while True:
                if not self._open:
                    raise self._closed(op)
                missing = self._table.missing(parts) if op in WAITS else []
                if not missing:
                    break
                left = deadline - time.monotonic()
                if left <= 0:
                    raise self._too_late(op, missing, seconds)
                self._changed.wait(left)
            result, changes = self._table.plan(op, parts)
            if changes:
                self._table.commit(changes)
                self._changed.notify_all()
            return result

    def close(self) -> None:
        """Leave the store: threads that wait on it get `StoreError`."""
        if self._pid != os.getpid():
            self._changed, self._pid = threading.Condition(), os.getpid()
        with self._changed:
            self._open = False
            self._changed.notify_all()

    def _where(self) -> str:
        return "HashStore"
