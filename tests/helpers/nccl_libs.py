"""Real NCCL libraries and their headers, where this machine has them.

``.ci/nccl_wheels.py`` fetches them; an installed nvidia wheel counts as well.
"""

from __future__ import annotations

import os
import re
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from helpers.build import ROOT

# The oldest supported, the last without fp8, a middle one, and the one that nccl_abi.h declares.
VERSIONS = ("2.18.3", "2.21.5", "2.27.7", "2.32.3")
CURRENT = VERSIONS[-1]


@dataclass(frozen=True)
class RealNccl:
    """One version of NCCL."""

    version: str
    library: Path
    header: Path

    @property
    def code(self) -> int:
        """The version as NCCL codes it."""
        major, minor, patch = map(int, self.version.split("."))
        return major * 10000 + minor * 100 + patch


@cache
def available() -> dict[str, RealNccl]:
    """Return what is here, by version."""
    found = {}
    for folder in _folders():
        for header in sorted(folder.glob("*/nccl.h")):
            _add(found, header.parent / "libnccl.so.2", header)
    for entry in filter(None, sys.path):
        wheel = Path(entry, "nvidia", "nccl")
        _add(found, wheel / "lib" / "libnccl.so.2", wheel / "include" / "nccl.h")
    return found


def get(version: str) -> RealNccl:
    """Return one version, or skip the test."""
    if version not in available():
        pytest.skip(f"NCCL {version} is not on this machine (.ci/nccl_wheels.py fetches it)")
    return available()[version]


def _folders() -> list[Path]:
    named = os.environ.get("PYNCCL_TEST_NCCL_DIR")
    if named:
        return [Path(named)]
    cache_folder = os.environ.get("PYNCCL_CI_CACHE")
    return [*([Path(cache_folder, "nccl")] if cache_folder else []), ROOT / ".cache" / "nccl"]


def _add(found: dict[str, RealNccl], library: Path, header: Path) -> None:
    if library.exists() and header.exists():
        text = header.read_text(encoding="utf-8")
        numbers = re.findall(r"#define NCCL_(?:MAJOR|MINOR|PATCH) (\d+)", text)
        version = ".".join(numbers)
        found.setdefault(version, RealNccl(version, library, header))
