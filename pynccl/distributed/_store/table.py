"""What the verbs of a store mean: a dictionary of bytes, and one function that says what a verb does to it.

Every store answers by this one table, so that they cannot differ: a `HashStore` keeps it, the server of a
`TCPStore` keeps it for its clients, a `FileStore` rebuilds it from its file.  `plan` does not change
anything: the caller makes the changes durable first, where it has to, and then commits them.

A verb and its arguments are an `Op` and a list of byte strings, also on the wire.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable, Sequence

from ...errors import StoreError

__all__ = ["Op", "Table", "describe"]

_INTEGER = re.compile(rb"[+-]?[0-9]{1,19}")
_INT64 = range(-(1 << 63), 1 << 63)


class Op(enum.IntEnum):
    """The verbs, and the byte strings that each takes."""

    SET = 1  # key, value, key, value, ...
    GET = 2  # keys; waits for all of them -> their values
    ADD = 3  # key, amount -> the sum
    COMPARE_SET = 4  # key, expected, desired -> what is there now
    WAIT = 5  # keys; waits for all of them
    DELETE = 6  # key -> one byte: was it there
    COUNT = 7  # prefix -> how many keys begin with it
    CHECK = 8  # keys -> one byte: are all there
    APPEND = 9  # key, value
    KEYS = 10  # prefix -> the keys that begin with it


WAITS = frozenset({Op.GET, Op.WAIT})

Changes = list[tuple[bytes, "bytes | None"]]


def describe(keys: Iterable[bytes]) -> str:
    """Name some keys in an error's text: the first eight."""
    names = [repr(key.decode(errors="replace")) for key in keys]
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return f"key{'s' * (len(names) > 1)} {', '.join(names[:8])}{more}"


class Table:
    """The dictionary, and the verbs."""

    def __init__(self) -> None:
        self.data: dict[bytes, bytes] = {}

    def missing(self, keys: Iterable[bytes]) -> list[bytes]:
        """List the keys that are not there, each once, in order."""
        return [key for key in dict.fromkeys(keys) if key not in self.data]

    def commit(self, changes: Changes) -> None:
        """Do what `plan` has said; None removes a key."""
        for key, value in changes:
            if value is None:
                self.data.pop(key, None)
            else:
                self.data[key] = value

    def plan(self, op: Op, parts: Sequence[bytes]) -> tuple[list[bytes], Changes]:
        """Say what a verb answers and changes; for one that waits, once its keys are there."""
        if op is Op.SET:
            return [], list(zip(parts[::2], parts[1::2], strict=True))
        if op is Op.GET:
            return [self.data[key] for key in parts], []
        if op is Op.WAIT:
            return [], []
        if op is Op.CHECK:
            return [b"\1" if not self.missing(parts) else b"\0"], []
        if op is Op.ADD:
            key, amount = parts
            total = b"%d" % self._sum(key, int(amount))
            return [total], [(key, total)]
        if op is Op.APPEND:
            key, value = parts
            return [], [(key, self.data.get(key, b"") + value)]
        if op is Op.COMPARE_SET:
            key, expected, desired = parts
            found = self.data.get(key)
            # c10d: an absent key equals the empty value, and answers with what was expected.
            if found == expected or (found is None and not expected):
                return [desired], [(key, desired)]
            return [expected if found is None else found], []
        if op is Op.DELETE:
            (key,) = parts
            there = key in self.data
            return [b"\1" if there else b"\0"], [(key, None)] if there else []
        (prefix,) = parts
        keys = [key for key in self.data if key.startswith(prefix)]
        return ([b"%d" % len(keys)] if op is Op.COUNT else keys), []

    def _sum(self, key: bytes, amount: int) -> int:
        held = self.data.get(key, b"0")
        if not _INTEGER.fullmatch(held):
            raise StoreError(f"add: {describe([key])} holds {held[:32]!r}, which is not an integer")
        total = int(held) + amount
        if total not in _INT64:
            raise StoreError(f"add: {describe([key])} would become {total}; 64 bits are the limit")
        return total
