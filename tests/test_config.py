"""Environment variables, and which library a ``library=`` argument means."""

import math
import os
import re
import shutil
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest

import pynccl
from helpers.build import build_shared
from helpers.stubs import build_cuda_stub, build_nccl_stub
from pynccl import _config, _nccl
from pynccl.errors import LibraryNotFoundError

# Beside the compiled modules: in an editable install they lie in the build folder.
HOST = str(Path(_nccl.__file__).parent / "host" / "libpynccl_host.so")


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch):
    """What the caller's shell has set decides nothing here."""
    for name in _config.ENV:
        monkeypatch.delenv(name, raising=False)


# ---- variables ------------------------------------------------------------------------------------------


def test_every_row_is_complete():
    for name, row in _config.ENV.items():
        assert row.name == name
        assert row.help.endswith(".")
        assert _config.get(name, {}) == row.default
        assert _config.get(name, {name: "  "}) == row.default, "empty counts as unset"


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("PYNCCL_TIMEOUT", "2.5", 2.5),
        ("PYNCCL_TIMEOUT", "inf", math.inf),
        ("PYNCCL_CAI_SYNC", "0", False),
        ("PYNCCL_CAI_SYNC", "1", True),
        ("PYNCCL_CAI_SYNC", "Off", False),
        ("PYNCCL_LIBRARY", " host ", "host"),
    ],
)
def test_values(name, text, value):
    assert _config.get(name, {name: text}) == value


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("PYNCCL_TIMEOUT", "soon"),
        ("PYNCCL_TIMEOUT", "-1"),
        ("PYNCCL_TIMEOUT", "0"),
        ("PYNCCL_TIMEOUT", "nan"),
        ("PYNCCL_CAI_SYNC", "maybe"),
    ],
)
def test_wrong_values_name_the_variable(name, text):
    with pytest.raises(ValueError, match=f"{name}='{text}' is n"):
        _config.get(name, {name: text})


def test_a_name_outside_the_table_is_a_mistake():
    with pytest.raises(KeyError):
        _config.get("PYNCCL_NO_SUCH", {})


def test_every_variable_that_the_sources_read_is_in_the_table():
    """A getenv somewhere in C or Python that the documentation would not know of."""
    root = Path(__file__).resolve().parents[1] / "pynccl"
    used = set()
    for path in root.rglob("*"):
        if path.suffix in (".py", ".pyx", ".c", ".h"):
            text = path.read_text(encoding="utf-8")
            used.update(re.findall(r"""["'](PYNCCL_[A-Z_]*[A-Z])["']""", text))
    assert {"PYNCCL_LIBRARY", "PYNCCL_LIBCUDA"} <= used
    assert used <= set(_config.ENV)


def test_timeouts(monkeypatch):
    assert _config.timeout() == 1800
    monkeypatch.setenv("PYNCCL_TIMEOUT", "7")
    assert _config.timeout() == 7
    assert _config.timeout(3) == 3.0
    assert _config.timeout(0.25) == 0.25
    assert _config.timeout(0) == 0.0
    assert _config.timeout(timedelta(minutes=2)) == 120.0
    assert _config.timeout(math.inf) == math.inf
    for value in (-1, math.nan, -math.inf, timedelta(seconds=-1)):
        with pytest.raises(ValueError, match="timeout: "):
            _config.timeout(value)
    for value in ("3", True, [3]):
        with pytest.raises(TypeError, match="timeout: "):
            _config.timeout(value)


# ---- choosing a library -----------------------------------------------------------------------------------


@pytest.fixture
def gpu(monkeypatch):
    """Pretend that there is a GPU: a device node, and a driver that can be opened."""
    monkeypatch.setattr(_config, "_has_device_node", lambda: True)
    monkeypatch.setenv("PYNCCL_LIBCUDA", str(build_cuda_stub()))


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(_config, "_has_device_node", lambda: False)


@pytest.fixture
def wheel(monkeypatch, tmp_path):
    """An nvidia wheel in a folder of sys.path; nothing else to be found."""
    folder = tmp_path / "site"
    library = folder / "nvidia" / "nccl" / "lib" / "libnccl.so.2"
    library.parent.mkdir(parents=True)
    shutil.copy(build_nccl_stub(), library)
    monkeypatch.setattr(sys, "path", [str(folder)])
    monkeypatch.setattr(_config, "loaded_nccl", lambda: None)
    return str(library)


