"""Run a piece of Python in a process of its own, away from the source tree and under a time limit."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parent.parent


def environment(**changes: str | None) -> dict[str, str]:
    """This process's environment with changes; None removes a variable."""
    env = {**os.environ, **{name: value for name, value in changes.items() if value is not None}}
    for name, value in changes.items():
        if value is None:
            env.pop(name, None)
    return env


def start(code: str, *args: str, **changes: str | None) -> subprocess.Popen[str]:
    """Start a script; ``helpers`` can be imported in it.  The caller waits for it or kills it."""
    boot = f"import sys; sys.path[:] = [{str(TESTS)!r}, *filter(None, sys.path)]\n"
    return subprocess.Popen(
        [sys.executable, "-c", boot + textwrap.dedent(code), *args],
        cwd="/",
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(**changes),
    )


def finish(process: subprocess.Popen[str], limit: float = 30.0) -> tuple[int, str, str]:
    """Wait for a script; returns its exit status, stdout and stderr.  It is killed at the limit."""
    try:
        out, err = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        raise AssertionError(f"not done after {limit} s\n{out}\n{err}") from None
    return process.returncode, out, err


def run(code: str, *args: str, limit: float = 30.0, **changes: Any) -> str:
    """Run a script that must succeed; returns what it printed."""
    status, out, err = finish(start(code, *args, **changes), limit)
    assert status == 0, f"exit status {status}\n{out}\n{err}"
    return out


def wait_until(
    condition: Callable[[], Any], limit: float = 10.0, what: str = "it did not happen"
) -> None:
    """Wait until something holds that nobody tells of: a file, a process that is gone."""
    deadline = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < deadline, f"{what}, after {limit} s"
        time.sleep(0.005)


def wait_for_line(process: subprocess.Popen[str], line: str, limit: float = 20.0) -> None:
    """Wait until a script has printed a line."""
    deadline = time.monotonic() + limit
    assert process.stdout is not None
    while time.monotonic() < deadline:
        got = process.stdout.readline()
        if got.strip() == line:
            return
        if not got:
            break
    process.kill()
    raise AssertionError(f"{line!r} was not printed; {process.communicate()}")
