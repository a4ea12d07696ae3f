"""parameters and set_encryption: what a library is asked and told before there is a communicator."""

import ctypes
import gc
import json
import struct

import pytest

import pynccl
from helpers import nccl_libs, scripts
from helpers.stubs import NcclStub, build_nccl_stub
from pynccl import _config

KEY = "0123456789abcdef" * 2


@pytest.fixture
def nccl():
    stub = NcclStub(build_nccl_stub())
    stub.reset()
    return stub


# --- parameters ------------------------------------------------------------------------------------------


LEVELS = "NCCL_DEBUG_TIMESTAMP_LEVELS"
PARTS = "NCCL_DEBUG_SUBSYS"
ALL_PARTS = (
    "INIT,COLL,P2P,SHM,NET,GRAPH,TUNING,ENV,ALLOC,ALLOC_HOST,CALL,PROXY,NVLS,BOOTSTRAP,REG,"
    "PROFILE,RAS,DESTROY"
)
# What the environment says (None: nothing), what the library shows, and the bytes of the value.
VALUES = [
    ("NCCL_DEBUG", None, "<unknown>", b"\0\0\0\0"),
    ("NCCL_DEBUG", "warn", "WARN", b"\2\0\0\0"),
    ("NCCL_DEBUG", " INFO ", "INFO", b"\3\0\0\0"),
    ("NCCL_DEBUG", "ATTN", "ATTN", b"\6\0\0\0"),
    ("NCCL_DEBUG", "2", "<unknown>", b"\0\0\0\0"),
    ("NCCL_DEBUG", None, "<unknown>", b"\0\0\0\0"),
    (LEVELS, None, "WARN,ATTN", b"\x44\0\0\0"),
    (LEVELS, "", "NONE", b"\0\0\0\0"),
    (LEVELS, "INFO,WARN", "WARN,INFO", b"\x0c\0\0\0"),
    (LEVELS, "^WARN", "VERSION,ATTN,INFO,ABORT,TRACE", b"\xfb\xff\xff\xff"),
    (LEVELS, "ALL", "ALL", b"\x7e\0\0\0"),
    (LEVELS, "NONE", "WARN,ATTN", b"\x44\0\0\0"),
    ("NCCL_DEBUG_LEVELS", "junk", "NONE", b"\0\0\0\0"),
    (PARTS, None, "INIT,ENV,BOOTSTRAP", b"\x81\x10\0\0\0\0\0\0"),
    (PARTS, " init , coll ,,", "INIT,COLL", b"\3\0\0\0\0\0\0\0"),
    (PARTS, ALL_PARTS, ALL_PARTS, b"\xff\xff\3\0\0\0\0\0"),
    (PARTS, "ALL", "ALL", b"\xff" * 8),
    (PARTS, "^ALL", "NONE", b"\0" * 8),
    (PARTS, "INIT,junk", "INIT,ENV,BOOTSTRAP", b"\x81\x10\0\0\0\0\0\0"),
    (PARTS, "INIT COLL", "INIT,ENV,BOOTSTRAP", b"\x81\x10\0\0\0\0\0\0"),
    ("NCCL_DEBUG_FILE", None, "", b"\0"),
    ("NCCL_DEBUG_FILE", "~/x.%p", "~/x.%p", b"~/x.%p\0"),
    ("NCCL_DEBUG_TIMESTAMP_FORMAT", None, "[%F %T] ", b"[%F %T] \0"),
    ("NCCL_DEBUG_TIMESTAMP_FORMAT", "", "", b"\0"),
    ("NCCL_SET_THREAD_NAME", None, "FALSE", b"\0"),
    ("NCCL_SET_THREAD_NAME", "TRUE", "FALSE", b"\0"),  # asked before: kept
]
SHOWN = """
import ctypes, json, sys
from ctypes import POINTER, byref, c_char_p, c_int, c_uint32, c_uint64, c_void_p

lib, libc = ctypes.CDLL(sys.argv[1]), ctypes.CDLL(None)
out = {"values": [], "types": {}}
for key, said in json.loads(sys.argv[2]):
    key = key.encode()
    libc.unsetenv(key) if said is None else libc.setenv(key, said.encode(), 1)
    text, length, handle = c_char_p(), c_int(-1), c_void_p()
    assert lib.ncclParamGetParameter(key, byref(text), byref(length)) == 0
    assert length.value == len(text.value)
    assert lib.ncclParamBind(byref(handle), key) == 0
    raw = ctypes.create_string_buffer(200)
    assert lib.ncclParamGet(handle, raw, 200, byref(length)) == 0
    out["values"].append([text.value.decode(), raw.raw[: length.value].hex()])
    libc.unsetenv(key)
keys, count = POINTER(c_char_p)(), c_int()
assert lib.ncclParamGetAllParameterKeys(byref(keys), byref(count)) == 0
names = [keys[i] for i in range(count.value)]
out["names"] = [name.decode() for name in names]
for name in names:
    handle, again, text = c_void_p(), c_void_p(), c_char_p()
    lib.ncclParamBind(byref(handle), name), lib.ncclParamBind(byref(again), name)
    assert handle.value == again.value
    widths = [f"ParamGet{s}{w}" for w in (8, 16, 32, 64) for s in "IU"]
    got = [w for w in widths if getattr(lib, "nccl" + w)(handle, byref(c_uint64())) == 0]
    got += ["Str"] * (lib.ncclParamGetStr(handle, byref(text)) == 0)
    raw, sizes = ctypes.create_string_buffer(b"U" * 99, 99), []
    for room in (-1, 0, 1, 3, 4, 8, 9, 99):
        length = c_int(-9)
        sizes.append([lib.ncclParamGet(handle, raw, room, byref(length)), length.value])
    out["types"][name.decode()] = [got, sizes]
value, length = c_char_p(b"zz"), c_int(-1)
out["wrong"] = [
    lib.ncclParamGetParameter(None, byref(value), byref(length)), value.value.decode(), length.value,
    lib.ncclParamGetParameter(b"NCCL_NOPE", byref(value), byref(length)), value.value, length.value,
    lib.ncclParamGetParameter(b"NCCL_DEBUG", None, byref(length)),
    lib.ncclParamGetParameter(b"NCCL_DEBUG", byref(value), None),
    lib.ncclParamGetAllParameterKeys(None, byref(length)),
    lib.ncclParamGetAllParameterKeys(byref(keys), None),
    lib.ncclParamGetU32(None, byref(c_uint32())), lib.ncclParamGetU32(handle, None),
    lib.ncclParamGetStr(None, byref(value)), lib.ncclParamGet(None, raw, 9, byref(length)),
    lib.ncclParamGet(handle, None, 9, byref(length)), lib.ncclParamGet(handle, raw, 9, None),
]
print(json.dumps(out))
"""


