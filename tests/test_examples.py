"""examples/ as a new user runs them: in an empty folder, by the command that examples/README.md gives.

Each example checks its own result. That it can also say no is shown with a copy in which one word is wrong.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.documents import ROOT
from helpers.scripts import environment

EXAMPLES = ROOT / "examples"
ROW = r"^\| \[(\w+\.py)\]\(\1\) \| .+? \| `([^`]+)` \| `([^`]+)` \|$"
TABLE = {
    name: (command, last)
    for name, command, last in re.findall(ROW, (EXAMPLES / "README.md").read_text(), re.M)
}

# What is wrong in the copy: (file, its words, other words).
FAULTS = [
    ("stencil.py", "comm.send(u[1], up)", "comm.send(u[0], up)"),
    ("stencil.py", "exchange_old, exchange_new = exchange_new, exchange_old", "pass"),
    ("sgd.py", 'op="avg"', 'op="sum"'),
    ("sgd.py", "comm.broadcast(weight, root=0)", "pass"),
    ("multi_sgd.py", "ReduceOp.AVG", "ReduceOp.SUM"),
    ("multi_sgd.py", "nccl.broadcast(replicas, root=0)", "pass"),
    ("fft_transpose.py", ".transpose(1, 2, 0)", ".transpose(1, 0, 2)"),
    (
        "fft_transpose.py",
        "xp.fft.fft(xp.asarray(signal[mine]), axis=1)",
        "xp.full_like(signal[mine], xp.nan)",
    ),
    ("pipeline.py", "gradient += dw", "gradient = dw"),
    ("pipeline.py", "comm.send(dx, before)", "comm.send(dy, before)"),
]  # fmt: skip


def run(command: str, folder: Path, limit: float = 60.0) -> tuple[int, list[str], str]:
    """Run a command of the table; gives exit code, lines and what else it said."""
    env = environment(
        PYNCCL_LIBRARY="host",
        PYNCCL_TIMEOUT="30",
        PATH=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        NUMBA_ENABLE_CUDASIM=None,  # setting it is the example's business
        PYTHONPATH=None,
    )
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        env.pop(name, None)
    done = subprocess.run(
        shlex.split(command), cwd=folder, env=env, timeout=limit, check=False,
        capture_output=True, text=True, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    return done.returncode, done.stdout.splitlines(), done.stderr


def test_the_table_has_every_example():
    assert set(TABLE) == {path.name for path in EXAMPLES.glob("*.py")}
    assert {name for name, _, _ in FAULTS} == set(TABLE)


@pytest.mark.parametrize("name", TABLE)
def test_it_is_a_file_to_learn_from(name):
    text = (EXAMPLES / name).read_text()
    docstring = text.split('"""')[1]
    assert text.count("\n") < 150
    assert f"\n    {TABLE[name][0]}\n" in docstring, "how to run it"
    assert "GPUs" in docstring
    assert "\ndef main() -> int:\n" in text
    assert text.endswith('\n\nif __name__ == "__main__":\n    sys.exit(main())\n')


@pytest.mark.parametrize("name", TABLE)
def test_it_runs_and_is_right(name, tmp_path):
    command, last = TABLE[name]
    shutil.copy(EXAMPLES / name, tmp_path)
    code, lines, said = run(command, tmp_path)
    assert (code, said) == (0, "")
    assert lines[-1] == last


@pytest.mark.parametrize(
    ("name", "words", "wrong"), FAULTS, ids=[f"{f[0]}: {f[2]}" for f in FAULTS]
)
def test_it_sees_that_a_result_is_wrong(name, words, wrong, tmp_path):
    command, _ = TABLE[name]
    text = (EXAMPLES / name).read_text()
    assert text.count(words) == 1
    (tmp_path / name).write_text(text.replace(words, wrong))
    code, lines, said = run(command.replace("-n 4", "-n 2"), tmp_path)
    assert code == 1, said
    assert re.search(r": WRONG by (\d\.\de[+-]\d\d|nan)$", lines[-1])
    assert "Traceback" not in said


@pytest.mark.parametrize("name", [n for n, (command, _) in TABLE.items() if "-n 4" in command])
def test_one_rank_needs_no_launcher(name, tmp_path):
    shutil.copy(EXAMPLES / name, tmp_path)
    code, lines, said = run(f"python {name}", tmp_path)
    assert (code, said) == (0, "")
    assert lines[-1] == TABLE[name][1].replace(" 4 ", " 1 ")
