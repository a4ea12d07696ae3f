# NCCL as Cython sees it, and the classes that other Cython code may cimport; docs/cython.md is the guide.
#
# Meant for outside code, and kept source-compatible:
#
#   here             NCCL's types and constants; CommBase with `api` (NCCL's functions by their own names),
#                    `at` (rank, nranks, device, host) and `library`; begin_call, end_call, reaches
#   pynccl._buffer   view, release, Ask, BufferView; Buffer with `view`; ElemType with `nccl`, `width`, `kind`
#
# The rest is the package's own.  NCCL's functions are fields of a table: nothing is linked against a library,
# and the same code calls NCCL or the host library, without the GIL:
#
#     handle = begin_call(comm, b"my_sum")
#     with nogil:
#         result = comm.api.ncclAllReduce(x, y, count, ncclFloat32, ncclSum, handle, stream)
#     end_call(comm, result, b"ncclAllReduce")
#
# Every function pointer is `noexcept nogil`; a test compares this list with nccl_abi.h.

from libc.stdint cimport (
    int8_t, int16_t, int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t, uintptr_t,
)

from pynccl._buffer cimport BufferView
from pynccl._call cimport Call, Kind, Place, Spec, UserOp


cdef extern from "nccl_abi.h" nogil:
    ctypedef struct CUstream_st:
        pass
    ctypedef CUstream_st *cudaStream_t
    ctypedef struct CUevent_st:
        pass
    ctypedef CUevent_st *cudaEvent_t
    ctypedef struct ncclComm:
        pass
    ctypedef ncclComm *ncclComm_t
    ctypedef struct ncclWindow_vidmem:
        pass
    ctypedef ncclWindow_vidmem *ncclWindow_t
    ctypedef struct ncclParamHandle:
        pass
    ctypedef ncclParamHandle *ncclParamHandle_t
    ctypedef const char *pynccl_text_t
    ctypedef void *pynccl_owner_t

    ctypedef struct ncclUniqueId:
        char internal[128]

    ctypedef enum ncclResult_t:
        ncclSuccess
        ncclUnhandledCudaError
        ncclSystemError
        ncclInternalError
        ncclInvalidArgument
        ncclInvalidUsage
        ncclRemoteError
        ncclInProgress
        ncclTimeout
        PYNCCL_MISSING

    ctypedef enum ncclDataType_t:
        ncclInt8
        ncclUint8
        ncclInt32
        ncclUint32
        ncclInt64
        ncclUint64
        ncclFloat16
        ncclFloat32
        ncclFloat64
        ncclBfloat16
        ncclFloat8e4m3
        ncclFloat8e5m2

    ctypedef enum ncclRedOp_t:
        ncclSum
        ncclProd
        ncclMax
        ncclMin
        ncclAvg
        ncclNumOps

    ctypedef enum ncclScalarResidence_t:
        ncclScalarDevice
        ncclScalarHostImmediate

    ctypedef enum ncclCommMemStat_t:
        ncclStatGpuMemSuspend
        ncclStatGpuMemSuspended
        ncclStatGpuMemPersist
        ncclStatGpuMemTotal

    ctypedef struct ncclConfig_t:
        size_t size
        unsigned int magic
        unsigned int version
        int blocking
        int cgaClusterSize
        int minCTAs
        int maxCTAs
        const char *netName
        int splitShare
        int trafficClass
        const char *commName
        int collnetEnable
        int CTAPolicy
        int shrinkShare
        int nvlsCTAs
        int nChannelsPerNetPeer
        int nvlinkCentricSched
        int graphUsageMode
        int numRmaCtx
        int maxP2pPeers
        int graphStreamOrdering
        int launchOrderImplicit
        int numRmaSig
        int rmaEagerInit
        int hostCftMode
        int nvlsHostMode

    ctypedef struct ncclCollConfig_t:
        size_t size
        unsigned int magic
        unsigned int version
        int minCTAs
        int maxCTAs
        int nvlsCTAs
        int cgaClusterSize
        const char *algSelection
        int forceAlgSelection
        int CTAPolicy
        uint64_t userProfilerTag
        cudaEvent_t launchCompletionEvent

    ctypedef struct ncclSimInfo_t:
        size_t size
        unsigned int magic
        unsigned int version
        float estimatedTime

    ctypedef struct ncclEncryptionConfig_t:
        size_t size
        unsigned int magic
        unsigned int version
        int mode
        const char *psk

    ctypedef struct ncclWaitSignalDesc_t:
        int opCnt
        int peer
        int sigIdx
        int ctx

    int NCCL_UNIQUE_ID_BYTES
    int NCCL_SPLIT_NOCOLOR
    int NCCL_SHRINK_DEFAULT
    int NCCL_SHRINK_ABORT
    int NCCL_SUSPEND_MEM
    int NCCL_ENCRYPTION_MODE_NONE
    int NCCL_ENCRYPTION_MODE_PSK
    int NCCL_CONFIG_UNDEF_INT
    unsigned int NCCL_API_MAGIC
    unsigned int PYNCCL_SIM_INFO_MAGIC
    int NCCL_VERSION_CODE
    float NCCL_UNDEF_FLOAT
    const ncclConfig_t NCCL_CONFIG_DEFAULT "((ncclConfig_t)NCCL_CONFIG_INITIALIZER)"
    int PYNCCL_HOST_ID_OFFSET
    int PYNCCL_HOST_ID_MAGIC_BYTES
    const char *PYNCCL_HOST_ID_MAGIC


