/* A CUDA driver without a device: contexts, streams and events that keep the driver's rules, and a log.
 *
 * Rules kept, because code that breaks them works by luck on a stub that does not: nothing works before
 * cuInit; an event is made in the current context and recorded on streams of that context only; default
 * streams (handles 0, 1, 2) are the current context's; a reset device invalidates its events. Handles are
 * never freed, so that the use of a dead one is seen rather than suffered.
 *
 * Owns the fake objects, the table of memory ranges and the log (stub_log.h). `lock` guards the tables; a
 * thread's context stack is its own.
 */
#define _GNU_SOURCE
#include "stub_log.h"

#include <stdatomic.h>

#ifndef STUB_CONTEXT_IDS
#define STUB_CONTEXT_IDS 1
#endif

enum { DEVICES = 4, STACK = 8, RANGES = 256, ORDERS = 16 };
enum { /* CUresult */
    OK = 0,
    INVALID_VALUE = 1,
    OUT_OF_MEMORY = 2,
    NOT_INITIALIZED = 3,
    INVALID_DEVICE = 101,
    INVALID_CONTEXT = 201,
    INVALID_HANDLE = 400,
    CONTEXT_IS_DESTROYED = 709
};
enum { CONTEXT = 0xc0, STREAM = 0x57, EVENT = 0xe7, DEAD = 0xdead };

struct context {
    int kind;
    int device;
    unsigned long long id;
    int generation; /* grows at a reset */
    int retained;
};
struct stream {
    int kind;
    struct context *context;
    int capture;
};
struct event {
    int kind;
    struct context *context;
    int generation;
};
struct range {
    uintptr_t begin, end;
    int device, type;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static atomic_int initialised, live_events;
static atomic_ullong ticks, context_ids;
static struct context primary[DEVICES];
static struct range ranges[RANGES];
static int nranges;
static struct {
    char function[48];
    int result, times;
} orders[ORDERS];
static int norders;

static _Thread_local struct context *stack[STACK];
static _Thread_local int depth; /* the current context is stack[depth] */

/* ---- what tests order ------------------------------------------------------------------------ */

STUB_EXPORT unsigned long long stub_next_tick(void) { return ++ticks; }

STUB_EXPORT int stub_current_device(void) { return stack[depth] ? stack[depth]->device : -1; }

STUB_EXPORT int stub_live_events(void) { return live_events; }

STUB_EXPORT void stub_reset(void) {
    log_clear();
    pthread_mutex_lock(&lock);
    norders = nranges = 0;
    pthread_mutex_unlock(&lock);
}

STUB_EXPORT void stub_fail(const char *function, int result, int times) {
    pthread_mutex_lock(&lock);
    if (norders == ORDERS)
        abort();
    snprintf(orders[norders].function, sizeof orders[norders].function, "%s", function);
    orders[norders].result = result;
    orders[norders++].times = times;
    pthread_mutex_unlock(&lock);
}

static void *make(size_t size) {
    void *p = calloc(1, size);
    if (!p)
        abort();
    return p;
}

static void fill_context(struct context *ctx, int device) {
    ctx->kind = CONTEXT;
    ctx->device = device;
    ctx->id = ++context_ids;
}

STUB_EXPORT struct context *stub_context(int device) {
    struct context *ctx = make(sizeof *ctx);
    fill_context(ctx, device);
    return ctx;
}

STUB_EXPORT struct stream *stub_stream(struct context *ctx) {
    struct stream *stream = make(sizeof *stream);
    *stream = (struct stream){STREAM, ctx, 0};
    return stream;
}

STUB_EXPORT void stub_capture(struct stream *stream, int status) { stream->capture = status; }

STUB_EXPORT void stub_reset_device(int device) {
    pthread_mutex_lock(&lock);
    primary[device].generation++;
    pthread_mutex_unlock(&lock);
}

STUB_EXPORT void stub_memory(uintptr_t pointer, size_t nbytes, int device, int type) {
    pthread_mutex_lock(&lock);
    if (nranges == RANGES)
        abort();
    ranges[nranges++] = (struct range){pointer, pointer + nbytes, device, type};
    pthread_mutex_unlock(&lock);
}

/* How many times a device's primary context is retained. */
STUB_EXPORT int stub_retained(int device) { return primary[device].retained; }

/* ---- the start of every driver function ------------------------------------------------------ */

static int obey(const char *function) {
    int result = initialised ? OK : NOT_INITIALIZED;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < norders; i++)
        if (orders[i].times > 0 && strcmp(orders[i].function, function) == 0) {
            orders[i].times--;
            result = orders[i].result;
        }
    pthread_mutex_unlock(&lock);
    return result;
}

