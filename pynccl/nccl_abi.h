/* NCCL 2.32.3's public ABI, as pynccl's own declarations.
 *
 * Owns the one C list of NCCL's functions and types: the loader's table, the host library's exports, the
 * test stubs and `pynccl info` are generated from NCCL_SYMBOLS; nothing repeats it. NCCL's header is not
 * needed to build pynccl; a test compiles this file against the nccl.h of an installed NCCL and compares
 * sizes, offsets, values and function types.
 *
 * Promises: only libc is included; every name and layout is NCCL's own. NCCL only ever appends to its
 * structs (their first field carries the size the caller was compiled with), so these declarations serve
 * older and newer libraries alike. Where NCCL's header has been included first, its types are used and only
 * the lists are added.
 *
 * No state, no code.
 */
#ifndef PYNCCL_NCCL_ABI_H
#define PYNCCL_NCCL_ABI_H

#include <limits.h>
#include <stddef.h>
#include <stdint.h>

/* CUDA's handles in NCCL's prototypes. C11 allows repeating a typedef, so CUDA's headers may be present. */
typedef struct CUstream_st *cudaStream_t;
typedef struct CUevent_st *cudaEvent_t;

#ifndef NCCL_H_ /* NCCL's own include guard */

/* ---- version --------------------------------------------------------------------------------- */

#define NCCL_MAJOR 2
#define NCCL_MINOR 32
#define NCCL_PATCH 3
#define NCCL_SUFFIX ""
#define NCCL_VERSION_CODE 23203
/* Up to 2.8 a minor was worth 100 and a major 1000; since 2.9 a major is worth 10000. */
#define NCCL_VERSION(X, Y, Z) \
    (((X) <= 2 && (Y) <= 8) ? (X) * 1000 + (Y) * 100 + (Z) : (X) * 10000 + (Y) * 100 + (Z))

/* ---- constants ------------------------------------------------------------------------------- */

#define NCCL_UNIQUE_ID_BYTES 128
#define NCCL_COMM_NULL NULL

/* "Not set" in the config structs: the library then uses its own default. */
#define NCCL_CONFIG_UNDEF_INT INT_MIN
#define NCCL_CONFIG_UNDEF_PTR NULL
#define NCCL_UNDEF_FLOAT -1.0f
#define NCCL_API_MAGIC 0xcafebeef

#define NCCL_SPLIT_NOCOLOR -1

#define NCCL_SHRINK_DEFAULT 0x00
#define NCCL_SHRINK_ABORT 0x01
#define NCCL_REVOKE_DEFAULT 0x00
#define NCCL_SUSPEND_MEM 0x01

#define NCCL_WIN_DEFAULT 0x00
#define NCCL_WIN_COLL_SYMMETRIC 0x01
#define NCCL_WIN_STRICT_ORDERING 0x02
#define NCCL_WIN_GIN_ONLY 0x04
#define NCCL_WIN_CFT_COUNTED 0x08
#define NCCL_WIN_REQUIRED_ALIGNMENT 4096

#define NCCL_CTA_POLICY_DEFAULT 0x00
#define NCCL_CTA_POLICY_EFFICIENCY 0x01
#define NCCL_CTA_POLICY_ZERO 0x02

/* ---- handles and enumerations ---------------------------------------------------------------- */

typedef struct ncclComm *ncclComm_t;
typedef struct ncclWindow_vidmem *ncclWindow_t;
typedef struct ncclParamHandle *ncclParamHandle_t;

typedef struct {
    char internal[NCCL_UNIQUE_ID_BYTES];
} ncclUniqueId;

typedef enum {
    ncclSuccess = 0,
    ncclUnhandledCudaError = 1,
    ncclSystemError = 2,
    ncclInternalError = 3,
    ncclInvalidArgument = 4,
    ncclInvalidUsage = 5,
    ncclRemoteError = 6,
    ncclInProgress = 7,
    ncclTimeout = 8,
    ncclNumResults = 9
} ncclResult_t;

