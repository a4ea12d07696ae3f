"""Print what pynccl finds on this machine.

Versions, the library that "auto" means and why, what each library lacks, the CUDA driver and GPUs, and
the environment variables in force: what a bug report needs. It never fails, whatever is missing.
"""

from __future__ import annotations

import argparse
import ctypes
import glob
import importlib.metadata
import json
import os
import platform
import sys
import textwrap
from collections.abc import Callable
from typing import Any

import pynccl

from .. import _config

__all__ = ["add_arguments", "main", "report"]

# Their versions decide how arrays look and who else holds an NCCL; none of them is imported here.
_PACKAGES = (
    "numpy",
    "numba",
    "numba-cuda",
    "cupy",
    "cupy-cuda12x",
    "cupy-cuda13x",
    "torch",
    "ml_dtypes",
    "mpi4py",
    "nvidia-nccl-cu12",
    "nvidia-nccl-cu13",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command line."""
    parser.add_argument("--json", action="store_true", help="print the same as JSON")


def main(arguments: argparse.Namespace) -> int:
    """Print the report."""
    found = report()
    print(json.dumps(found, indent=2) if arguments.json else _text(found))
    return 0


def report() -> dict[str, Any]:
    """Collect everything; what cannot be found out becomes ``{"error": why}``."""
    return {
        "pynccl": {"version": pynccl.__version__, "path": os.path.dirname(pynccl.__file__)},
        "python": {
            "version": platform.python_version(),
            "implementation": platform.python_implementation(),
            "executable": sys.executable,
        },
        "platform": _probe(_platform),
        "packages": _probe(_packages),
        "libraries": {name: _probe(_library, name) for name in ("auto", "nccl", "host")},
        "gpu": {"nodes": _probe(_nodes), "names": _probe(_names), "driver": _probe(_driver)},
        "environment": {name: _probe(_variable, name) for name in _config.ENV},
        "other_environment": {
            name: os.environ[name]
            for name in sorted(os.environ)
            if name.startswith(("NCCL_", "PYNCCL_", "CUDA_VISIBLE")) and name not in _config.ENV
        },
    }


def _probe(function: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return function(*arguments)
    except Exception as error:
        return {"error": f"{error}" or type(error).__name__}


def _platform() -> dict[str, Any]:
    return {
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "libc": " ".join(platform.libc_ver()),
        "cpus": os.cpu_count(),
        "usable_cpus": len(os.sched_getaffinity(0)),
    }


def _packages() -> dict[str, str]:
    versions = {}
    for name in _PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def _library(choice: str) -> dict[str, Any]:
    found = _config.find_library(choice)
    # By its path, so that the choice is made once and no warning about it is given.
    library = pynccl.library(found.path)
    return {
        "reason": found.reason,
        "kind": library.kind,
        "path": library.path,
        "version": _version(library.version),
        "missing": {name: _version(since) for name, since in library.missing},
    }


def _version(code: int) -> str:
    return f"{code // 10000}.{code // 100 % 100}.{code % 100}"


def _nodes() -> list[str]:
    return sorted(glob.glob("/dev/nvidia[0-9]*") + glob.glob("/dev/dxg"))


def _names() -> list[str]:
    names = []
    for path in sorted(glob.glob("/proc/driver/nvidia/gpus/*/information")):
        with open(path, encoding="utf-8", errors="replace") as lines:
            names += [line.partition(":")[2].strip() for line in lines if line.startswith("Model:")]
    return names


def _driver() -> dict[str, Any]:
    path = _config.get("PYNCCL_LIBCUDA") or "libcuda.so.1"
    driver = ctypes.CDLL(path)
    version = ctypes.c_int(0)
    # Allowed before cuInit, which would forbid later forks.
    code = driver.cuDriverGetVersion(ctypes.byref(version))
    if code:
        raise OSError(f"{path}: cuDriverGetVersion returned {code}")
    return {"path": path, "cuda": f"{version.value // 1000}.{version.value % 1000 // 10}"}


def _variable(name: str) -> dict[str, Any]:
    row = _config.ENV[name]
    text = os.environ.get(name)
    return {"set": text, "value": _config.get(name), "default": row.default, "help": row.help}


def _text(found: dict[str, Any]) -> str:
    python, system, gpu = found["python"], found["platform"], found["gpu"]
    lines = [
        f"pynccl      {found['pynccl']['version']}  {found['pynccl']['path']}",
        f"python      {python['version']} ({python['implementation']})  {python['executable']}",
    ]
    if "error" in system:
        lines.append(f"platform    {system['error']}")
    else:
        cpus = f"{system['usable_cpus']} of {system['cpus']} CPUs usable"
        lines.append(f"platform    {system['system']}, {system['libc']}, {cpus}")
    packages = found["packages"]
    lines += _wrapped("packages    ", ", ".join(f"{n} {v}" for n, v in packages.items()) or "none")
    lines += ["", "libraries"]
    for name, library in found["libraries"].items():
        lines += _library_text(name, library)
    lines += ["", "GPU"]
    lines += _wrapped("  nodes     ", _joined(gpu["nodes"]))
    lines += _wrapped("  names     ", _joined(gpu["names"]))
    driver = gpu["driver"]
    lines += _wrapped(
        "  driver    ", driver.get("error") or f"{driver['path']}, for CUDA up to {driver['cuda']}"
    )
    lines += ["", "environment"]
    for name, variable in found["environment"].items():
        if "error" in variable:
            state = variable["error"]
        elif variable["set"]:
            state = f"{variable['value']}  (set)"
        else:
            default = variable["default"]
            state = "not set" if default is None else f"{default}  (default)"
        lines.append(f"  {name:18}{state}")
    for name, value in found["other_environment"].items():
        lines.append(f"  {name:18}{value}  (set)")
    return "\n".join(lines)


def _library_text(name: str, library: dict[str, Any]) -> list[str]:
    if "error" in library:
        first, *rest = library["error"].splitlines()
        lines = _wrapped(f"  {name:10}", first)
        for line in rest:
            lines += _wrapped(" " * (12 + len(line) - len(line.lstrip())), line.strip())
        return lines
    lines = _wrapped(
        f"  {name:10}", f"{library['kind']} {library['version']}  ({library['reason']})"
    )
    if name == "auto":
        return lines
    lines.append(f"            {library['path']}")
    missing = library["missing"]
    lacks = ", ".join(f"{function} ({since})" for function, since in missing.items())
    lines += _wrapped("            ", f"lacks {lacks}" if missing else "lacks nothing")
    return lines


def _joined(values: Any) -> str:
    return values["error"] if isinstance(values, dict) else ", ".join(values) or "none"


def _wrapped(start: str, text: str) -> list[str]:
    return textwrap.wrap(
        text,
        width=100,
        initial_indent=start,
        subsequent_indent=" " * len(start),
        break_long_words=False,
        break_on_hyphens=False,
    )
