"""Training with data parallelism: every rank has a part of the data, and gradients are averaged.

A network of two layers learns a function. Rank 0's weights are broadcast. In each step every rank computes
the gradients of its own samples, and one launch averages all of them: a plan, replayed each step.

    pynccl run -n 4 sgd.py

The same file runs on GPUs: `xp` is CuPy there, and calls go to CuPy's current stream, after its kernels.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

import numpy as np
from numpy.typing import NDArray

import pynccl

SAMPLES, INPUTS, HIDDEN, STEPS, RATE = 240, 5, 8, 40, 0.5


def data() -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Make the samples and what is to be learned from them."""
    x = np.random.default_rng(seed=1).standard_normal((SAMPLES, INPUTS))
    return x, np.sin(x).sum(axis=1, keepdims=True)


def first_weights(seed: int) -> list[NDArray[np.float64]]:
    """Choose weights to begin with: two matrices and two biases."""
    rng = np.random.default_rng(seed)
    shapes = [(INPUTS, HIDDEN), (HIDDEN,), (HIDDEN, 1), (1,)]
    return [0.5 * rng.standard_normal(shape) for shape in shapes]


def gradients(xp: Any, weights: list[Any], x: Any, y: Any, out: list[Any]) -> None:
    """Write the gradients of half the mean squared error over these samples into `out`."""
    w1, b1, w2, b2 = weights
    hidden = xp.tanh(x @ w1 + b1)
    wrong = (hidden @ w2 + b2 - y) / len(x)
    back = (wrong @ w2.T) * (1.0 - hidden**2)
    for gradient, value in zip(
        out, (x.T @ back, back.sum(axis=0), hidden.T @ wrong, wrong.sum(axis=0)), strict=True
    ):
        gradient[...] = value  # in place: the plan below holds these arrays


def train_here() -> list[NDArray[np.float64]]:
    """Train on all samples in one process: what the ranks' result is compared with."""
    x, y = data()
    weights = first_weights(seed=0)
    grads = [np.empty_like(weight) for weight in weights]
    for _ in range(STEPS):
        gradients(np, weights, x, y, out=grads)
        for weight, grad in zip(weights, grads, strict=True):
            weight -= RATE * grad
    return weights


def main() -> int:
    """Run on every rank, and compare there. The exit code says whether the result is right."""
    with pynccl.init() as comm:  # on GPUs: device LOCAL_RANK is current from here on, for CuPy too
        xp = importlib.import_module("numpy" if comm.library.kind == "host" else "cupy")
        if SAMPLES % comm.nranks:  # unequal parts would need a weighted average
            raise SystemExit(f"{SAMPLES} samples cannot be divided among {comm.nranks} ranks")
        x, y = (xp.asarray(part[comm.rank :: comm.nranks]) for part in data())
        weights = [xp.asarray(weight) for weight in first_weights(seed=comm.rank)]
        grads = [xp.empty_like(weight) for weight in weights]

        with pynccl.group():
            for weight in weights:
                comm.broadcast(weight, root=0)
        with pynccl.group(run=False) as average:
            for grad in grads:
                comm.all_reduce(grad, out=grad, op="avg")
        for _ in range(STEPS):
            gradients(xp, weights, x, y, out=grads)
            average()
            for weight, grad in zip(weights, grads, strict=True):
                weight -= RATE * grad

        error = sum(
            abs(weight - xp.asarray(right)).sum()
            for weight, right in zip(weights, train_here(), strict=True)
        )
        error = float(comm.all_reduce(xp.asarray(error).reshape(1))[0])  # every rank must be right
        good = error < 1e-10
        if comm.rank == 0:
            verdict = "OK" if good else f"WRONG by {error:.1e}"
            print(f"sgd: {comm.nranks} ranks, {STEPS} steps, the weights of one process: {verdict}")
        return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
