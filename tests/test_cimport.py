"""What other Cython, C and C++ code can build on, as installed: docs/cython.md, carried out.

The page's own code is compiled, as C and as C++ with every warning of ``-Wall`` an error, by its recipes for
setuptools and Meson, and run.
"""

from __future__ import annotations

import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import numpy as np
import pytest

import pynccl
from helpers.build import compiler
from helpers.documents import ROOT, blocks
from helpers.ranks import create, new_id
from helpers.scripts import wait_until

PAGE = {
    block.directives["file"]: block.text
    for block in blocks(ROOT / "docs" / "cython.md")
    if "file" in block.directives
}
SHOWN = {
    command.removeprefix("$ python "): output
    for block in blocks(ROOT / "docs" / "cython.md")
    if block.language == "console"
    for command, _, output in [block.text.partition("$ python ")[2].partition("\n")]
}
INCLUDE = Path(pynccl.get_include())
SUFFIX = sysconfig.get_config_var("EXT_SUFFIX")
STRICT = ("-Wall", "-Werror", "-O1", "-shared", "-fPIC")
BIN = Path(sys.executable).parent
DEV = "needs the packages of the extra 'dev'"


def run(*command: object, cwd: Path, limit: float = 120.0) -> str:
    """Run a command outside of the source tree, whose pynccl is not compiled; give its output."""
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd, text=True, timeout=limit, check=False,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
        env={**os.environ, "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": str(cwd)},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    return done.stdout


def lay(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).write_text(PAGE[name])
    return folder


def cxx() -> list[str]:
    """The C++ compiler: the user's choice, else the one beside the C compiler."""
    if chosen := os.environ.get("CXX"):
        return shlex.split(chosen)
    found = shutil.which("g++") or shutil.which("clang++") or shutil.which("c++")
    if found is None:
        pytest.skip("no C++ compiler")
    return [found]


@pytest.fixture(scope="module", params=["c", "cpp"])
def ring(request, tmp_path_factory):
    """The page's module, compiled as C or as C++; a folder that holds it, and the module."""
    pytest.importorskip("Cython", reason=DEV)
    command = cxx() if request.param == "cpp" else compiler()
    folder = lay(tmp_path_factory.mktemp(request.param), "ring.pyx", "use.py")
    language = ["--cplus"] if request.param == "cpp" else []
    source = f"ring.{request.param}"
    run(
        sys.executable,
        "-m",
        "cython",
        "-3",
        "-Werror",
        *language,
        "ring.pyx",
        "-o",
        source,
        cwd=folder,
    )
    run(
        *command, *STRICT, f"-I{sysconfig.get_path('include')}", f"-I{INCLUDE}",
        source, "-o", f"ring{SUFFIX}", cwd=folder,
    )  # fmt: skip
    spec = importlib.util.spec_from_file_location("ring", folder / f"ring{SUFFIX}")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.folder = folder
    return module


# ---- what is installed --------------------------------------------------------------------------------


def test_get_include_has_every_header_and_declaration():
    assert INCLUDE.is_absolute()
    shipped = {path.name for path in (ROOT / "pynccl").glob("*.pxd")} | {"nccl_abi.h", "_loader.h"}
    missing = {name for name in shipped if not (INCLUDE / name).is_file()}
    assert not missing
    for path in (ROOT / "pynccl").glob("*.pxd"):
        assert (INCLUDE / path.name).read_text() == path.read_text(), "reinstall after a change"


def test_the_page_and_the_head_of_the_pxd_name_the_same():
    page = (ROOT / "docs" / "cython.md").read_text()
    head = (INCLUDE / "_nccl.pxd").read_text().partition("\n\nfrom ")[0]
    for name in (
        "begin_call", "end_call", "reaches", "CommBase", "view", "release", "Ask", "BufferView", "Buffer",
    ):  # fmt: skip
        assert name in page
        assert name in head


# ---- the page's module, with ranks as threads -------------------------------------------------------------


