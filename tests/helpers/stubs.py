"""The recording stubs as Python objects: `NcclStub` for libnccl, `CudaStub` for the driver.

Both are real shared libraries.  The code under test loads them by path like any other; these objects
open the same file through ctypes, so they see what it did.
"""

from __future__ import annotations

import ctypes
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from helpers import abi
from helpers.build import STUBS, build_shared

LATEST = 23203
_SIZED = ("ncclConfig_t", "ncclCollConfig_t", "ncclSimInfo_t", "ncclEncryptionConfig_t")
# Pointers to lists: the parameter, the parameter that counts its elements, and their type.
_LISTS = {
    "commIds": ("nId", "ncclUniqueId"),
    "devlist": ("ndev", "int"),
    "excludeRanksList": ("excludeRanksCount", "int"),
    "signalDescs": ("nDesc", "ncclWaitSignalDesc_t"),
}


@dataclass(frozen=True)
class Call:
    """One recorded call."""

    function: str
    args: dict[str, int | float]
    attached: dict[str, bytes] = field(repr=False)
    thread: int = field(repr=False)
    device: int = field(repr=False)
    tick: int = field(repr=False)

    def __getattr__(self, name: str) -> int | float:
        try:
            return self.args[name]
        except KeyError:
            raise AttributeError(f"{self.function} has no argument {name}") from None


class _Stub:
    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self.lib = lib = ctypes.CDLL(self.path)
        lib.stub_function.restype = ctypes.c_char_p
        lib.stub_arg.restype = ctypes.c_char_p
        lib.stub_attached.restype = ctypes.c_char_p
        lib.stub_thread.restype = ctypes.c_long
        lib.stub_tick.restype = ctypes.c_ulonglong

    @property
    def calls(self) -> list[Call]:
        """Every call so far, oldest first."""
        return [self._call(i) for i in range(self.lib.stub_count())]

    @property
    def names(self) -> list[str]:
        """The functions called so far, oldest first."""
        return [self.lib.stub_function(i).decode() for i in range(self.lib.stub_count())]

    def of(self, function: str) -> list[Call]:
        """Return the calls of one function."""
        return [call for call in self.calls if call.function == function]

    def reset(self) -> None:
        """Forget the calls, and the orders given."""
        self.lib.stub_reset()

    def _call(self, i: int) -> Call:
        return Call(
            self.lib.stub_function(i).decode(),
            dict(self._args(i)),
            dict(self._attached(i)),
            self.lib.stub_thread(i),
            self.lib.stub_device(i),
            self.lib.stub_tick(i),
        )

    def _args(self, i: int) -> Iterator[tuple[str, int | float]]:
        kind, value = ctypes.c_char(), ctypes.c_int64()
        for k in range(self.lib.stub_nargs(i)):
            name = self.lib.stub_arg(i, k, ctypes.byref(kind), ctypes.byref(value)).decode()
            if kind.value == b"d":
                yield name, struct.unpack("d", struct.pack("q", value.value))[0]
            elif kind.value == b"p":
                yield name, value.value & 0xFFFF_FFFF_FFFF_FFFF
            else:
                yield name, value.value

    def _attached(self, i: int) -> Iterator[tuple[str, bytes]]:
        size, data = ctypes.c_size_t(), ctypes.c_void_p()
        k = 0
        while name := self.lib.stub_attached(i, k, ctypes.byref(size), ctypes.byref(data)):
            yield name.decode(), ctypes.string_at(data.value or 0, size.value)
            k += 1


