"""Real NCCL libraries, without a GPU: what pynccl makes of them, and the same answers from the host library.

Everything here runs in processes of its own: NCCL starts threads, and keeps its last error for the process.
"""

import json

import pytest

from helpers import abi, nccl_libs, scripts
from pynccl import _config

# ---- what every NCCL answers, by the questions of helpers/answers.py -------------------------------------

INFO, WARN = "(run with NCCL_DEBUG=INFO for details)", "(run with NCCL_DEBUG=WARN for details)"
ERROR_STRINGS = [
    "unknown result code",
    "no error",
    f"unhandled cuda error {INFO}",
    f"unhandled system error {INFO}",
    "internal error - please report this issue to the NCCL developers",
    f"invalid argument {WARN}",
    f"invalid usage {WARN}",
    "remote process exited or there was a network error",
    "NCCL operation in progress",
]
NO_GROUP = "ncclGroupEnd: not in a group call."


def no_communicator(name):
    """What a call without a communicator says; ncclBcast calls itself Broadcast."""
    called = {"ncclBcast": "Broadcast"}.get(name, name.removeprefix("nccl"))
    return [4, f"{called} : comm argument is NULL"]


ANSWERS = {
    "last error at start": "",
    "version into NULL": 4,
    "id into NULL": [4, "GetUniqueId : out argument is NULL"],
    "group end without start": [5, NO_GROUP],
    "empty group": [0, 0],
    "nested groups": [0] * 6,
    "one end too many": 5,
    **{
        f"{name} of no communicator": no_communicator(name)
        for name in (
            "ncclAllReduce", "ncclReduce", "ncclReduceScatter", "ncclAllGather", "ncclBroadcast",
            "ncclBcast", "ncclAlltoAll", "ncclGather", "ncclScatter", "ncclSend", "ncclRecv",
            "ncclCommCount", "ncclCommUserRank", "ncclCommCuDevice",
        )
    },
    "ncclCommGetAsyncError of no communicator": 4,
    **{
        f"{name} of no communicator": [4, f"{called} : comm argument is NULL"]
        for name, called in {
            "ncclCommRegister": "ncclCommRegister",
            "ncclCommDeregister": "ncclCommRegister",  # so it says
            "ncclCommSuspend": "ncclCommSuspend",
            "ncclCommResume": "ncclCommResume",
            "ncclCommMemStats": "ncclCommMemStats",
        }.items()
    },
    "a handle that was not set": 2**64 - 7,
    "ncclCommFinalize of no communicator": 0,
    "ncclCommDestroy of no communicator": 0,
    "ncclCommAbort of no communicator": 0,
    "revoke of no communicator": [0, 0],
    "premul of no communicator": 4,
    "destroy of an operation of no communicator": 4,
    "a failed call in a group": [4, 4, 5],
    "a failed call in a nested group": [4, 0, 4],
    "simulate outside a group": [5, NO_GROUP],
    "simulate into NULL": 0,
    "simulate nothing": [0, -1.0],
    "simulate into garbage": [
        4, "ncclSimInfo_t argument not initialized via NCCL_SIM_INFO_INITIALIZER",
    ],
    "encryption that is none": [0, 0, 0],
    "garbage encryption": [
        4, "ncclSetEncryption: config not initialized via NCCL_ENCRYPTION_CONFIG_INITIALIZER",
    ],
    "a wrong mode of encryption": [
        4, "ncclSetEncryption: config->mode=2 is not a supported encryption mode",
    ],
    "keyless encryption": [4, "ncclSetEncryption: NCCL_ENCRYPTION_MODE_PSK requires config->psk"],
    "short-keyed encryption": [4, "ncclSetEncryption: config->psk must be at least 32 bytes"],
    "a parameter that is none": [4, 4, 4],
    "id of no communicator": [4, "ncclCommGetUniqueId : comm argument is NULL"],
    "grow": [4] * 5,
    "grow, texts": [
        [4, "ncclCommGrow: total ranks must be positive, got 0"],
        [4, "ncclCommGrow: new ranks must pass non-NULL uniqueId"],
        [4, "ncclCommGrow: new ranks must pass valid rank >= 0, got -1"],
        [4, "ncclCommGrow: new rank 2 exceeds total ranks 2"],
        [4, "ncclCommGrow: new ranks must pass non-NULL uniqueId"],
    ],
    # A configuration is looked at before the communicator.
    "config, garbage": [4, "ncclCollConfig_t magic mismatch (got 0xbad, expected 0xcafebeef)"],
    "config, short": [4, "ncclCollConfig_t magic mismatch (got 0x0, expected 0xcafebeef)"],
    "config, forced twice": [
        4, "config->forceAlgSelection=2 is invalid, accepted values are 0 or 1",
    ],
    "config, odd policy": [4, "config->CTAPolicy=4 is invalid, accepted values are [1, 3]"],
    "config, negative policy": [4, "config->CTAPolicy=-1 is invalid, accepted values are [1, 3]"],
    **{f"config, {name}": no_communicator("ncclAllReduce") for name in ("old", "long", "wide")},
    **{
        f"config of {name}": [
            no_communicator(name),
            no_communicator(name),
            [4, "ncclCollConfig_t magic mismatch (got 0x1, expected 0xcafebeef)"],
        ]
        for name in (
            "ncclAllReduce", "ncclReduce", "ncclReduceScatter", "ncclAllGather", "ncclBroadcast",
            "ncclAlltoAll", "ncclGather", "ncclScatter",
        )
    },
    "a garbage config in a group": [4, 0],
}  # fmt: skip


