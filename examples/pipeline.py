"""Pipeline parallelism: each rank has one layer of a network, and microbatches pass through the ranks.

All microbatches go forward, stage to stage, then their gradients come back. While a stage works on one
microbatch, the one before it works on the next. Each rank ends with the gradient of its own layer.

    pynccl run -n 4 pipeline.py

The same file runs on GPUs: `xp` is CuPy there, and calls go to CuPy's current stream, after its kernels.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

import numpy as np
from numpy.typing import NDArray

import pynccl

Floats = NDArray[np.float64]
WIDTH, BATCH, MICROBATCHES = 16, 48, 6


def model(layers: int) -> tuple[list[Floats], Floats, Floats]:
    """Make a layer's weights for each rank, the network's input, and what should come out."""
    rng = np.random.default_rng(seed=1)
    weights = [rng.standard_normal((WIDTH, WIDTH)) / WIDTH**0.5 for _ in range(layers)]
    return weights, rng.standard_normal((BATCH, WIDTH)), rng.standard_normal((BATCH, WIDTH))


def forward(xp: Any, weight: Any, x: Any) -> Any:
    """One layer."""
    return xp.tanh(x @ weight)


def backward(weight: Any, x: Any, y: Any, dy: Any) -> tuple[Any, Any]:
    """From the gradient of a layer's output to those of its weights and of its input."""
    inner = dy * (1.0 - y**2)
    return x.T @ inner, inner @ weight.T


def train_here(layers: int) -> list[Floats]:
    """All layers in one process, the batch as a whole: what the ranks' gradients are compared with."""
    weights, x, target = model(layers)
    inputs = [x]
    for weight in weights:
        inputs.append(forward(np, weight, inputs[-1]))
    gradients: list[Floats] = []
    grad = (inputs[-1] - target) / BATCH  # of half the mean squared error
    for layer in reversed(range(layers)):
        dw, grad = backward(weights[layer], inputs[layer], inputs[layer + 1], grad)
        gradients.insert(0, dw)
    return gradients


def train_stage(xp: Any, comm: pynccl.Communicator) -> Any:
    """Work as one stage; gives the gradient of this rank's weights."""
    first, last = comm.rank == 0, comm.rank == comm.nranks - 1
    before, after = comm.rank - 1, comm.rank + 1
    weights, batch, targets = model(comm.nranks)
    weight = xp.asarray(weights[comm.rank])
    # Every microbatch has arrays of its own: its layer's input and output are needed again on the way back.
    xs = list(xp.asarray(batch).reshape(MICROBATCHES, -1, WIDTH)) if first else []
    ys = []
    for m in range(MICROBATCHES):
        if not first:
            xs.append(comm.recv(xp.empty((BATCH // MICROBATCHES, WIDTH)), before))
        ys.append(forward(xp, weight, xs[m]))
        if not last:
            comm.send(ys[m], after)

    gradient = xp.zeros_like(weight)
    wanted = xp.asarray(targets).reshape(MICROBATCHES, -1, WIDTH)
    for m in range(MICROBATCHES):
        if last:
            dy = (ys[m] - wanted[m]) / BATCH
        else:
            dy = comm.recv(xp.empty_like(ys[m]), after)
        dw, dx = backward(weight, xs[m], ys[m], dy)
        gradient += dw
        if not first:
            comm.send(dx, before)
    return gradient


def main() -> int:
    """Run on every rank, and compare there. The exit code says whether the result is right."""
    with pynccl.init() as comm:  # on GPUs: device LOCAL_RANK is current from here on, for CuPy too
        xp = importlib.import_module("numpy" if comm.library.kind == "host" else "cupy")
        gradient = train_stage(xp, comm)
        right = xp.asarray(train_here(comm.nranks)[comm.rank])
        error = float(comm.all_reduce(abs(gradient - right).max().reshape(1))[0])  # on every rank
        good = error < 1e-12
        if comm.rank == 0:
            verdict = "OK" if good else f"WRONG by {error:.1e}"
            work = f"{comm.nranks} stages, {MICROBATCHES} microbatches"
            print(f"pipeline: {work}, the gradients of one process: {verdict}")
        return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