typedef enum {
    ncclInt8 = 0,
    ncclChar = 0,
    ncclUint8 = 1,
    ncclInt32 = 2,
    ncclInt = 2,
    ncclUint32 = 3,
    ncclInt64 = 4,
    ncclUint64 = 5,
    ncclFloat16 = 6,
    ncclHalf = 6,
    ncclFloat32 = 7,
    ncclFloat = 7,
    ncclFloat64 = 8,
    ncclDouble = 8,
    ncclBfloat16 = 9,
    ncclFloat8e4m3 = 10,
    ncclFloat8e5m2 = 11,
    ncclNumTypes = 12
} ncclDataType_t;

/* Max comes before Min. Values from ncclNumOps up are operations made by ncclRedOpCreatePreMulSum. */
typedef enum {
    ncclSum = 0,
    ncclProd = 1,
    ncclMax = 2,
    ncclMin = 3,
    ncclAvg = 4,
    ncclNumOps = 5,
    ncclMaxRedOp = 0x7fffffff
} ncclRedOp_t;

typedef enum { ncclNumOps_dummy = 5 } ncclRedOp_dummy_t;

typedef enum {
    ncclScalarDevice = 0,       /* read on the device while the collective runs */
    ncclScalarHostImmediate = 1 /* read before the creating call returns */
} ncclScalarResidence_t;

typedef enum {
    ncclStatGpuMemSuspend = 0,   /* bytes that ncclCommSuspend can release */
    ncclStatGpuMemSuspended = 1, /* 1 while they are released */
    ncclStatGpuMemPersist = 2,   /* bytes that it cannot */
    ncclStatGpuMemTotal = 3
} ncclCommMemStat_t;

typedef enum {
    ncclHostCftDefault = INT_MIN,
    ncclHostCftEnable = 1,
    ncclHostCftDisable = 2,
    ncclHostCftFallback = 3
} ncclHostCftMode_t;

/* Flags, except for the default and the two extremes. */
typedef enum {
    ncclNvlsHostModeDefault = INT_MIN,
    ncclNvlsHostModeEnable = 0,
    ncclNvlsHostModeDisableTransport = 1,
    ncclNvlsHostModeDisableSymmetricMultimem = 2,
    ncclNvlsHostModeDisable = INT_MAX
} ncclNvlsHostMode_t;

typedef enum { NCCL_ENCRYPTION_MODE_NONE = 0, NCCL_ENCRYPTION_MODE_PSK = 1 } ncclEncryptionMode_t;

/* ---- structs that the caller fills: start from the initialiser ------------------------------- */

/* Of a communicator. The comment names the first release that reads the field. */
typedef struct {
    size_t size;
    unsigned int magic;
    unsigned int version;
    int blocking;
    int cgaClusterSize;
    int minCTAs;
    int maxCTAs;
    const char *netName;
    int splitShare;
    int trafficClass;     /* 2.26 */
    const char *commName; /* 2.27 */
    int collnetEnable;
    int CTAPolicy;
    int shrinkShare;
    int nvlsCTAs;
    int nChannelsPerNetPeer; /* 2.28 */
    int nvlinkCentricSched;
    int graphUsageMode; /* 2.29 */
    int numRmaCtx;
    int maxP2pPeers; /* 2.30 */
    int graphStreamOrdering;
    int launchOrderImplicit; /* 2.31 */
    int numRmaSig;
    int rmaEagerInit;
    int hostCftMode;  /* ncclHostCftMode_t */
    int nvlsHostMode; /* 2.32; ncclNvlsHostMode_t */
} ncclConfig_t;

