from typing_extensions import disjoint_base

@disjoint_base
class Library:
    path: str
    kind: str
    version: int
    @property
    def missing(self) -> list[tuple[str, int]]: ...
    def require(self, function: str) -> None: ...

@disjoint_base
class CommBase:
    library: Library

@disjoint_base
class Recorder: ...
