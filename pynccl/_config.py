"""What the environment decides: the variables that pynccl reads, and which library it loads.

Every environment variable has one row in `ENV`; the documentation and ``pynccl info`` print the same rows.
Importing this module costs next to nothing: whatever is expensive is imported where it is needed.
"""

from __future__ import annotations

import os
import sys

from .errors import LibraryNotFoundError

TYPE_CHECKING = False  # typing itself is too slow to import for that
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from datetime import timedelta
    from typing import Any

# ---- environment variables --------------------------------------------------------------------------


class Variable:
    """One environment variable: a row of the table."""

    __slots__ = ("default", "help", "name", "parse")

    def __init__(self, name: str, default: Any, parse: Callable[[str], Any], help: str) -> None:
        self.name = name
        self.default = default
        self.parse = parse
        self.help = help

    def __repr__(self) -> str:
        return f"Variable({self.name!r}, default={self.default!r})"


def _flag(text: str) -> bool:
    lowered = text.lower()
    if lowered in ("1", "true", "yes", "on"):
        return True
    if lowered in ("0", "false", "no", "off"):
        return False
    raise ValueError("is neither 0 nor 1")


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not seconds > 0:  # also refuses nan
        raise ValueError("is not a positive number of seconds")
    return seconds


ENV: dict[str, Variable] = {
    row.name: row
    for row in (
        Variable(
            "PYNCCL_LIBRARY",
            "auto",
            str,
            'What library="auto" means: auto, nccl, host, or the path of a library. '
            "An explicit library= is not changed by it.",
        ),
        Variable(
            "PYNCCL_TIMEOUT",
            1800.0,
            _seconds,
            "Seconds after which the creation of a communicator, or a wait of the host library, fails.",
        ),
        Variable(
            "PYNCCL_CAI_SYNC",
            True,
            _flag,
            "0: do not make a call's stream wait for the stream that an array names as its producer.",
        ),
        Variable(
            "PYNCCL_HOST_DELAY",
            None,
            str,
            "Milliseconds that every call on a stream of pynccl.host waits before it runs, to bring out what "
            "relies on luck: a number, a range 0-20 to draw from, or 0-20:7 with a seed.",
        ),
        Variable(
            "PYNCCL_LIBCUDA",
            None,
            str,
            "Path of the CUDA driver library to use in place of libcuda.so.1.",
        ),
        Variable(
            "PYNCCL_JOB_ID",
            None,
            str,
            "Name of the job, alike on all its ranks; pynccl run sets it. By it, and by what other "
            "launchers set, the ranks of one job find each other.",
        ),
        Variable(
            "NCCL_DEBUG",
            None,
            str,
            "NCCL's own log level (VERSION, WARN, INFO, TRACE); the host library understands it too.",
        ),
        Variable(
            "NCCL_COMM_BLOCKING",
            None,
            str,
            "NCCL's: 0 makes every communicator nonblocking, 1 none, whatever their settings say; "
            "the host library understands it too.",
        ),
        Variable(
            "NCCL_COMM_ID",
            None,
            str,
            "NCCL's: a fixed meeting place of ranks; where it is set, no communicator gives an id to "
            "grow by.",
        ),
    )
}


def get(name: str, env: Mapping[str, str] | None = None) -> Any:
    """Return the value of a variable of `ENV`: parsed, or its default where it is unset or empty.

    Raises
    ------
    ValueError
        If the text means nothing; the message names the variable.
    """
    row = ENV[name]
    text = (os.environ if env is None else env).get(name, "").strip()
    if not text:
        return row.default
    try:
        return row.parse(text)
    except ValueError as error:
        raise ValueError(f"{name}={text!r} {error}") from None


def timeout(value: float | timedelta | None = None) -> float:
    """Return the seconds that a ``timeout=`` argument means.

    Parameters
    ----------
    value : float, int, datetime.timedelta or None
        None stands for ``PYNCCL_TIMEOUT``, or half an hour where that is not set.  ``math.inf`` is
        no limit.
    """
    if value is None:
        return float(get("PYNCCL_TIMEOUT"))
    if hasattr(value, "total_seconds"):
        seconds = value.total_seconds()
    elif isinstance(value, bool) or not hasattr(value, "__float__"):
        raise TypeError(f"timeout: seconds or a timedelta, not {type(value).__name__}")
    else:
        seconds = float(value)
    if not seconds >= 0:  # also refuses nan
        raise ValueError(f"timeout: {value!r} is not a number of seconds from 0 up")
    return seconds


# ---- which library ----------------------------------------------------------------------------------

HOST_NAME = "libpynccl_host.so"
NCCL_NAME = "libnccl.so.2"
_WHEEL = os.path.join("nvidia", "nccl", "lib", NCCL_NAME)


class Found:
    """The library that a ``library=`` argument means.

    Attributes
    ----------
    path : str
        What to load.
    kind : str
        ``"nccl"``, ``"host"``, or ``""`` where only the library itself can tell.
    fallback : bool
        Whether it is the host library only because there is no GPU.
    reason : str
        Why this one, in a few words.
    """

    __slots__ = ("fallback", "kind", "path", "reason")

    def __init__(self, path: str, kind: str, reason: str, fallback: bool = False) -> None:
        self.path = path
        self.kind = kind
        self.reason = reason
        self.fallback = fallback

    def __repr__(self) -> str:
        return f"Found({self.path!r}, {self.kind!r}, {self.reason!r}, fallback={self.fallback})"


