"""The rules of the house, checked: who may use whom, sizes, docstrings, and tables that must agree.

These tests read the source tree; those that need the compiled package import the installed one.
A new collective, environment variable or public name touches several places: each missing one fails here.
"""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

import pynccl
import pynccl.distributed
import pynccl.multi

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "pynccl"
# Where the compiled modules are: in an editable install that is not where the Python files are.
INSTALLED = Path(sys.modules["pynccl._nccl"].__file__).parent

MAX_LINES = 600
SOURCE = {".py", ".pyi", ".pyx", ".pxd", ".c", ".h", ".sh"}

# Who may use whom, by module; "*" stands for every public name. One-way: nothing here may form a circle.
BASE = {"enums", "errors"}
BUFFER = BASE | {"_elem", "_device", "_view", "_buffer"}
LAYERS: dict[str, set[str]] = {
    "enums": set(),
    "errors": {"enums"},
    "_config": BASE,
    "_environ": BASE | {"_config"},
    "_rendezvous": BASE | {"_config", "_environ"},
    "_scalar": BASE,
    "_stream": BASE,
    "_device": BASE | {"_config"},
    "_elem": BASE,
    "_ndarray": BASE | {"_elem"},
    "_view": BASE | {"_device", "_elem", "_ndarray"},
    "_dlpack": BASE | {"_device", "_elem", "_ndarray", "_view"},
    "_numba": BASE | {"_device", "_elem", "_ndarray", "_view"},
    "_torch": BASE | {"_dlpack", "_elem", "_view"},
    "_interface": BASE | {"_device", "_elem", "_ndarray", "_view"},
    "_buffer": BASE
    | {
        "_config",
        "_device",
        "_elem",
        "_ndarray",
        "_view",
        "_dlpack",
        "_interface",
        "_numba",
        "_torch",
    },
    "_alloc": BUFFER,
    "_fields": set(),
    "_keep": set(),
    "_call": BUFFER | {"_stream", "_fields"},
    "_nccl": BUFFER | {"_call", "_alloc", "_config", "_keep"},
    "_queue": BASE | {"_call", "_config", "_keep", "_nccl"},
    "_collectives": BUFFER | {"_call", "_nccl", "_scalar"},
    "_group": BUFFER | {"_call", "_keep", "_nccl"},
    "_uid": BUFFER | {"_nccl"},
    "_params": BUFFER | {"_nccl"},
    "_end": BUFFER | {"_nccl"},
    "_settings": BUFFER | {"_fields", "_nccl"},
    "_configured": {"_call", "_fields", "_nccl"},
    "_memory": BUFFER | {"_nccl", "_collectives"},
    "_family": BUFFER
    | {"_nccl", "_collectives", "_fields", "_memory", "_uid", "_config", "_settings"},
    "_comm": BUFFER
    | {"_call", "_nccl", "_collectives", "_fields", "_uid", "_end", "_config", "_family"},
    "_init": BASE | {"_settings", "_device", "_uid", "_comm", "_group", "_config", "_rendezvous"},
    "_cliques": BASE | {"_nccl", "_group", "_init"},
    "_batch": BUFFER | {"_call", "_keep", "_nccl", "_cliques"},
    "_lists": BUFFER | {"_alloc", "_call", "_nccl", "_comm", "_batch"},
    "multi": BASE | {"_buffer", "_cliques", "_comm", "_lists", "_uid"},
    "distributed": BASE,
    "host": {"*", "_config", "_queue"},
    "cli": {"*", "host", "_config", "_environ", "_rendezvous"},
    "__main__": {"cli"},
}
# Allowed against the direction, inside a function, each with its reason.
UPWARD = {
    ("_config", "_nccl"),  # only for the place of its file: the host library lies beside it
}
# Libraries that a module may import, and then only inside a function.
LAZY: dict[str, set[str]] = {
    "_alloc": {"numpy", "numba", "cupy", "torch", "ml_dtypes"},
    "cli": {"numba", "cupy", "ml_dtypes"},
}
# Modules that only the ranks of `pynccl perf` import, once it is known that the library is there.
EAGER: dict[str, set[str]] = {
    "_perf_data.py": {"numpy"},
    "_perf_rank.py": {"numpy"},
}
# Our own headers, by the file that includes them (a folder stands for its files).
HEADERS: dict[str, set[str]] = {
    "nccl_abi.h": set(),
    "_loader": {"nccl_abi.h", "_loader.h"},
    "_cuda": {"_cuda.h"},
    "_call": {"nccl_abi.h"},
    "_device": {"_cuda.h"},
    "_end": {"pthread.h"},
    "_ndarray": {"Python.h"},
    "_nccl": {"nccl_abi.h", "_loader.h", "_threads.h"},
    "_queue": {"Python.h"},
    "_threads": {"nccl_abi.h"},
}


