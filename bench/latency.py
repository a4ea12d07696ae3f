"""Microseconds for an 8-byte all_reduce between processes on the host library, from Python.

    python bench/latency.py [--ranks 2,4] [--json FILE] [--rounds N]

Each round starts the ranks anew for pynccl and, where mpi4py and its mpiexec are installed, for mpi4py, in
turn. A rank times batches of calls; the figure is rank 0's, as the median over all batches of all rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

import timing
from timing import Result

BATCHES = 40


def time_calls(call: Callable[[], object], seconds: float = 0.02) -> list[float]:
    """Time batches of `call`; the number of calls is agreed on by doing the same on all ranks."""
    for _ in range(200):
        call()
    number = 500
    samples = []
    for _ in range(BATCHES):
        begun = time.perf_counter_ns()
        for _ in range(number):
            call()
        samples.append((time.perf_counter_ns() - begun) / number / 1e3)
    return samples


def rank_of_pynccl() -> None:
    import numpy as np

    import pynccl

    with pynccl.init(library="host", timeout=60) as comm:
        x = np.full(1, comm.rank + 1.0)
        y = np.empty(1)
        samples = time_calls(lambda: comm.all_reduce(x, y))
        want = comm.nranks * (comm.nranks + 1) / 2
        if y[0] != want:
            raise SystemExit(f"wrong result: {y[0]} instead of {want}")
        if comm.rank == 0:
            print(json.dumps(samples))


def rank_of_mpi4py() -> None:
    import numpy as np
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    x = np.full(1, comm.rank + 1.0)
    y = np.empty(1)
    samples = time_calls(lambda: comm.Allreduce(x, y, MPI.SUM))
    if comm.rank == 0:
        print(json.dumps(samples))


def start_pynccl(ranks: int) -> list[float]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    common = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1"}
    children = []
    with tempfile.TemporaryDirectory() as elsewhere:
        for rank in range(ranks):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "MASTER_PORT": port}
            command = [sys.executable, os.path.abspath(__file__), "--as-rank", "pynccl"]
            environment = {**os.environ, **common, **own}
            children.append(
                subprocess.Popen(
                    command, cwd=elsewhere, env=environment, stdout=subprocess.PIPE, text=True
                )
            )
        try:
            outputs = [child.communicate(timeout=120)[0] for child in children]
        finally:
            for child in children:
                child.kill()
    if any(child.returncode for child in children):
        raise SystemExit("a rank failed")
    return list(json.loads(outputs[0]))


def start_mpi4py(ranks: int) -> list[float]:
    mpiexec = shutil.which("mpiexec", path=os.path.dirname(sys.executable)) or "mpiexec"
    command = [
        mpiexec,
        "-n",
        str(ranks),
        sys.executable,
        os.path.abspath(__file__),
        "--as-rank",
        "mpi4py",
    ]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=120, check=True)
    return list(json.loads(done.stdout))


def mpi_is_absent() -> str:
    """Say why mpi4py cannot run here; empty if it can."""
    check = subprocess.run(
        [sys.executable, "-c", "import mpi4py.MPI"], capture_output=True, text=True, check=False
    )
    if check.returncode:
        return check.stderr.strip().splitlines()[-1]
    found = shutil.which("mpiexec", path=os.path.dirname(sys.executable)) or shutil.which("mpiexec")
    return "" if found else "no mpiexec"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", default="2,4", help="numbers of ranks, by comma")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", metavar="FILE", help="write the results there too")
    parser.add_argument("--as-rank", choices=["pynccl", "mpi4py"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.as_rank:
        {"pynccl": rank_of_pynccl, "mpi4py": rank_of_mpi4py}[options.as_rank]()
        return

    reason = mpi_is_absent()
    absent = {"mpi4py": reason} if reason else {}
    starters = {"pynccl": start_pynccl} | ({} if reason else {"mpi4py": start_mpi4py})
    results = []
    for ranks in map(int, options.ranks.split(",")):
        samples: dict[str, list[float]] = {name: [] for name in starters}
        for _ in range(options.rounds):
            for name, start in starters.items():
                samples[name] += start(ranks)
        results += [
            Result(f"{name}, {ranks} processes", statistics.median(s), min(s))
            for name, s in samples.items()
        ]
    for key, value in timing.machine().items():
        print(f"{key}: {value}")
    print("\nall_reduce of one float64, NumPy arrays, from Python\n")
    print(timing.table(results, "us", 2))
    for name, why in absent.items():
        print(f"absent: {name} ({why})")
    if options.json:
        timing.save(options.json, results, absent)


if __name__ == "__main__":
    main()