def ask(path):
    """Return a library's answers."""
    code = (
        "import json, sys; from helpers import answers; print(json.dumps(answers.ask(sys.argv[1])))"
    )
    return json.loads(scripts.run(code, str(path), NCCL_DEBUG=None, NCCL_COMM_ID=None))


def check(told, expected):
    strings = told.pop("error strings")
    assert strings[: len(ERROR_STRINGS)] == ERROR_STRINGS
    assert strings[-1] == "unknown result code", "and so for any code that does not exist"
    assert told == expected


@pytest.mark.parametrize("version", nccl_libs.VERSIONS)
def test_the_answers_of_nccl(version):
    """That the table here is right: without it, the host library would be compared with our beliefs."""
    told = ask(nccl_libs.get(version).library)
    expected = {question: answer for question, answer in ANSWERS.items() if question in told}
    if version == nccl_libs.CURRENT:
        assert expected.keys() == ANSWERS.keys()
    check(told, expected)


def test_the_answers_of_the_host_library():
    """Word for word NCCL's, as far as no GPU is needed to hear them."""
    check(ask(_config.host_library()), ANSWERS)


# ---- through pynccl ------------------------------------------------------------------------------------

DESCRIBE = """
import json, pickle, sys
import pynccl

path = sys.argv[1]
library = pynccl.library(path)
uid = pynccl.unique_id(library=path)
out = {
    "path": library.path,
    "kind": library.kind,
    "version": library.version,
    "version_code": pynccl.version_code(path),
    "missing": library.missing,
    "id": [len(uid), bytes(uid).hex(), isinstance(uid, bytes), pickle.loads(pickle.dumps(uid)) == uid],
    "another id": bytes(pynccl.unique_id(library=path)).hex(),
}
refusals = out["refusals"] = {}
for name, _ in library.missing:
    try:
        library.require(name)
    except pynccl.UnsupportedError as error:
        refusals[name] = str(error)
try:
    with pynccl.Communicator(1, uid, 0, library=path) as comm:
        out["communicator"] = [comm.rank, comm.nranks]
except pynccl.NCCLError as error:
    out["communicator"] = [type(error).__name__, int(error.result), error.function, str(error)]
# The host library beside it, in the same process.
with pynccl.Communicator(1, pynccl.unique_id("host"), 0, library="host") as comm:
    data = memoryview(bytearray(b"\\1\\2\\3\\4"))
    comm.all_reduce(data)
    out["host"] = [comm.library.kind, list(data)]
print(json.dumps(out))
"""


