"""What the ranks of ``pynccl perf`` run: they do as they are told, and answer with times and errors found.

The launcher tells each rank, over a socket of its own, one JSON object a line, and gets one back.
It alone decides on the number of calls, so that all ranks make the same ones.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import socket
import sys
import threading
import time
import traceback
from typing import Any

import numpy as np

import pynccl

from ._perf_cases import COLLECTIVES, Area, Layout, call_of, lay_out
from ._perf_data import Data, bits_of, dtype_of, make_data

__all__ = ["Rank", "main"]

_GUARD = 64  # bytes on either side of a buffer, which no call may touch
_GUARD_BYTE = 0xA5


class NumpyArrays:
    """Buffers in NumPy arrays."""

    def empty(self, size: int, dtype: Any) -> Any:
        """Return a new array, contents unspecified."""
        return np.empty(size, dtype)

    def view(self, array: Any) -> Any:
        """Return the array's memory as a NumPy array, or a copy to be moved with `push` and `pull`."""
        return array

    def push(self, array: Any, copy: Any) -> None:
        """Bring what was written into the copy to the array."""

    def pull(self, array: Any, copy: Any) -> None:
        """Bring what the array holds into the copy."""

    def synchronize(self) -> None:
        """Wait for what the calls have put on a stream."""


class NumbaArrays(NumpyArrays):
    """Buffers in Numba's device arrays: on a GPU, or in its simulator."""

    def __init__(self) -> None:
        from numba import cuda

        self._cuda = cuda

    def empty(self, size: int, dtype: Any) -> Any:
        return self._cuda.device_array(size, dtype)

    def view(self, array: Any) -> Any:
        return np.empty(array.size, array.dtype)

    def push(self, array: Any, copy: Any) -> None:
        array.copy_to_device(copy)

    def pull(self, array: Any, copy: Any) -> None:
        array.copy_to_host(copy)

    def synchronize(self) -> None:
        self._cuda.synchronize()


class CupyArrays(NumpyArrays):
    """Buffers in CuPy's arrays."""

    def __init__(self) -> None:
        import cupy

        self._cupy = cupy

    def empty(self, size: int, dtype: Any) -> Any:
        return self._cupy.empty(size, dtype)

    def view(self, array: Any) -> Any:
        return np.empty(array.size, array.dtype)

    def push(self, array: Any, copy: Any) -> None:
        array.set(copy)

    def pull(self, array: Any, copy: Any) -> None:
        array.get(out=copy)

    def synchronize(self) -> None:
        self._cupy.cuda.get_current_stream().synchronize()


_ARRAYS = {"numpy": NumpyArrays, "numba": NumbaArrays, "cupy": CupyArrays}


class Buffer:
    """The memory of one `Area`, between guards."""

    def __init__(self, arrays: NumpyArrays, area: Area, dtype: Any, data: Data) -> None:
        self.arrays = arrays
        self.area = area
        self.data = data
        self.guard = _GUARD // dtype.itemsize
        self.whole = arrays.empty(area.size + 2 * self.guard, dtype)
        self.copy = arrays.view(self.whole)
        self.bits = self.copy.view(bits_of(dtype))

    def part(self, first: int, size: int) -> Any:
        """Return an array of some elements, for a call."""
        return self.whole[self.guard + first : self.guard + first + size]

    def fill(self) -> None:
        """Write what the buffer holds before the call, poison where it is to be received."""
        guard, inner = self.guard, self._inner()
        self.bits[:guard].view(np.uint8)[:] = _GUARD_BYTE
        self.bits[guard + self.area.size :].view(np.uint8)[:] = _GUARD_BYTE
        if [segment for _, segment in self.area.before] != self.area.after:
            self.data.write(inner, self.area.after, poison=True)
        for first, segment in self.area.before:
            self.data.write(inner[first : first + segment.size], [segment])
        self.arrays.push(self.whole, self.copy)

    def wrong(self) -> int:
        """Count the elements that are wrong after the call, and the bytes of the guards that changed."""
        self.arrays.pull(self.whole, self.copy)
        guard, size = self.guard, self.area.size
        wrong = self.data.wrong(self._inner(), self.area.after)
        for bits in (self.bits[:guard], self.bits[guard + size :]):
            wrong += int(np.count_nonzero(bits.view(np.uint8) != _GUARD_BYTE))
        return wrong

    def _inner(self) -> Any:
        return self.bits[self.guard : self.guard + self.area.size]