cdef extern from "_loader.h" nogil:
    # One loaded library: every function of NCCL by its own name.  A function that the library lacks
    # is there too and returns PYNCCL_MISSING; the host library's extensions are NULL on NCCL.
    struct nccl_api:
        ncclResult_t (*ncclGetVersion)(int*) noexcept nogil
        ncclResult_t (*ncclGetUniqueId)(ncclUniqueId*) noexcept nogil
        pynccl_text_t (*ncclGetErrorString)(ncclResult_t) noexcept nogil
        pynccl_text_t (*ncclGetLastError)(ncclComm_t) noexcept nogil
        void (*ncclResetDebugInit)() noexcept nogil
        ncclResult_t (*ncclSetEncryption)(const ncclEncryptionConfig_t*) noexcept nogil
        ncclResult_t (*ncclCommInitRank)(ncclComm_t*, int, ncclUniqueId, int) noexcept nogil
        ncclResult_t (*ncclCommInitRankConfig)(
            ncclComm_t*, int, ncclUniqueId, int, ncclConfig_t*) noexcept nogil
        ncclResult_t (*ncclCommInitRankScalable)(
            ncclComm_t*, int, int, int, ncclUniqueId*, ncclConfig_t*) noexcept nogil
        ncclResult_t (*ncclCommInitAll)(ncclComm_t*, int, const int*) noexcept nogil
        ncclResult_t (*ncclCommSplit)(
            ncclComm_t, int, int, ncclComm_t*, ncclConfig_t*) noexcept nogil
        ncclResult_t (*ncclCommShrink)(
            ncclComm_t, int*, int, ncclComm_t*, ncclConfig_t*, int) noexcept nogil
        ncclResult_t (*ncclCommGetUniqueId)(ncclComm_t, ncclUniqueId*) noexcept nogil
        ncclResult_t (*ncclCommGrow)(
            ncclComm_t, int, const ncclUniqueId*, int, ncclComm_t*, ncclConfig_t*) noexcept nogil
        ncclResult_t (*ncclCommRevoke)(ncclComm_t, int) noexcept nogil
        ncclResult_t (*ncclCommFinalize)(ncclComm_t) noexcept nogil
        ncclResult_t (*ncclCommDestroy)(ncclComm_t) noexcept nogil
        ncclResult_t (*ncclCommAbort)(ncclComm_t) noexcept nogil
        ncclResult_t (*ncclCommGetAsyncError)(ncclComm_t, ncclResult_t*) noexcept nogil
        ncclResult_t (*ncclCommCount)(const ncclComm_t, int*) noexcept nogil
        ncclResult_t (*ncclCommCuDevice)(const ncclComm_t, int*) noexcept nogil
        ncclResult_t (*ncclCommUserRank)(const ncclComm_t, int*) noexcept nogil
        ncclResult_t (*ncclCommSuspend)(ncclComm_t, int) noexcept nogil
        ncclResult_t (*ncclCommResume)(ncclComm_t) noexcept nogil
        ncclResult_t (*ncclCommMemStats)(ncclComm_t, ncclCommMemStat_t, uint64_t*) noexcept nogil
        ncclResult_t (*ncclMemAlloc)(void**, size_t) noexcept nogil
        ncclResult_t (*ncclMemFree)(void*) noexcept nogil
        ncclResult_t (*ncclCommRegister)(const ncclComm_t, void*, size_t, void**) noexcept nogil
        ncclResult_t (*ncclCommDeregister)(const ncclComm_t, void*) noexcept nogil
        ncclResult_t (*ncclCommWindowRegister)(
            ncclComm_t, void*, size_t, ncclWindow_t*, int) noexcept nogil
        ncclResult_t (*ncclCommWindowDeregister)(ncclComm_t, ncclWindow_t) noexcept nogil
        ncclResult_t (*ncclWinGetUserPtr)(ncclComm_t, ncclWindow_t, void**) noexcept nogil
        ncclResult_t (*ncclRedOpCreatePreMulSum)(
            ncclRedOp_t*, void*, ncclDataType_t, ncclScalarResidence_t, ncclComm_t) noexcept nogil
        ncclResult_t (*ncclRedOpDestroy)(ncclRedOp_t, ncclComm_t) noexcept nogil
        ncclResult_t (*ncclAllReduce)(
            const void*, void*, size_t, ncclDataType_t, ncclRedOp_t, ncclComm_t,
            cudaStream_t) noexcept nogil
        ncclResult_t (*ncclReduce)(
            const void*, void*, size_t, ncclDataType_t, ncclRedOp_t, int, ncclComm_t,
            cudaStream_t) noexcept nogil
        ncclResult_t (*ncclBroadcast)(
            const void*, void*, size_t, ncclDataType_t, int, ncclComm_t,
            cudaStream_t) noexcept nogil
        ncclResult_t (*ncclBcast)(
            void*, size_t, ncclDataType_t, int, ncclComm_t, cudaStream_t) noexcept nogil
        ncclResult_t (*ncclAllGather)(
            const void*, void*, size_t, ncclDataType_t, ncclComm_t, cudaStream_t) noexcept nogil
        ncclResult_t (*ncclReduceScatter)(
            const void*, void*, size_t, ncclDataType_t, ncclRedOp_t, ncclComm_t,
            cudaStream_t) noexcept nogil
        ncclResult_t (*ncclAlltoAll)(
            const void*, void*, size_t, ncclDataType_t, ncclComm_t, cudaStream_t) noexcept nogil
        ncclResult_t (*ncclGather)(
            const void*, void*, size_t, ncclDataType_t, int, ncclComm_t,
            cudaStream_t) noexcept nogil
        ncclResult_t (*ncclScatter)(
            const void*, void*, size_t, ncclDataType_t, int, ncclComm_t,
            cudaStream_t) noexcept nogil
        ncclResult_t (*ncclAllReduceConfig)(
            const void*, void*, size_t, ncclDataType_t, ncclRedOp_t, ncclComm_t, cudaStream_t,
            const ncclCollConfig_t*) noexcept nogil
        ncclResult_t (*ncclReduceConfig)(
            const void*, void*, size_t, ncclDataType_t, ncclRedOp_t, int, ncclComm_t, cudaStream_t,
            const ncclCollConfig_t*) noexcept nogil
        ncclResult_t (*ncclBroadcastConfig)(
            const void*, void*, size_t, ncclDataType_t, int, ncclComm_t, cudaStream_t,
            const ncclCollConfig_t*) noexcept nogil
        ncclResult_t (*ncclAllGatherConfig)(
            const void*, void*, size_t, ncclDataType_t, ncclComm_t, cudaStream_t,
            const ncclCollConfig_t*) noexcept nogil
        ncclResult_t (*ncclReduceScatterConfig)(
            const void*, void*, size_t, ncclDataType_t, ncclRedOp_t, ncclComm_t, cudaStream_t,
            const ncclCollConfig_t*) noexcept nogil
        ncclResult_t (*ncclAlltoAllConfig)(
            const void*, void*, size_t, ncclDataType_t, ncclComm_t, cudaStream_t,
            const ncclCollConfig_t*) noexcept nogil
        ncclResult_t (*ncclGatherConfig)(
            const void*, void*, size_t, ncclDataType_t, int, ncclComm_t, cudaStream_t,
            const ncclCollConfig_t*) noexcept nogil
        ncclResult_t (*ncclScatterConfig)(
            const void*, void*, size_t, ncclDataType_t, int, ncclComm_t, cudaStream_t,
            const ncclCollConfig_t*) noexcept nogil
        ncclResult_t (*ncclSend)(
            const void*, size_t, ncclDataType_t, int, ncclComm_t, cudaStream_t) noexcept nogil
        ncclResult_t (*ncclRecv)(
            void*, size_t, ncclDataType_t, int, ncclComm_t, cudaStream_t) noexcept nogil
        ncclResult_t (*ncclPutSignal)(
            const void*, size_t, ncclDataType_t, int, ncclWindow_t, size_t, int, int, unsigned int,
            ncclComm_t, cudaStream_t) noexcept nogil
        ncclResult_t (*ncclSignal)(
            int, int, int, unsigned int, ncclComm_t, cudaStream_t) noexcept nogil
        ncclResult_t (*ncclWaitSignal)(
            int, ncclWaitSignalDesc_t*, ncclComm_t, cudaStream_t) noexcept nogil
        ncclResult_t (*ncclGroupStart)() noexcept nogil
        ncclResult_t (*ncclGroupEnd)() noexcept nogil
        ncclResult_t (*ncclGroupSimulateEnd)(ncclSimInfo_t*) noexcept nogil
        ncclResult_t (*ncclParamBind)(ncclParamHandle_t*, const char*) noexcept nogil
        ncclResult_t (*ncclParamGetI8)(ncclParamHandle_t, int8_t*) noexcept nogil
        ncclResult_t (*ncclParamGetI16)(ncclParamHandle_t, int16_t*) noexcept nogil
        ncclResult_t (*ncclParamGetI32)(ncclParamHandle_t, int32_t*) noexcept nogil
        ncclResult_t (*ncclParamGetI64)(ncclParamHandle_t, int64_t*) noexcept nogil
        ncclResult_t (*ncclParamGetU8)(ncclParamHandle_t, uint8_t*) noexcept nogil
        ncclResult_t (*ncclParamGetU16)(ncclParamHandle_t, uint16_t*) noexcept nogil
        ncclResult_t (*ncclParamGetU32)(ncclParamHandle_t, uint32_t*) noexcept nogil
        ncclResult_t (*ncclParamGetU64)(ncclParamHandle_t, uint64_t*) noexcept nogil
        ncclResult_t (*ncclParamGetStr)(ncclParamHandle_t, const char**) noexcept nogil
        ncclResult_t (*ncclParamGet)(ncclParamHandle_t, void*, int, int*) noexcept nogil
        ncclResult_t (*ncclParamGetParameter)(const char*, const char**, int*) noexcept nogil
        ncclResult_t (*ncclParamGetAllParameterKeys)(const char***, int*) noexcept nogil
        void (*ncclParamDumpAll)() noexcept nogil

        int (*pyncclHostStamp)() noexcept nogil
        pynccl_text_t (*pyncclHostLastError)() noexcept nogil
        void (*pyncclHostSetInterrupt)(int (*hook)() noexcept nogil) noexcept nogil
        void (*pyncclHostSetInitTimeout)(double) noexcept nogil
        ncclResult_t (*pyncclHostSetTimeout)(ncclComm_t, double) noexcept nogil
        ncclResult_t (*pyncclHostStreamCreate)(cudaStream_t*) noexcept nogil
        ncclResult_t (*pyncclHostStreamDestroy)(cudaStream_t) noexcept nogil
        ncclResult_t (*pyncclHostStreamQuery)(cudaStream_t) noexcept nogil
        ncclResult_t (*pyncclHostStreamSynchronize)(cudaStream_t, double) noexcept nogil
        ncclResult_t (*pyncclHostStreamWaitEvent)(cudaStream_t, cudaEvent_t) noexcept nogil
        ncclResult_t (*pyncclHostStreamWaitStream)(cudaStream_t, cudaStream_t) noexcept nogil
        ncclResult_t (*pyncclHostStreamCall)(
            cudaStream_t, void (*function)(void*) noexcept nogil, void*) noexcept nogil
        ncclResult_t (*pyncclHostEventCreate)(cudaEvent_t*) noexcept nogil
        ncclResult_t (*pyncclHostEventDestroy)(cudaEvent_t) noexcept nogil
        ncclResult_t (*pyncclHostEventRecord)(cudaEvent_t, cudaStream_t) noexcept nogil
        ncclResult_t (*pyncclHostEventQuery)(cudaEvent_t) noexcept nogil
        ncclResult_t (*pyncclHostEventSynchronize)(cudaEvent_t, double) noexcept nogil
        ncclResult_t (*pyncclHostEventElapsed)(float*, cudaEvent_t, cudaEvent_t) noexcept nogil
        pynccl_owner_t (*pyncclHostKeep)(void*, void (*release)(void*) noexcept nogil) noexcept nogil

        int version
        int is_host
        const char *path

    int nccl_api_load(const char *path, nccl_api **out, char *err, size_t errlen)
    int nccl_api_has(const nccl_api *api, const char *symbol)
    int nccl_symbol_version(const char *symbol)
    int nccl_symbol_count()
    const char *nccl_symbol_name(int i)


