from os import PathLike
from typing import TypeAlias

_Choice: TypeAlias = str | PathLike[str]

def parameters(library: _Choice = "auto") -> dict[str, str]: ...
def set_encryption(
    psk: bytes | bytearray | memoryview | str | None, *, library: _Choice = "auto"
) -> None: ...
