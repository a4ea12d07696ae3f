"""Compiles the small shared libraries and programs that the tests use, once for each content."""

from __future__ import annotations

import hashlib
import os
import shlex
import subprocess
import sysconfig
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
ROOT = TESTS.parent
STUBS = TESTS / "stubs"
ABI_HEADER = ROOT / "pynccl" / "nccl_abi.h"

WARNINGS = ("-Wall", "-Wextra", "-Wpedantic", "-Werror")


def compiler() -> list[str]:
    """Return the C compiler's command: the user's choice, else Python's own, else cc."""
    chosen = os.environ.get("CC") or (sysconfig.get_config_var("CC") or "cc").split()[0]
    return shlex.split(chosen)


def cache() -> Path:
    """Return the folder where results are kept between runs."""
    folder = ROOT / ".cache" / "tests"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return folder
    except OSError:
        pass
    folder = Path(tempfile.gettempdir()) / f"pynccl-tests-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


def build_shared(
    name: str,
    sources: Iterable[Path],
    defines: Mapping[str, object] | None = None,
    *,
    options: Iterable[str] = (),
    generated: Mapping[str, str] | None = None,
) -> Path:
    """Compile C sources into a shared library.

    Parameters
    ----------
    name
        File name of the result.
    sources
        The C files; headers beside them and in ``pynccl/`` are found.
    defines
        Macros and their values.
    options
        Further compiler options.
    generated
        Headers made on the spot: name and text.

    Returns
    -------
    Path
        The library; the same one for the same content.
    """
    return _build(name, sources, defines, ("-shared", "-fPIC", *options), generated)


def build_program(
    name: str,
    sources: Iterable[Path],
    defines: Mapping[str, object] | None = None,
    *,
    options: Iterable[str] = (),
    generated: Mapping[str, str] | None = None,
) -> Path:
    """Compile C sources into an executable; parameters as in `build_shared`."""
    return _build(name, sources, defines, options, generated)


def _build(
    name: str,
    sources: Iterable[Path],
    defines: Mapping[str, object] | None,
    options: Iterable[str],
    generated: Mapping[str, str] | None,
) -> Path:
    sources = [Path(source) for source in sources]
    command = [
        *compiler(), "-std=gnu11", "-O1", "-g", "-pthread", *WARNINGS,
        f"-I{ABI_HEADER.parent}",
        *(f"-D{key}={value}" for key, value in (defines or {}).items()),
    ]  # fmt: skip
    trailing = [*options, "-ldl"]
    # Whatever can change the result is in the key, so that nobody waits for a rebuild or gets an old one.
    key = hashlib.sha256(
        repr((name, command, trailing, sorted((generated or {}).items()))).encode()
    )
    for header in sorted({h for s in sources for h in s.parent.glob("*.h")} | {ABI_HEADER}):
        key.update(header.read_bytes())
    for source in sources:
        key.update(source.read_bytes())
    folder = cache() / key.hexdigest()[:16]
    target = folder / name
    if target.exists():
        return target
    folder.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        for header, text in (generated or {}).items():
            Path(scratch, header).write_text(text, encoding="utf-8")
        result = Path(scratch, name)
        done = subprocess.run(
            [*command, f"-I{scratch}", *map(str, sources), "-o", str(result), *trailing],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"{name} does not compile:\n{done.stderr}")
        result.replace(target)  # atomic: another process may be building the same
    return target