cdef inline bint is_queue(const nccl_api *api, const Call *call) noexcept nogil:
    """Whether the call goes on a stream of the host library: any handle but those of the default streams."""
    return api.is_host and <size_t>call.stream > 2


cdef class Library:
    # One loaded shared library; lives as long as the process.
    cdef const nccl_api *api
    cdef readonly str path
    cdef readonly str kind          # "nccl" or "host"
    cdef readonly int version       # as NCCL codes it: 23203 is 2.32.3

    cdef int needs(self, const char *function) except -1


cdef enum:
    GIVEN_UP = 1001     # beside NCCL's results: a group was left before its end


cdef enum State:
    UNBORN          # no handle yet: __init__ has not succeeded
    CREATING        # queued in a group that has not ended
    PENDING         # being created in the background
    OPEN
    FINALIZED
    CLOSED
    ABORTED


cdef class CommBase:
    # A communicator's handle and the way its calls go.  Lifecycle is in _comm, the methods of the
    # collectives in _collectives.
    cdef ncclComm_t handle
    cdef const nccl_api *api
    cdef Place at
    cdef State state
    cdef unsigned int born          # how often this process's ancestors had forked
    cdef int busy                   # calls that are inside the library now
    cdef double patience            # seconds that a wait may take
    cdef bint nonblocking
    cdef bint foreign               # the handle is other code's, which will destroy it
    cdef object gate                # held by whoever is in a call, where threads share it; else None
    cdef void *token                # the barrier's own element, on the device
    cdef unsigned char host_token   # the same for the host library
    cdef readonly Library library
    cdef object __weakref__

    cdef int ready(self, const char *verb) except -1
    cdef int refuse(self, const char *verb) except -1
    cdef object run(self, Kind kind, object x, object out, object op, object root,
                    object stream, object dtype, object config)
    cdef int issue(self, const Call *call) except -1
    cdef object exchange(self, object x, object dest, object out, object source,
                         object stream, object dtype)
    cdef int meet(self, object stream) except -1
    cdef object output(self, Kind kind, object x, object root)
    cdef int wait(self, const char *function, double seconds=*) except -1
    cdef int settle(self, ncclResult_t result, const char *function) except -1
    cdef ncclResult_t create(self) except *
    cdef int created(self, ncclResult_t result) except -1


