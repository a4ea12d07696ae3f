"""What bindings do with arrays that must not be sent as they are: refuse them, or hand them to NCCL.

    python bench/peer_checks.py

Each case calls all_reduce of one binding on the null library, which accepts whatever reaches it. Reaching it
means that a real library would have read or written the wrong memory, or the wrong numbers.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from null_libraries import NullLibraries, build
from peers import Absent, ReadyCAI, need, preload

import pynccl

MEMORY = np.zeros(4096, "f4")


def device_array(**changes: Any) -> ReadyCAI:
    """Make an array object of 16 float32, with some entries of its interface changed."""
    array = ReadyCAI(MEMORY.ctypes.data, 16)
    array.__cuda_array_interface__.update(changes)
    return array


def pairs() -> Iterator[tuple[str, ReadyCAI, ReadyCAI]]:
    """Give (what is wrong, input, output)."""
    good = device_array(data=(MEMORY.ctypes.data + 8192, False))
    yield "nothing", device_array(), good
    yield "x is every other element", device_array(strides=(8,)), good
    yield "x is reversed", device_array(strides=(-4,)), good
    yield "x repeats one element", device_array(strides=(0,)), good
    yield "x has foreign byte order", device_array(typestr=">f4"), good
    yield "out is read-only", device_array(), device_array(data=(MEMORY.ctypes.data, True))
    yield (
        "out is too small",
        device_array(),
        device_array(shape=(4,), data=(MEMORY.ctypes.data + 64, False)),
    )


def through_pynccl(null: NullLibraries) -> Callable[[object, object], object]:
    comm = pynccl.Communicator(2, pynccl.unique_id(library=null.host), 0, library=null.host)
    return comm.all_reduce


def through_nccl4py(null: NullLibraries) -> Callable[[object, object], object]:
    preload(null.cuda, null.nccl)
    core = need("nccl.core")
    comm = core.Communicator.init(2, 0, core.get_unique_id())
    return lambda x, out: comm.allreduce(x, out, core.SUM, stream=0)


def through_mpi4py(null: NullLibraries) -> Callable[[object, object], object]:
    del null
    mpi = need("mpi4py.MPI")
    return lambda x, out: mpi.COMM_SELF.Allreduce(x, out, mpi.SUM)


def main() -> None:
    bindings = {"pynccl": through_pynccl, "nccl4py": through_nccl4py, "mpi4py": through_mpi4py}
    with tempfile.TemporaryDirectory() as directory:
        null = build(Path(directory))
        calls = {}
        for name, make in bindings.items():
            try:
                calls[name] = make(null)
            except Absent as reason:
                print(f"absent: {name} ({reason})")
        print(f"{'all_reduce(x, out), where':28}" + "".join(f"{name:24}" for name in calls))
        for what, x, out in pairs():
            answers = []
            for call in calls.values():
                try:
                    call(x, out)
                    answers.append("passed on")
                except Exception as error:
                    answers.append(type(error).__name__)
            print(f"{what:28}" + "".join(f"{answer:24}" for answer in answers))


if __name__ == "__main__":
    main()
