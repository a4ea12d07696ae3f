"""`CollConfig`: how one collective is to be done, and the C functions that are told."""

from libc.limits cimport INT_MAX
from libc.stdint cimport uintptr_t

from pynccl._call cimport (
    ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, BROADCAST, GATHER, REDUCE, REDUCE_SCATTER, Call, Kind,
    Setting,
)
from pynccl._nccl cimport (
    NCCL_API_MAGIC, NCCL_CONFIG_UNDEF_INT, NCCL_VERSION_CODE, Configured, Library, cudaEvent_t,
    cudaStream_t, nccl_api, ncclCollConfig_t, ncclComm_t, ncclDataType_t, ncclRedOp_t, ncclResult_t,
)

import operator

from pynccl.errors import UnsupportedError

cdef int SINCE = 23100


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

    def __init__(self, *, min_ctas=None, max_ctas=None, nvls_ctas=None, cga_cluster_size=None,
                 alg_selection=None, force_alg_selection=None, cta_policy=None, user_profiler_tag=None,
                 launch_completion_event=None):
        cdef ncclCollConfig_t *c = &self.c
        given = locals()
        self.values = {name: given[name] for name in _FIELDS if given[name] is not None}
        c.size = sizeof(self.c)
        c.magic = NCCL_API_MAGIC
        c.version = NCCL_VERSION_CODE
        c.minCTAs = _integer("min_ctas", min_ctas)
        c.maxCTAs = _integer("max_ctas", max_ctas)
        c.nvlsCTAs = _integer("nvls_ctas", nvls_ctas)
        c.cgaClusterSize = _integer("cga_cluster_size", cga_cluster_size)
        c.CTAPolicy = _integer("cta_policy", cta_policy)
        c.forceAlgSelection = 1
        if force_alg_selection is not None:
            if not isinstance(force_alg_selection, bool):
                raise TypeError(f"CollConfig: force_alg_selection must be True or False, not {force_alg_selection!r}")
            c.forceAlgSelection = force_alg_selection
        c.algSelection = NULL
        if alg_selection is not None:
            if not isinstance(alg_selection, str):
                raise TypeError(f"CollConfig: alg_selection must be a str, not {type(alg_selection).__name__!r}")
            if "\0" in alg_selection:
                raise ValueError("CollConfig: alg_selection holds a null character")
            self.algorithm = alg_selection.encode()
            c.algSelection = self.algorithm
        c.userProfilerTag = _unsigned("user_profiler_tag", user_profiler_tag)
        c.launchCompletionEvent = <cudaEvent_t><uintptr_t>_unsigned(
            "launch_completion_event", launch_completion_event)

    cdef int put(self, Call *call, object library) except -1:
        cdef Library lib = library
        if lib.version < SINCE:
            raise UnsupportedError(
                f"{call.spec.verb.decode()}: config needs NCCL {SINCE // 10000}.{SINCE // 100 % 100}, loaded "
                f"{lib.version // 10000}.{lib.version // 100 % 100} from {lib.path}"
            )
        call.config = &self.c
        call.configured = <void *><Configured>dispatch_configured
        return 0

    def __getattr__(self, name):
        if name in _FIELDS:
            return self.values.get(name)
        raise AttributeError(f"CollConfig has no field {name!r}")

    def __eq__(self, other):
        return self.values == (<CollConfig>other).values if type(other) is CollConfig else NotImplemented

    def __hash__(self):
        return hash(frozenset(self.values.items()))

    def __repr__(self):
        return f"CollConfig({', '.join(f'{name}={value!r}' for name, value in self.values.items())})"

    def __reduce__(self):
        return _again, (self.values,)


_FIELDS = (
    "min_ctas", "max_ctas", "nvls_ctas", "cga_cluster_size", "alg_selection", "force_alg_selection",
    "cta_policy", "user_profiler_tag", "launch_completion_event",
)


def _again(values):
    return CollConfig(**values)


cdef object _number(str name, object value):
    if isinstance(value, bool):
        raise TypeError(f"CollConfig: {name} must be an int, not a bool")
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"CollConfig: {name} must be an int, not {type(value).__name__!r}") from None


cdef int _integer(str name, object value) except? -1:
    if value is None:
        return NCCL_CONFIG_UNDEF_INT
    value = _number(name, value)
    if not -INT_MAX <= value <= INT_MAX:
        raise ValueError(f"CollConfig: {name}={value} does not fit in 32 bits")
    return value


cdef object _unsigned(str name, object value):
    value = 0 if value is None else _number(name, value)
    if not 0 <= value < 2**64:
        raise ValueError(f"CollConfig: {name}={value} does not fit in 64 bits without a sign")
    return value


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