def find_library(choice: str | os.PathLike[str] | None = None) -> Found:
    """Decide which library a ``library=`` argument means; loads nothing but, to look for a GPU, its driver.

    Parameters
    ----------
    choice : str, path or None
        ``"auto"``, ``"nccl"``, ``"host"``, or the path of a library.  ``PYNCCL_LIBRARY`` takes the
        place of ``"auto"`` and of None, never of anything else.

    Raises
    ------
    LibraryNotFoundError
        If there is no such library; the message lists the places searched.
    ValueError
        If `choice` is a word that means nothing.
    """
    word: Any = "auto"
    if choice is not None:
        word = os.fspath(choice) if hasattr(choice, "__fspath__") else choice
    if not isinstance(word, str):
        raise TypeError(
            f"library must be 'auto', 'nccl', 'host' or a path, not {type(choice).__name__!r}"
        )
    reason = f"library={word!r}"
    if word == "auto":
        word = get("PYNCCL_LIBRARY")
        reason = f"PYNCCL_LIBRARY={word}"
    if word == "nccl":
        return Found(_find_nccl(f"{reason} asks for NCCL"), "nccl", reason)
    if word == "host":
        return Found(host_library(), "host", reason)
    if word != "auto":
        return Found(_check_path(word), "", reason)
    absent = gpu_absent()
    if absent:
        return Found(host_library(), "host", absent, fallback=True)
    return Found(_find_nccl("there is a GPU"), "nccl", "there is a GPU")


def host_library() -> str:
    """Return the path of the host library: beside the compiled modules, also in an editable install."""
    from . import _nccl

    path = os.path.join(os.path.dirname(os.path.abspath(_nccl.__file__)), "host", HOST_NAME)
    if not os.path.exists(path):
        raise LibraryNotFoundError(f"the host library is missing from this installation: {path}")
    return path


def gpu_absent() -> str:
    """Return why no GPU can be used, or an empty string if one can.

    The driver is opened, not initialised, so that a process may still fork afterwards.
    """
    if not _has_device_node():
        return "no device node: neither /dev/nvidia[0-9]* nor /dev/dxg"
    error = _open(get("PYNCCL_LIBCUDA") or "libcuda.so.1")
    return f"no CUDA driver: {error}" if error else ""


def _has_device_node(folder: str = "/dev") -> bool:
    try:
        names = os.listdir(folder)
    except OSError:
        return False
    return any(
        name == "dxg" or (name.startswith("nvidia") and name[6:7].isdigit()) for name in names
    )


def _open(name: str) -> str:
    """Load a library for good; return why that failed, or an empty string."""
    import ctypes  # only where there is something to load: it costs more than the rest of pynccl

    try:
        ctypes.CDLL(name)
    except OSError as error:
        return str(error)
    return ""


def _check_path(path: str) -> str:
    # A bare file name is left to the dynamic linker, as everywhere.
    if os.sep in path:
        if not os.path.exists(path):
            what = "a link to a file that is not there" if os.path.islink(path) else "no such file"
            raise LibraryNotFoundError(f"{path}: {what}")
    elif ".so" not in path:
        raise ValueError(f'library: {path!r} is neither "auto", "nccl", "host" nor a path')
    return path


def _find_nccl(why: str) -> str:
    """Return the path of an NCCL: one already loaded, the nvidia wheel's, or the system's."""
    path = loaded_nccl()
    if path:
        return path
    folders = [entry for entry in sys.path if entry]
    candidates = [os.path.join(entry, _WHEEL) for entry in folders]
    candidates.append(os.path.join(sys.prefix, "lib", NCCL_NAME))  # conda's
    for path in candidates:
        if os.path.exists(path):
            return path
    error = _open(NCCL_NAME)
    if not error:
        return loaded_nccl() or NCCL_NAME
    raise LibraryNotFoundError(
        "\n".join(
            (
                f"{why}, but no NCCL was found. Searched:",
                "  what this process has loaded (/proc/self/maps)",
                *(f"  {path}" for path in candidates),
                f"  the system: {error}",
                "Install it with pip install nvidia-nccl-cu12 (CUDA 13: nvidia-nccl-cu13), "
                'or name it with library="/path/to/libnccl.so.2", '
                'or take the host library with library="host".',
            )
        )
    )


def loaded_nccl(maps: str = "/proc/self/maps") -> str | None:
    """Return the path of an NCCL that some package has loaded into this process, or None."""
    try:
        with open(maps, encoding="utf-8", errors="surrogateescape") as lines:
            for line in lines:
                # address, permissions, offset, device, inode, path (which may hold spaces)
                fields = line.rstrip("\n").split(None, 5)
                if len(fields) == 6 and _is_nccl_name(os.path.basename(fields[5])):
                    path = fields[5]
                    if os.path.exists(path):  # not one deleted or replaced since
                        return path
    except OSError:
        pass
    return None


def _is_nccl_name(name: str) -> bool:
    # libnccl.so, libnccl.so.2, libnccl.so.2.21.5; not libnccl-net.so, which is a plugin
    return name == "libnccl.so" or name.startswith("libnccl.so.")


def callers_level() -> int:
    """Return the stacklevel at which a warning of compiled code names the user's line."""
    level = 1  # the frame below this function's: compiled code has none of its own
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("pynccl."):
        frame = frame.f_back
        level += 1
    return level
