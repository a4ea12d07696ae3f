from typing import Any

KINDS: dict[str, int]

def call(
    kind: int,
    inputs: Any,
    outputs: Any,
    op: Any,
    root: Any,
    streams: Any,
    comms: Any,
    library: Any,
) -> Any: ...
def exchange(
    inputs: Any, outputs: Any, peers: Any, streams: Any, comms: Any, library: Any
) -> Any: ...
