"""The interface of every store: c10d's verbs, their arguments checked, over one abstract method.

A store of one's own derives from `Store` and writes `_do`, `_where` and, if it holds anything, `close`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from datetime import timedelta
from types import TracebackType
from typing import TypeVar

from ...errors import StoreError, StoreTimeoutError
from .table import Op, describe

__all__ = ["DEFAULT_SECONDS", "Seconds", "Store", "seconds_of"]

Seconds = float | timedelta
Value = bytes | bytearray | memoryview | str
DEFAULT_SECONDS = 300.0  # c10d's
# Beyond this a wait in the operating system overflows; ten years are as good as any.
_MAX_SECONDS = 3.2e8
_MAX_KEY = 1 << 16
_INT64 = range(-(1 << 63), 1 << 63)

S = TypeVar("S", bound="Store")


def seconds_of(verb: str, timeout: object) -> float:
    """Read a timeout: seconds or a timedelta, not negative; every wait ends."""
    if isinstance(timeout, timedelta):
        seconds = timeout.total_seconds()
    elif isinstance(timeout, (int, float)) and not isinstance(timeout, bool):
        seconds = float(timeout)
    else:
        raise TypeError(
            f"{verb}: timeout is {type(timeout).__name__}; expected seconds or a timedelta"
        )
    if not seconds >= 0 or math.isinf(seconds):
        raise ValueError(
            f"{verb}: timeout is {seconds:g}; expected a finite number of seconds >= 0"
        )
    return min(seconds, _MAX_SECONDS)


def _key(verb: str, key: object) -> bytes:
    if not isinstance(key, str):
        raise TypeError(f"{verb}: the key is {type(key).__name__}; expected str")
    encoded = key.encode()
    if len(encoded) > _MAX_KEY:
        raise ValueError(
            f"{verb}: the key has {len(encoded)} bytes; at most {_MAX_KEY} are allowed"
        )
    return encoded


def _keys(verb: str, keys: object) -> list[bytes]:
    # A str is a sequence of str, and never meant as one.
    if isinstance(keys, (str, bytes)) or not isinstance(keys, Iterable):
        raise TypeError(f"{verb}: keys is {type(keys).__name__}; expected a list of str")
    return [_key(verb, key) for key in keys]


def _value(verb: str, value: object) -> bytes:
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, (bytes, bytearray, memoryview)):
        return bytes(value)
    raise TypeError(f"{verb}: the value is {type(value).__name__}; expected bytes or str")


class Store(ABC):
    """A dictionary that ranks share; c10d's verbs.

    Keys are `str`, values `bytes`; a value given as `str` is stored as UTF-8. Any thread may use a store,
    also while another one waits on it. Every verb takes a `timeout`, in seconds or as a timedelta, which
    holds for this call; without it the store's own holds.

    Parameters
    ----------
    timeout : float or timedelta, default: 300
        How long a verb waits, unless its call says otherwise.

    Examples
    --------
    >>> from pynccl.distributed import HashStore
    >>> store = HashStore()
    >>> store.set("colour", b"red")
    >>> store.get("colour")
    b'red'
    """

    def __init__(self, timeout: Seconds = DEFAULT_SECONDS) -> None:
        self._timeout = seconds_of(type(self).__name__, timeout)

    # ---- what a kind of store writes ----------------------------------------------------------------

    @abstractmethod
    def _do(self, op: Op, parts: Sequence[bytes], seconds: float) -> list[bytes]:
        """Do one verb; raises `StoreTimeoutError` by `_too_late`, and `StoreError`."""

    @abstractmethod
    def _where(self) -> str:
        """Name the store in messages: its kind and its place."""

    def close(self) -> None:  # noqa: B027  (a store that holds nothing need not have one)
        """Leave the store; a second call does nothing. Using it afterwards raises `StoreError`."""

    def _too_late(self, op: Op, missing: Sequence[bytes], seconds: float) -> StoreTimeoutError:
        what = f"{describe(missing)} not set" if missing else "no answer"
        verb = op.name.lower()
        return StoreTimeoutError(f"{verb}: {what} within {seconds:g} s in {self._where()}")

    def _closed(self, op: Op) -> StoreError:
        return StoreError(f"{op.name.lower()}: {self._where()} is closed")

    # ---- timeouts -----------------------------------------------------------------------------------

    @property
    def timeout(self) -> timedelta:
        """How long a verb waits when its call does not say."""
        return timedelta(seconds=self._timeout)

    def set_timeout(self, timeout: Seconds) -> None:
        """Set how long a verb waits when its call does not say.

        Parameters
        ----------
        timeout : float or timedelta
            Seconds.
        """
        self._timeout = seconds_of("set_timeout", timeout)

    def _run(
        self, op: Op, parts: Sequence[bytes], timeout: Seconds | None, verb: str
    ) -> list[bytes]:
        seconds = self._timeout if timeout is None else seconds_of(verb, timeout)
        return self._do(op, parts, seconds)

    # ---- verbs --------------------------------------------------------------------------------------

    def set(self, key: str, value: Value, *, timeout: Seconds | None = None) -> None:
        """Set a key, whether or not it is there.

        Parameters
        ----------
        key : str
            The key.
        value : bytes or str
            Its value from now on.
        timeout : float or timedelta, optional
            Seconds for this call.
        """
        self._run(Op.SET, [_key("set", key), _value("set", value)], timeout, "set")

    def get(self, key: str, *, timeout: Seconds | None = None) -> bytes:
        """Give a key's value; waits until it is set.

        Parameters
        ----------
        key : str
            The key.
        timeout : float or timedelta, optional
            Seconds for this call.

        Returns
        -------
        bytes
            The value.

        Raises
        ------
        StoreTimeoutError
            The key was not set in time.
        """
        return self._run(Op.GET, [_key("get", key)], timeout, "get")[0]

    def add(self, key: str, amount: int, *, timeout: Seconds | None = None) -> int:
        """Add to a counter in one step; a key that is not there counts as 0.

        Parameters
        ----------
        key : str
            The key; its value is the decimal number, as text.
        amount : int
            What to add; may be negative.
        timeout : float or timedelta, optional
            Seconds for this call.

        Returns
        -------
        int
            The sum.

        Raises
        ------
        StoreError
            The key holds something else than a number, or the sum exceeds 64 bits.
        """
        if not isinstance(amount, int) or isinstance(amount, bool):
            raise TypeError(f"add: amount is {type(amount).__name__}; expected int")
        if amount not in _INT64:
            raise ValueError(f"add: amount is {amount}; 64 bits are the limit")
        return int(self._run(Op.ADD, [_key("add", key), b"%d" % amount], timeout, "add")[0])

    def compare_set(
        self, key: str, expected: Value, desired: Value, *, timeout: Seconds | None = None
    ) -> bytes:
        """Set a key to `desired` if it holds `expected`, in one step.

        Parameters
        ----------
        key : str
            The key.
        expected : bytes or str
            What it must hold; the empty value also stands for a key that is not there.
        desired : bytes or str
            What it holds then.
        timeout : float or timedelta, optional
            Seconds for this call.

        Returns
        -------
        bytes
            What the key holds now; `expected` where it is not there and `expected` is not empty.
        """
        verb = "compare_set"
        parts = [_key(verb, key), _value(verb, expected), _value(verb, desired)]
        return self._run(Op.COMPARE_SET, parts, timeout, verb)[0]

    def append(self, key: str, value: Value, *, timeout: Seconds | None = None) -> None:
        """Append to a key's value in one step; a key that is not there counts as empty.

        Parameters
        ----------
        key : str
            The key.
        value : bytes or str
            What to append.
        timeout : float or timedelta, optional
            Seconds for this call.
        """
        self._run(Op.APPEND, [_key("append", key), _value("append", value)], timeout, "append")

    def wait(self, keys: Iterable[str], timeout: Seconds | None = None) -> None:
        """Wait until all these keys are set at one time; at once if they are, or if there are none.

        Parameters
        ----------
        keys : iterable of str
            The keys; one may come twice.
        timeout : float or timedelta, optional
            Seconds for this call.

        Raises
        ------
        StoreTimeoutError
            Some were not set in time; the text names them.
        """
        self._run(Op.WAIT, _keys("wait", keys), timeout, "wait")

    def check(self, keys: Iterable[str], *, timeout: Seconds | None = None) -> bool:
        """Say whether all these keys are set; does not wait for them.

        Parameters
        ----------
        keys : iterable of str
            The keys.
        timeout : float or timedelta, optional
            Seconds for this call.

        Returns
        -------
        bool
            True if none is missing.
        """
        return self._run(Op.CHECK, _keys("check", keys), timeout, "check")[0] == b"\1"

    def delete(self, key: str, *, timeout: Seconds | None = None) -> bool:
        """Remove a key; who reads it afterwards waits until it is set again.

        Parameters
        ----------
        key : str
            The key.
        timeout : float or timedelta, optional
            Seconds for this call.

        Returns
        -------
        bool
            Whether it was there.
        """
        return self._run(Op.DELETE, [_key("delete", key)], timeout, "delete")[0] == b"\1"

    def delete_key(self, key: str, *, timeout: Seconds | None = None) -> bool:
        """Remove a key: c10d's name of `delete`.

        Parameters
        ----------
        key : str
            The key.
        timeout : float or timedelta, optional
            Seconds for this call.

        Returns
        -------
        bool
            Whether it was there.
        """
        return self.delete(key, timeout=timeout)

    def num_keys(self, *, timeout: Seconds | None = None) -> int:
        """Count the keys.

        Parameters
        ----------
        timeout : float or timedelta, optional
            Seconds for this call.

        Returns
        -------
        int
            How many keys users have set; a store keeps none of its own among them.
        """
        return int(self._run(Op.COUNT, [b""], timeout, "num_keys")[0])

    def list_keys(self, *, timeout: Seconds | None = None) -> list[str]:
        """List the keys, sorted.

        Parameters
        ----------
        timeout : float or timedelta, optional
            Seconds for this call.

        Returns
        -------
        list of str
            The keys that `num_keys` counts.
        """
        found = self._run(Op.KEYS, [b""], timeout, "list_keys")
        return sorted(key.decode() for key in found)

    def multi_set(
        self, keys: Sequence[str], values: Sequence[Value], *, timeout: Seconds | None = None
    ) -> None:
        """Set several keys in one step.

        Parameters
        ----------
        keys : sequence of str
            The keys; of one that comes twice, the last value stays.
        values : sequence of bytes or str
            As many values.
        timeout : float or timedelta, optional
            Seconds for this call.
        """
        names = _keys("multi_set", keys)
        if isinstance(values, (str, bytes)):
            raise TypeError("multi_set: values is one value; expected a list of them")
        contents = [_value("multi_set", value) for value in values]
        if len(names) != len(contents):
            raise ValueError(f"multi_set: {len(names)} keys and {len(contents)} values")
        parts = [part for pair in zip(names, contents, strict=True) for part in pair]
        self._run(Op.SET, parts, timeout, "multi_set")

    def multi_get(self, keys: Iterable[str], *, timeout: Seconds | None = None) -> list[bytes]:
        """Give the values of several keys as they are at one time; waits until all are set.

        Parameters
        ----------
        keys : iterable of str
            The keys.
        timeout : float or timedelta, optional
            Seconds for this call.

        Returns
        -------
        list of bytes
            The values, in the order of the keys.
        """
        return self._run(Op.GET, _keys("multi_get", keys), timeout, "multi_get")

    def has_extended_api(self) -> bool:
        """Say whether the store has append, multi_get and multi_set; c10d asks.

        Returns
        -------
        bool
            True.
        """
        return True

    # ---- lifetime -----------------------------------------------------------------------------------

    def __enter__(self: S) -> S:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<{self._where()}>"
