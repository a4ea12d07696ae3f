"""The host library posing as NCCL: see ``tests/stubs/shim.c``."""

from __future__ import annotations

from pathlib import Path

from helpers import abi
from helpers.build import STUBS, build_shared
from pynccl import _config

_SET, _MANY = ("ncclGetUniqueId", "ncclCommGetUniqueId"), "ncclCommInitRankScalable"


def build_shim() -> Path:
    """Compile it for the host library of this installation."""
    host = _config.host_library()
    return build_shared(
        "libnccl.so.2",
        [STUBS / "shim.c"],
        {"SHIM_HOST": f'"{host}"'},
        options=["-fvisibility=hidden", "-ldl"],
        generated={"shim_calls.h": "\n".join(_function(s) for s in abi.nccl_symbols())},
    )


def _function(symbol: abi.Symbol) -> str:
    names = [param.name for param in symbol.params]
    kinds = ", ".join(param.type for param in symbol.params) or "void"
    before, after = [], []
    for param in symbol.params:
        name = param.name
        if param.type == "ncclUniqueId":
            before.append(f"mask_id(&{name});")
        elif param.type == "const ncclUniqueId *":
            before.append(
                f"ncclUniqueId masked = {{{{0}}}}; if ({name}) masked = *{name}; mask_id(&masked);"
            )
            names[names.index(name)] = f"{name} ? &masked : NULL"
        elif symbol.name in _SET and param.type == "ncclUniqueId *":
            after.append(f"if (!answer) mask_id({name});")
        elif symbol.name == _MANY and param.type == "ncclUniqueId *":
            each = f"for (int i = 0; i < nId; i++) mask_id(&{name}[i]);"
            before.append(each)
            after.append(each)
    if symbol.name == "ncclCommCuDevice":  # where every rank has a number of its own
        after.append(f"if (!answer) *{names[-1]} = 0;")
    call = f"real({', '.join(names)})"
    if symbol.ret == "void":
        body = f"if (real) {call};"
    else:
        missing = "ncclInternalError" if symbol.ret == "ncclResult_t" else "NULL"
        body = f"{symbol.ret} answer = real ? {call} : {missing}; {' '.join(after)} return answer;"
    return (
        f"SHIM_EXPORT {symbol.prototype} {{\n"
        f"    {symbol.ret} (*real)({kinds});\n"
        f'    *(void **)&real = find("{symbol.name}");\n'
        f"    {' '.join(before)}\n    {body}\n}}\n"
    )