class Rank:
    """One rank: its communicator, and the case that is being measured.

    Parameters
    ----------
    comm : pynccl.Communicator
        What to call.
    """

    def __init__(self, comm: pynccl.Communicator) -> None:
        self.comm = comm
        self.arrays: dict[str, NumpyArrays] = {}
        self.make_data = functools.lru_cache(maxsize=4)(make_data)
        self.buffers: list[Buffer] = []
        self.call: Any = None
        self.keep: Any = None

    def set_up(
        self,
        collective: str,
        arrays: str,
        dtype: str,
        op: str,
        root: int,
        block: int,
        in_place: bool,
    ) -> None:
        """Make the buffers and the call of one case."""
        row, comm = COLLECTIVES[collective], self.comm
        self.buffers = []  # first give the memory of the last case back
        self.call = None
        if arrays not in self.arrays:
            self.arrays[arrays] = _ARRAYS[arrays]()
        data = self.make_data(dtype, op, comm.nranks)
        layout: Layout = lay_out(row, comm.rank, comm.nranks, block, root, in_place)
        self.keep = self.arrays[arrays]
        self.buffers = [Buffer(self.keep, area, dtype_of(dtype), data) for area in layout.areas]
        x, out = (
            None if part is None else self.buffers[part[0]].part(*part[1:])
            for part in (layout.x, layout.out)
        )
        reduction: Any = op
        if op == "premul":
            reduction = comm.premul_sum(data.factors[comm.rank], dtype)
        method, args, kwargs = call_of(row, comm, x, out, reduction, root)
        self.call = functools.partial(method, *args, **kwargs)

    def check(self) -> tuple[int, float]:
        """Make one call on fresh data; return how many elements are wrong, and the seconds it took."""
        for buffer in self.buffers:
            buffer.fill()
        seconds = self.time(1)
        return self.wrong(), seconds

    def wrong(self) -> int:
        """Count wrong elements in all buffers, those that must not have changed included."""
        return sum(buffer.wrong() for buffer in self.buffers)

    def time(self, calls: int) -> float:
        """Make calls back to back; return the seconds per call."""
        call = self.call
        self.keep.synchronize()
        self.comm.barrier()
        begin = time.perf_counter()
        for _ in itertools.repeat(None, calls):
            call()
        self.keep.synchronize()
        return (time.perf_counter() - begin) / calls

    def obey(self, order: dict[str, Any]) -> dict[str, Any]:
        """Do what the launcher asks for, and return the answer."""
        if "case" in order:
            self.set_up(**order["case"])
            results = [self.check() for _ in range(max(1, order["checks"]))]
            return {
                "wrong": sum(wrong for wrong, _ in results) if order["checks"] else 0,
                "seconds": min(seconds for _, seconds in results),
            }
        if order["check"]:
            for buffer in self.buffers:
                buffer.fill()
        if order["warmup"]:
            self.time(order["warmup"])
        return {
            "seconds": [self.time(order["calls"]) for _ in range(order["batches"])],
            # Calls that follow each other without a pause are the harder ones: look at the last result.
            "wrong": self.wrong() if order["check"] else 0,
        }


def _serve(rank: int, channel: socket.socket, connect: Any) -> None:
    """Follow the launcher's orders until it hangs up."""
    with channel, channel.makefile("rw", encoding="utf-8") as lines:
        comm = None

        def answer(reply: dict[str, Any]) -> None:
            lines.write(json.dumps(reply) + "\n")
            lines.flush()

        try:
            comm = connect(rank)
            worker = Rank(comm)
            answer({})
            for line in lines:
                answer(worker.obey(json.loads(line)))
        except BrokenPipeError:
            return  # the launcher is gone
        except Exception as error:
            answer({"error": f"{type(error).__name__}: {error}{_where(error)}"})
            if comm is not None:
                comm.abort()
            return
        comm.close()


def _where(error: BaseException) -> str:
    """Say where an error came from that is not one of pynccl's own, which say all there is to say."""
    if isinstance(error, pynccl.PyncclError):
        return ""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f" ({os.path.basename(frame.filename)}, line {frame.lineno})"


def main() -> None:
    """Be one rank, or several threads; the arguments are the descriptors of their sockets."""
    channels = [socket.socket(fileno=int(fd)) for fd in sys.argv[1:]]
    if len(channels) == 1:
        _serve(int(os.environ["RANK"]), channels[0], lambda rank: pynccl.init())
        return
    uid = pynccl.unique_id()

    def connect(rank: int) -> pynccl.Communicator:
        return pynccl.Communicator(len(channels), uid, rank, device=rank)

    threads = [
        threading.Thread(target=_serve, args=(rank, channel, connect))
        for rank, channel in enumerate(channels)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    main()
