"""What a call costs before the library works: nanoseconds, against a library that returns at once.

    python bench/overhead.py [--json FILE] [--rounds N] [--peers ctypes,cupy,nccl4py,mpi4py]

Every case is the same all_reduce of 1024 float32. pynccl's cases run with the default checks. Cases run in
interleaved batches in one process, so ratios hold also on a machine that is busy; see `timing.py`. Import
times come from fresh interpreters, interleaved too.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import timing
from null_libraries import NullLibraries, build
from peers import COUNT, PEERS, Absent, ReadyCAI, need
from timing import Case, Result

import pynccl


def communicator(path: str) -> pynccl.Communicator:
    """Make rank 0 of 2 on a null library."""
    return pynccl.Communicator(2, pynccl.unique_id(library=path), 0, library=path)


def python_case() -> list[Case]:
    """Time what Python itself asks for a call with two arguments."""

    def nothing(x: object, out: object) -> None:
        return None

    return [Case("Python function that does nothing", "f(1, 2)", {"f": nothing})]


def numpy_cases(null: NullLibraries) -> list[Case]:
    import numpy as np

    comm = communicator(null.host)
    a, b = np.zeros(COUNT, "f4"), np.zeros(COUNT, "f4")
    names = {
        "comm": comm, "a": a, "b": b, "MAX": pynccl.ReduceOp.MAX,
        "x": pynccl.Buffer(a), "y": pynccl.Buffer(b),
        "one": plan(comm, a, b, 1), "eight": plan(comm, a, b, 8),
    }  # fmt: skip
    return [
        Case("pynccl, two NumPy arrays", "comm.all_reduce(a, b)", names),
        Case("pynccl, two NumPy arrays, op=ReduceOp.MAX", "comm.all_reduce(a, b, MAX)", names),
        Case("pynccl, two NumPy arrays, op='max'", "comm.all_reduce(a, b, 'max')", names),
        Case("pynccl, in place", "comm.all_reduce(a, a)", names),
        Case("pynccl, result allocated", "comm.all_reduce(a)", names),
        Case("pynccl, two Buffers", "comm.all_reduce(x, y)", names),
        Case("pynccl, plan of one", "one()", names),
        Case("pynccl, plan of eight", "eight()", names),
    ]


def plan(comm: pynccl.Communicator, a: object, b: object, calls: int) -> Callable[[], None]:
    """Record `calls` calls without running them."""
    with pynccl.group(run=False) as g:
        for _ in range(calls):
            comm.all_reduce(a, b)
    return g


def list_cases(null: NullLibraries) -> list[Case]:
    """Time the list API: one call for eight ranks of this process."""
    import numpy as np

    import pynccl.multi as nccl

    xs = [np.zeros(COUNT, "f4") for _ in range(8)]
    names = {"nccl": nccl, "xs": xs, "outs": [x.copy() for x in xs], "path": null.host}
    names["comms"] = pynccl.init_all(8, library=null.host)
    return [
        Case("pynccl.multi, eight NumPy arrays", "nccl.all_reduce(xs, library=path)", names),
        Case("pynccl.multi, eight in, eight out", "nccl.all_reduce(xs, outs, library=path)", names),
        Case("pynccl.multi, eight, comms given", "nccl.all_reduce(xs, comms=comms)", names),
    ]


def cai_cases(null: NullLibraries) -> list[Case]:
    import numpy as np

    memory = np.zeros((2, COUNT), "f4")
    names = {
        "comm": communicator(null.host),
        "a": ReadyCAI(memory[0].ctypes.data),
        "b": ReadyCAI(memory[1].ctypes.data),
        "keep": memory,
    }
    return [Case("pynccl, two ready CAI objects", "comm.all_reduce(a, b)", names)]


def numba_cases(null: NullLibraries) -> list[Case]:
    """Time Numba's own device arrays, and beside them what reading their attributes costs.

    The class is Numba's; its memory is the host's, which needs no GPU and changes nothing of the way.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        driver = need("numba.cuda.cudadrv.driver")
        devicearray = need("numba.cuda.cudadrv.devicearray")
    numpy = need("numpy")
    if not hasattr(driver, "MemoryPointer"):
        raise Absent("NUMBA_ENABLE_CUDASIM is set: Numba has no device arrays then")
    memory = numpy.zeros((2, COUNT), "f4")
    names = {"comm": communicator(null.host), "keep": [memory]}

    class Context:
        pass

    for name, row in zip("ab", memory, strict=True):
        context = Context()
        pointer = driver.MemoryPointer(context, ctypes.c_void_p(row.ctypes.data), row.nbytes)
        names["keep"].append(context)
        names[name] = devicearray.DeviceNDArray((COUNT,), (4,), row.dtype, gpu_data=pointer)
    return [
        Case(NUMBA, "comm.all_reduce(a, b)", names),
        Case(NUMBA_READ, "a.__cuda_array_interface__; b.__cuda_array_interface__", names),
    ]


