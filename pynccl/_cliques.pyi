from collections.abc import Callable
from typing import final

@final
class Clique:
    @property
    def comms(self) -> tuple[object, ...]: ...
    @property
    def broken(self) -> bool: ...

class Gate:
    enter: Callable[[], int]
    leave: Callable[[bool], int]
    def __init__(self, clique: Clique) -> None: ...

def clear() -> None: ...
