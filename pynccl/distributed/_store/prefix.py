"""A part of another store, under a name."""

from __future__ import annotations

from collections.abc import Sequence

from .base import Store
from .table import Op

__all__ = ["PrefixStore"]

# Which of a verb's byte strings are keys; the others have one, the first.
_ALL_KEYS = frozenset({Op.GET, Op.WAIT, Op.CHECK})


class PrefixStore(Store):
    """A part of another store; what is set here is seen under the same prefix only.

    Prefixes stack. The prefix is stored with its length, so that "a" with the key "b/x" and "a/b" with the
    key "x" are two keys. `num_keys` and `list_keys` look at this prefix and those stacked upon it.

    Parameters
    ----------
    prefix : str
        The name of the part.
    store : Store
        The store that holds it. It stays the caller's to close.

    Examples
    --------
    >>> from pynccl.distributed import HashStore, PrefixStore
    >>> whole = HashStore()
    >>> a, b = PrefixStore("a", whole), PrefixStore("b", whole)
    >>> a.set("key", b"1")
    >>> a.num_keys(), b.num_keys(), whole.num_keys()
    (1, 0, 1)
    """

    def __init__(self, prefix: str, store: Store) -> None:
        if not isinstance(prefix, str):
            raise TypeError(f"PrefixStore: prefix is {type(prefix).__name__}; expected str")
        if not isinstance(store, Store):
            raise TypeError(f"PrefixStore: store is {type(store).__name__}; expected a Store")
        super().__init__(store.timeout)
        self.prefix = prefix
        self._store = store
        encoded = prefix.encode()
        self._bytes = b"%d:%s/" % (len(encoded), encoded)

    @property
    def underlying_store(self) -> Store:
        """The store that holds this part."""
        return self._store

    def _do(self, op: Op, parts: Sequence[bytes], seconds: float) -> list[bytes]:
        if op in _ALL_KEYS:
            parts = [self._bytes + key for key in parts]
        elif op is Op.SET:
            parts = [part if i % 2 else self._bytes + part for i, part in enumerate(parts)]
        else:
            parts = [self._bytes + parts[0], *parts[1:]]
        result = self._store._do(op, parts, seconds)
        return [key[len(self._bytes) :] for key in result] if op is Op.KEYS else result

    def _where(self) -> str:
        return f"PrefixStore {self.prefix!r} of {self._store._where()}"
