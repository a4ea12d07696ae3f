from os import PathLike
from typing import TypeAlias

from ._nccl import Library

_Choice: TypeAlias = str | PathLike[str]

UNIQUE_ID_BYTES: int

class UniqueId(bytes):
    def __new__(cls, raw: bytes | bytearray | memoryview) -> UniqueId: ...
    @property
    def kind(self) -> str: ...

def unique_id(library: _Choice = "auto") -> UniqueId: ...
def library(name: _Choice = "auto") -> Library: ...
def version_code(library: _Choice = "auto") -> int: ...
