from typing import TypedDict, type_check_only

from ._collectives import Collectives

@type_check_only
class _Stats(TypedDict):
    suspendable: int
    suspended: bool
    persistent: int
    total: int

class Memory(Collectives):
    def suspend(self) -> None: ...
    def resume(self) -> None: ...
    def memory_stats(self) -> _Stats: ...
