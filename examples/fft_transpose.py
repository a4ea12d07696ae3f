"""A two-dimensional FFT of an array whose rows are divided among ranks.

Each rank transforms its rows, an all_to_all transposes the array across ranks, and each transforms the
rows of the transpose. It stays transposed, as distributed FFTs leave it: a rank has columns of the spectrum.

    pynccl run -n 4 fft_transpose.py

The same file runs on GPUs: `xp` is CuPy there, and calls go to CuPy's current stream, after its kernels.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

import numpy as np

import pynccl

SIZE = 64


def transpose(xp: Any, comm: pynccl.Communicator, rows: Any) -> Any:
    """Give this rank's rows of the transpose of an array of which it has some rows.

    Rank r needs the r-th block of columns. Axis 0 of an all_to_all counts the blocks, each of which lies in
    one piece: hence the copy.
    """
    count, size = rows.shape
    blocks = rows.reshape(count, comm.nranks, size // comm.nranks).transpose(1, 2, 0)
    received = comm.all_to_all(xp.ascontiguousarray(blocks))  # any dtype moves, here complex128
    # received[r] has rank r's rows as its columns: side by side they are whole rows of the transpose.
    return received.transpose(1, 0, 2).reshape(-1, count * comm.nranks)


def main() -> int:
    """Run on every rank, and compare there. The exit code says whether the result is right."""
    with pynccl.init() as comm:  # on GPUs: device LOCAL_RANK is current from here on, for CuPy too
        xp = importlib.import_module("numpy" if comm.library.kind == "host" else "cupy")
        if SIZE % comm.nranks:
            raise SystemExit(f"{SIZE} rows cannot be divided among {comm.nranks} ranks")
        rng = np.random.default_rng(seed=1)
        signal = rng.standard_normal((SIZE, SIZE)) + 1j * rng.standard_normal((SIZE, SIZE))
        count = SIZE // comm.nranks
        mine = slice(comm.rank * count, (comm.rank + 1) * count)

        along_rows = xp.fft.fft(xp.asarray(signal[mine]), axis=1)
        spectrum = xp.fft.fft(transpose(xp, comm, along_rows), axis=1)

        right = np.fft.fft2(signal)[:, mine].T
        error = abs(spectrum - xp.asarray(right)).max().reshape(1)
        error = float(comm.all_reduce(error)[0])  # every rank must be right
        good = error < 1e-9
        if comm.rank == 0:
            verdict = "OK" if good else f"WRONG by {error:.1e}"
            work = f"{comm.nranks} ranks, {SIZE} x {SIZE}"
            print(f"fft_transpose: {work}, as numpy.fft.fft2: {verdict}")
        return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
