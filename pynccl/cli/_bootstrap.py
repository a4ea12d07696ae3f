"""Run a script or module as ``python`` would, in a rank of a job.

Started by path, as ``python .../_bootstrap.py script.py ...`` or ``... -m module ...``.  It differs from
plain Python in three things: a source tree of pynccl that is not compiled does not hide the
installed package, each line of output is passed on at once, and a crash leaves a traceback.
"""

from __future__ import annotations

import sys

if not getattr(sys.flags, "safe_path", False):
    del sys.path[0]  # this file's folder: its neighbours are not top-level modules

import builtins
import faulthandler
import importlib.util
import io
import os
import runpy
import types
from importlib.machinery import SourceFileLoader


def _is_uncompiled(folder: str) -> bool:
    package = os.path.join(folder, "pynccl")
    if not os.path.isfile(os.path.join(package, "_nccl.pyx")):
        return False
    return not any(
        name.startswith("_nccl.") and name.endswith(".so") for name in os.listdir(package)
    )


def _set_path(folder: str) -> None:
    """Put the script's folder first, and whatever would hide the installed package last."""
    path = sys.path if getattr(sys.flags, "safe_path", False) else [folder, *sys.path]
    hiding = [entry for entry in path if _is_uncompiled(entry or os.curdir)]
    sys.path[:] = [entry for entry in path if entry not in hiding] + hiding


def _run_script(script: str) -> None:
    # A module of its own: the script's names must not meet ours, and multiprocessing and pickle look
    # for what is in `__main__`, also while Python shuts down.
    main = types.ModuleType("__main__")
    script = os.path.abspath(script)
    main.__dict__.update(
        __file__=script,
        __builtins__=builtins,
        __loader__=SourceFileLoader("__main__", script),
        __spec__=None,
        __cached__=None,
    )
    sys.modules["__main__"] = main
    try:
        with io.open_code(script) as file:
            code = compile(file.read(), script, "exec")
        exec(code, main.__dict__)
    except Exception as error:
        # As plain Python shows it: without the frames of this file.
        error.__traceback__ = error.__traceback__ and error.__traceback__.tb_next
        sys.excepthook(type(error), error, error.__traceback__)
        sys.exit(1)


def main() -> None:
    """Become the script or module that the command line names."""
    if not faulthandler.is_enabled() and sys.stderr is not None:
        faulthandler.enable()
    if isinstance(sys.stdout, io.TextIOWrapper) and not sys.stdout.isatty():
        sys.stdout.reconfigure(line_buffering=True)
    if sys.argv[1] == "-m":
        del sys.argv[:2]
        _set_path(os.getcwd())
        if importlib.util.find_spec(sys.argv[0]) is None:
            sys.exit(f"{sys.executable}: No module named {sys.argv[0]}")
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        del sys.argv[0]
        _set_path(os.path.dirname(os.path.realpath(sys.argv[0])))
        _run_script(sys.argv[0])


if __name__ == "__main__":
    main()