def shown(path):
    """What a library makes of each environment of `VALUES`, and of each kind of question."""
    asked = json.dumps([[key, said] for key, said, *_ in VALUES])
    unset = dict.fromkeys({key for key, *_ in VALUES})
    return json.loads(scripts.run(SHOWN, str(path), asked, **unset))


@pytest.fixture(scope="module")
def of_host():
    return shown(_config.host_library())


def test_values_are_read_as_nccl_reads_them(of_host):
    for row, (text, raw) in zip(VALUES, of_host["values"], strict=True):
        assert (text, bytes.fromhex(raw)) == row[2:], row


def test_the_current_nccl_says_the_same(of_host):
    assert shown(nccl_libs.get(nccl_libs.CURRENT).library) == of_host


PRINT = "import pynccl, sys; print(pynccl.parameters(sys.argv[1]))"


def test_parameters_of_the_host_library_are_those_of_the_current_nccl():
    real = nccl_libs.get(nccl_libs.CURRENT).library
    said = scripts.run(PRINT, "host")
    assert said == scripts.run(PRINT, str(real))
    assert "NCCL_DEBUG_SUBSYS" in said


def test_parameters_follow_the_environment():
    assert "'NCCL_DEBUG': 'WARN'" in scripts.run(PRINT, "host", NCCL_DEBUG="WARN")
    assert "'NCCL_SET_THREAD_NAME': 'TRUE'" in scripts.run(PRINT, "host", NCCL_SET_THREAD_NAME="t")


