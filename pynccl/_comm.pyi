from datetime import timedelta
from os import PathLike
from types import TracebackType
from typing import TypeAlias

from ._family import Family
from ._settings import Config

_Choice: TypeAlias = str | PathLike[str]
_Seconds: TypeAlias = float | timedelta | None

EXIT_SECONDS: float

class Communicator(Family):
    def __init__(
        self,
        nranks: int,
        uid: bytes | list[bytes] | tuple[bytes, ...],
        rank: int,
        *,
        device: int | None = None,
        timeout: _Seconds = None,
        config: Config | None = None,
        library: _Choice = "auto",
    ) -> None: ...
    @classmethod
    def from_handle(
        cls, handle: int, *, timeout: _Seconds = None, library: _Choice = "auto"
    ) -> Communicator: ...
    @property
    def rank(self) -> int: ...
    @property
    def nranks(self) -> int: ...
    @property
    def device(self) -> int: ...
    @property
    def timeout(self) -> float: ...
    @property
    def closed(self) -> bool: ...
    @property
    def handle(self) -> int: ...
    def close(self, timeout: _Seconds = None) -> None: ...
    def abort(self) -> None: ...
    def __enter__(self) -> Communicator: ...
    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...
