from collections.abc import Callable
from typing import Any, Protocol, TypeAlias, TypeVar, overload

from typing_extensions import disjoint_base

from ._buffer import Buffer
from ._call import UserOp
from ._configured import CollConfig
from ._nccl import CommBase
from .enums import ReduceOp

# A result that is allocated has the type of the input, and one that was given is returned.
_Array = TypeVar("_Array")
_Out = TypeVar("_Out")
_Made = TypeVar("_Made", covariant=True)

# Where an axis is added or taken away: NumPy's types name the shape, and what `reshape` gives has any.
class _Shaped(Protocol[_Made]):
    def reshape(self, shape: tuple[int, ...], /) -> _Made: ...

# What cannot be written to gives another type: a bytearray, or an array like the one in the Buffer.
_Source: TypeAlias = bytes | Buffer
# A ReduceOp, its name, what premul_sum returned, or a NumPy ufunc.
_Op: TypeAlias = ReduceOp | str | UserOp | Callable[..., Any]
# A handle, or a stream object of CUDA's protocol, Numba, CuPy or Torch.
_Stream: TypeAlias = Any
_DType: TypeAlias = Any

@disjoint_base
class Collectives(CommBase):
    @overload
    def all_reduce(
        self,
        x: _Source,
        out: None = None,
        op: _Op = ...,
        *,
        stream: _Stream = None,
        dtype: _DType = None,
        config: CollConfig | None = None,
    ) -> Any: ...
    @overload
    def all_reduce(
        self,
        x: _Array,
        out: None = None,
        op: _Op = ...,
        *,
        stream: _Stream = None,
        dtype: _DType = None,
        config: CollConfig | None = None,
    ) -> _Array: ...
    @overload
    def all_reduce(
        self,
        x: Any,
        out: _Out,
        op: _Op = ...,
        *,
        stream: _Stream = None,
        dtype: _DType = None,
        config: CollConfig | None = None,
    ) -> _Out: ...
    @overload
    def reduce(
        self,
        x: _Source,
        out: None = None,
        op: _Op = ...,
        root: int = 0,
        *,
        stream: _Stream = None,
        dtype: _DType = None,
        config: CollConfig | None = None,
    ) -> Any: ...
    @overload
    def reduce(
        self,
        x: _Array,
        out: None = None,
        op: _Op = ...,
        root: int = 0,
        *,
        stream: _Stream = None,
        dtype: _DType = None,
        config: CollConfig | None = None,
    ) -> _Array | None: ...
    @overload
    def reduce(
        self,
        x: Any,
        out: _Out,
        op: _Op = ...,
        root: int = 0,
        *,
        stream: _Stream = None,
        dtype: _DType = None,
        config: CollConfig | None = None,
    ) -> _Out | None: ...
    @overload
    def broadcast(
        self,
        x: _Array,
        root: int = 0,
        *,
        out: None = None,
        stream: _Stream = None,
        dtype: _DType = None,
        config: CollConfig | None = None,
    ) -> _Array: ...
    @overload
    def broadcast(
        self,
        x: Any,
        root: int = 0,
        *,
        out: _Out,
        stream: _Stream = None,
        dtype: _DType = None,
        config: CollConfig | None = None,
    ) -> _Out: ...
    @overload
    def all_gather(
        self,
        x: _Source,
        out: None = None,
        *,
        stream: _Stream = None,
        dtype: _DType = None,
        config: CollConfig | None = None,
    ) -> Any: ...
    @overload
    def all_gather(
        self,
        x: _Shaped[_Made],
        out: None = None,
        *,
        stream: _Stream = None,
        dtype: _DType = None,
        config: CollConfig | None = None,
    ) -> _Made: ...
    @overload
    def all_gather(
        self,
        x: _Array,
        out: None = None,
        *,
        stream: _Stream = None,
        dtype: _DType = None,
        config: CollConfig | None = None,
    ) -> _Array: ...
    @overload
    def all_gather(
        self,
        x: Any,
        out: _Out,
        *,
        stream: _Stream = None,
        dtype: _DType = None,
        config: CollConfig | None = None,
    ) -> _Out: ...
    @overload
    def reduce_scatter(
        self,
        x: _Source,
        out: None = None,
        op: _Op = ...,
        *,
        stream: _Stream = None,
        dtype: _DType = None,
        config: CollConfig | None = None,
    ) -> Any: ...
    @overload
    def reduce_scatter(
        self,
        x: _Shaped[_Made],
        out: None = None,
        op: _Op = ...,
        *,
        stream: _Stream = None,
        dtype: _DType = None,
        config: CollConfig | None = None,
    ) -> _Made: ...
    @overload
    def reduce_scatter(
        self,
        x: _Array,
        out: None = None,
        op: _Op = ...,
        *,
        stream: _Stream = None,
        dtype: _DType = None,
        config: CollConfig | None = None,
    ) -> _Array: ...
    @overload
    def reduce_scatter(
        self,
        x: Any,
        out: _Out,
        op: _Op = ...,
        *,
        stream: _Stream = None,
        dtype: _DType = None,
        config: CollConfig | None = None,
    ) -> _Out: ...
    @overload
    def all_to_all(
        self,
        x: _Source,
        out: None = None,
        *,
        stream: _Stream = None,
        dtype: _DType = None,
        config: CollConfig | None = None,
    ) -> Any: ...
    @overload
    def all_to_all(
        self,
        x: _Array,
        out: None = None,
        *,
        stream: _Stream = None,
        dtype: _DType = None,
        config: CollConfig | None = None,
    ) -> _Array: ...
    @overload
    def all_to_all(
        self,
        x: Any,
        out: _Out,
        *,
        stream: _Stream = None,
        dtype: _DType = None,
        config: CollConfig | None = None,
    ) -> _Out: ...
    @overload
    def gather(
        self,
        x: _Source,
        out: None = None,
        root: int = 0,
        *,
        stream: _Stream = None,
        dtype: _DType = None,
        config: CollConfig | None = None,
    ) -> Any: ...
    @overload
    def gather(
        self,
        x: _Shaped[_Made],
        out: None = None,
        root: int = 0,
        *,
        stream: _Stream = None,
        dtype: _DType = None,
        config: CollConfig | None = None,
    ) -> _Made | None: ...
    @overload
    def gather(
        self,
        x: _Array,
        out: None = None,
        root: int = 0,
        *,
        stream: _Stream = None,
        dtype: _DType = None,
        config: CollConfig | None = None,
    ) -> _Array | None: ...
    @overload
    def gather(
        self,
        x: Any,
        out: _Out,
        root: int = 0,
        *,
        stream: _Stream = None,
        dtype: _DType = None,
        config: CollConfig | None = None,
    ) -> _Out | None: ...
    @overload
    def scatter(
        self,
        x: _Source,
        out: None = None,
        root: int = 0,
        *,
        stream: _Stream = None,
        dtype: _DType = None,
        config: CollConfig | None = None,
    ) -> Any: ...
    @overload
    def scatter(
        self,
        x: _Shaped[_Made],
        out: None = None,
        root: int = 0,
        *,
        stream: _Stream = None,
        dtype: _DType = None,
        config: CollConfig | None = None,
    ) -> _Made: ...
    @overload
    def scatter(
        self,
        x: _Array,
        out: None = None,
        root: int = 0,
        *,
        stream: _Stream = None,
        dtype: _DType = None,
        config: CollConfig | None = None,
    ) -> _Array: ...
    @overload
    def scatter(
        self,
        x: Any,
        out: _Out,
        root: int = 0,
        *,
        stream: _Stream = None,
        dtype: _DType = None,
        config: CollConfig | None = None,
    ) -> _Out: ...
    def send(self, x: Any, peer: int, *, stream: _Stream = None, dtype: _DType = None) -> None: ...
    def recv(
        self, out: _Out, peer: int, *, stream: _Stream = None, dtype: _DType = None
    ) -> _Out: ...
    @overload
    def send_recv(
        self,
        x: _Source,
        dest: int,
        out: None = None,
        source: int | None = None,
        *,
        stream: _Stream = None,
        dtype: _DType = None,
    ) -> Any: ...
    @overload
    def send_recv(
        self,
        x: _Array,
        dest: int,
        out: None = None,
        source: int | None = None,
        *,
        stream: _Stream = None,
        dtype: _DType = None,
    ) -> _Array: ...
    @overload
    def send_recv(
        self,
        x: Any,
        dest: int,
        out: _Out,
        source: int | None = None,
        *,
        stream: _Stream = None,
        dtype: _DType = None,
    ) -> _Out: ...
    def barrier(self, *, stream: _Stream = None) -> None: ...
    def premul_sum(self, scalar: Any, dtype: _DType) -> UserOp: ...
