"""What the user of `perf` sees: the table, and meanwhile what is being measured."""

from __future__ import annotations

import contextlib
import os
import statistics
import sys
import time
from typing import Any, NamedTuple, TextIO

from ._perf_cases import Case

__all__ = ["BATCH_SECONDS", "Half", "Progress", "Table"]

BATCH_SECONDS = 0.008  # what a batch of calls takes, unless their number is given


class Half(NamedTuple):
    """Result of a case, in place or out of place."""

    seconds: float
    algbw: float
    busbw: float
    wrong: int


class Table:
    """The table, one row at a time.

    Parameters
    ----------
    stream : file
        Where it goes.
    cases : list of Case
        All rows to come, from which the width of a column follows.
    """

    def __init__(self, stream: TextIO, cases: list[Case]) -> None:
        self._stream = stream
        self._width = max([8, *(len(case.dtype) for case in cases)])
        self._section: tuple[str, str] | None = None
        self._began = time.monotonic()
        self.wrong = 0
        self._busbw: list[float] = []

    @property
    def average(self) -> float:
        """Mean of all bus bandwidths, as nccl-tests reports it."""
        return statistics.fmean(self._busbw) if self._busbw else 0.0

    def _print(self, text: str) -> None:
        print(text, file=self._stream, flush=True)

    def header(self, about: dict[str, Any]) -> None:
        """Say what is measured, where and how."""
        library, machine = about["library"], about["machine"]
        ranks = f"{about['nranks']} rank{'s' * (about['nranks'] > 1)}"
        self._print(
            f"# pynccl {about['pynccl']} perf: {ranks} ({about['mode']}), {library['kind']} library"
        )
        self._print(f"# library {library['version']}: {library['path']}")
        self._print(
            f"# {machine['cpu']}, {machine['cpus']} CPUs; {machine['system']}; {about['python']}"
        )
        calls = f"{about['iters']} calls" if about["iters"] else f"{BATCH_SECONDS * 1e3:g} ms"
        checks = "every element verified" if about["check"] else "results not verified"
        self._print(f"# warmup {about['warmup']}, batches of {calls}, {checks}")
        half = f"{'time':>9} {'algbw':>7} {'busbw':>7} {'#wrong':>6}"
        units = f"{'(us)':>9} {'(GB/s)':>7} {'(GB/s)':>7} {'':>6}"
        start = f"{'size':>12} {'count':>12} {'type':>{self._width}} {'redop':>7} {'root':>5} "
        under = f"{'(B)':>12} {'(elements)':>12} {'':>{self._width}} {'':>7} {'':>5} "
        self._print("#")
        self._print(f"#{'':{len(start)}}{'out-of-place':>22}{'':11}{'in-place':>18}")
        self._print(f"#{start} {half}  {half}")
        self._print(f"#{under} {units}  {units}".rstrip())

    def row(self, case: Case, rooted: bool, halves: list[Half]) -> None:
        """Print one row, under a heading where a new collective begins."""
        if (case.collective, case.arrays) != self._section:
            self._section = (case.collective, case.arrays)
            self._print(f"# {case.collective}, {case.arrays} arrays")
        cells = [f"{case.size:13} {case.block:12} {case.dtype:>{self._width}} {case.op:>7} "
                 f"{case.root if rooted else -1:5} "]  # fmt: skip
        for half in halves:
            self.wrong += half.wrong
            self._busbw.append(half.busbw)
            micro = half.seconds * 1e6
            shown = f"{micro:9.2f}" if micro < 1e4 else f"{micro:9.0f}"
            cells.append(f"{shown} {half.algbw:7.2f} {half.busbw:7.2f} {half.wrong:6}")
        if len(halves) == 1:
            cells.append(f"{'N/A':>9} {'N/A':>7} {'N/A':>7} {'N/A':>6}")
        self._print(cells[0] + " " + "  ".join(cells[1:]))

    def footer(self) -> None:
        """Say whether all is well."""
        seconds = time.monotonic() - self._began
        state = "OK" if not self.wrong else "FAILED"
        self._print("#")
        self._print(f"# Out of bounds values : {self.wrong} {state}")
        self._print(f"# Avg bus bandwidth    : {self.average:.3f} GB/s")
        self._print(f"# Took                 : {seconds:.1f} s")


class Progress:
    """What is being measured now, on standard error.

    On a terminal it is one line that changes. Elsewhere each row gets a line, unless the rows themselves
    go to the same place.
    """

    def __init__(self, total: int, quiet: bool) -> None:
        self._total = total
        self._done = 0
        self._quiet = quiet
        self._live = sys.stderr.isatty()
        self._began = time.monotonic()
        with contextlib.suppress(OSError, ValueError):
            out, err = os.fstat(sys.stdout.fileno()), os.fstat(sys.stderr.fileno())
            if not self._live and (out.st_dev, out.st_ino) == (err.st_dev, err.st_ino):
                self._quiet = True

    def show(self, case: Case) -> None:
        """Say which case is next."""
        self._done += 1
        if self._quiet:
            return
        text = (
            f"[{self._done}/{self._total}] {case.collective} {case.dtype} {case.op} {case.size} B"
        )
        if self._live:
            spent = time.monotonic() - self._began
            left = spent / max(1, self._done - 1) * (self._total - self._done + 1)
            text += f", about {left:.0f} s left" if self._done > 5 else ""
            sys.stderr.write(f"\r{text}\x1b[K")
        else:
            sys.stderr.write(text + "\n")
        sys.stderr.flush()

    def clear(self) -> None:
        """Remove the line from the terminal, where the next row will be."""
        if self._live and not self._quiet:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
