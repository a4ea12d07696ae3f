/* A library with NCCL's ABI whose every function returns at once: what remains is the caller's own cost.
 *
 * Owns nothing: a communicator is an address that says its rank and size, a unique id is zeros. A rank's
 * device is its number.
 * Promises success for whatever it is given, and never touches a buffer.
 *
 * Built by null_libraries.py, once plain and once with -DNULL_HOST. The second carries the host library's
 * marker, so that the binding accepts host memory.
 */
#include "nccl_abi.h"

#include <string.h>

#define EXPORT __attribute__((visibility("default")))
#define AT_ONCE(ret, name, version, parameters) \
    EXPORT ret name parameters { return ncclSuccess; }

NCCL_SYMBOLS_MEMORY(AT_ONCE)
NCCL_SYMBOLS_COLLECTIVE(AT_ONCE)
NCCL_SYMBOLS_COLLECTIVE_CONFIG(AT_ONCE)
NCCL_SYMBOLS_POINT_TO_POINT(AT_ONCE)
NCCL_SYMBOLS_GROUP(AT_ONCE)

/* Up to so many ranks: the place in the array is size * MOST + rank. */
enum { MOST = 256 };
static char places[(MOST + 1) * MOST];

static ncclComm_t a_communicator(int nranks, int rank) { return (ncclComm_t)&places[nranks * MOST + rank]; }
static int rank_of(ncclComm_t comm) { return (int)((char *)comm - places) % MOST; }
static int size_of(ncclComm_t comm) { return (int)((char *)comm - places) / MOST; }

EXPORT ncclResult_t ncclGetVersion(int *version) {
    *version = NCCL_VERSION_CODE;
    return ncclSuccess;
}

EXPORT ncclResult_t ncclGetUniqueId(ncclUniqueId *id) {
    memset(id, 0, sizeof *id);
#ifdef NULL_HOST
    memcpy((char *)id + PYNCCL_HOST_ID_OFFSET, PYNCCL_HOST_ID_MAGIC, PYNCCL_HOST_ID_MAGIC_BYTES);
#endif
    return ncclSuccess;
}

EXPORT const char *ncclGetErrorString(ncclResult_t result) {
    return result == ncclSuccess ? "no error" : "error";
}

EXPORT const char *ncclGetLastError(ncclComm_t comm) {
    (void)comm;
    return "";
}

EXPORT ncclResult_t ncclCommInitRank(ncclComm_t *comm, int nranks, ncclUniqueId id, int rank) {
    (void)id;
    if (nranks < 1 || nranks > MOST || rank < 0 || rank >= nranks)
        return ncclInvalidArgument;
    *comm = a_communicator(nranks, rank);
    return ncclSuccess;
}

EXPORT ncclResult_t ncclCommInitRankConfig(
    ncclComm_t *comm, int nranks, ncclUniqueId id, int rank, ncclConfig_t *config
) {
    (void)config;
    return ncclCommInitRank(comm, nranks, id, rank);
}

EXPORT ncclResult_t ncclCommInitRankScalable(
    ncclComm_t *comm, int nranks, int rank, int nids, ncclUniqueId *ids, ncclConfig_t *config
) {
    (void)nids, (void)config;
    return ncclCommInitRank(comm, nranks, ids[0], rank);
}

EXPORT ncclResult_t ncclCommInitAll(ncclComm_t *comms, int count, const int *devices) {
    (void)devices;
    for (int i = 0; i < count; i++)
        comms[i] = a_communicator(count, i);
    return ncclSuccess;
}

EXPORT ncclResult_t ncclCommSplit(
    ncclComm_t comm, int color, int key, ncclComm_t *newcomm, ncclConfig_t *config
) {
    (void)color, (void)key, (void)config;
    *newcomm = comm;
    return ncclSuccess;
}

#define KEEPS_QUIET(name, ...) \
    EXPORT ncclResult_t name(__VA_ARGS__) { (void)comm; return ncclSuccess; }
KEEPS_QUIET(ncclCommFinalize, ncclComm_t comm)
KEEPS_QUIET(ncclCommDestroy, ncclComm_t comm)
KEEPS_QUIET(ncclCommAbort, ncclComm_t comm)

#define ANSWERS(name, type, value) \
    EXPORT ncclResult_t name(ncclComm_t comm, type *answer) { (void)comm; *answer = (value); return ncclSuccess; }
ANSWERS(ncclCommGetAsyncError, ncclResult_t, ncclSuccess)
ANSWERS(ncclCommCount, int, size_of(comm))
ANSWERS(ncclCommUserRank, int, rank_of(comm))
ANSWERS(ncclCommCuDevice, int, rank_of(comm))

#ifdef NULL_HOST
EXPORT int pyncclHostStamp(void) { return 1; }
EXPORT const char *pyncclHostLastError(void) { return ""; }
EXPORT void pyncclHostSetInterrupt(int (*hook)(void)) { (void)hook; }
EXPORT void pyncclHostSetInitTimeout(double seconds) { (void)seconds; }
EXPORT ncclResult_t pyncclHostSetTimeout(ncclComm_t comm, double seconds) {
    (void)comm, (void)seconds;
    return ncclSuccess;
}
#endif