#define NCCL_CONFIG_INITIALIZER \
    { \
        .size = sizeof(ncclConfig_t), \
        .magic = NCCL_API_MAGIC, \
        .version = NCCL_VERSION_CODE, \
        .blocking = NCCL_CONFIG_UNDEF_INT, \
        .cgaClusterSize = NCCL_CONFIG_UNDEF_INT, \
        .minCTAs = NCCL_CONFIG_UNDEF_INT, \
        .maxCTAs = NCCL_CONFIG_UNDEF_INT, \
        .netName = NCCL_CONFIG_UNDEF_PTR, \
        .splitShare = NCCL_CONFIG_UNDEF_INT, \
        .trafficClass = NCCL_CONFIG_UNDEF_INT, \
        .commName = NCCL_CONFIG_UNDEF_PTR, \
        .collnetEnable = NCCL_CONFIG_UNDEF_INT, \
        .CTAPolicy = NCCL_CONFIG_UNDEF_INT, \
        .shrinkShare = NCCL_CONFIG_UNDEF_INT, \
        .nvlsCTAs = NCCL_CONFIG_UNDEF_INT, \
        .nChannelsPerNetPeer = NCCL_CONFIG_UNDEF_INT, \
        .nvlinkCentricSched = NCCL_CONFIG_UNDEF_INT, \
        .graphUsageMode = NCCL_CONFIG_UNDEF_INT, \
        .numRmaCtx = NCCL_CONFIG_UNDEF_INT, \
        .maxP2pPeers = NCCL_CONFIG_UNDEF_INT, \
        .graphStreamOrdering = NCCL_CONFIG_UNDEF_INT, \
        .launchOrderImplicit = NCCL_CONFIG_UNDEF_INT, \
        .numRmaSig = NCCL_CONFIG_UNDEF_INT, \
        .rmaEagerInit = NCCL_CONFIG_UNDEF_INT, \
        .hostCftMode = NCCL_CONFIG_UNDEF_INT, \
        .nvlsHostMode = NCCL_CONFIG_UNDEF_INT, \
    }

/* A vendor's option for one collective, in a linked list; NCCL itself ignores all of them. */
typedef struct ncclConfigExt {
    struct ncclConfigExt *next;
    struct {
        int vendorId;
        int optionId;
    } key;
    union {
        int i;
        const char *s;
        void *raw;
    } val;
} ncclConfigExt_t;

/* Of one collective call (2.31, the nccl...Config functions); must be the same on every rank. */
typedef struct {
    size_t size;
    unsigned int magic;
    unsigned int version;
    ncclConfigExt_t *ext;
    int minCTAs;
    int maxCTAs;
    int nvlsCTAs;
    int cgaClusterSize;
    const char *algSelection;
    int forceAlgSelection; /* 1: an algSelection that cannot be met is an error */
    int CTAPolicy;         /* NCCL_CTA_POLICY_* */
    uint64_t userProfilerTag;
    cudaEvent_t launchCompletionEvent;
} ncclCollConfig_t;

#define NCCL_COLLCONFIG_INITIALIZER \
    { \
        .size = sizeof(ncclCollConfig_t), \
        .magic = NCCL_API_MAGIC, \
        .version = NCCL_VERSION_CODE, \
        .ext = NCCL_CONFIG_UNDEF_PTR, \
        .minCTAs = NCCL_CONFIG_UNDEF_INT, \
        .maxCTAs = NCCL_CONFIG_UNDEF_INT, \
        .nvlsCTAs = NCCL_CONFIG_UNDEF_INT, \
        .cgaClusterSize = NCCL_CONFIG_UNDEF_INT, \
        .algSelection = NCCL_CONFIG_UNDEF_PTR, \
        .forceAlgSelection = 1, \
        .CTAPolicy = NCCL_CONFIG_UNDEF_INT, \
        .userProfilerTag = 0, \
        .launchCompletionEvent = NCCL_CONFIG_UNDEF_PTR, \
    }

typedef struct {
    size_t size;
    unsigned int magic;
    unsigned int version;
    float estimatedTime; /* microseconds, filled by ncclGroupSimulateEnd */
} ncclSimInfo_t;

#define NCCL_SIM_INFO_INITIALIZER \
    { \
        .size = sizeof(ncclSimInfo_t), \
        .magic = PYNCCL_SIM_INFO_MAGIC, \
        .version = NCCL_VERSION_CODE, \
        .estimatedTime = NCCL_UNDEF_FLOAT, \
    }