@pytest.fixture
def nowhere(monkeypatch, tmp_path):
    """A machine without NCCL."""
    monkeypatch.setattr(sys, "path", [str(tmp_path / "a"), str(tmp_path / "b")])
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "prefix"))
    monkeypatch.setattr(_config, "loaded_nccl", lambda: None)
    monkeypatch.setattr(_config, "_open", lambda name: f"{name}: not on this system")
    return tmp_path


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize("choice", [None, "auto"])
def test_auto_without_a_gpu_is_the_host_library(choice):
    found = _config.find_library(choice)
    assert (found.path, found.kind, found.fallback) == (HOST, "host", True)
    assert "no device node" in found.reason


@pytest.mark.usefixtures("gpu")
def test_auto_with_a_gpu_is_nccl(wheel):
    found = _config.find_library("auto")
    assert (found.path, found.kind, found.fallback) == (wheel, "nccl", False)


@pytest.mark.usefixtures("gpu")
def test_a_gpu_without_nccl_is_an_error_and_no_fallback(monkeypatch, nowhere):
    monkeypatch.setattr(_config, "gpu_absent", lambda: "")
    with pytest.raises(LibraryNotFoundError) as caught:
        _config.find_library("auto")
    text = str(caught.value)
    assert "there is a GPU" in text
    for place in ("a", "b"):
        assert str(nowhere / place / "nvidia" / "nccl" / "lib" / "libnccl.so.2") in text
    assert "not on this system" in text
    assert "pip install nvidia-nccl-cu12" in text
    assert isinstance(caught.value, ImportError)


def test_a_device_node_without_a_driver_is_no_gpu(monkeypatch, tmp_path):
    monkeypatch.setattr(_config, "_has_device_node", lambda: True)
    monkeypatch.setenv("PYNCCL_LIBCUDA", str(tmp_path / "libcuda.so.1"))
    found = _config.find_library("auto")
    assert found.fallback
    assert found.kind == "host"
    assert "no CUDA driver" in found.reason
    assert str(tmp_path) in found.reason


@pytest.mark.usefixtures("gpu")
def test_explicit_choices_are_not_changed(monkeypatch, wheel):
    monkeypatch.setenv("PYNCCL_LIBRARY", "host")
    assert _config.find_library("nccl").path == wheel
    monkeypatch.setenv("PYNCCL_LIBRARY", "nccl")
    assert _config.find_library("host").path == HOST
    path = build_nccl_stub()
    found = _config.find_library(path)
    assert (found.path, found.kind) == (str(path), "")


@pytest.mark.parametrize("choice", [None, "auto"])
def test_the_variable_takes_the_place_of_auto(monkeypatch, wheel, choice):
    monkeypatch.setenv("PYNCCL_LIBRARY", "nccl")
    assert _config.find_library(choice).path == wheel
    monkeypatch.setenv("PYNCCL_LIBRARY", "host")
    found = _config.find_library(choice)
    assert (found.path, found.fallback) == (HOST, False), "a choice, not a fallback"
    path = str(build_nccl_stub())
    monkeypatch.setenv("PYNCCL_LIBRARY", path)
    assert _config.find_library(choice).path == path
    monkeypatch.setenv("PYNCCL_LIBRARY", "hots")
    with pytest.raises(ValueError, match="hots"):
        _config.find_library(choice)


@pytest.mark.usefixtures("no_gpu")
def test_nccl_may_be_asked_for_without_a_gpu(wheel):
    assert _config.find_library("nccl").path == wheel


@pytest.mark.usefixtures("nowhere")
def test_nccl_asked_for_and_not_there():
    with pytest.raises(LibraryNotFoundError, match="asks for NCCL, but no NCCL was found"):
        _config.find_library("nccl")


def test_words_and_paths(tmp_path):
    for word in ("ncll", "Host", "gpu"):
        with pytest.raises(ValueError, match=f"library: '{word}' is neither"):
            _config.find_library(word)
    with pytest.raises(LibraryNotFoundError, match="no such file"):
        _config.find_library(tmp_path / "libnccl.so.2")
    dangling = tmp_path / "libdangling.so"
    dangling.symlink_to(tmp_path / "gone")
    with pytest.raises(LibraryNotFoundError, match="a link to a file that is not there"):
        _config.find_library(dangling)
    assert _config.find_library("libnccl.so.2").path == "libnccl.so.2", "the linker's to find"
    for wrong in (3, b"libnccl.so.2", ["host"]):
        with pytest.raises(TypeError):
            _config.find_library(wrong)


