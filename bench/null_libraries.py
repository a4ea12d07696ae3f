"""Builds the null libraries: NCCL plain, NCCL with the host library's marker, and a CUDA driver."""

from __future__ import annotations

import subprocess
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import pynccl

HERE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class NullLibraries:
    """Where the built libraries lie."""

    nccl: str
    host: str
    cuda: str


def build(directory: Path) -> NullLibraries:
    """Compile the three libraries into `directory`."""
    compiler = (sysconfig.get_config_var("CC") or "cc").split()[0]

    def one(name: str, source: str, *options: str) -> str:
        target = directory / name
        subprocess.run(
            [
                compiler, "-O2", "-std=gnu11", "-fPIC", "-shared", "-fvisibility=hidden", *options,
                f"-I{pynccl.get_include()}", f"-Wl,-soname,{name}", str(HERE / source),
                "-o", str(target), "-ldl",
            ],
            check=True,
        )  # fmt: skip
        return str(target)

    return NullLibraries(
        nccl=one("libnccl.so.2", "null_nccl.c"),
        host=one("libnull_host.so", "null_nccl.c", "-DNULL_HOST"),
        cuda=one("libcuda.so.1", "null_cuda.c"),
    )
