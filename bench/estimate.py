"""What `Group.simulate` says beside what a call takes: microseconds, between processes on the host library.

    python bench/estimate.py [--ranks 2,4] [--json FILE]

The figure is rank 0's median of many calls, each after a barrier, and their minimum.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

import timing

COUNTS = (2, 1 << 10, 1 << 14, 1 << 18, 1 << 21)
VERBS = ("all_reduce", "broadcast", "all_gather")
CALLS = 30


def rank() -> None:
    """Print what this rank measures, if it is rank 0."""
    import numpy as np

    import pynccl

    rows = []
    with pynccl.init(library="host", timeout=60) as comm:
        for verb in VERBS:
            for count in COUNTS:
                x = np.ones(count, "f4")
                out = np.zeros(count * (comm.nranks if verb == "all_gather" else 1), "f4")
                with pynccl.group(run=False) as plan:
                    getattr(comm, verb)(x, out=out)
                said = plan.simulate()
                for _ in range(5):
                    plan()
                samples = []
                for _ in range(CALLS):
                    comm.barrier()
                    begun = time.perf_counter()
                    plan()
                    samples.append(time.perf_counter() - begun)
                rows.append([verb, 4 * count, said, statistics.median(samples), min(samples)])
        if comm.rank == 0:
            print(json.dumps(rows))


def main() -> None:
    """Run the ranks and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", default="2,4")
    parser.add_argument("--json")
    parser.add_argument("--as-rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.as_rank:
        rank()
        return
    print(*(f"{name}: {value}" for name, value in timing.machine().items()), sep="\n")
    print(
        f"\n{'ranks':>5} {'verb':<12} {'bytes':>9} {'estimate':>10} {'median':>10} {'min us':>10}   ratio"
    )
    results = []
    for n in map(int, options.ranks.split(",")):
        command = [
            sys.executable,
            "-m",
            "pynccl",
            "run",
            "-n",
            str(n),
            Path(__file__).name,
            "--as-rank",
        ]
        # From here: in the root, "-m" would find the sources.
        said = subprocess.run(
            command,
            cwd=Path(__file__).parent,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
            timeout=300,
        )
        for verb, size, estimate, median, least in json.loads(said.stdout):
            results.append([n, verb, size, estimate, median, least])
            print(
                f"{n:5} {verb:<12} {size:9} {estimate * 1e6:10.1f} {median * 1e6:10.1f} "
                f"{least * 1e6:10.1f} {estimate / median:7.2f}"
            )
    ratios = sorted(row[3] / row[4] for row in results)
    print(
        f"\nestimate / median: {ratios[0]:.2f} to {ratios[-1]:.2f}, median {statistics.median(ratios):.2f}"
    )
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"machine": timing.machine(), "results": results}, file, indent=1)


if __name__ == "__main__":
    main()