typedef struct {
    size_t size;
    unsigned int magic;
    unsigned int version;
    int mode; /* ncclEncryptionMode_t */
    const char *psk;
} ncclEncryptionConfig_t;

#define NCCL_ENCRYPTION_CONFIG_INITIALIZER \
    { \
        .size = sizeof(ncclEncryptionConfig_t), \
        .magic = NCCL_API_MAGIC, \
        .version = NCCL_VERSION_CODE, \
        .mode = NCCL_ENCRYPTION_MODE_NONE, \
        .psk = NCCL_CONFIG_UNDEF_PTR, \
    }

typedef struct {
    int opCnt; /* how many signals to wait for */
    int peer;
    int sigIdx;
    int ctx;
} ncclWaitSignalDesc_t;

#endif /* NCCL_H_ */

/* NCCL's header has only the number, inside the initialiser. */
#define PYNCCL_SIM_INFO_MAGIC 0x74685283

/* What the stub for a symbol that the loaded library lacks returns: far from any code that NCCL may add. */
#define PYNCCL_MISSING ((ncclResult_t)1000)

/* A return type of one token, so that a list's user can paste it into a macro name (MY_##ret). */
typedef const char *pynccl_text_t;
typedef void *pynccl_owner_t;

/* ---- the functions ------------------------------------------------------------------------------
 * X(return type, name, first version that has it, (parameters))
 * The version is the code of the first minor release; 21000 stands for "2.10 or before". Supported is 2.18 and
 * later; an older library works for what it has. Every function is also exported as pname. */
#define NCCL_SYMBOLS(X) \
    NCCL_SYMBOLS_LIBRARY(X) \
    NCCL_SYMBOLS_COMMUNICATOR(X) \
    NCCL_SYMBOLS_MEMORY(X) \
    NCCL_SYMBOLS_COLLECTIVE(X) \
    NCCL_SYMBOLS_COLLECTIVE_CONFIG(X) \
    NCCL_SYMBOLS_POINT_TO_POINT(X) \
    NCCL_SYMBOLS_GROUP(X) \
    NCCL_SYMBOLS_PARAMETER(X)

#define NCCL_SYMBOLS_LIBRARY(X) \
    X(ncclResult_t, ncclGetVersion, 21000, (int *version)) \
    X(ncclResult_t, ncclGetUniqueId, 21000, (ncclUniqueId *uniqueId)) \
    X(pynccl_text_t, ncclGetErrorString, 21000, (ncclResult_t result)) \
    X(pynccl_text_t, ncclGetLastError, 21300, (ncclComm_t comm)) \
    X(void, ncclResetDebugInit, 22400, (void)) \
    X(ncclResult_t, ncclSetEncryption, 23200, (const ncclEncryptionConfig_t *config))