@pytest.fixture(scope="module", params=nccl_libs.VERSIONS)
def described(request):
    """One version of NCCL, and what pynccl says of it."""
    real = nccl_libs.get(request.param)
    return real, json.loads(scripts.run(DESCRIBE, str(real.library), limit=60, NCCL_DEBUG=None))


def test_version_and_kind(described):
    real, told = described
    assert told["path"] == str(real.library)
    assert told["kind"] == "nccl"
    assert told["version"] == told["version_code"] == real.code


def test_what_is_missing_is_what_came_later(described):
    """The versions in NCCL_SYMBOLS, checked against the symbols that the binaries have."""
    real, told = described
    later = [[s.name, s.version] for s in abi.nccl_symbols() if s.version > real.code]
    assert told["missing"] == later


def test_refusals_name_both_versions(described):
    real, told = described
    if real.version == "2.21.5":
        assert told["refusals"]["ncclAlltoAll"] == (
            f"ncclAlltoAll needs NCCL 2.28, loaded 2.21.5 from {real.library}"
        )
    for name, version in told["missing"]:
        minor = version // 100 % 100
        assert told["refusals"][name].startswith(
            f"{name} needs NCCL 2.{minor}, loaded {real.version} "
        )


def test_unique_ids(described):
    _, told = described
    length, text, is_bytes, survives = told["id"]
    assert (length, is_bytes, survives) == (128, True, True)
    assert text != told["another id"]
    raw = bytes.fromhex(text)
    assert any(raw[:8])
    assert not any(raw[96:]), "where the host library's ids carry their magic"


def test_a_communicator_without_a_gpu_fails_in_words(described):
    _, told = described
    if _config.gpu_absent():
        kind, code, function, text = told["communicator"]
        assert (kind, code) == ("CudaError", 1)
        assert function.startswith("ncclCommInitRank")
        assert "CUDA driver version is insufficient" in text
    else:
        assert told["communicator"] == [0, 1]


def test_the_host_library_works_beside_it(described):
    _, told = described
    assert told["host"] == ["host", [1, 2, 3, 4]]


def test_all_versions_in_one_process():
    """Each communicator belongs to its library, so several can be there at once, and each stays itself."""
    paths = [str(nccl_libs.get(version).library) for version in nccl_libs.VERSIONS]
    code = """
    import sys
    import pynccl
    for _ in range(2):
        print(*[pynccl.version_code(path) for path in sys.argv[1:]], pynccl.library("host").kind)
    ids = [pynccl.unique_id(library=path) for path in sys.argv[1:]]
    print(len(set(ids)))
    print(*[len(pynccl.library(path).missing) for path in sys.argv[1:]])
    """
    versions = [nccl_libs.get(version).code for version in nccl_libs.VERSIONS]
    counts = [sum(s.version > code for s in abi.nccl_symbols()) for code in versions]
    line = " ".join(map(str, versions)) + " host"
    assert scripts.run(code, *paths, limit=60).splitlines() == [
        line, line, str(len(paths)), " ".join(map(str, counts)),
    ]  # fmt: skip


def test_an_nccl_that_another_package_loaded_is_the_one_used():
    """Not a second one beside it, whatever is installed."""
    old = str(nccl_libs.get("2.18.3").library)
    code = """
    import ctypes, sys
    ctypes.CDLL(sys.argv[1])
    import pynccl
    print(pynccl.library("nccl").path)
    """
    assert scripts.run(code, old).strip() == old


def test_a_host_id_is_not_for_nccl():
    """Ids say whose they are: the mistake is named before NCCL waits for a peer that cannot answer."""
    path = str(nccl_libs.get(nccl_libs.CURRENT).library)
    code = """
    import sys
    import pynccl
    for made, used in (("host", sys.argv[1]), (sys.argv[1], "host")):
        try:
            pynccl.Communicator(1, bytes(pynccl.unique_id(library=made)), 0, library=used)
        except ValueError as error:
            print(error)
    """
    first, second = scripts.run(code, path).splitlines()
    assert "host" in first
    assert "host" in second