static int start(const char *function, const char *name1, uintptr_t value1, const char *name2,
                 uintptr_t value2) {
    struct call *call = log_begin(function, stub_current_device(), stub_next_tick());
    if (name1)
        log_arg(call, name1, 'p', (int64_t)value1);
    if (name2)
        log_arg(call, name2, 'p', (int64_t)value2);
    log_end(call);
    return obey(function);
}

/* Log the call with up to two arguments, and leave the function if it may not go on. */
#define BEGIN(name1, value1, name2, value2) \
    do { \
        int ordered = start(__func__, name1, value1, name2, value2); \
        if (ordered != OK) \
            return ordered; \
    } while (0)

/* Queries are not logged: they change nothing, and tests compare what does. */
#define BEGIN_QUERY() \
    do { \
        int ordered = obey(__func__); \
        if (ordered != OK) \
            return ordered; \
    } while (0)

/* ---- devices and contexts -------------------------------------------------------------------- */

STUB_EXPORT int cuInit(unsigned flags) {
    initialised = 1;
    BEGIN("flags", flags, NULL, 0);
    return OK;
}

STUB_EXPORT int cuDeviceGetCount(int *count) {
    BEGIN_QUERY();
    *count = DEVICES;
    return OK;
}

STUB_EXPORT int cuDeviceGet(int *device, int ordinal) {
    BEGIN_QUERY();
    if (ordinal < 0 || ordinal >= DEVICES)
        return INVALID_DEVICE;
    *device = ordinal;
    return OK;
}

STUB_EXPORT int cuDevicePrimaryCtxRetain(struct context **out, int device) {
    BEGIN_QUERY();
    if (device < 0 || device >= DEVICES)
        return INVALID_DEVICE;
    pthread_mutex_lock(&lock);
    if (!primary[device].kind)
        fill_context(&primary[device], device);
    primary[device].retained++;
    pthread_mutex_unlock(&lock);
    *out = &primary[device];
    return OK;
}

STUB_EXPORT int cuDevicePrimaryCtxRelease_v2(int device) {
    BEGIN_QUERY();
    pthread_mutex_lock(&lock);
    primary[device].retained--;
    pthread_mutex_unlock(&lock);
    return OK;
}

STUB_EXPORT int cuCtxGetCurrent(struct context **out) {
    BEGIN_QUERY();
    *out = stack[depth];
    return OK;
}

STUB_EXPORT int cuCtxSetCurrent(struct context *ctx) {
    BEGIN("ctx", (uintptr_t)ctx, NULL, 0);
    stack[depth] = ctx;
    return OK;
}

STUB_EXPORT int cuCtxPushCurrent_v2(struct context *ctx) {
    BEGIN("ctx", (uintptr_t)ctx, NULL, 0);
    if (depth + 1 == STACK)
        return INVALID_VALUE;
    stack[++depth] = ctx;
    return OK;
}

STUB_EXPORT int cuCtxPopCurrent_v2(struct context **out) {
    BEGIN(NULL, 0, NULL, 0);
    if (!depth)
        return INVALID_CONTEXT;
    *out = stack[depth];
    stack[depth--] = NULL;
    return OK;
}

STUB_EXPORT int cuCtxGetDevice(int *device) {
    BEGIN_QUERY();
    if (!stack[depth])
        return INVALID_CONTEXT;
    *device = stack[depth]->device;
    return OK;
}

#if STUB_CONTEXT_IDS
STUB_EXPORT int cuCtxGetId(struct context *ctx, unsigned long long *id) {
    BEGIN_QUERY();
    *id = ctx->id;
    return OK;
}
#endif

/* ---- memory ---------------------------------------------------------------------------------- */

STUB_EXPORT int cuMemAlloc_v2(uintptr_t *pointer, size_t nbytes) {
    BEGIN("nbytes", nbytes, NULL, 0);
    if (!stack[depth])
        return INVALID_CONTEXT;
    *pointer = (uintptr_t)malloc(nbytes);
    if (!*pointer)
        return OUT_OF_MEMORY;
    stub_memory(*pointer, nbytes, stack[depth]->device, 2);
    return OK;
}