class NcclStub(_Stub):
    """A recording libnccl; see ``tests/stubs/nccl_stub.c``."""

    def fail(self, function: str, result: int, skip: int = 0) -> None:
        """Make every call of `function` but the next `skip` return `result`."""
        self.lib.stub_fail(function.encode(), result, skip)

    def hold(self, function: str) -> None:
        """Make calls of `function` block until `release` (ten seconds at most)."""
        self.lib.stub_hold(function.encode())

    def release(self) -> None:
        """Let the held calls go on, and hold no more."""
        self.lib.stub_release()

    @property
    def held(self) -> int:
        """How many calls are being held now."""
        return self.lib.stub_nheld()

    @property
    def live(self) -> int:
        """How many communicators exist."""
        return self.lib.stub_live()

    def asynchronous(self, result: int, polls: int = 1) -> None:
        """Make the next `polls` questions for the asynchronous state answer `result`."""
        self.lib.stub_async(result, polls)

    def last_error(self, text: str) -> None:
        """Set what ncclGetLastError says."""
        self.lib.stub_last_error(text.encode())

    def share(self, cuda: CudaStub) -> None:
        """Take the clock and the current device from the stub driver, so that calls can be compared."""
        self.lib.stub_share(cuda.lib.stub_current_device, cuda.lib.stub_next_tick)


class CudaStub(_Stub):
    """A recording CUDA driver; see ``tests/stubs/cuda_stub.c``."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.lib.stub_context.restype = ctypes.c_void_p
        self.lib.stub_context.argtypes = [ctypes.c_int]
        self.lib.stub_stream.restype = ctypes.c_void_p
        self.lib.stub_stream.argtypes = [ctypes.c_void_p]
        self.lib.stub_capture.argtypes = [ctypes.c_void_p, ctypes.c_int]
        self.lib.stub_memory.argtypes = [
            ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int,
        ]  # fmt: skip
        self.lib.cuCtxSetCurrent.argtypes = [ctypes.c_void_p]

    def start(self) -> None:
        """Do what cuInit does: before, most functions say that the driver is not initialised."""
        self.lib.cuInit(0)

    def fail(self, function: str, result: int, times: int = 1) -> None:
        """Make the next `times` calls of `function` return `result`."""
        self.lib.stub_fail(function.encode(), result, times)

    def primary(self, device: int) -> int:
        """Return the handle of a device's primary context."""
        context = ctypes.c_void_p()
        assert self.lib.cuDevicePrimaryCtxRetain(ctypes.byref(context), device) == 0
        assert self.lib.cuDevicePrimaryCtxRelease_v2(device) == 0
        return context.value or 0

    def context(self, device: int) -> int:
        """Make a context that is not a device's primary one."""
        return self.lib.stub_context(device)

    def stream(self, device: int, context: int | None = None) -> int:
        """Make a stream in a device's primary context, or in `context`."""
        return self.lib.stub_stream(context or self.primary(device))

    def capture(self, stream: int, status: int = 1) -> None:
        """Begin (1), invalidate (2) or end (0) the capture of a stream."""
        self.lib.stub_capture(stream, status)

    def memory(self, pointer: int, nbytes: int, device: int, kind: int = 2) -> None:
        """Say that a range is memory of a device (`kind` 1: of the host, page-locked)."""
        self.lib.stub_memory(pointer, nbytes, device, kind)

    def make_current(self, context: int | None) -> None:
        """Make a context current in this thread."""
        assert self.lib.cuCtxSetCurrent(context) == 0

    @property
    def current_device(self) -> int:
        """The device of this thread's current context, -1 if there is none."""
        return self.lib.stub_current_device()

    @property
    def current_context(self) -> int:
        """This thread's current context, 0 if there is none."""
        context = ctypes.c_void_p()
        self.lib.cuCtxGetCurrent(ctypes.byref(context))
        return context.value or 0

    def reset_device(self, device: int) -> None:
        """Do what cudaDeviceReset does: what was made in the primary context is gone."""
        self.lib.stub_reset_device(device)

    @property
    def live_events(self) -> int:
        """Events made and not destroyed."""
        return self.lib.stub_live_events()


