"""Timing in interleaved batches, and what a result must say about where it was taken.

Cases that are compared run in turn, a short batch each, for many rounds: what slows the machine for a while
slows all of them. The median over the batches is the figure; the minimum shows the undisturbed cost.
"""

from __future__ import annotations

import gc
import json
import os
import platform
import statistics
import sys
import timeit
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class Case:
    """One statement to time, and the names it uses."""

    name: str
    statement: str
    names: dict[str, Any] = field(repr=False, default_factory=dict)
    note: str = ""


@dataclass
class Result:
    """Nanoseconds for one execution of a case."""

    name: str
    median: float
    minimum: float
    note: str = ""


def measure(cases: list[Case], rounds: int = 60, batch_ns: float = 400_000) -> list[Result]:
    """Time each case in `rounds` interleaved batches of about `batch_ns` nanoseconds."""
    timers, numbers = [], []
    for case in cases:
        timer = timeit.Timer(case.statement, globals=case.names, timer=_clock)
        timer.timeit(50)  # first calls fill caches and import lazily
        once = max(timer.timeit(200) / 200, 1.0)
        timers.append(timer)
        numbers.append(max(20, int(batch_ns / once)))
    samples: list[list[float]] = [[] for _ in cases]
    enabled = gc.isenabled()
    gc.disable()
    try:
        for _ in range(rounds):
            for slot, timer, number in zip(samples, timers, numbers, strict=True):
                slot.append(timer.timeit(number) / number)
    finally:
        if enabled:
            gc.enable()
    return [
        Result(case.name, statistics.median(slot), min(slot), case.note)
        for case, slot in zip(cases, samples, strict=True)
    ]


def _clock() -> float:
    import time

    return float(time.perf_counter_ns())


def machine() -> dict[str, str]:
    """Describe the machine without naming it."""
    model = platform.processor() or platform.machine()
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                model = line.split(":", 1)[1].strip()
                break
    except OSError:
        pass
    return {
        "cpu": model,
        "cores": str(len(os.sched_getaffinity(0))),
        "load": " ".join(f"{x:.1f}" for x in os.getloadavg()),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "command": " ".join(["python", *sys.argv]),
    }


def table(results: list[Result], unit: str = "ns", digits: int = 0) -> str:
    """Lay the results out as text."""
    width = max(len(r.name) for r in results)
    lines = [f"{'':{width}}  {'median':>9} {'min':>9}  {unit}"]
    lines += [
        f"{r.name:{width}}  {r.median:9.{digits}f} {r.minimum:9.{digits}f}  {r.note}".rstrip()
        for r in results
    ]
    return "\n".join(lines)


def save(path: str, results: list[Result], absent: dict[str, str]) -> None:
    """Write results and machine as JSON."""
    data = {"machine": machine(), "results": [asdict(r) for r in results], "absent": absent}
    Path(path).write_text(json.dumps(data, indent=1) + "\n")