STUB_EXPORT int cuMemFree_v2(uintptr_t pointer) {
    BEGIN("pointer", pointer, NULL, 0);
    pthread_mutex_lock(&lock);
    int found = 0;
    for (int i = 0; i < nranges && !found; i++)
        if (ranges[i].begin == pointer) {
            ranges[i] = ranges[--nranges];
            found = 1;
        }
    pthread_mutex_unlock(&lock);
    if (!found)
        return INVALID_VALUE;
    free((void *)pointer);
    return OK;
}

STUB_EXPORT int cuPointerGetAttributes(unsigned n, const int *attributes, void **out, uintptr_t pointer) {
    BEGIN_QUERY();
    struct range hit = {0, 0, -2, 0}; /* what the driver says of memory that it does not know */
    pthread_mutex_lock(&lock);
    for (int i = 0; i < nranges; i++)
        if (ranges[i].begin <= pointer && pointer < ranges[i].end)
            hit = ranges[i];
    pthread_mutex_unlock(&lock);
    for (unsigned i = 0; i < n; i++)
        switch (attributes[i]) {
        case 2:
            *(unsigned *)out[i] = (unsigned)hit.type;
            break;
        case 9:
            *(int *)out[i] = hit.device;
            break;
        default:
            return INVALID_VALUE;
        }
    return OK;
}

/* ---- streams and events ---------------------------------------------------------------------- */

/* The context of a stream, NULL for a handle that is none. */
static struct context *context_of(struct stream *stream) {
    if ((uintptr_t)stream <= 2)
        return stack[depth];
    return stream->kind == STREAM ? stream->context : NULL;
}

STUB_EXPORT int cuStreamGetCtx(struct stream *stream, struct context **out) {
    BEGIN_QUERY();
    *out = context_of(stream);
    return *out ? OK : INVALID_CONTEXT;
}

STUB_EXPORT int cuStreamIsCapturing(struct stream *stream, int *status) {
    BEGIN_QUERY();
    if (!context_of(stream))
        return INVALID_CONTEXT;
    *status = (uintptr_t)stream <= 2 ? 0 : stream->capture;
    return OK;
}

STUB_EXPORT int cuStreamSynchronize(struct stream *stream) {
    BEGIN("stream", (uintptr_t)stream, NULL, 0);
    return context_of(stream) ? OK : INVALID_CONTEXT;
}

STUB_EXPORT int cuEventCreate(struct event **out, unsigned flags) {
    BEGIN("flags", flags, NULL, 0);
    if (!stack[depth])
        return INVALID_CONTEXT;
    struct event *event = make(sizeof *event);
    *event = (struct event){EVENT, stack[depth], stack[depth]->generation};
    live_events++;
    *out = event;
    return OK;
}

STUB_EXPORT int cuEventDestroy_v2(struct event *event) {
    BEGIN("event", (uintptr_t)event, NULL, 0);
    if (event->kind != EVENT)
        return INVALID_HANDLE;
    event->kind = DEAD;
    live_events--;
    return OK;
}

STUB_EXPORT int cuEventRecord(struct event *event, struct stream *stream) {
    BEGIN("event", (uintptr_t)event, "stream", (uintptr_t)stream);
    struct context *ctx = context_of(stream);
    if (event->kind != EVENT || !ctx || event->context != ctx)
        return INVALID_HANDLE;
    return event->generation == ctx->generation ? OK : CONTEXT_IS_DESTROYED;
}

STUB_EXPORT int cuStreamWaitEvent(struct stream *stream, struct event *event, unsigned flags) {
    (void)flags;
    BEGIN("stream", (uintptr_t)stream, "event", (uintptr_t)event);
    return event->kind == EVENT && context_of(stream) ? OK : INVALID_HANDLE;
}

/* ---- errors ---------------------------------------------------------------------------------- */

static const struct {
    int code;
    const char *name, *text;
} texts[] = {
    {OK, "CUDA_SUCCESS", "no error"},
    {INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
};

static int find_text(int code) {
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++)
        if (texts[i].code == code)
            return (int)i;
    return -1;
}

STUB_EXPORT int cuGetErrorName(int code, const char **out) {
    int i = find_text(code);
    *out = i < 0 ? NULL : texts[i].name;
    return i < 0 ? INVALID_VALUE : OK;
}

STUB_EXPORT int cuGetErrorString(int code, const char **out) {
    int i = find_text(code);
    *out = i < 0 ? NULL : texts[i].text;
    return i < 0 ? INVALID_VALUE : OK;
}
