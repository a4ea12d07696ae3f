/* A library with NCCL's ABI that moves no data and remembers every call.
 *
 * The functions themselves are in nccl_stub_calls.h, which the tests' build generates from NCCL_SYMBOLS: each
 * logs its arguments, then does what effect_NAME here says, if there is one, else succeeds. STUB_VERSION is
 * the version it poses as: functions that came later are not exported. With STUB_HOST it also exports the
 * host library's extensions and so passes for that one, which lets tests use plain memory.
 *
 * Owns: the log (stub_log.h), the fake communicators, and the orders given by stub_fail, stub_hold and
 * stub_async. `state.lock` guards all of it except the log, which has its own. A held call gives up after ten
 * seconds, so that a test that forgets it does not hang.
 */
#define _GNU_SOURCE
#include "nccl_abi.h"
#include "stub_log.h"

#include <errno.h>
#include <time.h>

#ifndef STUB_VERSION
#define STUB_VERSION NCCL_VERSION_CODE
#endif

#define MAYBE_UNUSED __attribute__((unused)) /* by the functions of an old version */

enum { COMM_ALIVE = 0x11fe, COMM_GONE = 0xdead, MAX_ORDERS = 16 };

struct ncclComm {
    int state;
    int nranks;
    int rank;
    int device;
};

struct order { /* what is to happen to calls of one function */
    char function[48];
    ncclResult_t result; /* to fail with; ncclSuccess: hold it */
    int skip;            /* so many calls pass first */
};

static struct {
    pthread_mutex_t lock;
    pthread_cond_t released;
    struct order orders[MAX_ORDERS];
    int norders;
    int nheld;
    ncclResult_t async_result;
    int async_polls;
    int live;
    int next_op;
    int next_id;
    int (*device)(void);
    unsigned long long (*tick)(void);
    unsigned long long own_tick;
    char last_error[512];
} state = {
    .lock = PTHREAD_MUTEX_INITIALIZER,
    .released = PTHREAD_COND_INITIALIZER,
    .next_op = ncclNumOps,
};

/* ---- what tests order ------------------------------------------------------------------------ */

STUB_EXPORT void stub_release(void) {
    pthread_mutex_lock(&state.lock);
    int kept = 0;
    for (int i = 0; i < state.norders; i++)
        if (state.orders[i].result != ncclSuccess)
            state.orders[kept++] = state.orders[i];
    state.norders = kept;
    pthread_cond_broadcast(&state.released);
    pthread_mutex_unlock(&state.lock);
}

STUB_EXPORT void stub_reset(void) {
    stub_release();
    log_clear();
    pthread_mutex_lock(&state.lock);
    state.norders = 0;
    state.async_result = ncclSuccess;
    state.async_polls = 0;
    state.last_error[0] = 0;
    pthread_mutex_unlock(&state.lock);
}

/* After `skip` more calls, every call of the function returns this result (0: is held until stub_release). */
static void give_order(const char *function, ncclResult_t result, int skip) {
    pthread_mutex_lock(&state.lock);
    if (state.norders == MAX_ORDERS)
        abort();
    struct order *order = &state.orders[state.norders++];
    snprintf(order->function, sizeof order->function, "%s", function);
    order->result = result;
    order->skip = skip;
    pthread_mutex_unlock(&state.lock);
}

STUB_EXPORT void stub_fail(const char *function, int result, int skip) {
    give_order(function, (ncclResult_t)result, skip);
}

STUB_EXPORT void stub_hold(const char *function) { give_order(function, ncclSuccess, 0); }

STUB_EXPORT int stub_nheld(void) {
    pthread_mutex_lock(&state.lock);
    int n = state.nheld;
    pthread_mutex_unlock(&state.lock);
    return n;
}

/* The next `polls` calls of ncclCommGetAsyncError answer this; later ones, success. */
STUB_EXPORT void stub_async(int result, int polls) {
    pthread_mutex_lock(&state.lock);
    state.async_result = (ncclResult_t)result;
    state.async_polls = polls;
    pthread_mutex_unlock(&state.lock);
}

STUB_EXPORT void stub_last_error(const char *text) {
    pthread_mutex_lock(&state.lock);
    snprintf(state.last_error, sizeof state.last_error, "%s", text);
    pthread_mutex_unlock(&state.lock);
}

