"""Heat on a plate whose rows are divided among ranks: Numba kernels, and borders exchanged by a plan.

Each rank holds its rows and one more at either end, the halo: a copy of the neighbour's border. A step is
an exchange of borders and a kernel. The exchange is recorded once, in a group, and replayed each step.

    pynccl run -n 4 stencil.py

The same file runs on GPUs as it is. Without one, Numba's simulator runs the kernels.
"""

# mypy: disable-error-code="attr-defined, import-untyped, untyped-decorator"
# (what Numba's own annotations leave open; pynccl's need none of this)

from __future__ import annotations

import os
import sys
from typing import Any

import numpy as np
from numpy.typing import NDArray

import pynccl

if pynccl.library().kind == "host":  # no GPU, or --library host; to be set before Numba is imported
    os.environ["NUMBA_ENABLE_CUDASIM"] = "1"
from numba import cuda

ROWS, COLUMNS, STEPS = 16, 8, 10  # small: the simulator makes a thread of Python for each point
BLOCK = (8, 8)  # columns, rows


@cuda.jit
def step(old: Any, new: Any) -> None:
    """Move every inner point towards the mean of its four neighbours."""
    j, i = cuda.grid(2)  # neighbouring threads take neighbouring columns, which lie side by side
    if 0 < i < old.shape[0] - 1 and 0 < j < old.shape[1] - 1:
        around = old[i - 1, j] + old[i + 1, j] + old[i, j - 1] + old[i, j + 1]
        new[i, j] = old[i, j] + 0.2 * (around - 4.0 * old[i, j])


def border_exchange(comm: pynccl.Communicator, u: Any) -> pynccl.Group:
    """Record the calls that fill the halo of `u`; calling the result makes them."""
    last = u.shape[0] - 1
    up, down = comm.rank - 1, comm.rank + 1
    # In a group both directions go at once: no rank waits for one that waits for it.
    with pynccl.group(run=False) as plan:
        if up >= 0:
            comm.send(u[1], up)
            comm.recv(u[0], up)
        if down < comm.nranks:
            comm.send(u[last - 1], down)
            comm.recv(u[last], down)
    return plan


def run_here(plate: NDArray[np.float64]) -> NDArray[np.float64]:
    """Do the same on one array: what the ranks' result is compared with."""
    old, new = plate.copy(), plate.copy()
    for _ in range(STEPS):
        around = old[:-2, 1:-1] + old[2:, 1:-1] + old[1:-1, :-2] + old[1:-1, 2:]
        new[1:-1, 1:-1] = old[1:-1, 1:-1] + 0.2 * (around - 4.0 * old[1:-1, 1:-1])
        old, new = new, old
    return old


def main() -> int:
    """Run on every rank; rank 0 compares. The exit code says whether the result is right."""
    with pynccl.init() as comm:  # on GPUs: device LOCAL_RANK is current from here on, for Numba too
        rows = ROWS // comm.nranks
        if rows * comm.nranks != ROWS:
            raise SystemExit(f"{ROWS} rows cannot be divided among {comm.nranks} ranks")
        # The edges of the plate stay as they are.
        plate = np.random.default_rng(seed=1).random((ROWS + 2, COLUMNS))
        part = plate[comm.rank * rows : (comm.rank + 1) * rows + 2]

        old, new = cuda.to_device(part), cuda.to_device(part)
        exchange_old, exchange_new = border_exchange(comm, old), border_exchange(comm, new)
        grid = (-(-COLUMNS // BLOCK[0]), -(-(rows + 2) // BLOCK[1]))
        for _ in range(STEPS):
            # Kernels and calls are all on the default stream, which keeps their order: nothing to wait for.
            exchange_old()
            step[grid, BLOCK](old, new)
            old, new = new, old
            exchange_old, exchange_new = exchange_new, exchange_old

        parts = comm.gather(old[1 : rows + 1])
        if parts is None:  # not on rank 0
            return 0
        got = parts.copy_to_host().reshape(ROWS, COLUMNS)
        error = float(np.abs(got - run_here(plate)[1:-1]).max())
        good = error < 1e-12
        verdict = "OK" if good else f"WRONG by {error:.1e}"
        print(f"stencil: {comm.nranks} ranks, {STEPS} steps, as on one array: {verdict}")
        return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
