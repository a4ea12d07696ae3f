"""README, docs/ and docstrings: their code is run, and their links lead somewhere.

A ``python`` block runs on its own. A comment before a block says what else it is:

- ``<!-- file: NAME -->``: the block is a file that later blocks of the document use;
- ``<!-- unordered -->``: the lines of the output may come in any order (ranks print when they like);
- ``<!-- needs: PACKAGE -->``: the block uses a package that is in no extra; without it, it is skipped;
- ``<!-- not run: REASON -->``: shown only.

In a ``console`` block a line that starts with ``$`` is run, and what follows must be its output; ``...``
stands for anything, as in doctest.
"""

from __future__ import annotations

import doctest
import importlib.util
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import pynccl
import pynccl.distributed
import pynccl.multi
from helpers.documents import Block, blocks

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = sorted(
    [
        *ROOT.glob("*.md"),
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "bench").glob("*.md"),
        *(ROOT / "examples").glob("*.md"),
    ]
)
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE

# Why a block may be shown without being run; anything else is a block that rots.
REASONS = {
    "installs from the network",
    "needs a GPU",
    "another test builds it",
    "other libraries' code",
    "runs for minutes",
    "a sketch",
}


ALL = [block for document in DOCUMENTS for block in blocks(document)]


def environment() -> dict[str, str]:
    bin_directory = str(Path(sys.executable).parent)
    return {
        **os.environ,
        "PATH": bin_directory + os.pathsep + os.environ.get("PATH", ""),
        "PYNCCL_LIBRARY": "host",
        "PYNCCL_TIMEOUT": "60",
        "NUMBA_ENABLE_CUDASIM": "1",
    }


def lay_files(block: Block, directory: Path) -> None:
    """Write the files that the document has shown up to this block."""
    for earlier in ALL:
        if (
            earlier.document == block.document
            and earlier.line < block.line
            and "file" in earlier.directives
        ):
            (directory / earlier.directives["file"]).write_text(earlier.text)


def same_output(want: str, got: str, unordered: bool) -> bool:
    if unordered:
        want = "\n".join(sorted(want.splitlines())) + "\n"
        got = "\n".join(sorted(got.splitlines())) + "\n"
    return doctest.OutputChecker().check_output(want, got, FLAGS)


def test_every_block_says_its_language_and_no_block_is_left_out_without_reason():
    assert {block.language for block in ALL} <= {"python", "console", "bash", "text", "cython", "c"}
    reasons = {b.directives["not run"] for b in ALL if "not run" in b.directives}
    assert reasons <= REASONS
    # bash blocks are for installing and the like; what a reader may try is a console block with its output
    quiet = [b for b in ALL if b.language == "console" and "$" not in b.text]
    assert not quiet


@pytest.mark.parametrize(
    "block",
    [b for b in ALL if b.language == "python" and not {"file", "not run"} & set(b.directives)],
    ids=lambda b: b.id,
)
def test_python_block_runs(block, tmp_path):
    package = block.directives.get("needs")
    if package and importlib.util.find_spec(package) is None:
        pytest.skip(f"needs {package}, which is in no extra")
    lay_files(block, tmp_path)
    script = tmp_path / "block.py"
    script.write_text(block.text)
    done = subprocess.run(
        [sys.executable, str(script)],
        cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "block",
    [b for b in ALL if b.language == "console" and "not run" not in b.directives],
    ids=lambda b: b.id,
)
def test_console_block_prints_what_it_shows(block, tmp_path):
    lay_files(block, tmp_path)
    parts = re.split(r"^\$ (.*)\n", block.text, flags=re.M)
    assert not parts[0].strip()
    for command, want in zip(parts[1::2], parts[2::2], strict=True):
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=tmp_path, env=environment(), text=True, timeout=120, check=False,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        if not same_output(want, done.stdout, "unordered" in block.directives):
            pytest.fail(f"$ {command}\n--- the document shows\n{want}--- it printed\n{done.stdout}")


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda d: str(d.relative_to(ROOT)))
def test_links_lead_to_files(document):
    text = re.sub(r"```(?s:.*?)```", "", document.read_text())
    for target in re.findall(r"\]\(([^)#\s]+)", text):
        if not target.startswith(("http://", "https://")):
            assert (document.parent / target).exists(), target


def test_files_named_in_the_documents_exist():
    # `path/like/this.py` in running text; a glob or a placeholder is not a name.
    missing = []
    for document in DOCUMENTS:
        if document.name == "CHANGELOG.md" or "decisions" in document.parts:
            continue
        text = re.sub(r"```(?s:.*?)```", "", document.read_text())
        for name in re.findall(r"`((?:pynccl|tests|docs|bench|examples|\.ci)/[\w./-]+)`", text):
            if not (ROOT / name).exists():
                missing.append(f"{document.name}: {name}")
    assert not missing


def test_tests_named_in_the_documents_exist():
    # `test_file.py::test_name` in a table of features or faults.
    missing = []
    for document in DOCUMENTS:
        for file, name in re.findall(r"`(?:tests/)?(test_\w+\.py)::(\w+)", document.read_text()):
            path = ROOT / "tests" / file
            if not path.exists() or not re.search(
                rf"^(?:async )?def {name}\(", path.read_text(), re.M
            ):
                missing.append(f"{document.name}: {file}::{name}")
    assert not missing


def examples() -> list[doctest.DocTest]:
    found = []
    names = [(name, getattr(pynccl, name)) for name in pynccl.__all__]
    for module in (pynccl.multi, pynccl.distributed):
        short = module.__name__.partition(".")[2]
        names += [(f"{short}.{name}", getattr(module, name)) for name in module.__all__]
    for name, thing in names:
        owners = [(name, thing)]
        if inspect.isclass(thing):
            owners += [
                (f"{name}.{a}", getattr(thing, a)) for a in dir(thing) if not a.startswith("_")
            ]
        for label, owner in owners:
            if getattr(owner, "__doc__", None) and ">>>" in owner.__doc__:
                text = inspect.cleandoc(owner.__doc__)
                found.append(doctest.DocTestParser().get_doctest(text, {}, label, label, 0))
    return found


@pytest.mark.parametrize("example", examples(), ids=lambda e: e.name)
def test_docstring_example(example, monkeypatch):
    monkeypatch.setenv("PYNCCL_LIBRARY", "host")
    report: list[str] = []
    failed, tried = doctest.DocTestRunner(optionflags=FLAGS).run(example, out=report.append)
    assert tried
    assert not failed, "".join(report)