#define NCCL_SYMBOLS_COMMUNICATOR(X) \
    X(ncclResult_t, ncclCommInitRank, 21000, (ncclComm_t *comm, int nranks, ncclUniqueId commId, int rank)) \
    X(ncclResult_t, ncclCommInitRankConfig, 21400, \
      (ncclComm_t *comm, int nranks, ncclUniqueId commId, int rank, ncclConfig_t *config)) \
    X(ncclResult_t, ncclCommInitRankScalable, 22300, \
      (ncclComm_t *newcomm, int nranks, int myrank, int nId, ncclUniqueId *commIds, ncclConfig_t *config)) \
    X(ncclResult_t, ncclCommInitAll, 21000, (ncclComm_t *comm, int ndev, const int *devlist)) \
    X(ncclResult_t, ncclCommSplit, 21800, \
      (ncclComm_t comm, int color, int key, ncclComm_t *newcomm, ncclConfig_t *config)) \
    X(ncclResult_t, ncclCommShrink, 22700, \
      (ncclComm_t comm, int *excludeRanksList, int excludeRanksCount, ncclComm_t *newcomm, ncclConfig_t *config, \
       int shrinkFlags)) \
    X(ncclResult_t, ncclCommGetUniqueId, 22900, (ncclComm_t comm, ncclUniqueId *uniqueId)) \
    X(ncclResult_t, ncclCommGrow, 22900, \
      (ncclComm_t comm, int nRanks, const ncclUniqueId *uniqueId, int rank, ncclComm_t *newcomm, \
       ncclConfig_t *config)) \
    X(ncclResult_t, ncclCommRevoke, 22800, (ncclComm_t comm, int revokeFlags)) \
    X(ncclResult_t, ncclCommFinalize, 21400, (ncclComm_t comm)) \
    X(ncclResult_t, ncclCommDestroy, 21000, (ncclComm_t comm)) \
    X(ncclResult_t, ncclCommAbort, 21000, (ncclComm_t comm)) \
    X(ncclResult_t, ncclCommGetAsyncError, 21000, (ncclComm_t comm, ncclResult_t *asyncError)) \
    X(ncclResult_t, ncclCommCount, 21000, (const ncclComm_t comm, int *count)) \
    X(ncclResult_t, ncclCommCuDevice, 21000, (const ncclComm_t comm, int *device)) \
    X(ncclResult_t, ncclCommUserRank, 21000, (const ncclComm_t comm, int *rank)) \
    X(ncclResult_t, ncclCommSuspend, 22900, (ncclComm_t comm, int flags)) \
    X(ncclResult_t, ncclCommResume, 22900, (ncclComm_t comm)) \
    X(ncclResult_t, ncclCommMemStats, 22900, (ncclComm_t comm, ncclCommMemStat_t stat, uint64_t *value))

#define NCCL_SYMBOLS_MEMORY(X) \
    X(ncclResult_t, ncclMemAlloc, 21900, (void **ptr, size_t size)) \
    X(ncclResult_t, ncclMemFree, 21900, (void *ptr)) \
    X(ncclResult_t, ncclCommRegister, 21900, (const ncclComm_t comm, void *buff, size_t size, void **handle)) \
    X(ncclResult_t, ncclCommDeregister, 21900, (const ncclComm_t comm, void *handle)) \
    X(ncclResult_t, ncclCommWindowRegister, 22700, \
      (ncclComm_t comm, void *buff, size_t size, ncclWindow_t *win, int winFlags)) \
    X(ncclResult_t, ncclCommWindowDeregister, 22700, (ncclComm_t comm, ncclWindow_t win)) \
    X(ncclResult_t, ncclWinGetUserPtr, 22900, (ncclComm_t comm, ncclWindow_t win, void **outUserPtr))

#define NCCL_SYMBOLS_COLLECTIVE(X) \
    X(ncclResult_t, ncclRedOpCreatePreMulSum, 21100, \
      (ncclRedOp_t *op, void *scalar, ncclDataType_t datatype, ncclScalarResidence_t residence, ncclComm_t comm)) \
    X(ncclResult_t, ncclRedOpDestroy, 21100, (ncclRedOp_t op, ncclComm_t comm)) \
    X(ncclResult_t, ncclAllReduce, 21000, \
      (const void *sendbuff, void *recvbuff, size_t count, ncclDataType_t datatype, ncclRedOp_t op, \
       ncclComm_t comm, cudaStream_t stream)) \
    X(ncclResult_t, ncclReduce, 21000, \
      (const void *sendbuff, void *recvbuff, size_t count, ncclDataType_t datatype, ncclRedOp_t op, int root, \
       ncclComm_t comm, cudaStream_t stream)) \
    X(ncclResult_t, ncclBroadcast, 21000, \
      (const void *sendbuff, void *recvbuff, size_t count, ncclDataType_t datatype, int root, ncclComm_t comm, \
       cudaStream_t stream)) \
    X(ncclResult_t, ncclBcast, 21000, \
      (void *buff, size_t count, ncclDataType_t datatype, int root, ncclComm_t comm, cudaStream_t stream)) \
    X(ncclResult_t, ncclAllGather, 21000, \
      (const void *sendbuff, void *recvbuff, size_t sendcount, ncclDataType_t datatype, ncclComm_t comm, \
       cudaStream_t stream)) \
    X(ncclResult_t, ncclReduceScatter, 21000, \
      (const void *sendbuff, void *recvbuff, size_t recvcount, ncclDataType_t datatype, ncclRedOp_t op, \
       ncclComm_t comm, cudaStream_t stream)) \
    X(ncclResult_t, ncclAlltoAll, 22800, \
      (const void *sendbuff, void *recvbuff, size_t count, ncclDataType_t datatype, ncclComm_t comm, \
       cudaStream_t stream)) \
    X(ncclResult_t, ncclGather, 22800, \
      (const void *sendbuff, void *recvbuff, size_t count, ncclDataType_t datatype, int root, ncclComm_t comm, \
       cudaStream_t stream)) \
    X(ncclResult_t, ncclScatter, 22800, \
      (const void *sendbuff, void *recvbuff, size_t count, ncclDataType_t datatype, int root, ncclComm_t comm, \
       cudaStream_t stream))

