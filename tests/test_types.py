"""What a type checker sees of the installed package: users' code under ``mypy --strict``.

.ci/run checks the package itself, and its stubs against the compiled modules.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import pynccl
from helpers.documents import ROOT

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))

# Correct code: mypy --strict has nothing to say. assert_type compares with the type that mypy found.
RIGHT = """
import array
from datetime import timedelta
from typing import Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import assert_type

import pynccl

Vector = np.ndarray[tuple[int], np.dtype[np.float64]]
AnyShape = np.ndarray[tuple[int, ...], np.dtype[np.float64]]


def results(comm: pynccl.Communicator, x: Vector, matrix: NDArray[np.float32]) -> None:
    # the type of what came in
    assert_type(comm.all_reduce(x), Vector)
    assert_type(comm.all_reduce(x, op="max"), Vector)
    assert_type(comm.all_reduce(matrix), NDArray[np.float32])
    assert_type(comm.reduce(x, root=1), Vector | None)
    assert_type(comm.broadcast(x), Vector)
    assert_type(comm.all_to_all(x), Vector)
    assert_type(comm.send_recv(x, 1), Vector)
    assert_type(comm.all_reduce(array.array("d")), "array.array[float]")
    assert_type(comm.all_gather(bytearray(2)), bytearray)
    # an axis more or less
    assert_type(comm.all_gather(x), AnyShape)
    assert_type(comm.reduce_scatter(x), AnyShape)
    assert_type(comm.gather(x), AnyShape | None)
    assert_type(comm.scatter(x), AnyShape)
    rows, columns = comm.all_gather(x).shape
    # the type of what was given
    out = bytearray(8)
    assert_type(comm.all_reduce(x, out), bytearray)
    assert_type(comm.reduce(x, out), bytearray | None)
    assert_type(comm.broadcast(None, out=out), bytearray)
    assert_type(comm.all_gather(x, out), bytearray)
    assert_type(comm.reduce_scatter(x, out=out), bytearray)
    assert_type(comm.all_to_all(x, out), bytearray)
    assert_type(comm.gather(x, out), bytearray | None)
    assert_type(comm.scatter(None, out), bytearray)
    assert_type(comm.recv(out, 0), bytearray)
    assert_type(comm.send_recv(x, 1, out, 0), bytearray)
    # what is neither
    assert_type(comm.all_reduce(pynccl.Buffer(x)), Any)
    assert_type(comm.all_gather(b"sent"), Any)


def arguments(comm: pynccl.Communicator, x: Vector, stream: object) -> None:
    half = comm.premul_sum(0.5, np.float64)
    for op in (pynccl.ReduceOp.AVG, "sum", np.maximum, half):
        comm.all_reduce(x, x, op, stream=stream, dtype="float64")
    comm.send(x, peer=1)
    comm.barrier(stream=0)
    part = comm.split(None)
    if part is not None:
        part.close(timeout=timedelta(seconds=1))


def groups(x: Vector) -> int:
    with pynccl.init(timeout=5) as comm, pynccl.group(run=False) as plan:
        comm.all_reduce(x, out=x)
    plan()
    comms = pynccl.init_all([0, 1], library="host")
    assert_type(comms, list[pynccl.Communicator])
    assert_type(comms[0].library.path, str)
    try:
        return len(plan)
    except pynccl.NCCLError as error:
        assert_type(error.function, str)
        raise
"""

# Mistakes that a type checker should find, and what mypy calls them.
WRONG = {
    "comm.all_reduce(x, op=0)": "call-overload",
    "comm.send(x)": "call-arg",
    "comm.recv(x, peer='left')": "arg-type",
    "comm.gather(x).shape": "union-attr",
    "comm.rank = 3": "misc",
    "comm.allreduce(x)": "attr-defined",
    "pynccl.Communicator(1, 'id', 0)": "arg-type",
    "pynccl.group(True)": "call-arg",
}
WRONG_HEAD = """
import numpy as np

import pynccl


def wrong(comm: pynccl.Communicator, x: np.ndarray[tuple[int], np.dtype[np.float64]]) -> None:
"""


@pytest.fixture(scope="module")
def verdict(tmp_path_factory) -> dict[str, list[str]]:
    """What mypy --strict says of the examples and of the code above, for each file."""
    pytest.importorskip("mypy", reason="needs the packages of the extra 'dev'")
    folder = tmp_path_factory.mktemp("types")
    (folder / "right.py").write_text(RIGHT)
    (folder / "wrong.py").write_text(WRONG_HEAD + "".join(f"    {line}\n" for line in WRONG))
    files = [*EXAMPLES, folder / "right.py", folder / "wrong.py"]
    # From another folder: in the root, the sources would be found in place of the installed package.
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--config-file=", *map(str, files)],
        cwd=folder, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode in (0, 1), done.stdout + done.stderr
    said: dict[str, list[str]] = {path.name: [] for path in files}
    for line in done.stdout.splitlines()[:-1]:
        said[Path(line.partition(":")[0]).name].append(line)
    return said


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.name)
def test_the_examples_are_strictly_typed(verdict, path):
    assert verdict[path.name] == []


def test_results_have_the_types_that_they_have(verdict):
    assert verdict["right.py"] == []


def test_mistakes_are_found(verdict):
    first = WRONG_HEAD.count("\n") + 1
    found = {}
    for line in verdict["wrong.py"]:
        if ": error: " in line:
            found[int(line.split(":")[1])] = line[line.rindex("[") + 1 : -1]
    assert found == {first + i: code for i, code in enumerate(WRONG.values())}


def test_the_package_says_that_it_is_typed():
    assert (Path(pynccl.__file__).parent / "py.typed").exists()