def test_the_page_prints_what_it_shows(ring):
    # Two ranks in two threads: a call that held the GIL would never let the other one come.
    assert run(sys.executable, "use.py", cwd=ring.folder) == SHOWN["use.py"]


ARRAYS = {
    "float32": lambda: np.arange(6, dtype="f4").reshape(2, 3),
    "float64 in Fortran order": lambda: np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    "complex128": lambda: np.arange(4) * (1 + 2j),
    "int32": lambda: np.arange(5, dtype="i4") * 2,
    "memoryview": lambda: memoryview(bytearray(8)).cast("d"),
    "Buffer": lambda: pynccl.Buffer(np.ones(3, "f4")),
    "empty": lambda: np.empty(0),
}


def as_numpy(x):
    return np.asarray(x.obj if isinstance(x, pynccl.Buffer) else x)


@pytest.mark.parametrize("make", ARRAYS.values(), ids=ARRAYS.keys())
def test_the_reader_takes_any_array(ring, threads, make):
    def job(comm):
        x = make()
        values = as_numpy(x)
        values += comm.rank * 4
        assert ring.mean(comm, x) is x
        return values

    for got in threads(2).run(job):
        assert np.array_equal(got, as_numpy(make()) + 2)


def test_a_loop_of_its_own_between_calls(ring, threads):
    def job(comm):
        x = np.arange(1000.0) * (comm.rank + 1)
        total = np.full(1000, 0.5)
        return ring.ring_sum(comm, x, np.empty(1000), total)

    for got in threads(4).run(job):
        assert np.array_equal(got, np.arange(1000.0) * 10 + 0.5)


@pytest.mark.parametrize(
    ("wrong", "error", "words"),
    [
        (lambda: [1.0], TypeError, "mean: x is a 'list'"),
        (lambda: np.zeros((4, 4))[:, 1], BufferError, "mean: x is not contiguous"),
        (lambda: b"abc", BufferError, "mean: x is read-only"),
        (lambda: np.zeros(3, "M8[s]"), TypeError, "no dtype that NCCL averages"),
        (lambda: np.zeros(3, bool), TypeError, "no dtype that NCCL averages"),
        (lambda: pynccl.Buffer(ptr=4096, count=1, dtype="f4", device=0), ValueError, "not in the memory"),
        (lambda: None, TypeError, "mean: x is a 'NoneType'"),
    ],
    ids=["list", "strided", "read-only", "datetime", "bool", "on a device", "None"],
)  # fmt: skip
def test_wrong_arrays_raise_before_any_call(ring, alone, wrong, error, words):
    with pytest.raises(error, match=words):
        ring.mean(alone, wrong())
    assert ring.mean(alone, np.ones(2)).tolist() == [1.0, 1.0]


def test_a_communicator_that_cannot_be_used_is_refused(ring, alone):
    x = np.ones(2)
    with pytest.raises(ValueError, match="mean: a group is open"), pynccl.group():
        ring.mean(alone, x)
    with pytest.raises(TypeError, match="comm"):
        ring.mean(None, x)
    closed = create(1, new_id(), 0)
    closed.close()
    with pytest.raises(pynccl.CommunicatorClosedError, match="mean: this communicator is closed"):
        ring.mean(closed, x)


def test_a_result_code_becomes_the_exception_of_a_method(ring, threads):
    def job(comm):
        ring.mean(comm, np.ones(3 + comm.rank))

    for outcome in threads(2).outcomes(job):
        assert isinstance(outcome.error, pynccl.InvalidUsageError), outcome
        assert outcome.error.function == "ncclAllReduce"
        assert outcome.error.rank == outcome.rank
        assert "count=3" in str(outcome.error)


def occupied(comm) -> bool:
    try:
        return comm.handle < 0
    except pynccl.InvalidUsageError as error:
        return "another thread is inside a call" in str(error)


