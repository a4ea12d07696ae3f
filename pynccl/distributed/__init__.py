"""What ranks of several processes need to work together: so far, the stores by which they find each other.

A store is a small dictionary that all ranks share: keys are `str`, values `bytes`, and a rank that reads a
key that is not there yet waits for it. `HashStore` is for threads, `FileStore` for processes that share a
file system, `TCPStore` for anything that reaches a port, `PrefixStore` a part of any other. The verbs are
c10d's. ``docs/distributed.md`` has the guarantees, the wire format and the differences from torch.

Nothing here needs a library, an array or a compiled module.
"""

from ._store.base import Store
from ._store.file import FileStore
from ._store.hash import HashStore
from ._store.prefix import PrefixStore
from ._store.tcp import TCPStore

__all__ = ["FileStore", "HashStore", "PrefixStore", "Store", "TCPStore"]
