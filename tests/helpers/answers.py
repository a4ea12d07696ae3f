"""What an NCCL library answers to questions that need no GPU, asked through its C functions.

Run in a process of its own (`main`): real NCCL starts threads, and its last error is the process's.
"""

from __future__ import annotations

import ctypes
import json
import sys
from ctypes import byref, c_char_p, c_int, c_size_t, c_void_p
from typing import Any

NULL = None
SUM, INT8 = 0, 0


class UniqueId(ctypes.Structure):
    """``ncclUniqueId``."""

    _fields_ = [("internal", ctypes.c_char * 128)]


class SimInfo(ctypes.Structure):
    """``ncclSimInfo_t``."""

    _fields_ = [
        ("size", c_size_t), ("magic", ctypes.c_uint), ("version", ctypes.c_uint),
        ("time", ctypes.c_float),
    ]  # fmt: skip


class Encryption(ctypes.Structure):
    """``ncclEncryptionConfig_t``."""

    _fields_ = [
        ("size", c_size_t), ("magic", ctypes.c_uint), ("version", ctypes.c_uint),
        ("mode", c_int), ("psk", c_char_p),
    ]  # fmt: skip


class CollConfig(ctypes.Structure):
    """``ncclCollConfig_t``, with its defaults."""

    _fields_ = [
        ("size", c_size_t), ("magic", ctypes.c_uint), ("version", ctypes.c_uint), ("ext", c_void_p),
        ("least", c_int), ("most", c_int), ("nvls", c_int), ("cluster", c_int),
        ("algorithm", c_char_p), ("force", c_int), ("policy", c_int), ("tag", ctypes.c_uint64),
        ("event", c_void_p),
    ]  # fmt: skip

    def __init__(self, **fields: int) -> None:
        undefined = dict.fromkeys(("least", "most", "nvls", "cluster", "policy"), -(2**31))
        head = {
            "size": ctypes.sizeof(type(self)),
            "magic": 0xCAFEBEEF,
            "version": 23203,
            "force": 1,
        }
        super().__init__(**(undefined | head | fields))