@cache
def tree() -> tuple[Path, ...]:
    """Every file of the project: what git tracks, or in an unpacked sdist what lies there."""
    listed = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files", "-z"], capture_output=True, text=True, check=False
    )
    if listed.returncode == 0 and listed.stdout:
        files = [ROOT / name for name in listed.stdout.split("\0") if name]
    else:
        skip = {"build", "dist", "__pycache__"}
        files = [
            path
            for path in ROOT.rglob("*")
            if not any(
                part in skip or (part.startswith(".") and part != ".ci")
                for part in path.relative_to(ROOT).parts
            )
        ]
    return tuple(sorted(path for path in files if path.is_file()))


def sources(*suffixes: str, under: Path = ROOT) -> list[Path]:
    return [path for path in tree() if path.suffix in suffixes and under in path.parents]


def module_of(path: Path) -> str:
    """Give the name by which LAYERS knows a file of the package."""
    return path.relative_to(PACKAGE).parts[0].split(".")[0]


# --- Layers ---------------------------------------------------------------------------------------


def python_imports(path: Path) -> list[tuple[str, list[str], bool]]:
    """List (module, names, at module level) for each import in a Python file."""
    body = ast.parse(path.read_text(), str(path))
    package = ["pynccl", *path.relative_to(PACKAGE).parts[:-1]]
    found = []
    lazy = {
        id(node)
        for function in ast.walk(body)
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef))
        for node in ast.walk(function)
    }
    for node in ast.walk(body):
        if isinstance(node, ast.Import):
            found += [(alias.name, [], id(node) not in lazy) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            name = ".".join([*base, *([node.module] if node.module else [])])
            found.append((name, [alias.name for alias in node.names], id(node) not in lazy))
    return found


def cython_imports(path: Path) -> list[tuple[str, list[str], bool]]:
    """List (module, names, at module level) for each import and cimport in a Cython file."""
    text = re.sub(r"\\\n", " ", path.read_text())
    text = re.sub(r'"""(?s:.*?)"""', "", text)
    # `from x import (a,\n b)` on one line
    text = re.sub(r"\(([^()]*)\)", lambda m: "(" + m.group(1).replace("\n", " ") + ")", text)
    found = []
    for line in text.splitlines():
        top = not line.startswith((" ", "\t"))
        code = line.split("#")[0].strip()
        if match := re.match(r"from\s+(\S+)\s+c?import\s+(.+)", code):
            name = match.group(1)
            if name.startswith("."):
                name = "pynccl" + ("." + name[1:] if name != "." else "")
            names = [
                part.split()[0] for part in match.group(2).strip("() ,").split(",") if part.strip()
            ]
            found.append((name, names, top))
        elif match := re.match(r"c?import\s+(.+)", code):
            found += [(part.split()[0], [], top) for part in match.group(1).split(",")]
    return found


def faults_of_imports(path: Path, imports: list[tuple[str, list[str], bool]]) -> list[str]:
    me = module_of(path)
    allowed = LAYERS[me]
    faults = []
    for name, names, top in imports:
        first, *rest = name.split(".")
        if first != "pynccl":
            known = first in sys.stdlib_module_names or first in {
                "libc",
                "posix",
                "cpython",
                "cython",
            }
            may = EAGER.get(path.name, set()) | (set() if top else LAZY.get(me, set()))
            if not known and first not in may:
                faults.append(f"{path.name}: imports {name}")
            continue
        targets = (
            [rest[0]]
            if rest
            else [
                n
                for n in names
                if (PACKAGE / f"{n}.pyx").exists()
                or (PACKAGE / f"{n}.py").exists()
                or (PACKAGE / n).is_dir()
            ]
        )
        if not rest and not targets and "*" not in allowed and me != "__init__":
            faults.append(f"{path.name}: imports the package itself")
        faults += [
            f"{path.name}: uses {t}"
            for t in targets
            if t != me
            and t not in allowed
            and not ("*" in allowed and not t.startswith("_"))
            and (top or (me, t) not in UPWARD)
        ]
    return faults


def test_every_module_has_a_layer():
    modules = {module_of(path) for path in sources(".py", ".pyx", under=PACKAGE)}
    assert modules - {"__init__"} == set(LAYERS)


def test_layers_form_no_circle():
    done: set[str] = set()
    while len(done) < len(LAYERS):
        ready = {m for m, uses in LAYERS.items() if m not in done and uses - {"*"} <= done}
        assert ready, f"these use each other: {sorted(set(LAYERS) - done)}"
        done |= ready


def test_python_files_import_only_what_their_layer_may():
    faults = []
    for path in sources(".py", under=PACKAGE):
        if path != PACKAGE / "__init__.py":
            faults += faults_of_imports(path, python_imports(path))
    assert not faults


def test_cython_files_import_only_what_their_layer_may():
    faults = []
    for path in sources(".pyx", ".pxd", under=PACKAGE):
        faults += faults_of_imports(path, cython_imports(path))
    assert not faults


def test_headers_are_included_only_where_they_belong():
    faults = []
    for path in sources(".pyx", ".pxd", ".c", ".h", under=PACKAGE):
        include = (
            r'extern from "([^"]+)"'
            if path.suffix in {".pyx", ".pxd"}
            else r'#\s*include\s+"([^"]+)"'
        )
        for header in re.findall(include, path.read_text()):
            if PACKAGE / "host" in path.parents:
                allowed = (
                    header in {"nccl_abi.h", "../../nccl_abi.h"} or (path.parent / header).exists()
                )
            else:
                allowed = header in HEADERS.get(path.name, HEADERS.get(path.stem, set()))
            if not allowed:
                faults.append(f"{path.relative_to(ROOT)} includes {header}")
    assert not faults


def test_the_c_code_knows_nothing_of_python_and_cuda_headers():
    # The host library is for any client; the bindings must build with no CUDA toolkit.
    for path in sources(".c", ".h", under=PACKAGE):
        included = re.findall(r"#\s*include\s+<([^>]+)>", path.read_text())
        assert not [h for h in included if "ython" in h or "cuda" in h or "nccl" in h], path.name


# --- Sizes, paths, changelog ----------------------------------------------------------------------


def test_no_source_is_over_600_lines():
    sizes = {path.relative_to(ROOT): path.read_text().count("\n") for path in sources(*SOURCE)}
    assert {path: n for path, n in sizes.items() if n > MAX_LINES} == {}


def test_no_cython_include_files():
    # .pxi files have no import graph, and cython-lint does not read them.
    assert sources(".pxi") == []


def test_every_c_file_says_what_it_owns():
    for path in sources(".c", under=PACKAGE):
        head = re.match(r"\s*/\*(?s:(.*?))\*/", path.read_text())
        assert head, f"{path.name} does not open with a comment"
        lines = head.group(0).strip().count("\n") + 1
        assert 3 <= lines <= 40, f"{path.name}: a head of 5 to 15 lines is wanted, not {lines}"


def test_no_path_of_a_build_machine():
    # Spelled in pieces, or this file would be the first to be found.
    places = "|".join(["wo" + "rk", "ro" + "ot", "fa" + "rm", "ho" + "me"])
    pattern = re.compile(rf"(?<![\w.~$}}])/(?:(?:{places})/|tm" + r"p/[A-Za-z])")
    faults = []
    for path in tree():
        try:
            text = path.read_text()
        except UnicodeDecodeError:
            continue
        faults += [
            f"{path.relative_to(ROOT)}:{number}: {line.strip()[:80]}"
            for number, line in enumerate(text.splitlines(), 1)
            if pattern.search(line)
        ]
    assert not faults


def test_the_changelog_has_its_form():
    kinds = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
    lines = (ROOT / "CHANGELOG.md").read_text().splitlines()
    assert lines[0] == "# Changelog"
    releases = [line for line in lines if line.startswith("## ")]
    assert releases[0] == "## [Unreleased]"
    for line in releases[1:]:
        assert re.fullmatch(r"## \[\d+\.\d+\.\d+\] - \d{4}-\d\d-\d\d", line), line
    assert {line[4:] for line in lines if line.startswith("### ")} <= kinds


def test_meson_lists_every_file_of_the_package():
    text = (PACKAGE / "meson.build").read_text()
    (block,) = re.findall(r"^sources = \[\n(.*?)^\]", text, re.M | re.S)
    listed = set(re.findall(r"'([^']+)'", block))
    shipped = {
        str(path.relative_to(PACKAGE)) for path in sources(".py", ".pyi", ".pxd", under=PACKAGE)
    } | {"py.typed", "nccl_abi.h"}
    assert shipped <= listed, "not installed: " + ", ".join(sorted(shipped - listed))
    missing = {name for name in listed if not (PACKAGE / name).exists()}
    assert not missing, "listed but not there: " + ", ".join(sorted(missing))


# --- What is loaded and exported ------------------------------------------------------------------


def test_import_loads_no_array_library_and_no_nccl(tmp_path):
    code = (
        "import sys, pynccl\n"
        "print(*sorted({'numpy', 'numba', 'cupy', 'torch', 'asyncio', 'multiprocessing', 'typing_extensions'}"
        " & set(sys.modules)))\n"
        "print(*{line.split('/')[-1].strip() for line in open('/proc/self/maps')"
        " if 'libnccl' in line or 'libcuda' in line or 'pynccl_host' in line})\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert done.stdout == "\n\n"


def exported(library: Path) -> set[str]:
    done = subprocess.run(
        ["nm", "-D", "--defined-only", str(library)], capture_output=True, text=True, check=True
    )
    return {line.split()[-1].split("@")[0] for line in done.stdout.splitlines()}


def test_modules_export_only_their_init_function():
    modules = [path for path in INSTALLED.glob("_*.so")]
    assert modules
    for path in modules:
        assert exported(path) == {"PyInit_" + path.name.split(".")[0]}


def test_the_host_library_exports_only_the_abi():
    names = exported(INSTALLED / "host" / "libpynccl_host.so")
    strangers = {name for name in names if not re.match(r"p?nccl[A-Z]|pyncclHost[A-Z]", name)}
    assert not strangers
    plain = {name for name in names if name.startswith("nccl")}
    assert plain
    assert {"p" + name for name in plain} <= names, "every function has its profiling twin"


# --- Public names and their documentation ---------------------------------------------------------


def public() -> dict[str, object]:
    return {name: getattr(pynccl, name) for name in pynccl.__all__}


def callables() -> list[tuple[str, object]]:
    """Every public function, class and method, by its dotted name."""
    found = []
    stores = {name: getattr(pynccl.distributed, name) for name in pynccl.distributed.__all__}
    for name, thing in (public() | stores).items():
        if not callable(thing):
            continue
        found.append((name, thing))
        if inspect.isclass(thing) and not issubclass(thing, BaseException):
            found += [
                (f"{name}.{attribute}", getattr(thing, attribute))
                for attribute in vars(thing)
                if not attribute.startswith("_")
                and callable(getattr(thing, attribute))
                and not isinstance(getattr(thing, attribute), thing)
            ]
    for name in pynccl.multi.__all__:
        thing = getattr(pynccl.multi, name)
        if inspect.isfunction(thing):
            found.append((f"multi.{name}", thing))
    return found


def sections(docstring: str) -> dict[str, str]:
    """Split a numpydoc docstring into its sections; the part before the first is named ``""``."""
    parts = re.split(r"^([A-Z][A-Za-z ]+)\n-{3,}\n", inspect.cleandoc(docstring) + "\n", flags=re.M)
    return {"": parts[0], **dict(zip(parts[1::2], parts[2::2], strict=True))}


def documented_parameters(docstring: str) -> set[str]:
    text = sections(docstring).get("Parameters", "")
    names = re.findall(r"^(\*{0,2}\w[\w*, ]*?)(?: ?:.*)?$", text, re.M)
    return {name.strip(" *") for group in names for name in group.split(",")}


def test_all_is_sorted_and_complete():
    assert list(pynccl.__all__) == sorted(set(pynccl.__all__))
    extra = {
        name
        for name, thing in vars(pynccl).items()
        if not name.startswith("_") and name not in pynccl.__all__ and not inspect.ismodule(thing)
    } - {"annotations"}
    assert not extra, "public by name, but not in __all__"


def test_every_public_name_is_in_the_api_reference():
    documented = set(re.findall(r"^\| `(\w+)", (ROOT / "docs" / "api.md").read_text(), re.M))
    assert documented >= set(pynccl.__all__), sorted(set(pynccl.__all__) - documented)
    methods = {
        name.split(".")[1]
        for name, _ in callables()
        if name.startswith(("Communicator.", "multi."))
    }
    assert documented >= methods, sorted(methods - documented)


@pytest.mark.parametrize(
    ("name", "thing"), callables(), ids=lambda v: v if isinstance(v, str) else ""
)
def test_public_callables_are_documented_as_numpydoc_asks(name, thing):
    doc = thing.__doc__
    assert doc, "no docstring"
    summary = inspect.cleandoc(doc).splitlines()[0]
    assert len(summary) <= 110
    assert summary.endswith("."), "the summary is one sentence on the first line"
    try:
        signature = inspect.signature(thing)
    except ValueError:
        return
    parameters = {p.name for p in signature.parameters.values() if p.name not in {"self", "cls"}}
    if inspect.isclass(thing) and (issubclass(thing, (BaseException, int)) or not parameters):
        return
    missing = parameters - documented_parameters(doc)
    assert not missing, "not described under Parameters"


@cache
def annotated_results() -> dict[str, str]:
    """Give the result type that stubs and annotations declare, by dotted name as `callables` has it."""
    found = {}
    for path in sources(".pyi", ".py", under=PACKAGE):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and node.returns:
                home = "multi." if path.parent.name == "multi" else ""
                found[home + node.name] = ast.unparse(node.returns)
            elif isinstance(node, ast.ClassDef):
                for inner in node.body:
                    if isinstance(inner, ast.FunctionDef) and inner.returns:
                        owner = "Communicator" if node.name == "Collectives" else node.name
                        found[f"{owner}.{inner.name}"] = ast.unparse(inner.returns)
    return found


def test_a_result_is_described_where_there_is_one():
    results = annotated_results()
    missing, surplus = [], []
    for name, thing in callables():
        if inspect.isclass(thing):
            continue
        described = "Returns" in sections(thing.__doc__)
        assert name in results, f"{name} has no annotation, or its module no stub"
        if results[name] == "None":
            surplus += [name] if described else []
        elif not described:
            missing.append(name)
    assert (missing, surplus) == ([], [])


def test_every_environment_variable_is_documented():
    from pynccl import _config

    documented = set(
        re.findall(r"^\| `(\w+)`", (ROOT / "docs" / "environment.md").read_text(), re.M)
    )
    assert documented == set(_config.ENV)


# --- The places of a collective -------------------------------------------------------------------

ROW = re.compile(r'^row\((\w+),\s*"(\w+)",\s*"(\w+)"', re.M)


def rows() -> list[tuple[str, str, str]]:
    """Give (kind, verb, C function) for each row of the table of collectives."""
    found = ROW.findall((PACKAGE / "_call.pyx").read_text())
    assert len(found) >= 10
    return found


def read(*parts: str) -> str:
    return ROOT.joinpath(*parts).read_text()


def test_the_table_has_one_row_per_kind():
    (body,) = re.findall(r"^cdef enum Kind:\n((?:    .*\n)+)", read("pynccl", "_call.pxd"), re.M)
    kinds = [line.split("#")[0].strip() for line in body.splitlines()]
    assert [kind for kind, _, _ in rows()] == [k for k in kinds if k and k != "KINDS"]


@pytest.mark.parametrize(("kind", "verb", "function"), rows(), ids=lambda text: text)
def test_a_collective_is_complete(kind, verb, function):
    missing = []

    def place(name: str, pattern: str, text: str) -> None:
        if not re.search(pattern, text, re.M):
            missing.append(name)

    place(
        "NCCL_SYMBOLS in nccl_abi.h",
        rf"X\(ncclResult_t, {function}, \d+,",
        read("pynccl", "nccl_abi.h"),
    )
    place("a function pointer in _nccl.pxd", rf"\(\*{function}\)", read("pynccl", "_nccl.pxd"))
    dispatch = read("pynccl", "_nccl.pyx").partition("ncclResult_t dispatch(")[2]
    place("a case of dispatch() in _nccl.pyx", rf"api\.{function}\(", dispatch)
    place(
        "a method in _collectives.pyx",
        rf"^    def {verb}\(self",
        read("pynccl", "_collectives.pyx"),
    )
    place(
        "a signature in _collectives.pyi", rf"^    def {verb}\(", read("pynccl", "_collectives.pyi")
    )
    host = "".join(path.read_text() for path in sources(".c", ".h", under=PACKAGE / "host"))
    place("a function of the host library", rf"\b{function}\b", host)
    place("a row in docs/api.md", rf"^\| `{verb}\(.*`{function}`", read("docs", "api.md"))
    if kind not in {"SEND", "RECV", "SEND_TO", "RECV_FROM"}:  # what these deliver is what was sent
        place("a line in the oracle", rf'Spec\("{verb}"', read("tests", "helpers", "oracle.py"))
    assert not missing


def test_the_host_library_exports_every_function_of_the_abi_and_no_other():
    row = r"X\((?:ncclResult_t|pynccl_text_t|void), (nccl\w+), \d+,"
    declared = set(re.findall(row, read("pynccl", "nccl_abi.h")))
    assert len(declared) == 73
    answered = {
        n for n in exported(INSTALLED / "host" / "libpynccl_host.so") if n.startswith("nccl")
    }
    assert answered == declared
    assert {function for _, _, function in rows()} <= answered
