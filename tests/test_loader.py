"""The loader: one table for each library, stubs for what it lacks, and clear words for what is none."""

import ctypes
import os
import shutil
import threading

import pytest

from helpers import abi
from helpers.build import ROOT, build_shared
from helpers.stubs import LATEST, NcclStub, build_nccl_stub

MISSING = 1000


class Api(ctypes.Structure):
    """``struct nccl_api``."""

    _fields_ = [
        *((symbol.name, ctypes.c_void_p) for symbol in abi.nccl_symbols() + abi.host_symbols()),
        ("next", ctypes.c_void_p),
        ("dl", ctypes.c_void_p),
        ("version", ctypes.c_int),
        ("is_host", ctypes.c_int),
        ("path", ctypes.c_char * 4096),
    ]


class Loader:
    """The loader's C functions, compiled on their own."""

    def __init__(self, path):
        self.lib = ctypes.CDLL(str(path))
        self.lib.nccl_api_load.argtypes = [
            ctypes.c_char_p, ctypes.POINTER(ctypes.POINTER(Api)), ctypes.c_char_p, ctypes.c_size_t,
        ]  # fmt: skip
        self.lib.nccl_symbol_name.restype = ctypes.c_char_p

    def load(self, path):
        """Return the table, or the text of the error."""
        api = ctypes.POINTER(Api)()
        text = ctypes.create_string_buffer(1024)
        if self.lib.nccl_api_load(os.fsencode(path), ctypes.byref(api), text, len(text)) == 0:
            return api
        assert not api, "a failed load must leave the result alone"
        return text.value.decode()

    def has(self, api, name):
        return self.lib.nccl_api_has(api, name.encode())

    def probe(self, api, name):
        """Call a function of the table with zeros for arguments."""
        return getattr(self.lib, f"probe_{name}")(api)


def probes():
    """Write a function that calls its namesake in the table, typed as the list says."""
    lines = ['#include "_loader.h"', "#include <string.h>"]
    for symbol in abi.nccl_symbols():
        zeros = ", ".join(f"({param.type}){{0}}" for param in symbol.params)
        call = f"api->{symbol.name}({zeros})"
        body = {
            "ncclResult_t": f"return (int){call};",
            "pynccl_text_t": f'return strcmp({call}, "") == 0 ? {MISSING} : 0;',
            "void": f"{call}; return {MISSING};",
        }[symbol.ret]
        lines.append(f"int probe_{symbol.name}(const struct nccl_api *api) {{ {body} }}")
    return "\n".join(lines)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    source = tmp_path_factory.mktemp("probes") / "probes.c"
    source.write_text(probes())
    return build_shared("libloader.so", [ROOT / "pynccl" / "_loader.c", source])


@pytest.fixture
def loader(built, tmp_path):
    """A loader that has loaded nothing yet: a copy of the file is a library of its own."""
    return Loader(shutil.copy(built, tmp_path / "libloader.so"))


def library(tmp_path, text, name="libother.so"):
    source = tmp_path / "source.c"
    source.write_text(text)
    return build_shared(name, [source])


def test_table_of_a_current_library(loader):
    path = build_nccl_stub()
    api = loader.load(path)
    assert api.contents.version == LATEST
    assert not api.contents.is_host
    assert api.contents.path.decode() == str(path)
    stub = NcclStub(path)
    stub.reset()
    for symbol in abi.nccl_symbols():
        assert loader.has(api, symbol.name), symbol.name
    # Each pointer leads to the function of its own name.
    safe = [s.name for s in abi.nccl_symbols() if s.name.startswith(("ncclAll", "ncclGroup"))]
    for name in safe:
        loader.probe(api, name)
    assert stub.names == safe


def test_host_library_is_told_by_its_marker(loader):
    nccl = loader.load(build_nccl_stub())
    host = loader.load(build_nccl_stub(host=True))
    assert host.contents.is_host
    for symbol in abi.host_symbols():
        assert loader.has(host, symbol.name)
        assert not loader.has(nccl, symbol.name)
        assert getattr(nccl.contents, symbol.name) is None, "NCCL's tables have NULL there"


@pytest.mark.parametrize("version", [21000, 21800, 22300])
def test_what_an_older_library_lacks_is_a_stub(loader, version):
    path = build_nccl_stub(version)
    api = loader.load(path)
    stub = NcclStub(path)
    stub.reset()
    lacking = [symbol.name for symbol in abi.nccl_symbols() if symbol.version > version]
    assert lacking
    for symbol in abi.nccl_symbols():
        assert bool(loader.has(api, symbol.name)) == (symbol.name not in lacking)
    assert {name: loader.probe(api, name) for name in lacking} == dict.fromkeys(lacking, MISSING)
    assert stub.names == [], "a stub for a missing function must not reach the library"
    assert loader.probe(api, "ncclGroupStart") == 0
    assert stub.names == ["ncclGroupStart"]


def test_one_table_for_one_file(loader, tmp_path):
    path = build_nccl_stub()
    first = loader.load(path)
    link = tmp_path / "libnccl.so"
    link.symlink_to(path)
    chain = tmp_path / "chain.so"
    chain.symlink_to(link)
    for name in (path, link, chain):
        again = loader.load(name)
        assert ctypes.addressof(again.contents) == ctypes.addressof(first.contents)
    other = loader.load(shutil.copy(path, tmp_path / "copy.so"))
    assert ctypes.addressof(other.contents) != ctypes.addressof(first.contents)