def test_it_is_occupied_during_the_call_and_free_after_it(ring, crew):
    uid = new_id()
    left, right = (o.value for o in crew(2).run(lambda rank: create(2, uid, rank), 30.0))
    waiter = crew(1)
    waiter.start(lambda _: ring.mean(left, np.zeros(2)))
    try:
        wait_until(lambda: occupied(left), what="no call was seen under way")
    finally:
        ring.mean(right, np.ones(2))
        (outcome,) = waiter.gather(30.0)
    assert outcome.error is None
    left.close()
    right.close()


def test_it_is_free_after_a_failed_call(ring, threads):
    def job(comm):
        with pytest.raises(pynccl.InvalidUsageError, match="ncclAllReduce"):
            ring.mean(comm, np.ones(1 + comm.rank))
        return occupied(comm)

    assert threads(2).run(job) == [False, False]
    threads(2).renew()


MISUSE = """
from pynccl._nccl cimport CommBase, begin_call, end_call, ncclSuccess

def begin(CommBase comm):
    begin_call(comm, b"mine")

def end(CommBase comm):
    end_call(comm, ncclSuccess, b"mine")
"""


def test_calls_that_are_ended_twice_or_begun_on_none_are_errors(tmp_path, alone):
    pytest.importorskip("Cython", reason=DEV)
    (tmp_path / "misuse.pyx").write_text(MISUSE)
    run(sys.executable, "-m", "cython", "-3", "misuse.pyx", cwd=tmp_path)
    run(
        *compiler(), *STRICT, f"-I{sysconfig.get_path('include')}", f"-I{INCLUDE}",
        "misuse.c", "-o", f"misuse{SUFFIX}", cwd=tmp_path,
    )  # fmt: skip
    spec = importlib.util.spec_from_file_location("misuse", tmp_path / f"misuse{SUFFIX}")
    misuse = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(misuse)
    misuse.begin(alone)
    misuse.end(alone)
    for comm in (alone, None):
        with pytest.raises(RuntimeError, match="^end_call: no begin_call came before this of mine"):
            misuse.end(comm)
    with pytest.raises(TypeError, match="^mine: comm is None"):
        misuse.begin(None)
    assert alone.all_reduce(np.ones(2)).tolist() == [1.0, 1.0]


# ---- the page's recipes -----------------------------------------------------------------------------------


def test_the_recipe_for_setuptools(tmp_path):
    for package in ("Cython", "setuptools"):
        pytest.importorskip(package, reason=DEV)
    lay(tmp_path, "ring.pyx", "setup.py", "use.py")
    run(sys.executable, "setup.py", "build_ext", "--inplace", cwd=tmp_path)
    assert run(sys.executable, "use.py", cwd=tmp_path) == SHOWN["use.py"]


def test_the_recipe_for_meson(tmp_path):
    pytest.importorskip("Cython", reason=DEV)
    path = f"{BIN}{os.pathsep}{os.environ['PATH']}"
    if not all(shutil.which(tool, path=path) for tool in ("meson", "ninja", "cython")):
        pytest.skip(DEV)
    lay(tmp_path, "ring.pyx", "meson.build", "use.py")
    # Which Python: that of the environment in which Meson was found may be another one.
    (tmp_path / "native.ini").write_text(f"[binaries]\npython = {sys.executable!r}\n")
    run("meson", "setup", "build", "--native-file", "native.ini", cwd=tmp_path)
    run("meson", "compile", "-C", "build", cwd=tmp_path)
    (built,) = (tmp_path / "build").glob("ring*.so")
    shutil.copy(built, tmp_path)
    assert run(sys.executable, "use.py", cwd=tmp_path) == SHOWN["use.py"]


@pytest.mark.parametrize("language", ["c", "c++"])
def test_plain_c_and_cpp_can_include_the_header(tmp_path, language):
    command = cxx() if language == "c++" else compiler()
    lay(tmp_path, "count.c", "count.py")
    run(
        *command, "-x", language, *STRICT, "-Wextra", f"-I{INCLUDE}", "count.c", "-o", "libcount.so", "-ldl",
        cwd=tmp_path,
    )  # fmt: skip
    assert run(sys.executable, "count.py", cwd=tmp_path) == SHOWN["count.py"]