def test_symbolic_links_count(monkeypatch, tmp_path):
    """A wheel, or an environment, whose libnccl.so.2 is a link to the real file."""
    real = tmp_path / "store" / "libnccl.so.2.99"
    real.parent.mkdir()
    shutil.copy(build_nccl_stub(), real)
    link = tmp_path / "site" / "nvidia" / "nccl" / "lib" / "libnccl.so.2"
    link.parent.mkdir(parents=True)
    link.symlink_to(real)
    monkeypatch.setattr(sys, "path", ["", str(tmp_path / "site")])
    monkeypatch.setattr(_config, "loaded_nccl", lambda: None)
    assert _config.find_library("nccl").path == str(link)


def test_the_environments_own_folder(monkeypatch, nowhere):
    library = nowhere / "prefix" / "lib" / "libnccl.so.2"
    library.parent.mkdir(parents=True)
    shutil.copy(build_nccl_stub(), library)
    assert _config.find_library("nccl").path == str(library)


# ---- what is loaded already -------------------------------------------------------------------------------

MAPS = """\
7f0000000000-7f0000001000 r-xp 00000000 08:01 11 /usr/lib/libc.so.6
7f0000001000-7f0000002000 r-xp 00000000 08:01 12 {plugin}
7f0000002000-7f0000003000 r-xp 00000000 08:01 13 /gone/libnccl.so.2 (deleted)
7f0000003000-7f0000004000 rw-p 00000000 00:00 0
7f0000004000-7f0000005000 r-xp 00000000 08:01 14 {library}
7ffd00000000-7ffd00001000 rw-p 00000000 00:00 0 [stack]
"""


@pytest.mark.parametrize("name", ["libnccl.so", "libnccl.so.2", "libnccl.so.2.21.5"])
def test_a_loaded_library_is_found_by_its_name(tmp_path, name):
    folder = tmp_path / "with a space"
    folder.mkdir()
    library, plugin = folder / name, folder / "libnccl-net.so"
    library.touch()
    plugin.touch()
    maps = tmp_path / "maps"
    maps.write_text(MAPS.format(library=library, plugin=plugin))
    assert _config.loaded_nccl(str(maps)) == str(library)
    library.unlink()
    assert _config.loaded_nccl(str(maps)) is None


def test_no_maps_no_answer(tmp_path):
    assert _config.loaded_nccl(str(tmp_path / "none")) is None


def test_what_another_package_loaded_comes_first(tmp_path):
    """In a process that has an NCCL already, with another one installed as a wheel."""
    mine = tmp_path / "site" / "nvidia" / "nccl" / "lib" / "libnccl.so.2"
    mine.parent.mkdir(parents=True)
    shutil.copy(build_nccl_stub(22300), mine)
    script = (
        "import ctypes, sys; from pynccl import _config; sys.path.insert(0, sys.argv[1]); "
        "print(_config.find_library('nccl').path); ctypes.CDLL(sys.argv[2]); "
        "print(_config.find_library('nccl').path)"
    )
    loaded = str(build_nccl_stub())
    done = run(script, str(tmp_path / "site"), loaded)
    assert done.splitlines() == [str(mine), loaded]


def run(script, *arguments, **environment):
    """Run a script in a fresh interpreter, outside the clone's root, and return what it printed."""
    clean = {k: v for k, v in os.environ.items() if k not in _config.ENV}
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        env=clean | environment, cwd="/", capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_device_nodes(tmp_path):
    def has(*names):
        folder = tmp_path / "-".join(names or ("empty",))
        folder.mkdir()
        for name in names:
            (folder / name).touch()
        return _config._has_device_node(str(folder))

    assert has("nvidia0")
    assert has("null", "nvidia17")
    assert has("dxg")
    assert not has()
    assert not has("nvidiactl", "nvidia-uvm", "nvidia")
    assert not _config._has_device_node(str(tmp_path / "none"))


# ---- through the public names ---------------------------------------------------------------------------