#define NCCL_SYMBOLS_COLLECTIVE_CONFIG(X) \
    X(ncclResult_t, ncclAllReduceConfig, 23100, \
      (const void *sendbuff, void *recvbuff, size_t count, ncclDataType_t datatype, ncclRedOp_t op, \
       ncclComm_t comm, cudaStream_t stream, const ncclCollConfig_t *config)) \
    X(ncclResult_t, ncclReduceConfig, 23100, \
      (const void *sendbuff, void *recvbuff, size_t count, ncclDataType_t datatype, ncclRedOp_t op, int root, \
       ncclComm_t comm, cudaStream_t stream, const ncclCollConfig_t *config)) \
    X(ncclResult_t, ncclBroadcastConfig, 23100, \
      (const void *sendbuff, void *recvbuff, size_t count, ncclDataType_t datatype, int root, ncclComm_t comm, \
       cudaStream_t stream, const ncclCollConfig_t *config)) \
    X(ncclResult_t, ncclAllGatherConfig, 23100, \
      (const void *sendbuff, void *recvbuff, size_t sendcount, ncclDataType_t datatype, ncclComm_t comm, \
       cudaStream_t stream, const ncclCollConfig_t *config)) \
    X(ncclResult_t, ncclReduceScatterConfig, 23100, \
      (const void *sendbuff, void *recvbuff, size_t recvcount, ncclDataType_t datatype, ncclRedOp_t op, \
       ncclComm_t comm, cudaStream_t stream, const ncclCollConfig_t *config)) \
    X(ncclResult_t, ncclAlltoAllConfig, 23100, \
      (const void *sendbuff, void *recvbuff, size_t count, ncclDataType_t datatype, ncclComm_t comm, \
       cudaStream_t stream, const ncclCollConfig_t *config)) \
    X(ncclResult_t, ncclGatherConfig, 23100, \
      (const void *sendbuff, void *recvbuff, size_t count, ncclDataType_t datatype, int root, ncclComm_t comm, \
       cudaStream_t stream, const ncclCollConfig_t *config)) \
    X(ncclResult_t, ncclScatterConfig, 23100, \
      (const void *sendbuff, void *recvbuff, size_t count, ncclDataType_t datatype, int root, ncclComm_t comm, \
       cudaStream_t stream, const ncclCollConfig_t *config))

