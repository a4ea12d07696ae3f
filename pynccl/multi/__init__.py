"""One process, many devices: collectives on lists, as torch.cuda.nccl has them, for any array.

    import pynccl.multi as nccl

    nccl.all_reduce([x0, x1, x2, x3])       # one array per device, summed in place

Every function takes lists with one entry per rank. On NCCL an entry's rank is its device, and a device may
come once; on the host library devices are numbered slots, so that lists of NumPy arrays of any length work.
Each call checks its lists as a whole before anything moves: lengths, counts, dtypes, devices, shared memory;
messages name the entry. All calls of one function run in one group, and join a `pynccl.group` that is open.

What all functions share:

streams : list of (int or stream object or None), optional
    One per entry; None is the current stream of the array's producer, else the default stream.
comms : list of Communicator, optional
    One per entry, in rank order; also capsules of ``torch.cuda.nccl.init_rank``, and a single one for lists
    of one entry. Without them, communicators are created at the first call on these devices and kept;
    threads that call at once take turns. `clear_cache` destroys them.
library : {"auto", "nccl", "host"} or path, default: "auto"
    Library to use where `comms` does not say it.
root : int
    A place in the lists. Where `comms` are only some of a communicator's ranks, a rank.

Differences from torch.cuda.nccl are in ``docs/multi.md``, row by row.
"""

from ._collectives import SUM, all_gather, all_reduce, broadcast, reduce, reduce_scatter
from ._movement import all_to_all, gather, scatter, send_recv
from ._setup import clear_cache, init_rank, is_available, unique_id, version

__all__ = [
    "SUM",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "broadcast",
    "clear_cache",
    "gather",
    "init_rank",
    "is_available",
    "reduce",
    "reduce_scatter",
    "scatter",
    "send_recv",
    "unique_id",
    "version",
]