def simulator_cases(null: NullLibraries) -> list[Case]:
    simulated = need("numba.cuda.simulator.cudadrv.devicearray").FakeCUDAArray
    numpy = need("numpy")
    a, b = simulated(numpy.zeros(COUNT, "f4")), simulated(numpy.zeros(COUNT, "f4"))
    names = {"comm": communicator(null.host), "a": a, "b": b}
    return [Case("pynccl, two Numba simulator arrays", "comm.all_reduce(a, b)", names)]


def torch_cases(null: NullLibraries) -> list[Case]:
    torch = need("torch")
    names = {
        "comm": communicator(null.host), "a": torch.zeros(COUNT), "b": torch.zeros(COUNT),
        "weight": torch.nn.Parameter(torch.zeros(COUNT)),
    }  # fmt: skip
    return [
        Case("pynccl, two Torch CPU tensors", "comm.all_reduce(a, b)", names),
        Case("pynccl, a Torch CPU parameter in place", "comm.all_reduce(weight, weight)", names),
        Case("Torch's own two data_ptr()", "a.data_ptr(); b.data_ptr()", names),
    ]


def jax_cases(null: NullLibraries) -> list[Case]:
    jax = need("jax")
    numpy = need("numpy")
    x = jax.device_put(numpy.zeros(COUNT, "f4"))
    names = {"comm": communicator(null.host), "x": x, "out": numpy.zeros(COUNT, "f4")}
    return [Case("pynccl, a JAX CPU array into NumPy's", "comm.all_reduce(x, out)", names)]


NUMBA, NUMBA_READ = "pynccl, two Numba device arrays", "Numba's own two interface properties"
# Rows of libraries that need not be there.
OPTIONAL = {
    "numba": numba_cases,
    "numba simulator": simulator_cases,
    "torch": torch_cases,
    "jax": jax_cases,
}


def import_times(rounds: int) -> list[Result]:
    """Time the start of an interpreter with and without the import, in milliseconds."""
    programs = {
        "python": "pass",
        "python, import pynccl": "import pynccl",
        "python, import numpy": "import numpy",
    }
    samples: dict[str, list[float]] = {name: [] for name in programs}
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as empty:
        for _ in range(rounds + 1):
            for name, program in programs.items():
                begun = time.perf_counter()
                subprocess.run(
                    [sys.executable, "-c", program], cwd=empty, env=environment, check=True
                )
                samples[name].append(1e3 * (time.perf_counter() - begun))
    # The first round fills the page cache and the byte code caches.
    return [Result(n, statistics.median(s[1:]), min(s[1:])) for n, s in samples.items()]


def ratios(results: list[Result]) -> str:
    """Compare with the peers' cheapest relative, CuPy's call with bare integers; and with Numba itself."""
    by_name = {r.name: r.median for r in results}
    base = by_name.get("CuPy NcclCommunicator, integers")
    lines = []
    if base is not None:
        wanted = (
            "pynccl, two NumPy arrays",
            "pynccl, two ready CAI objects",
            "pynccl, plan of one",
        )
        lines += [f"{name} / CuPy's integers = {by_name[name] / base:.2f}" for name in wanted]
    if NUMBA in by_name:
        more = by_name[NUMBA] - by_name[NUMBA_READ]
        lines.append(f"{NUMBA} - {NUMBA_READ} = {more:.0f} ns")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", metavar="FILE", help="write the results there too")
    parser.add_argument("--rounds", type=int, default=60, help="interleaved batches per case")
    parser.add_argument(
        "--peers", default=",".join(PEERS), help="which peers to run, by comma; '' for none"
    )
    options = parser.parse_args()

    absent: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as directory:
        null = build(Path(directory))
        cases = [*python_case(), *numpy_cases(null), *list_cases(null), *cai_cases(null)]
        peers = filter(None, options.peers.split(","))
        for name, make in [*OPTIONAL.items(), *((name, PEERS[name]) for name in peers)]:
            try:
                cases += make(null)
            except Absent as reason:
                absent[name] = str(reason)
        results = timing.measure(cases, options.rounds)
    imports = import_times(max(5, options.rounds // 3))

    for key, value in timing.machine().items():
        print(f"{key}: {value}")
    print("\nall_reduce of 1024 float32 on a library that returns at once\n")
    print(timing.table(results))
    print(f"\n{ratios(results)}")
    print("\nstarting an interpreter\n")
    print(timing.table(imports, "ms", 1))
    for name, reason in absent.items():
        print(f"absent: {name} ({reason})")
    if options.json:
        timing.save(options.json, [*results, *imports], absent)


if __name__ == "__main__":
    main()