#define NCCL_SYMBOLS_POINT_TO_POINT(X) \
    X(ncclResult_t, ncclSend, 21000, \
      (const void *sendbuff, size_t count, ncclDataType_t datatype, int peer, ncclComm_t comm, \
       cudaStream_t stream)) \
    X(ncclResult_t, ncclRecv, 21000, \
      (void *recvbuff, size_t count, ncclDataType_t datatype, int peer, ncclComm_t comm, cudaStream_t stream)) \
    X(ncclResult_t, ncclPutSignal, 22900, \
      (const void *localbuff, size_t count, ncclDataType_t datatype, int peer, ncclWindow_t peerWin, \
       size_t peerWinOffset, int sigIdx, int ctx, unsigned int flags, ncclComm_t comm, cudaStream_t stream)) \
    X(ncclResult_t, ncclSignal, 22900, \
      (int peer, int sigIdx, int ctx, unsigned int flags, ncclComm_t comm, cudaStream_t stream)) \
    X(ncclResult_t, ncclWaitSignal, 22900, \
      (int nDesc, ncclWaitSignalDesc_t *signalDescs, ncclComm_t comm, cudaStream_t stream))

#define NCCL_SYMBOLS_GROUP(X) \
    X(ncclResult_t, ncclGroupStart, 21000, (void)) \
    X(ncclResult_t, ncclGroupEnd, 21000, (void)) \
    X(ncclResult_t, ncclGroupSimulateEnd, 22200, (ncclSimInfo_t *simInfo))

#define NCCL_SYMBOLS_PARAMETER(X) \
    X(ncclResult_t, ncclParamBind, 23000, (ncclParamHandle_t *out, const char *key)) \
    X(ncclResult_t, ncclParamGetI8, 23000, (ncclParamHandle_t h, int8_t *out)) \
    X(ncclResult_t, ncclParamGetI16, 23000, (ncclParamHandle_t h, int16_t *out)) \
    X(ncclResult_t, ncclParamGetI32, 23000, (ncclParamHandle_t h, int32_t *out)) \
    X(ncclResult_t, ncclParamGetI64, 23000, (ncclParamHandle_t h, int64_t *out)) \
    X(ncclResult_t, ncclParamGetU8, 23000, (ncclParamHandle_t h, uint8_t *out)) \
    X(ncclResult_t, ncclParamGetU16, 23000, (ncclParamHandle_t h, uint16_t *out)) \
    X(ncclResult_t, ncclParamGetU32, 23000, (ncclParamHandle_t h, uint32_t *out)) \
    X(ncclResult_t, ncclParamGetU64, 23000, (ncclParamHandle_t h, uint64_t *out)) \
    X(ncclResult_t, ncclParamGetStr, 23000, (ncclParamHandle_t h, const char **out)) \
    X(ncclResult_t, ncclParamGet, 23000, (ncclParamHandle_t h, void *out, int maxLen, int *len)) \
    X(ncclResult_t, ncclParamGetParameter, 23000, (const char *key, const char **value, int *valueLen)) \
    X(ncclResult_t, ncclParamGetAllParameterKeys, 23000, (const char ***table, int *tableLen)) \
    X(void, ncclParamDumpAll, 23000, (void))

/* ---- the element types --------------------------------------------------------------------------
 * X(name in pynccl.DataType, code, bytes, name that the dtype has in Python) */
#define NCCL_DTYPES(X) \
    X(INT8, ncclInt8, 1, "int8") \
    X(UINT8, ncclUint8, 1, "uint8") \
    X(INT32, ncclInt32, 4, "int32") \
    X(UINT32, ncclUint32, 4, "uint32") \
    X(INT64, ncclInt64, 8, "int64") \
    X(UINT64, ncclUint64, 8, "uint64") \
    X(FLOAT16, ncclFloat16, 2, "float16") \
    X(FLOAT32, ncclFloat32, 4, "float32") \
    X(FLOAT64, ncclFloat64, 8, "float64") \
    X(BFLOAT16, ncclBfloat16, 2, "bfloat16") \
    X(FLOAT8_E4M3FN, ncclFloat8e4m3, 1, "float8_e4m3fn") \
    X(FLOAT8_E5M2, ncclFloat8e5m2, 1, "float8_e5m2")