def test_import_needs_and_loads_nothing():
    """Importing the package opens no library, whatever is installed, and no heavy module."""
    script = (
        # What was there before does not count: the hook of an editable install, say.
        "import sys; before = {*sys.modules}; import pynccl; maps = open('/proc/self/maps').read(); "
        "print([n for n in ('libnccl', 'libcuda', 'libpynccl_host') if n in maps], "
        "[m for m in ('numpy', 'ctypes', 'numba', 'typing', 're') if m in {*sys.modules} - before])"
    )
    assert run(script, PYNCCL_LIBRARY="/nowhere/libnccl.so.2").strip() == "[] []"


@pytest.mark.parametrize("kind", ["text", "missing", "other"])
def test_a_bad_library_is_one_error_each_time(tmp_path, monkeypatch, kind):
    path = tmp_path / "libbad.so"
    if kind == "text":
        path.write_text("this is text")
    elif kind == "other":
        shutil.copy(build_cuda_stub(), path)
    reasons = {"text": "file too short", "missing": "no such file", "other": "ncclGetVersion"}
    uses = [
        lambda: pynccl.unique_id(library=path),
        lambda: pynccl.version_code(library=str(path)),
        lambda: pynccl.library(path),
        lambda: pynccl.init_all(1, library=str(path)),
    ]
    for _ in range(2):
        for use in uses:
            with pytest.raises(LibraryNotFoundError) as caught:
                use()
            assert str(path) in str(caught.value)
            assert reasons[kind] in str(caught.value)
    monkeypatch.setenv("PYNCCL_LIBRARY", str(path))
    with pytest.raises(LibraryNotFoundError, match=reasons[kind]):
        pynccl.unique_id()


def test_the_variable_wins_at_the_first_use():
    stub = str(build_nccl_stub(22300, host=True))
    script = "import pynccl; print(pynccl.library().path, pynccl.version_code())"
    assert run(script, PYNCCL_LIBRARY=stub).split() == [stub, "22300"]


def test_an_old_library_works_for_what_it_has():
    """An emulation of 2.10: what came later is refused by name and version, the rest works."""
    path = build_nccl_stub(21000, host=True)
    with pynccl.Communicator(2, pynccl.unique_id(library=path), 0, library=path) as comm:
        data = memoryview(bytearray(16)).cast("f")
        comm.all_reduce(data)
        missing = dict(comm.library.missing)
        assert missing["ncclCommSplit"] == 21800
        where = f"loaded 2.10.0 from {path}"
        with pytest.raises(
            pynccl.UnsupportedError,
            match=rf"ncclRedOpCreatePreMulSum needs NCCL 2\.11, {where}",
        ):
            comm.premul_sum(2.0, "float32")
        with pytest.raises(
            pynccl.UnsupportedError, match=rf"ncclCommSplit needs NCCL 2\.18, {where}"
        ):
            comm.split(0)
        comm.all_reduce(data)


def test_a_library_may_lack_what_its_version_has(tmp_path):
    """The text must not send the reader to an older version than the one that is loaded."""
    source = tmp_path / "odd.c"
    source.write_text("int ncclGetVersion(int *v) { *v = 23203; return 0; }\n")
    path = str(build_shared("libodd.so", [source]))
    with pytest.raises(pynccl.UnsupportedError, match=rf"^ncclSend is not offered by {path}$"):
        pynccl.library(path).require("ncclSend")
    with pytest.raises(ValueError, match="NCCL has no function ncclSned"):
        pynccl.library(path).require("ncclSned")


FALLBACK = """
import sys
import warnings
import pynccl
from pynccl import _config

_config._has_device_node = lambda: False
warnings.simplefilter("always")
with warnings.catch_warnings(record=True) as caught:
    pynccl.unique_id(*sys.argv[1:])
    uid = pynccl.unique_id(*sys.argv[1:])
    pynccl.Communicator(1, uid, 0).close()
for each in caught:
    print(each.category.__name__, each.filename, each.lineno, each.message)
"""


def test_the_fallback_is_said_once_and_where():
    (line,) = run(FALLBACK).splitlines()
    assert line.startswith("HostFallbackWarning <string> 10 "), "the user's own line"
    assert "no device node" in line
    assert "PYNCCL_LIBRARY=host" in line


def test_a_chosen_host_library_is_no_fallback():
    assert run(FALLBACK, PYNCCL_LIBRARY="host") == ""