def ask(path: str) -> dict[str, Any]:
    """Return the answers of a library by question: a result, and the error text where that is fixed."""
    lib = ctypes.CDLL(path)
    lib.ncclGetErrorString.restype = c_char_p
    lib.ncclGetLastError.restype = c_char_p
    out: dict[str, Any] = {}
    number, handle = c_int(-7), c_void_p(-7)

    def last() -> str:
        return lib.ncclGetLastError(NULL).decode()

    def said(result: int) -> list[Any]:
        """Result and text, without the host library's own additions after the first line."""
        return [result, last().splitlines()[0].rstrip() if last() else ""]

    out["last error at start"] = last()
    out["error strings"] = [lib.ncclGetErrorString(code).decode() for code in range(-1, 12)]
    out["version into NULL"] = lib.ncclGetVersion(NULL)
    out["id into NULL"] = said(lib.ncclGetUniqueId(NULL))

    # Groups without calls.
    out["group end without start"] = said(lib.ncclGroupEnd())
    out["empty group"] = [lib.ncclGroupStart(), lib.ncclGroupEnd()]
    nested = [lib.ncclGroupStart() for _ in range(3)]
    out["nested groups"] = nested + [lib.ncclGroupEnd() for _ in range(3)]
    out["one end too many"] = lib.ncclGroupEnd()

    # Calls without a communicator; each has a text of its own.
    reduce_args = (NULL, NULL, c_size_t(1), INT8, SUM)
    move_args = (NULL, NULL, c_size_t(1), INT8)
    calls = {
        "ncclAllReduce": (*reduce_args, NULL, NULL),
        "ncclReduce": (*reduce_args, 0, NULL, NULL),
        "ncclReduceScatter": (*reduce_args, NULL, NULL),
        "ncclAllGather": (*move_args, NULL, NULL),
        "ncclBroadcast": (*move_args, 0, NULL, NULL),
        "ncclBcast": (NULL, c_size_t(1), INT8, 0, NULL, NULL),
        "ncclAlltoAll": (*move_args, NULL, NULL),
        "ncclGather": (*move_args, 0, NULL, NULL),
        "ncclScatter": (*move_args, 0, NULL, NULL),
        "ncclSend": (NULL, c_size_t(1), INT8, 0, NULL, NULL),
        "ncclRecv": (NULL, c_size_t(1), INT8, 0, NULL, NULL),
        "ncclCommCount": (NULL, byref(number)),
        "ncclCommUserRank": (NULL, byref(number)),
        "ncclCommCuDevice": (NULL, byref(number)),
    }
    for name, arguments in calls.items():
        if hasattr(lib, name):
            out[f"{name} of no communicator"] = said(getattr(lib, name)(*arguments))
    out["ncclCommGetAsyncError of no communicator"] = lib.ncclCommGetAsyncError(NULL, byref(number))
    # Between two of these another text is left, so that each is seen to write its own.
    memory = {
        "ncclCommRegister": (NULL, NULL, c_size_t(0), byref(handle)),
        "ncclCommDeregister": (NULL, NULL),
        "ncclCommSuspend": (NULL, 0),
        "ncclCommResume": (NULL,),
        "ncclCommMemStats": (NULL, 99, NULL),
    }
    for name, arguments in memory.items():
        if hasattr(lib, name):
            lib.ncclGetUniqueId(NULL)
            out[f"{name} of no communicator"] = said(getattr(lib, name)(*arguments))
    out["a handle that was not set"] = handle.value
    for name in ("ncclCommFinalize", "ncclCommDestroy", "ncclCommAbort"):
        out[f"{name} of no communicator"] = getattr(lib, name)(NULL)
    if hasattr(lib, "ncclCommRevoke"):
        out["revoke of no communicator"] = [lib.ncclCommRevoke(NULL, flags) for flags in (0, 1)]
    out["premul of no communicator"] = lib.ncclRedOpCreatePreMulSum(
        byref(number), byref(number), INT8, 1, NULL
    )
    out["destroy of an operation of no communicator"] = lib.ncclRedOpDestroy(7, NULL)

    # A failed call inside a group comes back at its end.
    lib.ncclGroupStart()
    inside = lib.ncclAllReduce(*reduce_args, NULL, NULL)
    out["a failed call in a group"] = [inside, lib.ncclGroupEnd(), lib.ncclGroupEnd()]
    lib.ncclGroupStart()
    lib.ncclGroupStart()
    inside = lib.ncclAllReduce(*reduce_args, NULL, NULL)
    out["a failed call in a nested group"] = [inside, lib.ncclGroupEnd(), lib.ncclGroupEnd()]

    if hasattr(lib, "ncclGroupSimulateEnd"):
        out["simulate outside a group"] = said(lib.ncclGroupSimulateEnd(NULL))
        lib.ncclGroupStart()
        out["simulate into NULL"] = lib.ncclGroupSimulateEnd(NULL)
        info = SimInfo(ctypes.sizeof(SimInfo), 0x74685283, 23203, -1.0)
        lib.ncclGroupStart()
        out["simulate nothing"] = [lib.ncclGroupSimulateEnd(byref(info)), info.time]
        info.magic = 1
        lib.ncclGroupStart()
        out["simulate into garbage"] = said(lib.ncclGroupSimulateEnd(byref(info)))

    if hasattr(lib, "ncclSetEncryption"):
        psk = b"0123456789abcdef0123456789abcdef"
        size = ctypes.sizeof(Encryption)
        cases = {
            "garbage": Encryption(size, 0xCAFE, 23203, 0, None),
            "a wrong mode of": Encryption(size, 0xCAFEBEEF, 23203, 2, psk),
            "keyless": Encryption(size, 0xCAFEBEEF, 23203, 1, None),
            "short-keyed": Encryption(size, 0xCAFEBEEF, 23203, 1, psk[:31]),
        }
        no = Encryption(size, 0xCAFEBEEF, 23203, 0, None)
        keyed = Encryption(size, 0xCAFEBEEF, 23203, 1, psk)
        out["encryption that is none"] = [
            lib.ncclSetEncryption(c) for c in (NULL, byref(no), byref(keyed))
        ]
        for name, config in cases.items():
            out[f"{name} encryption"] = said(lib.ncclSetEncryption(byref(config)))

    if hasattr(lib, "ncclParamBind"):
        out["a parameter that is none"] = [
            lib.ncclParamBind(byref(handle), b"NCCL_NO_SUCH_PARAMETER"),
            lib.ncclParamBind(byref(handle), NULL),
            lib.ncclParamBind(NULL, b"NCCL_DEBUG"),
        ]

    if hasattr(lib, "ncclCommGrow"):
        lib.ncclCommGrow.argtypes = [c_void_p, c_int, c_void_p, c_int, c_void_p, c_void_p]
        uid = UniqueId()
        new = c_void_p()
        out["grow"] = [
            lib.ncclCommGrow(NULL, 2, byref(uid), 0, NULL, NULL),
            lib.ncclCommGrow(NULL, 0, byref(uid), 0, byref(new), NULL),
            lib.ncclCommGrow(NULL, 2, NULL, 0, byref(new), NULL),
            lib.ncclCommGrow(NULL, 2, byref(uid), -1, byref(new), NULL),
            lib.ncclCommGrow(NULL, 2, byref(uid), 2, byref(new), NULL),
        ]
        out["id of no communicator"] = said(lib.ncclCommGetUniqueId(NULL, byref(uid)))
        wrong = [(0, uid, 0), (2, NULL, 0), (2, uid, -1), (2, uid, 2), (2, NULL, 2)]
        out["grow, texts"] = [
            said(lib.ncclCommGrow(NULL, n, which and byref(which), rank, byref(new), NULL))
            for n, which, rank in wrong
        ]
    if hasattr(lib, "ncclAllReduceConfig"):
        configs = {
            "garbage": CollConfig(magic=0xBAD),
            "short": CollConfig(size=8),
            "old": CollConfig(size=16, force=7),  # what it does not say is the default
            "long": CollConfig(size=1000, version=99999),
            "forced twice": CollConfig(force=2, policy=9),
            "odd policy": CollConfig(policy=4),
            "negative policy": CollConfig(policy=-1),
            "wide": CollConfig(least=5, most=3, cluster=-1),
        }
        for name, config in configs.items():
            out[f"config, {name}"] = said(
                lib.ncclAllReduceConfig(*reduce_args, NULL, NULL, byref(config))
            )
        for name, arguments in calls.items():
            if hasattr(lib, name + "Config"):
                function = getattr(lib, name + "Config")
                out[f"config of {name}"] = [
                    said(function(*arguments, NULL)),
                    said(function(*arguments, byref(CollConfig()))),
                    said(function(*arguments, byref(CollConfig(magic=1)))),
                ]
        # Such an error is the call's alone.
        lib.ncclGroupStart()
        inside = lib.ncclAllReduceConfig(*reduce_args, NULL, NULL, byref(CollConfig(magic=1)))
        out["a garbage config in a group"] = [inside, lib.ncclGroupEnd()]
    return out


if __name__ == "__main__":
    json.dump(ask(sys.argv[1]), sys.stdout)