def test_all_parameters_are_printed_with_their_origin():
    code = """
    import ctypes, sys
    lib = ctypes.CDLL(sys.argv[1])
    lib.ncclParamDumpAll()
    """
    said = scripts.run(code, _config.host_library(), NCCL_DEBUG_FILE="there", NCCL_DEBUG=None)
    assert "Current value=there set_by=Environment" in said
    assert "NCCL_DEBUG (ncclDebugLogLevel)" in said
    assert said.count("Current value=") == 7


def test_log_is_set_up_anew_after_a_reset():
    code = """
    import ctypes, sys
    lib, libc = ctypes.CDLL(sys.argv[1]), ctypes.CDLL(None)
    lib.ncclGetUniqueId(None)
    libc.setenv(b"NCCL_DEBUG", b"WARN", 1)
    lib.ncclGetUniqueId(None)
    lib.ncclResetDebugInit()
    lib.ncclGetUniqueId(None)
    """
    said = scripts.run(code, _config.host_library(), NCCL_DEBUG=None)
    assert said.count("NCCL WARN GetUniqueId : out argument is NULL") == 1


def test_an_older_library_says_what_it_lacks():
    library = nccl_libs.get("2.27.7").library
    with pytest.raises(pynccl.UnsupportedError, match=r"needs NCCL 2\.30, loaded 2\.27\.7"):
        pynccl.parameters(library)
    with pytest.raises(pynccl.UnsupportedError, match=r"needs NCCL 2\.32, loaded 2\.27\.7"):
        pynccl.set_encryption(KEY, library=library)


# --- encryption ------------------------------------------------------------------------------------------


def fields(raw):
    """Read an ``ncclEncryptionConfig_t``."""
    return struct.unpack("@NIIiP", raw)


@pytest.mark.parametrize(
    "psk", [KEY, KEY.encode(), bytearray(KEY.encode()), memoryview(KEY.encode())]
)
def test_key_reaches_the_library(psk, nccl):
    pynccl.set_encryption(psk, library=nccl.path)
    gc.collect()
    (call,) = nccl.of("ncclSetEncryption")
    size, magic, version, mode, address = fields(call.attached["config"])
    assert (size, magic, version, mode) == (32, 0xCAFEBEEF, 23203, 1)
    assert ctypes.string_at(address) == KEY.encode()


def test_none_ends_it(nccl):
    pynccl.set_encryption(None, library=nccl.path)
    (call,) = nccl.of("ncclSetEncryption")
    assert fields(call.attached["config"])[3] == 0


@pytest.mark.parametrize(
    ("psk", "error", "says"),
    [
        ("x" * 31, ValueError, "psk has 31 bytes; it must have at least 32"),
        ("", ValueError, "psk has 0 bytes"),
        (b"x" * 40 + b"\0", ValueError, "holds a zero byte"),
        (32, TypeError, "must be bytes or str, not 'int'"),
        (["x" * 32], TypeError, "must be bytes or str, not 'list'"),
    ],
)
def test_no_such_key_reaches_the_library(psk, error, says, nccl):
    with pytest.raises(error, match=says):
        pynccl.set_encryption(psk, library=nccl.path)
    assert not nccl.of("ncclSetEncryption")


@pytest.mark.parametrize("psk", [KEY, None, "é" * 16])
def test_host_library_and_the_current_nccl_take_it(psk):
    pynccl.set_encryption(psk, library="host")
    pynccl.set_encryption(psk, library=nccl_libs.get(nccl_libs.CURRENT).library)
