"""What the launcher of a job has put into the environment of its ranks.

One table of launchers, in the order in which they nest; and the name of the job, by which its ranks
tell each other from those of any other job on the machine.
"""

from __future__ import annotations

import os
import re
import socket
import struct
from collections.abc import Mapping
from typing import NamedTuple


class Layout(NamedTuple):
    """Place of this process in its job.

    Attributes
    ----------
    rank, nranks : int
        Rank, and number of ranks.
    local_rank, local_nranks : int
        The same on this machine; `local_nranks` is 0 where the launcher does not say.
    """

    rank: int
    nranks: int
    local_rank: int
    local_nranks: int


class _Launcher(NamedTuple):
    name: str
    rank: str
    nranks: str
    local_rank: str
    local_nranks: str
    needs_local: bool = False  # is it this launcher only if it sets `local_nranks`?


# In this order: the inner launcher wins.  torchrun may be started by mpiexec or srun, and Hydra inside
# an srun; srun itself may offer PMI, whose variables then lack what only Slurm's tell.
_LAUNCHERS = (
    _Launcher("pynccl run, torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    _Launcher(
        "mpiexec of Open MPI",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    _Launcher(
        "mpiexec of MPICH", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", True
    ),
    # SLURM_NTASKS is also set in a batch script that srun did not start; SLURM_STEP_NUM_TASKS is not.
    _Launcher(
        "srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"
    ),
    _Launcher("PMI", "PMI_RANK", "PMI_SIZE", "PMI_LOCAL_RANK", "PMI_LOCAL_SIZE"),
)

# What tells one job from another; none of them is always there.
_JOB_VARIABLES = (
    "PYNCCL_JOB_ID",
    "MASTER_PORT",
    "TORCHELASTIC_RUN_ID",
    "PMIX_NAMESPACE",
    "SLURM_JOB_ID",
    "SLURM_STEP_ID",
)


def from_environ(env: Mapping[str, str] = os.environ) -> Layout:
    """Read this process's rank from what its launcher set.

    Parameters
    ----------
    env : mapping of str to str
        The environment; understood are the variables of ``pynccl run`` and torchrun, of mpiexec (Open MPI;
        MPICH and others with Hydra) and of srun, in this order.

    Returns
    -------
    Layout
        ``(rank, nranks, local_rank, local_nranks)``; a process that no launcher has started is alone.

    Raises
    ------
    ValueError
        One variable of a pair is missing, or both beside a LOCAL_RANK, or a value is not a number in its
        range.
    """
    half: tuple[_Launcher, str] | None = None
    for names in _LAUNCHERS:
        needed = (names.rank, names.nranks) + ((names.local_nranks,) * names.needs_local)
        missing = [v for v in needed if not env.get(v)]
        if not missing:
            return _layout(names, env)
        # A batch script that srun did not start has a SLURM_PROCID too, and is alone.
        if half is None and len(missing) == 1 and missing[0] in needed[:2] and names.name != "srun":
            half = names, missing[0]
    if half is None:
        # A rank that knows its place on the machine belongs to a job: alone it would compute nonsense.
        alone = [v for v in ("LOCAL_RANK", "LOCAL_WORLD_SIZE") if env.get(v)]
        if not alone:
            return Layout(0, 1, 0, 1)
        raise ValueError(
            f"init: {alone[0]} is set, but neither RANK nor WORLD_SIZE; set both, or unset it "
            f"for a communicator of one rank"
        )
    raise ValueError(
        f"init: of {half[0].rank} and {half[0].nranks}, {half[1]} is not set; "
        f"`pynccl run -n 4 script.py`, torchrun, mpiexec and srun set all that is needed"
    )


def _layout(names: _Launcher, env: Mapping[str, str]) -> Layout:
    nranks = env_int(env, names.nranks, 1, None)
    rank = env_int(env, names.rank, 0, nranks)
    local_nranks = _local_nranks(names, env, nranks)
    if env.get(names.local_rank):
        local_rank = env_int(env, names.local_rank, 0, local_nranks or nranks)
    elif local_nranks == nranks:
        local_rank = rank
    else:
        raise ValueError(
            f"init: {names.local_rank} is not set, and whether all {nranks} ranks are on one machine is "
            f"not known: set it, and {names.local_nranks} to the number of ranks on this machine"
        )
    return Layout(rank, nranks, local_rank, local_nranks)


def env_int(env: Mapping[str, str], name: str, low: int, end: int | None) -> int:
    """Read a variable that must be a number from `low` to below `end`."""
    try:
        value = int(env[name])
    except ValueError:
        raise ValueError(f"init: {name} is {env[name]!r}, not a number") from None
    if value < low or (end is not None and value >= end):
        expected = f"{low} or more" if end is None else f"{low} to {end - 1}"
        raise ValueError(f"init: {name} is {value}; expected {expected}")
    return value


def _local_nranks(names: _Launcher, env: Mapping[str, str], nranks: int) -> int:
    text = env.get(names.local_nranks, "")
    if names.name == "srun":
        # One entry per machine, runs of equal ones abbreviated: "4(x2),3".
        entries = re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
        per_node = [int(count) for count, times in entries for _ in range(int(times or 1))]
        node = int(env.get("SLURM_NODEID") or 0)
        return per_node[node] if node < len(per_node) else 0
    if text:
        return env_int(env, names.local_nranks, 1, nranks + 1)
    # Variables set by hand: without an address, or with the loopback one, there is one machine.
    return nranks if _is_loopback(env.get("MASTER_ADDR", "")) else 0


def _is_loopback(host: str) -> bool:
    return host in ("", "localhost", "::1") or host.startswith("127.")


def job_name(env: Mapping[str, str], *, local: bool) -> str:
    """Name the job, alike in all its processes and unlike any other job's.

    Parameters
    ----------
    env : mapping of str to str
        The environment of one rank.
    local : bool
        Whether all ranks are on this machine: then its process ids may be part of the name.
    """
    parts = [f"{v}={env[v]}" for v in _JOB_VARIABLES if env.get(v)]
    if local:
        # Hydra names no job, but its ranks (perhaps wrapped in shells) inherited a socket with one
        # proxy at the other end.  Where nothing says which job this is, its processes have one parent.
        proxy = _hydra_proxy(env)
        if proxy or not parts:
            parts.append(f"launcher={proxy or os.getppid()}")
    return ",".join(parts)


def _hydra_proxy(env: Mapping[str, str]) -> int:
    try:
        with socket.socket(fileno=os.dup(int(env["PMI_FD"]))) as sock:
            return process_at(sock)[0]
    except (KeyError, ValueError, OSError):
        return 0


def one_machine(nranks: int, env: Mapping[str, str]) -> bool:
    """Tell whether all ranks are known to be on this machine."""
    try:
        return from_environ(env).local_nranks == nranks
    except ValueError:
        return _is_loopback(env.get("MASTER_ADDR", ""))


def process_at(sock: socket.socket) -> tuple[int, int]:
    """Say whose process is at the other end of a unix socket: its id and its user's."""
    pid, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return pid, uid
