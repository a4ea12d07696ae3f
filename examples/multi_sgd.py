"""Training with data parallelism in one process that drives several devices, through `pynccl.multi`.

Each device has a part of the data and a replica of the weights. The functions of `pynccl.multi` take a list
with one array for each device, and make and keep the communicators.

    python multi_sgd.py

The same file runs on GPUs: `xp` is CuPy there, and the devices are all that it finds. On the host library
devices are mere numbers; here there are four.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from typing import Any

import numpy as np
from numpy.typing import NDArray

import pynccl
import pynccl.multi as nccl

SAMPLES, INPUTS, STEPS, RATE = 840, 5, 50, 0.2  # 840 can be divided among 1 to 8 devices


def data() -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Make the samples and what is to be learned from them."""
    rng = np.random.default_rng(seed=1)
    x = rng.standard_normal((SAMPLES, INPUTS))
    return x, x @ np.arange(1.0, INPUTS + 1.0) + 0.1 * rng.standard_normal(SAMPLES)


def gradient(x: Any, y: Any, weights: Any) -> Any:
    """Of half the mean squared error of a linear model over these samples."""
    return x.T @ (x @ weights - y) / len(x)


def train_here() -> NDArray[np.float64]:
    """Train on all samples at once: what the devices' result is compared with."""
    x, y = data()
    weights = np.zeros(INPUTS)
    for _ in range(STEPS):
        weights -= RATE * gradient(x, y, weights)
    return weights


def main() -> int:
    """Train, and compare. The exit code says whether the result is right."""
    on_gpus = pynccl.library().kind == "nccl"
    xp = importlib.import_module("cupy" if on_gpus else "numpy")
    count = xp.cuda.runtime.getDeviceCount() if on_gpus else 4
    if SAMPLES % count:
        raise SystemExit(f"{SAMPLES} samples cannot be divided among {count} devices")

    def device(i: int) -> Any:
        return xp.cuda.Device(i) if on_gpus else contextlib.nullcontext()

    x, y = data()
    parts, replicas = [], []
    for i in range(count):
        with device(i):
            parts.append((xp.asarray(x[i::count]), xp.asarray(y[i::count])))
            replicas.append(xp.full(INPUTS, float(i)))  # device 0 has zeros
    nccl.broadcast(replicas, root=0)

    for _ in range(STEPS):
        gradients = []
        for i, weights in enumerate(replicas):
            with device(i):  # this only queues kernels: the devices work at the same time
                gradients.append(gradient(*parts[i], weights))
        nccl.all_reduce(gradients, op=pynccl.ReduceOp.AVG)  # in place, after the kernels
        for i, weights in enumerate(replicas):
            with device(i):
                weights -= RATE * gradients[i]

    right = train_here()
    error = 0.0
    for i, weights in enumerate(replicas):
        with device(i):
            error += float(abs(weights - xp.asarray(right)).max())
    nccl.clear_cache()  # closes the communicators
    good = error < 1e-10
    verdict = "OK" if good else f"WRONG by {error:.1e}"
    print(f"multi_sgd: {count} devices, {STEPS} steps, the weights of one device: {verdict}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
