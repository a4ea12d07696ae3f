from collections.abc import Iterable
from datetime import timedelta
from os import PathLike
from typing import TypeAlias

from typing_extensions import Self, disjoint_base

from ._comm import Communicator
from ._memory import Memory
from ._settings import Config
from ._uid import UniqueId
from .enums import Result

UNIQUE_ID_BYTES: int
_Choice: TypeAlias = str | PathLike[str]
_Seconds: TypeAlias = float | timedelta | None

@disjoint_base
class Family(Memory):
    def split(
        self,
        color: int | None,
        key: int = 0,
        *,
        timeout: _Seconds = None,
        config: Config | None = None,
    ) -> Communicator | None: ...
    def shrink(
        self,
        exclude: Iterable[int],
        *,
        abort: bool = False,
        timeout: _Seconds = None,
        config: Config | None = None,
    ) -> Communicator: ...
    def unique_id(self) -> UniqueId: ...
    def grow(
        self,
        nranks: int,
        uid: bytes | None = None,
        *,
        timeout: _Seconds = None,
        config: Config | None = None,
    ) -> Communicator: ...
    @classmethod
    def join(
        cls,
        nranks: int,
        uid: bytes,
        rank: int,
        *,
        device: int | None = None,
        timeout: _Seconds = None,
        config: Config | None = None,
        library: _Choice = "auto",
    ) -> Self: ...
    def revoke(self) -> None: ...
    def finalize(self) -> None: ...
    @property
    def async_error(self) -> Result: ...
    def wait_ready(self, timeout: _Seconds = None) -> None: ...