# How a call with a configuration is made.
ctypedef ncclResult_t (*Configured)(const nccl_api *, ncclComm_t, const Call *) noexcept nogil


# One recorded call.  Handle and place lie inside the communicator, which the recorder holds.
cdef struct Step:
    Call call
    const ncclComm_t *comm
    const Place *at


cdef class Recorder:
    # What run() talks to while a group is open on its thread.
    cdef int record(self, CommBase comm, const Call *call, BufferView *views,
                    object x, object out, object op) except -1
    cdef int record_creation(self, CommBase comm, CommBase parent) except -1


cdef Recorder recorder()
cdef bint at_once(CommBase comm) noexcept
cdef void set_recorder(Recorder group) noexcept
cdef ncclResult_t dispatch(const nccl_api *api, ncclComm_t comm, const Place *at,
                           const Call *call) noexcept nogil
cdef ncclResult_t run_steps(const nccl_api *api, const Step *steps, Py_ssize_t count,
                            Py_ssize_t *failed) noexcept nogil
cdef bint went(ncclResult_t result) noexcept nogil
cdef object new_result(const Spec *spec, const Place *at, object x, const char *arg)
cdef int order_call(const nccl_api *api, const Call *call) except -1
cdef int passed(const nccl_api *api, ncclResult_t result, const char *function) except -1
cdef object holding(const BufferView *send, const BufferView *recv, object x, object out)
cdef int drain(const nccl_api *api, void *stream, double seconds) except -1
cdef Exception failure(ncclResult_t result, const char *function, const nccl_api *api,
                       ncclComm_t comm, object rank)