/* Communicators created and neither destroyed nor aborted. */
STUB_EXPORT int stub_live(void) {
    pthread_mutex_lock(&state.lock);
    int n = state.live;
    pthread_mutex_unlock(&state.lock);
    return n;
}

/* Share the stub driver's clock, and its idea of the current device. */
STUB_EXPORT void stub_share(int (*device)(void), unsigned long long (*tick)(void)) {
    pthread_mutex_lock(&state.lock);
    state.device = device;
    state.tick = tick;
    pthread_mutex_unlock(&state.lock);
}

/* ---- what every generated function does ------------------------------------------------------ */

static struct call *begin(const char *function) {
    pthread_mutex_lock(&state.lock);
    int device = state.device ? state.device() : -1;
    unsigned long long tick = state.tick ? state.tick() : ++state.own_tick;
    pthread_mutex_unlock(&state.lock);
    return log_begin(function, device, tick);
}

static struct order *find_order(const char *function) {
    for (int i = 0; i < state.norders; i++)
        if (strcmp(state.orders[i].function, function) == 0)
            return &state.orders[i];
    return NULL;
}

/* Count the call as made, then obey the orders for its function: what it is to return at once, if not 0. */
static ncclResult_t commit(struct call *call) {
    struct timespec deadline;
    clock_gettime(CLOCK_REALTIME, &deadline);
    deadline.tv_sec += 10;
    log_end(call);
    pthread_mutex_lock(&state.lock);
    ncclResult_t result = ncclSuccess;
    struct order *order = find_order(call->function);
    if (order && order->skip > 0)
        order->skip--;
    else if (order && order->result != ncclSuccess)
        result = order->result;
    else if (order) {
        state.nheld++;
        while ((order = find_order(call->function)) && order->result == ncclSuccess)
            if (pthread_cond_timedwait(&state.released, &state.lock, &deadline) == ETIMEDOUT)
                break;
        state.nheld--;
    }
    pthread_mutex_unlock(&state.lock);
    return result;
}

/* A struct whose first field is its own size. */
static MAYBE_UNUSED void attach_sized(struct call *call, const char *name, const void *p) {
    size_t size = 0;
    if (p)
        memcpy(&size, p, sizeof size);
    if (size >= sizeof size && size <= 4096)
        log_attach(call, name, p, size);
}

