"""Time the collectives, and verify every element of their results.

The columns are those of NVIDIA's nccl-tests: time is the slowest rank's, as the median over several
batches of calls; algbw is size over time; busbw is algbw times the part of the data that the busiest
link has to move. #wrong counts wrong elements on all ranks: of the output, which holds wrong values
before the call; of the input, which must not change; and bytes next to either. Inputs differ between
ranks and positions and are such that only one result is right, to the last bit.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.util
import json
import os
import platform
import socket
import statistics
import sys
import warnings
from collections.abc import Iterator
from importlib import metadata
from typing import Any, NoReturn, TextIO

import pynccl

from . import UsageError
from ._launch import Job, bootstrap, environments
from ._perf_cases import ARRAYS, COLLECTIVES, DTYPES, OPS, Case
from ._perf_table import BATCH_SECONDS, Half, Progress, Table
from .run import add_library_argument, check_nranks, library_choice

__all__ = ["add_arguments", "main"]

_DTYPE_ALIASES = {
    "float": "float32",
    "double": "float64",
    "half": "float16",
    "f8e4m3": "float8_e4m3fn",
    "f8e5m2": "float8_e5m2",
}
_OP_ALIASES = {"mulsum": "premul"}
_MAX_BATCHES = 5


# fmt: off
def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command line."""
    parser.usage = "pynccl perf [all | NAME ...] -n N [options]"
    add = parser.add_argument
    add("names", nargs="*", metavar="NAME", help=f"all (default), or: {', '.join(COLLECTIVES)}")
    add("-n", "--nranks", type=int, default=2, metavar="N", help="how many ranks (default: 2)")
    add("-b", "--minbytes", type=_bytes, metavar="SIZE",
        help="smallest size, as 8, 64K or 1M (default: 8)")
    add("-e", "--maxbytes", type=_bytes, metavar="SIZE", help="largest size (default: 8M)")
    add("-f", "--stepfactor", type=float, metavar="F",
        help="factor between sizes (default: 2; 32 if no sizes are given)")
    add("-i", "--stepbytes", type=_bytes, metavar="SIZE",
        help="difference between sizes, in place of -f")
    add("-d", "--dtype", default="float32", metavar="LIST",
        help="element types, or all (default: float32)")
    add("-o", "--op", default="sum", metavar="LIST",
        help=f"{', '.join(OPS)}, or all (default: sum)")
    add("-r", "--root", default="0", metavar="R", help="root rank, or all (default: 0)")
    add("--arrays", metavar="LIST",
        help="numpy, numba (without a GPU its simulator), cupy (default: numpy; on GPUs cupy)")
    add("--threads", action="store_true", help="ranks are threads of one process")
    add("-w", "--warmup", type=int, default=5, metavar="N",
        help="calls before timing (default: 5)")
    add("--iters", type=int, metavar="N",
        help=f"calls in a batch (default: as many as take {BATCH_SECONDS * 1e3:g} ms)")
    add("-c", "--check", type=int, default=1, metavar="N",
        help="verified calls of each row, 0 for none (default: 1)")
    add("--timeout", type=float, default=120, metavar="SECONDS",
        help="longest wait of one rank for another (default: 120)")
    add("--json", metavar="FILE",
        help="write the results as JSON, too; - for the standard output")
    add("-q", "--quiet", action="store_true", help="no progress on standard error")
    add_library_argument(parser)
# fmt: on


def _bytes(text: str) -> int:
    """Read a size with a binary unit, as nccl-tests does."""
    number = text.upper().removesuffix("IB").removesuffix("B")
    scale = 1
    if number[-1:] in ("K", "M", "G"):
        scale = 1024 ** ("KMG".index(number[-1]) + 1)
        number = number[:-1]
    try:
        size = int(float(number) * scale)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 8, 64K or 1M") from None
    if size < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: a size is at least 1")
    return size


class Failure(Exception):
    """The measurement cannot go on; the exit code, and what to say."""

    def __init__(self, code: int, text: str) -> None:
        self.code = code
        super().__init__(text)