cdef Exception unsupported(str what, int needed, const nccl_api *api)
cdef int interrupted() except -1
cdef unsigned int forks() noexcept nogil
cdef Library load(object choice)


# ---- for outside code, which makes its own C calls -----------------------------------------------

cdef inline ncclComm_t begin_call(CommBase comm, const char *verb) except NULL:
    """Occupy a communicator for C calls of one's own; `end_call` must follow, whatever they return.

    Raises where a method would: it is closed, of before a fork, or inside another thread's call.  A call
    made at once would overtake what an open group has recorded, so that this is refused, too.
    """
    if comm is None:
        raise TypeError(f"{verb.decode()}: comm is None, not a communicator")
    comm.ready(verb)
    if recorder() is not None:
        raise ValueError(f"{verb.decode()}: a group is open, whose calls run at its end; call it after")
    comm.busy += 1
    return comm.handle


cdef inline int end_call(CommBase comm, ncclResult_t result, const char *function) except -1:
    """Release it, and raise the exception of a result that is not success.

    Where a nonblocking communicator has answered ncclInProgress, this waits until it is done.
    """
    if comm is None or comm.busy <= 0:
        raise RuntimeError(f"end_call: no begin_call came before this of {function.decode()}")
    comm.busy -= 1
    if result != ncclSuccess:
        comm.settle(result, function)
    return 0


cdef inline bint reaches(CommBase comm, const BufferView *v) noexcept:
    """Whether the communicator's library can read this memory: on its GPU, or on the host library the host's."""
    return v.nbytes == 0 or (v.device < 0 if comm.at.host else v.device == comm.at.device)