static MAYBE_UNUSED int64_t bits_of(double value) {
    int64_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

/* ---- effects: results through pointers, communicators ---------------------------------------- */

static ncclComm_t make_comm(int nranks, int rank, int device) {
    ncclComm_t comm = malloc(sizeof *comm); /* never freed: a use after destroy must stay visible */
    if (!comm)
        abort();
    *comm = (struct ncclComm){COMM_ALIVE, nranks, rank, device};
    pthread_mutex_lock(&state.lock);
    state.live++;
    pthread_mutex_unlock(&state.lock);
    return comm;
}

static int current_device(void) {
    int device = state.device ? state.device() : 0;
    return device < 0 ? 0 : device;
}

static ncclResult_t end_comm(ncclComm_t comm) {
    if (!comm)
        return ncclSuccess;
    pthread_mutex_lock(&state.lock);
    int alive = comm->state == COMM_ALIVE;
    comm->state = COMM_GONE;
    state.live -= alive;
    pthread_mutex_unlock(&state.lock);
    return alive ? ncclSuccess : ncclInvalidArgument;
}

#define EFFECT(name, ...) static ncclResult_t effect_##name(__VA_ARGS__)

EFFECT(ncclGetVersion, int *version) {
    *version = STUB_VERSION;
    return ncclSuccess;
}

/* Bytes that a conversion through signed chars or C strings would spoil, then a number. */
EFFECT(ncclGetUniqueId, ncclUniqueId *id) {
    static const unsigned char hard[] = {0x00, 0x7f, 0x80, 0xff, 0x00, 0x01};
    memset(id, 0, sizeof *id);
    memcpy(id, hard, sizeof hard);
    pthread_mutex_lock(&state.lock);
    int n = ++state.next_id;
    pthread_mutex_unlock(&state.lock);
    memcpy(id->internal + 8, &n, sizeof n);
#ifdef STUB_HOST
    memcpy(id->internal + PYNCCL_HOST_ID_OFFSET, PYNCCL_HOST_ID_MAGIC, PYNCCL_HOST_ID_MAGIC_BYTES);
#endif
    return ncclSuccess;
}

#ifdef HAS_ncclCommGetUniqueId
EFFECT(ncclCommGetUniqueId, ncclComm_t comm, ncclUniqueId *id) {
    (void)comm;
    return effect_ncclGetUniqueId(id);
}
#endif

static const char *text_ncclGetErrorString(ncclResult_t result) {
    static const char *const texts[] = {
        "no error",         "unhandled cuda error", "unhandled system error",
        "internal error",   "invalid argument",     "invalid usage",
        "remote process exited or there was a network error", "NCCL operation in progress", "timeout"};
    return (unsigned)result < sizeof texts / sizeof *texts ? texts[result] : "unknown result code";
}

#ifdef HAS_ncclGetLastError
static const char *text_ncclGetLastError(ncclComm_t comm) {
    (void)comm;
    return state.last_error;
}
#endif

EFFECT(ncclCommInitRank, ncclComm_t *comm, int nranks, ncclUniqueId id, int rank) {
    (void)id;
    *comm = make_comm(nranks, rank, current_device());
    return ncclSuccess;
}

#ifdef HAS_ncclCommInitRankConfig
EFFECT(ncclCommInitRankConfig, ncclComm_t *comm, int nranks, ncclUniqueId id, int rank, ncclConfig_t *c) {
    ncclResult_t result = effect_ncclCommInitRank(comm, nranks, id, rank);
    /* A nonblocking creation is under way for as long as ncclCommGetAsyncError is to say so. */
    pthread_mutex_lock(&state.lock);
    if (c && c->blocking == 0 && state.async_polls > 0)
        result = ncclInProgress;
    pthread_mutex_unlock(&state.lock);
    return result;
}
#endif

#ifdef HAS_ncclCommInitRankScalable
EFFECT(ncclCommInitRankScalable, ncclComm_t *comm, int nranks, int rank, int nids, ncclUniqueId *ids,
       ncclConfig_t *c) {
    (void)nids, (void)c;
    return effect_ncclCommInitRank(comm, nranks, *ids, rank);
}
#endif

EFFECT(ncclCommInitAll, ncclComm_t *comms, int n, const int *devices) {
    for (int i = 0; i < n; i++)
        comms[i] = make_comm(n, i, devices ? devices[i] : i);
    return ncclSuccess;
}

#ifdef HAS_ncclCommSplit
EFFECT(ncclCommSplit, ncclComm_t comm, int color, int key, ncclComm_t *out, ncclConfig_t *c) {
    (void)key, (void)c;
    *out = color == NCCL_SPLIT_NOCOLOR ? NULL : make_comm(comm->nranks, comm->rank, comm->device);
    return ncclSuccess;
}
#endif

#ifdef HAS_ncclCommShrink
EFFECT(ncclCommShrink, ncclComm_t comm, int *list, int n, ncclComm_t *out, ncclConfig_t *c, int flags) {
    (void)list, (void)c, (void)flags;
    *out = make_comm(comm->nranks - n, comm->rank, comm->device);
    return ncclSuccess;
}
#endif

#ifdef HAS_ncclCommGrow
EFFECT(ncclCommGrow, ncclComm_t comm, int nranks, const ncclUniqueId *id, int rank, ncclComm_t *out,
       ncclConfig_t *c) {
    (void)id, (void)c;
    *out = make_comm(nranks, comm ? comm->rank : rank, comm ? comm->device : current_device());
    return ncclSuccess;
}
#endif

EFFECT(ncclCommDestroy, ncclComm_t comm) { return end_comm(comm); }

EFFECT(ncclCommAbort, ncclComm_t comm) { return end_comm(comm); }

EFFECT(ncclCommGetAsyncError, ncclComm_t comm, ncclResult_t *out) {
    (void)comm;
    pthread_mutex_lock(&state.lock);
    *out = state.async_polls > 0 ? state.async_result : ncclSuccess;
    state.async_polls -= state.async_polls > 0;
    pthread_mutex_unlock(&state.lock);
    return ncclSuccess;
}

#define QUERY(name, field) \
    EFFECT(name, ncclComm_t comm, int *out) { \
        if (!comm || comm->state != COMM_ALIVE) \
            return ncclInvalidArgument; \
        *out = comm->field; \
        return ncclSuccess; \
    }
QUERY(ncclCommCount, nranks)
QUERY(ncclCommUserRank, rank)
QUERY(ncclCommCuDevice, device)

#ifdef HAS_ncclCommMemStats
EFFECT(ncclCommMemStats, ncclComm_t comm, ncclCommMemStat_t stat, uint64_t *value) {
    (void)comm;
    *value = 1000u + (uint64_t)stat;
    return ncclSuccess;
}
#endif

/* ---- effects: memory, operations, the rest --------------------------------------------------- */

#ifdef HAS_ncclMemAlloc
EFFECT(ncclMemAlloc, void **p, size_t size) {
    *p = malloc(size ? size : 1);
    return *p ? ncclSuccess : ncclSystemError;
}

EFFECT(ncclMemFree, void *p) {
    free(p);
    return ncclSuccess;
}

EFFECT(ncclCommRegister, ncclComm_t comm, void *buff, size_t size, void **handle) {
    (void)comm, (void)size;
    *handle = buff;
    return ncclSuccess;
}
#endif

#ifdef HAS_ncclCommWindowRegister
EFFECT(ncclCommWindowRegister, ncclComm_t comm, void *buff, size_t size, ncclWindow_t *win, int flags) {
    (void)comm, (void)size, (void)flags;
    *win = (ncclWindow_t)buff;
    return ncclSuccess;
}
#endif

#ifdef HAS_ncclWinGetUserPtr
EFFECT(ncclWinGetUserPtr, ncclComm_t comm, ncclWindow_t win, void **out) {
    (void)comm;
    *out = win;
    return ncclSuccess;
}
#endif

#ifdef HAS_ncclRedOpCreatePreMulSum
EFFECT(ncclRedOpCreatePreMulSum, ncclRedOp_t *op, void *scalar, ncclDataType_t type,
       ncclScalarResidence_t where, ncclComm_t comm) {
    (void)scalar, (void)type, (void)where, (void)comm;
    pthread_mutex_lock(&state.lock);
    *op = (ncclRedOp_t)state.next_op++;
    pthread_mutex_unlock(&state.lock);
    return ncclSuccess;
}
#endif

#ifdef HAS_ncclGroupSimulateEnd
EFFECT(ncclGroupSimulateEnd, ncclSimInfo_t *info) {
    if (info)
        info->estimatedTime = 12.5f;
    return ncclSuccess;
}
#endif

#ifdef HAS_ncclParamBind
struct ncclParamHandle {
    char key[64];
};
static struct ncclParamHandle a_param;

EFFECT(ncclParamBind, ncclParamHandle_t *out, const char *key) {
    if (!key || !out || strncmp(key, "NCCL_", 5) != 0)
        return ncclInvalidArgument;
    snprintf(a_param.key, sizeof a_param.key, "%s", key);
    *out = &a_param;
    return ncclSuccess;
}

#define PARAM(suffix, type, number) \
    EFFECT(ncclParamGet##suffix, ncclParamHandle_t h, type *out) { \
        (void)h; \
        *out = number; \
        return ncclSuccess; \
    }
PARAM(I8, int8_t, -8)
PARAM(I16, int16_t, -16)
PARAM(I32, int32_t, -32)
PARAM(I64, int64_t, -64)
PARAM(U8, uint8_t, 8)
PARAM(U16, uint16_t, 16)
PARAM(U32, uint32_t, 32)
PARAM(U64, uint64_t, 64)

EFFECT(ncclParamGetStr, ncclParamHandle_t h, const char **out) {
    *out = h->key;
    return ncclSuccess;
}

EFFECT(ncclParamGetParameter, const char *key, const char **value, int *length) {
    if (!key || strncmp(key, "NCCL_", 5) != 0)
        return ncclInvalidArgument;
    *value = "stub";
    *length = 4;
    return ncclSuccess;
}

EFFECT(ncclParamGetAllParameterKeys, const char ***table, int *length) {
    static const char *keys[] = {"NCCL_DEBUG", "NCCL_STUB"};
    *table = keys;
    *length = 2;
    return ncclSuccess;
}
#endif

#ifdef STUB_HOST
static int number_pyncclHostStamp(void) { return 1; }

static const char *text_pyncclHostLastError(void) { return state.last_error; }

/* Every call is done when it returns, so that no queue takes what is to be kept with the next one. */
static void *owner_pyncclHostKeep(void *owner, void (*release)(void *)) {
    static _Thread_local void *given;
    void *before = given;
    (void)release;
    given = owner;
    return before;
}
#endif

#include "nccl_stub_calls.h"