/* ---- what libpynccl_host.so exports beside NCCL's functions -------------------------------------
 * X(return type, name, version of the extension, (parameters)); NCCL has none of them.
 *
 * pyncclHostStamp           the stamp of the shared-memory format. Having the symbol means "not NCCL".
 * pyncclHostLastError       text of the calling thread's last error, "" if it had none; the text of
 *                           ncclGetLastError is the process's.
 * pyncclHostSetInterrupt    a hook of the process that sleeping calls ask every few ms. PYNCCL_HOST_STOP in its
 *                           answer ends the wait: the call returns ncclSystemError and its communicator is
 *                           broken. PYNCCL_HOST_ALONE says that no other thread of the process can make a
 *                           call, so that a wait for a rank of this thread is proved hopeless. NULL takes
 *                           the hook away.
 * pyncclHostSetInitTimeout  seconds that creations started by this thread from now on may take, also those
 *                           that it queues in a group; < 0: the default.
 * pyncclHostSetTimeout      the same for every later wait of one communicator. */
#define PYNCCL_HOST_STOP 1
#define PYNCCL_HOST_ALONE 2
#define HOST_SYMBOLS(X) \
    X(int, pyncclHostStamp, 1, (void)) \
    X(pynccl_text_t, pyncclHostLastError, 1, (void)) \
    X(void, pyncclHostSetInterrupt, 1, (int (*hook)(void))) \
    X(void, pyncclHostSetInitTimeout, 1, (double seconds)) \
    X(ncclResult_t, pyncclHostSetTimeout, 1, (ncclComm_t comm, double seconds)) \
    HOST_SYMBOLS_STREAM(X)

/* Streams on which calls are queued, as on a GPU; their handles go where NCCL takes a cudaStream_t. Waits take
 * seconds (negative: PYNCCL_TIMEOUT), queries answer ncclInProgress while something is left. */
#define HOST_SYMBOLS_STREAM(X) \
    X(ncclResult_t, pyncclHostStreamCreate, 1, (cudaStream_t *stream)) \
    X(ncclResult_t, pyncclHostStreamDestroy, 1, (cudaStream_t stream)) \
    X(ncclResult_t, pyncclHostStreamQuery, 1, (cudaStream_t stream)) \
    X(ncclResult_t, pyncclHostStreamSynchronize, 1, (cudaStream_t stream, double seconds)) \
    X(ncclResult_t, pyncclHostStreamWaitEvent, 1, (cudaStream_t stream, cudaEvent_t event)) \
    X(ncclResult_t, pyncclHostStreamWaitStream, 1, (cudaStream_t stream, cudaStream_t other)) \
    X(ncclResult_t, pyncclHostStreamCall, 1, (cudaStream_t stream, void (*function)(void *), void *argument)) \
    X(ncclResult_t, pyncclHostEventCreate, 1, (cudaEvent_t *event)) \
    X(ncclResult_t, pyncclHostEventDestroy, 1, (cudaEvent_t event)) \
    X(ncclResult_t, pyncclHostEventRecord, 1, (cudaEvent_t event, cudaStream_t stream)) \
    X(ncclResult_t, pyncclHostEventQuery, 1, (cudaEvent_t event)) \
    X(ncclResult_t, pyncclHostEventSynchronize, 1, (cudaEvent_t event, double seconds)) \
    X(ncclResult_t, pyncclHostEventElapsed, 1, (float *milliseconds, cudaEvent_t start, cudaEvent_t end)) \
    X(pynccl_owner_t, pyncclHostKeep, 1, (void *owner, void (*release)(void *)))

/* A bit that the binding adds to the datatype argument of the host library's collectives for an array of
 * more than one dimension in Fortran order; ranks whose orders differ would otherwise mix up elements. */
#define PYNCCL_HOST_FORTRAN 0x100

/* These bytes at this offset of a unique id say that the host library made it; NCCL leaves them zero. */
#define PYNCCL_HOST_ID_OFFSET 96
#define PYNCCL_HOST_ID_MAGIC_BYTES 32
#define PYNCCL_HOST_ID_MAGIC "pynccl host-memory unique id v1."

#endif /* PYNCCL_NCCL_ABI_H */
