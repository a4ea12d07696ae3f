"""``pynccl perf`` as its user sees it: the table, the verdict, and what happens when a rank lies or dies."""

import json
import os
import pty
import re
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from helpers.scripts import wait_until
from pynccl.cli import UsageError, perf
from pynccl.cli._perf_cases import ARRAYS, COLLECTIVES, DTYPES, OPS

LIMIT = 120
PERF = [sys.executable, "-c", "import sys; from pynccl.cli import main; sys.exit(main())", "perf"]


def run(*arguments, code=0, cwd, **options):
    done = subprocess.run(
        [*PERF, *map(str, arguments)],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=LIMIT,
        **options,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout, done.stderr


SMALL = ("-b", 4096, "-e", 4096, "-w", 0, "--iters", 1, "--library", "host")


@pytest.mark.parametrize("nranks", [1, 2, 4])
def test_all_collectives_dtypes_and_ops_are_right(nranks, tmp_path):
    out, _ = run(
        "all",
        "-n",
        nranks,
        "--threads",
        "-d",
        "all",
        "-o",
        "all",
        "-r",
        "all",
        *SMALL,
        cwd=tmp_path,
    )
    assert "# Out of bounds values : 0 OK" in out
    rows = [line.split() for line in out.splitlines() if not line.startswith("#")]
    rooted = sum(row.root for row in COLLECTIVES.values() if not row.op)
    reductions = len(OPS) * (2 + nranks)  # reduce has a root, the other two have not
    assert len(rows) == len(DTYPES) * (reductions + 4 - 1 + rooted * nranks)
    assert {row[2] for row in rows} == set(DTYPES)
    assert {row[3] for row in rows} == {*OPS, "none"}
    assert all(row[8] == "0" and row[12] in ("0", "N/A") for row in rows)


def test_ranks_as_processes(tmp_path):
    """All collectives at sizes on both sides of the library's thresholds, with an odd number of ranks."""
    out, err = run(
        "all",
        "-n",
        3,
        "-b",
        24,
        "-e",
        "3M",
        "-f",
        50,
        "--json",
        "r.json",
        "--library",
        "host",
        cwd=tmp_path,
    )
    result = json.loads((tmp_path / "r.json").read_text())
    assert "# Out of bounds values : 0 OK" in out
    assert result["wrong"] == 0
    assert result["nranks"] == 3
    assert result["mode"] == "processes"
    assert result["library"]["kind"] == "host"
    assert [row["collective"] for row in result["rows"][::4]] == list(COLLECTIVES)
    for row in result["rows"]:
        half = row["out_of_place"]
        assert half["algbw"] == pytest.approx(row["size"] / half["time_us"] / 1e3)
        factor = COLLECTIVES[row["collective"]].factor(3)
        assert half["busbw"] == pytest.approx(half["algbw"] * factor)
        assert (row["in_place"] is None) == (row["collective"] in ("all_to_all", "send_recv"))
        blocks = 3 if COLLECTIVES[row["collective"]].blocks else 1
        assert row["size"] == row["count"] * 4 * blocks
    # Progress: every row is announced, in order.
    assert [int(n) for n in re.findall(r"^\[(\d+)/36\]", err, re.M)] == list(range(1, 37))
    shown = [line for line in out.splitlines() if not line.startswith("#")]
    assert len(shown) == 36
    first = re.fullmatch(
        r" +24 +6 +float32 +sum +-1" + r" +\d+\.\d\d +\d+\.\d\d +\d+\.\d\d +0" * 2, shown[0]
    )
    assert first, shown[0]


def test_arrays_of_numba(tmp_path):
    out, _ = run(
        "all_reduce", "gather", "-n", 2, "--arrays", "numpy,numba", "-d", "float32,bfloat16", *SMALL,
        "-q", cwd=tmp_path,
    )  # fmt: skip
    assert "# Out of bounds values : 0 OK" in out
    headings = re.findall(r"^# (\w+), (\w+) arrays$", out, re.M)
    assert headings == [(c, a) for c in ("all_reduce", "gather") for a in ("numpy", "numba")]


def test_sizes_and_roots(tmp_path):
    out, _ = run(
        "broadcast", "-n", 3, "-b", "1K", "-e", "3K", "-i", "1K", "-r", 2, "--json", "-", "-d", "half",
        "--threads", "--library", "host", "--iters", 2, cwd=tmp_path,
    )  # fmt: skip
    result = json.loads(out)
    assert [(row["size"], row["root"], row["dtype"]) for row in result["rows"]] == [
        (size, 2, "float16") for size in (1024, 2048, 3072)
    ]


def test_quiet_means_no_progress(tmp_path):
    assert run("reduce", "-n", 2, "-q", *SMALL, cwd=tmp_path)[1] == ""


def test_progress_on_a_terminal_is_one_line(tmp_path):
    ours, theirs = pty.openpty()
    try:
        done = subprocess.run(
            [*PERF, "all_reduce", "-n", "2", *map(str, SMALL)],
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=theirs,
            timeout=LIMIT,
        )
        os.close(theirs)
        assert done.returncode == 0
        shown = os.read(ours, 4096).decode()
    finally:
        os.close(ours)
    assert shown == "\r[1/1] all_reduce float32 sum 4096 B\x1b[K" + "\r\x1b[K" * 2


def test_a_reader_that_leaves_ends_the_ranks(tmp_path):
    process = subprocess.Popen(
        [*PERF, "all", "-n", "2", "--library", "host"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    process.stdout.readline()
    process.stdout.close()
    with process.stderr:
        process.stderr.read()
    assert process.wait(LIMIT) == 141


# What a test does to the ranks: a site customisation that Python imports before anything else.
SABOTAGE = """
    import os
    if os.environ.get("RANK") == "1":
        import pynccl
        real = pynccl.init

        class Saboteur:
            def __init__(self, comm):
                self.comm, self.calls = comm, 0
            def __getattr__(self, name):
                return getattr(self.comm, name)
            def all_reduce(self, x, out, op):
                self.calls += 1
                {before}
                self.comm.all_reduce(x, out, op)
                {after}

        pynccl.init = lambda **options: Saboteur(real(**options))
"""


def sabotage(folder, action, when="after"):
    actions = {"before": "pass", "after": "pass"} | {when: action}
    (folder / "sitecustomize.py").write_text(textwrap.dedent(SABOTAGE).format(**actions))
    path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
    return {"env": os.environ | {"PYTHONPATH": path}}


@pytest.mark.fault
def test_a_rank_with_wrong_results_fails_the_run(tmp_path):
    lie = sabotage(tmp_path, "if self.calls == 1: out.view('u4')[[3, 5]] ^= 1")
    out, _ = run(
        "all_reduce", "broadcast", "-n", 2, *SMALL, "--json", "r.json", code=1, cwd=tmp_path, **lie
    )
    assert "# Out of bounds values : 2 FAILED" in out
    rows = [line.split() for line in out.splitlines() if not line.startswith("#")]
    assert [row[8] for row in rows] == ["2", "0"]
    result = json.loads((tmp_path / "r.json").read_text())
    assert result["wrong"] == 2


@pytest.mark.fault
@pytest.mark.parametrize(
    ("action", "message", "code"),
    [
        ("os.kill(os.getpid(), 9)", r"rank 1 \(process \d+\) was killed by SIGKILL", 137),
        ("os._exit(7)", r"rank 1 \(process \d+\) exited with code 7", 7),
        ("os._exit(0)", r"pynccl perf: rank 1 ended before it was done", 1),
        (
            "raise MemoryError('no more')",
            r"pynccl perf: rank 1: MemoryError: no more \(sitecustomize.py, line \d+\)",
            1,
        ),
    ],
)
def test_a_rank_that_fails_is_a_sentence_and_no_hang(action, message, code, tmp_path):
    trick = sabotage(tmp_path, action)
    since = time.monotonic()
    _, err = run("all_reduce", "-n", 3, *SMALL, "-q", code=code, cwd=tmp_path, **trick)
    assert time.monotonic() - since < 30
    assert re.search(message, err), err
    assert "Traceback" not in err


@pytest.mark.fault
@pytest.mark.parametrize(
    ("when", "message"),
    [
        # Inside the collective, the library names it; after it, the launcher does.
        ("before", r"pynccl perf: rank [02].*: NCCLTimeoutError: .*rank 1"),
        ("after", r"pynccl perf: rank 1 did not answer within 2 s of the others"),
    ],
)
def test_a_rank_that_hangs_is_named_after_the_timeout(when, message, tmp_path):
    trick = sabotage(tmp_path, "__import__('time').sleep(600)", when)
    _, err = run("all_reduce", "-n", 3, *SMALL, "-q", "--timeout", 2, code=1, cwd=tmp_path, **trick)
    assert re.search(message, err), err


@pytest.mark.fault
def test_sigint_ends_the_ranks(tmp_path):
    trick = sabotage(tmp_path, "open('ready', 'w').close(); __import__('time').sleep(600)")
    process = subprocess.Popen(
        [*PERF, "all_reduce", "-n", "2", *map(str, SMALL), "-q"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        **trick,
    )
    try:
        wait_until((tmp_path / "ready").exists, 60)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 130
    assert b"pynccl perf: got SIGINT" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nope"], "'nope' is no collective; expected all, or all_reduce, reduce"),
        (["-n", "0"], "-n: 0 ranks; expected 1 to 1024"),
        (["-d", "int16"], "-d: 'int16' is none of int8"),
        (["-o", "xor"], "-o: 'xor' is none of sum"),
        (["-r", "2"], "-r: root 2 is not a rank; expected 0 to 1, or all"),
        (["-r", "-1"], "-r: root -1 is not a rank"),
        (["-r", "x"], "-r: root x is not a rank"),
        (["-b", "x"], "'x' is not a size such as 8, 64K or 1M"),
        (["-b", "0"], "'0': a size is at least 1"),
        (
            ["-b", "1M", "-e", "1K"],
            "-e: the largest size, 1024, is less than the smallest, 1048576",
        ),
        (["-f", "1"], "-f: 1 does not make sizes larger"),
        (["-f", "0"], "-f: 0 does not make sizes larger"),
        (["-f", "nan"], "-f: nan does not make sizes larger"),
        (["-w", "-1"], "--warmup: expected 0 or more"),
        (["-c", "-1"], "--check: expected 0 or more"),
        (["--iters", "0"], "--iters: expected 1 or more"),
        (["--arrays", "torch"], "--arrays: 'torch' is none of numpy, numba, cupy"),
        (["--arrays", "cupy"], "CuPy's arrays are GPU memory"),
        (["--json", "no/such/folder/r.json"], "--json: cannot write no/such/folder/r.json"),
        (["--timeout", "0"], "--timeout: expected more than 0"),
    ],
)
def test_a_wrong_command_line_is_one_line_and_code_2(arguments, message, tmp_path):
    out, err = run("--library", "host", *arguments, code=2, cwd=tmp_path)
    assert out == ""
    assert err.startswith("pynccl perf: ")
    assert message in err
    assert err.count("\n") == 1


def test_a_library_that_makes_no_sense_is_one_line(tmp_path):
    _, err = run(code=2, cwd=tmp_path, env=os.environ | {"PYNCCL_LIBRARY": "nonsense"})
    assert err.startswith("pynccl perf: library: 'nonsense' is neither")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("options", "package"),
    [([], "numpy"), (["-d", "bfloat16"], "ml_dtypes"), (["--arrays", "numba"], "numba")],
)
def test_a_missing_package_is_named(options, package, tmp_path):
    program = f"import sys; sys.modules[{package!r}] = None; from pynccl.cli import main; sys.exit(main())"
    done = subprocess.run(
        [sys.executable, "-c", program, "perf", "--library", "host", *options],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    assert done.returncode == 2
    assert done.stderr == (
        f"pynccl perf: this needs packages that are not installed: pip install {package}\n"
    )


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("8", 8),
        ("64K", 65536),
        ("1M", 1 << 20),
        ("2g", 2 << 30),
        ("4KiB", 4096),
        ("1.5k", 1536),
        ("8B", 8),
    ],
)
def test_sizes_have_binary_units(text, size):
    assert perf._bytes(text) == size


def parsed(*arguments):
    from pynccl.cli import parser_of

    return parser_of("perf").parse_args(arguments)


@pytest.mark.parametrize(
    ("arguments", "sizes"),
    [
        ([], [8, 256, 8192, 262144, 8388608]),
        (["-b", "8", "-e", "64"], [8, 16, 32, 64]),
        (["-b", "16M"], [1 << 24]),
        (["-e", "4"], [4]),
        (["-b", "1", "-e", "9", "-f", "3"], [1, 3, 9]),
        (["-b", "100", "-e", "400", "-i", "100"], [100, 200, 300, 400]),
    ],
)
def test_the_steps_between_sizes(arguments, sizes):
    assert perf._sizes(parsed(*arguments)) == sizes


def test_numpy_arrays_are_no_gpu_memory():
    with pytest.raises(UsageError, match="NCCL moves GPU memory"):
        list(perf._cases(parsed("--arrays", "numpy"), 2, "nccl"))
    assert next(perf._cases(parsed(), 2, "nccl")).arrays == "cupy"
    assert ARRAYS == ("numpy", "numba", "cupy")