def main(arguments: argparse.Namespace) -> int:
    """Measure all cases; return 0 if every result was right."""
    nranks = check_nranks(arguments.nranks)
    library = _library(library_choice(arguments.library))
    cases = list(_cases(arguments, nranks, library.kind))
    _need_packages(cases)
    with contextlib.ExitStack() as stack:
        document = _open_json(arguments.json, stack)
        table = Table(sys.stderr if document is sys.stdout else sys.stdout, cases)
        about = _about(arguments, nranks, library)
        table.header(about)
        # With the table on standard error there is no room for more.
        progress = Progress(len(cases), arguments.quiet or document is sys.stdout)
        stack.callback(progress.clear)
        try:
            rows = _measure_all(arguments, nranks, library, cases, table, progress)
        except Failure as failure:
            progress.clear()
            if str(failure):
                print(f"pynccl perf: {failure}", file=sys.stderr)
            return failure.code
        table.footer()
        if document is not None:
            about |= {"rows": rows, "wrong": table.wrong, "avg_busbw": table.average}
            document.write(json.dumps(about, indent=1) + "\n")
    return 1 if table.wrong else 0


def _open_json(path: str | None, stack: contextlib.ExitStack) -> TextIO | None:
    """Open the file for the results first: hours of measuring may follow."""
    if path is None:
        return None
    if path == "-":
        return sys.stdout
    try:
        return stack.enter_context(open(path, "w", encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"--json: cannot write {path}: {error.strerror}") from error


def _need_packages(cases: list[Case]) -> None:
    needed = (
        {"numpy"} | {DTYPES[case.dtype].package for case in cases} | {case.arrays for case in cases}
    )
    missing = sorted(name for name in needed if importlib.util.find_spec(name) is None)
    if missing:
        names = " ".join(missing)
        raise UsageError(f"this needs packages that are not installed: pip install {names}")


def _library(choice: str | None) -> pynccl.Library:
    with warnings.catch_warnings():
        # The header says which library it is.
        warnings.simplefilter("ignore", pynccl.HostFallbackWarning)
        try:
            return pynccl.library("auto" if choice is None else choice)
        except ValueError as error:  # what PYNCCL_LIBRARY says makes no sense
            raise UsageError(str(error)) from None


def _choices(text: str, known: tuple[str, ...], what: str, aliases: dict[str, str]) -> list[str]:
    if text == "all":
        return list(known)
    chosen = [aliases.get(name, name) for name in text.split(",")]
    for name in chosen:
        if name not in known:
            raise UsageError(f"{what}: {name!r} is none of {', '.join(known)}")
    return chosen


def _cases(arguments: argparse.Namespace, nranks: int, kind: str) -> Iterator[Case]:
    names = arguments.names or ["all"]
    names = list(COLLECTIVES) if names == ["all"] else names
    for name in names:
        if name not in COLLECTIVES:
            raise UsageError(
                f"{name!r} is no collective; expected all, or {', '.join(COLLECTIVES)}"
            )
    dtypes = _choices(arguments.dtype, tuple(DTYPES), "-d", _DTYPE_ALIASES)
    ops = _choices(arguments.op, OPS, "-o", _OP_ALIASES)
    arrays = _choices(
        arguments.arrays or ("numpy" if kind == "host" else "cupy"), ARRAYS, "--arrays", {}
    )
    if kind != "host" and "numpy" in arrays:
        raise UsageError("--arrays: NCCL moves GPU memory, not NumPy's; choose numba or cupy")
    if kind == "host" and "cupy" in arrays:
        raise UsageError(
            "--arrays: CuPy's arrays are GPU memory, the host library moves host memory"
        )
    if arguments.root != "all" and not (arguments.root.isdigit() and int(arguments.root) < nranks):
        raise UsageError(
            f"-r: root {arguments.root} is not a rank; expected 0 to {nranks - 1}, or all"
        )
    for name in ("warmup", "check"):
        if getattr(arguments, name) < 0:
            raise UsageError(f"--{name}: expected 0 or more")
    if not arguments.timeout > 0:
        raise UsageError("--timeout: expected more than 0 seconds")
    if arguments.iters is not None and arguments.iters < 1:
        raise UsageError("--iters: expected 1 or more")
    sizes = _sizes(arguments)
    for name in names:
        row = COLLECTIVES[name]
        roots = (
            [0]
            if not row.root
            else range(nranks)
            if arguments.root == "all"
            else [int(arguments.root)]
        )
        for kind_of_array in arrays:
            for dtype in dtypes:
                unit = DTYPES[dtype].itemsize * (nranks if row.blocks else 1)
                for op in ops if row.op else ["none"]:
                    for root in roots:
                        # Small sizes may round to the same number of elements: one row is enough.
                        for block in dict.fromkeys(max(1, size // unit) for size in sizes):
                            yield Case(name, kind_of_array, dtype, op, root, block, block * unit)


def _sizes(arguments: argparse.Namespace) -> list[int]:
    given = (arguments.minbytes, arguments.maxbytes, arguments.stepfactor, arguments.stepbytes)
    default = 2 if any(size is not None for size in given) else 32
    factor = default if arguments.stepfactor is None else arguments.stepfactor
    first = arguments.minbytes or min(8, arguments.maxbytes or 8)
    last = arguments.maxbytes or max(8 << 20, first)
    if last < first:
        raise UsageError(f"-e: the largest size, {last}, is less than the smallest, {first}")
    if not factor > 1:  # nor is it not-a-number
        raise UsageError(f"-f: {factor:g} does not make sizes larger")
    if arguments.stepbytes:
        return list(range(first, last + 1, arguments.stepbytes))
    sizes = []
    size = float(first)
    while size <= last:
        sizes.append(int(size))
        size *= factor
    return sizes


# ---- the ranks ----------------------------------------------------------------------------------


class _Ranks:
    """The ranks, each at the other end of a socket.

    Parameters
    ----------
    job : Job
        Their processes.
    channels : list of socket
        One per rank.
    patience : float
        Seconds that a rank may answer later than the first.
    """

    def __init__(self, job: Job, channels: list[socket.socket], patience: float) -> None:
        self._job = job
        self._channels = channels
        self._patience = patience
        self._received = [b""] * len(channels)
        self._answers: dict[int, dict[str, Any]] = {}  # in the order of their arrival
        self._gone: list[int] = []
        for rank, channel in enumerate(channels):
            channel.setblocking(False)
            job.watch(channel.fileno(), functools.partial(self._receive, rank))

    def _receive(self, rank: int) -> None:
        try:
            data = self._channels[rank].recv(1 << 16)
        except BlockingIOError:
            return
        except ConnectionError:
            data = b""
        if not data:
            self._job.unwatch(self._channels[rank].fileno())
            self._gone.append(rank)
        self._received[rank] += data
        if self._received[rank].endswith(b"\n"):
            self._answers[rank] = json.loads(self._received[rank])
            self._received[rank] = b""

    def _done(self) -> bool:
        answers = self._answers.values()
        all_here = len(answers) == len(self._channels)
        return all_here or bool(self._gone) or any("error" in answer for answer in answers)

    def ask(self, order: dict[str, Any] | None) -> list[dict[str, Any]]:
        """Give all ranks an order, and return their answers (to nothing: that they are ready)."""
        if order is not None:
            line = json.dumps(order).encode() + b"\n"
            for channel in self._channels:
                with contextlib.suppress(ConnectionError):  # whose end will be noticed below
                    channel.sendall(line)
        code = self._job.run(lambda: bool(self._answers) or self._done())
        if code is None:
            code = self._job.run(self._done, wake=self._patience)
        answers, self._answers = self._answers, {}
        errors: dict[str, list[str]] = {}  # what came first is the cause of the rest
        for rank, answer in answers.items():
            if "error" in answer:
                errors.setdefault(answer["error"], []).append(str(rank))
        if errors:
            told = [f"rank {', '.join(ranks)}: {error}" for error, ranks in errors.items()]
            raise Failure(code or 1, "\n".join(told))
        if self._gone:
            self._lost(self._gone[0])
        if code is not None:
            raise Failure(code or 1, "" if code else "the ranks ended before they were done")
        missing = [str(rank) for rank in range(len(self._channels)) if rank not in answers]
        if missing:
            names = ", ".join(missing)
            raise Failure(
                1, f"rank {names} did not answer within {self._patience:g} s of the others"
            )
        return list(answers.values())

    def _lost(self, rank: int) -> NoReturn:
        """Say why a rank has hung up, unless the job has told so already."""
        process = rank if rank < self._job.size else 0
        code = self._job.run(lambda: self._job.code_of(process) is not None, wake=5)
        if code is None and self._job.code_of(process):
            code = self._job.run()  # which names the rank and stops the others
        raise Failure(code or 1, "" if code else f"rank {rank} ended before it was done")

    def dismiss(self) -> None:
        """Hang up: the ranks close their communicators and end."""
        for channel in self._channels:
            with contextlib.suppress(OSError):
                channel.shutdown(socket.SHUT_WR)
        code = self._job.run(timeout=30)
        if code:
            raise Failure(1, "the results stand, but the ranks did not end as they should")


@contextlib.contextmanager
def _start(arguments: argparse.Namespace, nranks: int, library: pynccl.Library) -> Iterator[_Ranks]:
    with contextlib.ExitStack() as stack:
        pairs = [socket.socketpair() for _ in range(nranks)]
        for pair in pairs:
            for sock in pair:
                stack.enter_context(sock)
        theirs = [pair[1].fileno() for pair in pairs]
        groups = [theirs] if arguments.threads else [[fd] for fd in theirs]
        ranks = environments(len(groups), library.path)
        for env in ranks:
            env["PYNCCL_TIMEOUT"] = str(arguments.timeout)
            env.setdefault("OPENBLAS_NUM_THREADS", "1")  # NumPy need not start threads for us
            if library.kind == "host":
                env["NUMBA_ENABLE_CUDASIM"] = "1"
        command = [*bootstrap(), "-m", "pynccl.cli._perf_rank"]
        commands = [[*command, *map(str, fds)] for fds in groups]
        job = Job(commands, ranks, name="pynccl perf", stdout=2, pass_fds=groups)
        stack.enter_context(job)
        for pair in pairs:
            pair[1].close()
        yield _Ranks(job, [pair[0] for pair in pairs], arguments.timeout)


def _measure_all(
    arguments: argparse.Namespace,
    nranks: int,
    library: pynccl.Library,
    cases: list[Case],
    table: Table,
    progress: Progress,
) -> list[dict[str, Any]]:
    rows = []
    with _start(arguments, nranks, library) as ranks:
        ranks.ask(None)
        for case in cases:
            progress.show(case)
            row = COLLECTIVES[case.collective]
            factor = row.factor(nranks)
            halves = [_measure(arguments, ranks, case, False, factor)]
            if row.in_place:
                halves.append(_measure(arguments, ranks, case, True, factor))
            progress.clear()
            table.row(case, row.root, halves)
            rows.append(_json_row(case, row.root, halves))
        ranks.dismiss()
    return rows


def _measure(
    arguments: argparse.Namespace, ranks: _Ranks, case: Case, in_place: bool, factor: float
) -> Half:
    what = case._asdict() | {"in_place": in_place}
    del what["size"]
    answers = ranks.ask({"case": what, "checks": arguments.check})
    wrong = sum(answer["wrong"] for answer in answers)
    estimate = max(answer["seconds"] for answer in answers)
    calls = arguments.iters or max(1, min(1000, int(BATCH_SECONDS / estimate)))
    batches = max(1, min(_MAX_BATCHES, int(0.2 / (calls * estimate))))
    # What a call in place leaves is the next one's input: only the first of them can be verified.
    check = bool(arguments.check) and not in_place
    order = {"warmup": arguments.warmup, "calls": calls, "batches": batches, "check": check}
    answers = ranks.ask(order)
    wrong += sum(answer["wrong"] for answer in answers)
    slowest = [max(batch) for batch in zip(*(a["seconds"] for a in answers), strict=True)]
    seconds = statistics.median(slowest)
    algbw = case.size / seconds / 1e9
    return Half(seconds, algbw, algbw * factor, wrong)


def _about(arguments: argparse.Namespace, nranks: int, library: pynccl.Library) -> dict[str, Any]:
    code = library.version
    return {
        "pynccl": pynccl.__version__,
        "library": {
            "kind": library.kind,
            "version": f"{code // 10000}.{code // 100 % 100}.{code % 100}",
            "path": library.path,
        },
        "machine": {
            "cpu": _cpu(),
            "cpus": len(os.sched_getaffinity(0)),
            "system": f"{platform.system()} {platform.release()}",
        },
        "python": f"Python {platform.python_version()}, NumPy {metadata.version('numpy')}",
        "nranks": nranks,
        "mode": "threads" if arguments.threads else "processes",
        "warmup": arguments.warmup,
        "iters": arguments.iters,
        "check": arguments.check,
    }


def _cpu() -> str:
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as lines:
        for line in lines:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def _json_row(case: Case, rooted: bool, halves: list[Half]) -> dict[str, Any]:
    results: list[dict[str, Any] | None] = [
        {"time_us": h.seconds * 1e6, "algbw": h.algbw, "busbw": h.busbw, "wrong": h.wrong}
        for h in halves
    ]
    out_of_place, in_place = (*results, None)[:2]
    return {
        "collective": case.collective,
        "arrays": case.arrays,
        "dtype": case.dtype,
        "op": case.op,
        "root": case.root if rooted else -1,
        "size": case.size,
        "count": case.block,
        "out_of_place": out_of_place,
        "in_place": in_place,
    }
