"""`CollConfig`: how one collective is to be done, and the C functions that are told."""

from libc.limits cimport INT_MAX
from libc.stdint cimport uint64_t, uintptr_t

from pynccl._call cimport (
    ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, BROADCAST, GATHER, REDUCE, REDUCE_SCATTER, Call, Kind,
    Setting,
)
from pynccl._fields cimport flag, integer, text
from pynccl._nccl cimport (
    NCCL_API_MAGIC, NCCL_CONFIG_UNDEF_INT, NCCL_VERSION_CODE, Configured, Library, cudaEvent_t,
    cudaStream_t, nccl_api, ncclCollConfig_t, ncclComm_t, ncclDataType_t, ncclRedOp_t, ncclResult_t,
)


cdef class CollConfig(Setting):
    """Settings of one call, for the ``config=`` of the collectives; they must be the same on every rank.

    A field that is left out, or None, is NCCL's choice.  They tune NCCL on GPUs; the host library checks
    them as NCCL does, and does what it always does.

    Parameters
    ----------
    min_ctas, max_ctas : int, optional
        Blocks that the call may use.
    nvls_ctas : int, optional
        Blocks of NVLink SHARP.
    cga_cluster_size : int, optional
        Blocks of a cluster.
    alg_selection : str, optional
        Algorithms and protocols to choose from, in NCCL's notation.
    force_alg_selection : bool, default: True
        Whether an `alg_selection` that cannot be met is an error.
    cta_policy : int, optional
        1 efficiency, 2 zero CTA; they combine.
    user_profiler_tag : int, default: 0
        64 bits that a profiler sees beside the call.
    launch_completion_event : int, optional
        Handle of a CUDA event that is recorded when the call has been launched.

    Attributes
    ----------
    values : dict
        What was given, by name.

    Raises
    ------
    TypeError
        A field is of the wrong type.
    ValueError
        A number does not fit, or `alg_selection` holds a null character.

    Notes
    -----
    C type: ``ncclCollConfig_t``, NCCL 2.31.  A plan keeps the settings that its calls were made with.

    Examples
    --------
    >>> import array, pynccl
    >>> quick = pynccl.CollConfig(max_ctas=4)
    >>> with pynccl.Communicator(1, pynccl.unique_id("host"), 0) as comm:
    ...     comm.all_reduce(array.array("d", [1.0]), config=quick)
    array('d', [1.0])
    """

    NAMES = (
        "min_ctas", "max_ctas", "nvls_ctas", "cga_cluster_size", "alg_selection", "force_alg_selection",
        "cta_policy", "user_profiler_tag", "launch_completion_event",
    )

    def __init__(self, *, min_ctas=None, max_ctas=None, nvls_ctas=None, cga_cluster_size=None,
                 alg_selection=None, force_alg_selection=None, cta_policy=None, user_profiler_tag=None,
                 launch_completion_event=None):
        cdef ncclCollConfig_t *c = &self.c
        given = locals()
        self.values = {name: given[name] for name in self.NAMES if given[name] is not None}
        c.size = sizeof(self.c)
        c.magic = NCCL_API_MAGIC
        c.version = NCCL_VERSION_CODE
        c.minCTAs = self.count("min_ctas")
        c.maxCTAs = self.count("max_ctas")
        c.nvlsCTAs = self.count("nvls_ctas")
        c.cgaClusterSize = self.count("cga_cluster_size")
        c.CTAPolicy = self.count("cta_policy")
        c.forceAlgSelection = flag("CollConfig: force_alg_selection", self.values.get("force_alg_selection", True))
        c.algSelection = NULL
        if alg_selection is not None:
            self.algorithm = text("CollConfig: alg_selection", alg_selection)
            c.algSelection = self.algorithm
        c.userProfilerTag = self.word("user_profiler_tag")
        c.launchCompletionEvent = <cudaEvent_t><uintptr_t>self.word("launch_completion_event")

    cdef int count(self, str name) except? -1:
        if name not in self.values:
            return NCCL_CONFIG_UNDEF_INT
        return integer(f"CollConfig: {name}", self.values[name], -INT_MAX)

    cdef uint64_t word(self, str name) except? 1:
        return integer(
            f"CollConfig: {name}", self.values.get(name, 0), 0, 2**64 - 1, "64 bits without a sign")

    cdef int put(self, Call *call, object library) except -1:
        (<Library>library).needs(<bytes>call.spec.function + b"Config")
        call.config = &self.c
        call.configured = <void *><Configured>dispatch_configured
        return 0


cdef ncclResult_t dispatch_configured(const nccl_api *api, ncclComm_t comm, const Call *call) noexcept nogil:
    cdef ncclDataType_t dtype = <ncclDataType_t>call.dtype
    cdef ncclRedOp_t op = <ncclRedOp_t>call.op
    cdef cudaStream_t stream = <cudaStream_t>call.stream
    cdef const ncclCollConfig_t *c = <const ncclCollConfig_t *>call.config
    cdef Kind kind = call.spec.kind
    if kind == ALL_REDUCE:
        return api.ncclAllReduceConfig(call.send, call.recv, call.count, dtype, op, comm, stream, c)
    elif kind == REDUCE:
        return api.ncclReduceConfig(call.send, call.recv, call.count, dtype, op, call.root, comm, stream, c)
    elif kind == BROADCAST:
        return api.ncclBroadcastConfig(call.send, call.recv, call.count, dtype, call.root, comm, stream, c)
    elif kind == ALL_GATHER:
        return api.ncclAllGatherConfig(call.send, call.recv, call.count, dtype, comm, stream, c)
    elif kind == REDUCE_SCATTER:
        return api.ncclReduceScatterConfig(call.send, call.recv, call.count, dtype, op, comm, stream, c)
    elif kind == ALL_TO_ALL:
        return api.ncclAlltoAllConfig(call.send, call.recv, call.count, dtype, comm, stream, c)
    elif kind == GATHER:
        return api.ncclGatherConfig(call.send, call.recv, call.count, dtype, call.root, comm, stream, c)
    else:
        return api.ncclScatterConfig(call.send, call.recv, call.count, dtype, call.root, comm, stream, c)