def build_nccl_stub(version: int = LATEST, *, host: bool = False, name: str | None = None) -> Path:
    """Compile the recording NCCL that poses as `version`; with `host`, as the host library."""
    symbols = [symbol for symbol in abi.nccl_symbols() if symbol.version <= version]
    if host:
        symbols += abi.host_symbols()
    source = STUBS / "nccl_stub.c"
    defines: dict[str, object] = {"STUB_VERSION": version}
    defines |= {f"HAS_{symbol.name}": 1 for symbol in symbols}
    if host:
        defines["STUB_HOST"] = 1
    return build_shared(
        name or ("libpynccl_host_stub.so" if host else "libnccl.so.2"),
        [source],
        defines,
        options=["-fvisibility=hidden"],
        generated={"nccl_stub_calls.h": _calls(symbols, source.read_text(encoding="utf-8"))},
    )


def build_cuda_stub(*, context_ids: bool = True) -> Path:
    """Compile the recording driver; without `context_ids`, one from before CUDA 12."""
    return build_shared(
        "libcuda.so.1",
        [STUBS / "cuda_stub.c"],
        {"STUB_CONTEXT_IDS": int(context_ids)},
        # The name by which the dynamic linker knows a driver that is loaded already.
        options=["-fvisibility=hidden", "-Wl,-soname,libcuda.so.1"],
    )


def _calls(symbols: list[abi.Symbol], source: str) -> str:
    """Write the functions of the NCCL stub."""
    effects = set(re.findall(r"(?:EFFECT|QUERY)\((nccl\w+),", source))
    effects |= {f"ncclParamGet{suffix}" for suffix in re.findall(r"PARAM\((\w+),", source)}
    answers = set(re.findall(r"\b(?:text|number|owner)_\w+(?=\()", source))
    return "\n".join(_function(symbol, effects, answers) for symbol in symbols)


def _function(symbol: abi.Symbol, effects: set[str], answers: set[str]) -> str:
    names = ", ".join(p.name for p in symbol.params)
    lines = [f'struct call *call = begin("{symbol.name}");']
    lines += [line for p in symbol.params for line in _log(p)]
    if symbol.ret == "ncclResult_t":
        effect = f"effect_{symbol.name}({names})" if symbol.name in effects else "ncclSuccess"
        lines += ["ncclResult_t ordered = commit(call);"]
        lines += [f"return ordered != ncclSuccess ? ordered : {effect};"]
    else:
        lines += ["commit(call);"]
        for kind in ("text", "number", "owner"):
            if f"{kind}_{symbol.name}" in answers:
                lines += [f"return {kind}_{symbol.name}({names});"]
    body = "\n".join(f"    {line}" for line in lines)
    return f"STUB_EXPORT {symbol.prototype} {{\n{body}\n}}\n"


def _log(param: abi.Param) -> list[str]:
    name, type_ = param.name, param.type
    if type_ == "ncclUniqueId":
        return [f'log_attach(call, "{name}", &{name}, sizeof {name});']
    if type_ == "double":
        return [f"log_arg(call, \"{name}\", 'd', bits_of({name}));"]
    pointer = type_.endswith("*") or "(*)" in type_ or type_.split()[-1] in (
        "ncclComm_t", "ncclWindow_t", "ncclParamHandle_t", "cudaStream_t",
    )  # fmt: skip
    if not pointer:
        return [f"log_arg(call, \"{name}\", 'i', (int64_t){name});"]
    lines = [f"log_arg(call, \"{name}\", 'p', (int64_t)(uintptr_t){name});"]
    if any(sized in type_ for sized in _SIZED):
        lines.append(f'attach_sized(call, "{name}", {name});')
    if name in _LISTS:
        count, element = _LISTS[name]
        lines.append(
            f'log_attach(call, "{name}", {name}, {count} > 0 ? (size_t){count} * sizeof({element}) : 0);'
        )
    if type_ == "const ncclUniqueId *":
        lines.append(f'log_attach(call, "{name}", {name}, sizeof *{name});')
    if type_ == "const char *":
        lines.append(f'log_attach(call, "{name}", {name}, {name} ? strlen({name}) : 0);')
    return lines