def test_libraries_side_by_side_keep_their_functions(loader):
    """RTLD_LOCAL: each library answers for itself, although all export the same names."""
    versions = (21000, 21800, 22300, LATEST)
    apis = [loader.load(build_nccl_stub(version)) for version in versions]
    assert [api.contents.version for api in apis] == list(versions)
    stubs = [NcclStub(build_nccl_stub(version)) for version in versions]
    for stub in stubs:
        stub.reset()
    loader.probe(apis[2], "ncclAllReduce")
    assert [stub.names for stub in stubs] == [[], [], ["ncclAllReduce"], []]


def test_a_loaded_library_offers_its_names_to_nobody_else(loader, tmp_path):
    """A global NCCL would capture the calls of another one that is loaded later."""
    assert loader.load(shutil.copy(build_nccl_stub(), tmp_path / "copy.so"))
    assert not hasattr(ctypes.CDLL(None), "ncclGroupStart")


def mapped(path):
    with open("/proc/self/maps") as maps:
        return any(line.rstrip().endswith(str(path)) for line in maps)


def test_a_text_file(loader, tmp_path):
    path = tmp_path / "readme.txt"
    path.write_text("not a library")
    text = loader.load(path)
    assert str(path) in text
    assert "file too short" in text or "invalid ELF header" in text
    assert text.count(str(path)) == 1, "the linker's own copy of the path is left out"


def test_a_missing_file_and_a_folder(loader, tmp_path):
    text = loader.load(tmp_path / "nowhere.so")
    assert text.startswith(f"cannot load {tmp_path / 'nowhere.so'}: ")
    assert "No such file" in text
    assert str(tmp_path) in loader.load(tmp_path)


def test_no_path_at_all(loader):
    # dlopen would take an empty name for the program itself, and dlsym then find whatever is loaded.
    assert "path is empty" in loader.load("")


def test_a_library_that_is_not_nccl(loader, tmp_path):
    path = library(tmp_path, "int nothing_of_nccl(void) { return 1; }\n")
    for _ in range(3):
        text = loader.load(path)
        assert str(path) in text
        assert "not an NCCL library" in text
        assert "ncclGetVersion" in text
    assert not mapped(path), "a failed load must drop the library"


def test_a_library_whose_version_cannot_be_had(loader, tmp_path):
    fails = library(
        tmp_path, "int ncclGetVersion(int *v) { *v = 22000; return 2; }\n", "libfails.so"
    )
    text = loader.load(fails)
    assert str(fails) in text
    assert "ncclGetVersion returned 2" in text
    assert not mapped(fails)
    zero = library(tmp_path, "int ncclGetVersion(int *v) { *v = 0; return 0; }\n", "libzero.so")
    assert "version 0" in loader.load(zero)
    assert not mapped(zero)


def test_a_library_with_an_unresolved_symbol(loader, tmp_path):
    source = (
        "extern int pynccl_test_nowhere(void);\n"
        "int ncclGetVersion(int *v) { return *v = pynccl_test_nowhere(); }\n"
    )
    path = library(tmp_path, source, "libbroken.so")
    text = loader.load(path)
    assert "undefined symbol: pynccl_test_nowhere" in text


def test_the_error_text_is_cut_to_its_room(loader):
    room = ctypes.create_string_buffer(b"x" * 32, 32)
    api = ctypes.POINTER(Api)()
    assert loader.lib.nccl_api_load(b"/nowhere/at/all.so", ctypes.byref(api), room, 12) == -1
    assert room.raw[:12] == b"cannot load\0"
    assert room.raw[12:] == b"x" * 20


def test_threads_that_load_at_once_share_the_tables(loader):
    paths = [build_nccl_stub(version) for version in (21000, 21800, 22300, LATEST)] * 4
    barrier = threading.Barrier(len(paths))
    found = [None] * len(paths)

    def load(i):
        barrier.wait(10)
        found[i] = ctypes.addressof(loader.load(paths[i]).contents)

    threads = [threading.Thread(target=load, args=(i,)) for i in range(len(paths))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert len(set(found)) == 4
    assert all(found[i] == found[i % 4] for i in range(len(paths)))
    # The list holds four tables, however the race went.
    tables = set()
    for head in set(found):
        while head:
            tables.add(head)
            head = Api.from_address(head).next
    assert tables == set(found)


def test_questions_about_the_table(loader):
    lib = loader.lib
    names = [lib.nccl_symbol_name(i).decode() for i in range(lib.nccl_symbol_count())]
    assert names == [symbol.name for symbol in abi.nccl_symbols()]
    assert len(set(names)) == 73
    assert lib.nccl_symbol_name(73) is None
    assert lib.nccl_symbol_name(-1) is None
    for symbol in abi.nccl_symbols():
        assert lib.nccl_symbol_version(symbol.name.encode()) == symbol.version
    assert lib.nccl_symbol_version(b"ncclAllReduc") == 0
    assert lib.nccl_symbol_version(b"pyncclHostStamp") == 0
    api = loader.load(build_nccl_stub())
    assert loader.has(api, "ncclNoSuch") == 0
