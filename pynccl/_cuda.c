/* The CUDA driver, found at run time.
 *
 * Owns the table of driver functions, one retained primary context per device that was made current, and for
 * each thread a few events. All of them last as long as the process (a thread's events, as the thread).
 *
 * Promises: nothing here loads a driver except cuda_open(); nothing needs one. The calling thread's current
 * context is the same after a call as before, except after cuda_set_device and cuda_device_enter.
 *
 * No lock: `driver` and `primary` go from NULL to their value once, by compare-exchange; the loser of a race
 * drops its own. Events are thread-local.
 */
#define _GNU_SOURCE /* dl_iterate_phdr, RTLD_NOLOAD */
#include "_cuda.h"

#include <dlfcn.h>
#include <glob.h>
#include <link.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* ---- the driver's functions, by the names that its header maps them to ----------------------- */

typedef struct CUctx_st *context_t;
typedef struct CUstream_st *stream_t;
typedef struct CUevent_st *event_t;

enum { /* CUresult */
    CUDA_OK = 0,
    CUDA_NOT_INITIALIZED = 3,
    CUDA_INVALID_DEVICE = 101,
    CUDA_INVALID_CONTEXT = 201
};
enum { CAPTURE_NONE = 0 };         /* CUstreamCaptureStatus */
enum { EVENT_DISABLE_TIMING = 2 }; /* CUevent_flags */
enum { POINTER_MEMORY_TYPE = 2, POINTER_DEVICE_ORDINAL = 9 }; /* CUpointer_attribute */
enum { MEMORY_DEVICE = 2 };        /* CUmemorytype */
#define STREAM_LEGACY ((uintptr_t)1)
#define STREAM_PER_THREAD ((uintptr_t)2)

/* X(name, (parameters)); all return CUresult. */
#define CUDA_SYMBOLS(X) \
    X(cuInit, (unsigned int flags)) \
    X(cuDeviceGet, (int *device, int ordinal)) \
    X(cuDeviceGetCount, (int *count)) \
    X(cuDevicePrimaryCtxRetain, (context_t * ctx, int device)) \
    X(cuDevicePrimaryCtxRelease_v2, (int device)) \
    X(cuCtxGetCurrent, (context_t * ctx)) \
    X(cuCtxSetCurrent, (context_t ctx)) \
    X(cuCtxPushCurrent_v2, (context_t ctx)) \
    X(cuCtxPopCurrent_v2, (context_t * ctx)) \
    X(cuCtxGetDevice, (int *device)) \
    X(cuMemAlloc_v2, (uintptr_t * pointer, size_t nbytes)) \
    X(cuMemFree_v2, (uintptr_t pointer)) \
    X(cuPointerGetAttributes, (unsigned int n, int *attributes, void **data, uintptr_t pointer)) \
    X(cuStreamGetCtx, (stream_t stream, context_t * ctx)) \
    X(cuStreamIsCapturing, (stream_t stream, int *status)) \
    X(cuStreamSynchronize, (stream_t stream)) \
    X(cuStreamWaitEvent, (stream_t stream, event_t event, unsigned int flags)) \
    X(cuEventCreate, (event_t * event, unsigned int flags)) \
    X(cuEventRecord, (event_t event, stream_t stream)) \
    X(cuEventDestroy_v2, (event_t event)) \
    X(cuGetErrorName, (int code, const char **text)) \
    X(cuGetErrorString, (int code, const char **text))

/* Not in every driver: NULL where it is missing. */
#define CUDA_SYMBOLS_OPTIONAL(X) X(cuCtxGetId, (context_t ctx, unsigned long long *id)) /* 12.0 */

struct driver {
#define DRIVER_FIELD(name, args) int(*name) args;
    CUDA_SYMBOLS(DRIVER_FIELD)
    CUDA_SYMBOLS_OPTIONAL(DRIVER_FIELD)
#undef DRIVER_FIELD
};

static _Atomic(struct driver *) driver;

/* ---- finding it ------------------------------------------------------------------------------ */

static int resolve(void *dl, const char *name, void *slot) {
    void *symbol = dlsym(dl, name);
    memcpy(slot, &symbol, sizeof symbol); /* C has no conversion between data and function pointers */
    return symbol != NULL;
}

/* Publish the table of an open library; drops the library if it is no driver. */
static struct driver *adopt(void *dl) {
    struct driver *mine = calloc(1, sizeof *mine);
    int complete = mine != NULL;
#define RESOLVE(name, args) complete = complete && resolve(dl, #name, &mine->name);
    CUDA_SYMBOLS(RESOLVE)
#undef RESOLVE
    if (!complete) {
        free(mine);
        dlclose(dl);
        return NULL;
    }
#define RESOLVE(name, args) resolve(dl, #name, &mine->name);
    CUDA_SYMBOLS_OPTIONAL(RESOLVE)
#undef RESOLVE
    struct driver *first = NULL;
    if (!atomic_compare_exchange_strong(&driver, &first, mine)) {
        free(mine);
        dlclose(dl);
        return first;
    }
    return mine;
}

/* That the environment names none is asked once, except by cuda_open(): this stands in the way of every array
 * whose device has to be found out, and looking through the environment costs as much as the rest of it. */
static const char *named_library(int load) {
    static atomic_int absent;
    if (!load && atomic_load_explicit(&absent, memory_order_relaxed))
        return NULL;
    const char *name = getenv("PYNCCL_LIBCUDA");
    if (name && name[0])
        return name;
    atomic_store_explicit(&absent, 1, memory_order_relaxed);
    return NULL;
}

#ifndef DEVICE_NODES /* the tests have their own */
#define DEVICE_NODES "/dev/nvidia[0-9]*"
#endif

/* Without a device node no library will ever be worth looking for. Asked of the system once. */
static int has_device_node(void) {
    static atomic_int answer; /* 0 not asked, 1 no, 2 yes */
    int known = atomic_load_explicit(&answer, memory_order_relaxed);
    if (!known) {
        glob_t nodes;
        known = 1;
        if (access("/dev/dxg", F_OK) == 0)
            known = 2;
        else if (glob(DEVICE_NODES, GLOB_NOSORT, NULL, &nodes) == 0) {
            known = 2;
            globfree(&nodes);
        }
        atomic_store_explicit(&answer, known, memory_order_relaxed);
    }
    return known == 2;
}

static int count_loads(struct dl_phdr_info *info, size_t size, void *out) {
    (void)size;
    *(unsigned long long *)out = info->dlpi_adds;
    return 1; /* the first object's record says it all */
}

/* How many libraries the process has ever loaded. */
static unsigned long long loads(void) {
    unsigned long long n = 0;
    dl_iterate_phdr(count_loads, &n);
    return n;
}

/* A driver that somebody else has loaded. To look costs a search of the library path, so it is done again
 * only after something was loaded. */
static struct driver *find_loaded(void) {
    static _Atomic unsigned long long looked_at;
    if (!has_device_node())
        return NULL;
    unsigned long long now = loads();
    if (atomic_load_explicit(&looked_at, memory_order_relaxed) == now)
        return NULL;
    void *dl = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD);
    if (dl)
        return adopt(dl);
    atomic_store_explicit(&looked_at, now, memory_order_relaxed);
    return NULL;
}

static struct driver *find(int load) {
    struct driver *d = atomic_load_explicit(&driver, memory_order_acquire);
    if (d)
        return d;
    const char *name = named_library(load);
    if (!name && !load)
        return find_loaded();
    void *dl = dlopen(name ? name : "libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    return dl ? adopt(dl) : NULL;
}

int cuda_ready(void) { return find(0) != NULL; }

int cuda_open(void) { return find(1) != NULL; }

/* ---- memory ---------------------------------------------------------------------------------- */

int cuda_pointer_device(const void *p) {
    struct driver *d = find(0);
    if (!d)
        return -2;
    int attributes[] = {POINTER_MEMORY_TYPE, POINTER_DEVICE_ORDINAL};
    unsigned int type = 0;
    int device = -1;
    void *out[] = {&type, &device};
    /* Unlike the singular form this one takes memory that CUDA never saw for granted: type 0, no error. */
    int rc = d->cuPointerGetAttributes(2, attributes, out, (uintptr_t)p);
    if (rc == CUDA_NOT_INITIALIZED)
        return -1; /* nobody can have allocated on a device yet */
    if (rc != CUDA_OK)
        return -2;
    return type == MEMORY_DEVICE && device >= 0 ? device : -1;
}

int cuda_malloc(void **p, size_t nbytes) {
    struct driver *d = find(0);
    uintptr_t pointer = 0;
    int rc = d ? d->cuMemAlloc_v2(&pointer, nbytes) : CUDA_NOT_INITIALIZED;
    *p = rc == CUDA_OK ? (void *)pointer : NULL;
    return rc;
}

int cuda_free(void *p) {
    struct driver *d = find(0);
    if (!p)
        return CUDA_OK;
    return d ? d->cuMemFree_v2((uintptr_t)p) : CUDA_NOT_INITIALIZED;
}

/* ---- devices --------------------------------------------------------------------------------- */

enum { MAX_DEVICES = 128 };
static _Atomic(context_t) primary[MAX_DEVICES];

static int primary_context(struct driver *d, int ordinal, context_t *out) {
    if (ordinal < 0 || ordinal >= MAX_DEVICES)
        return CUDA_INVALID_DEVICE;
    *out = atomic_load_explicit(&primary[ordinal], memory_order_acquire);
    if (*out)
        return CUDA_OK;
    int device, rc = d->cuDeviceGet(&device, ordinal);
    if (rc == CUDA_NOT_INITIALIZED) {
        rc = d->cuInit(0);
        if (rc == CUDA_OK)
            rc = d->cuDeviceGet(&device, ordinal);
    }
    if (rc == CUDA_OK)
        rc = d->cuDevicePrimaryCtxRetain(out, device);
    if (rc != CUDA_OK)
        return rc;
    context_t first = NULL;
    if (!atomic_compare_exchange_strong(&primary[ordinal], &first, *out))
        d->cuDevicePrimaryCtxRelease_v2(device); /* another thread retained it as well */
    return CUDA_OK;
}

int cuda_device_count(int *count) {
    struct driver *d = find(0);
    *count = 0;
    if (!d)
        return CUDA_NOT_INITIALIZED;
    int rc = d->cuDeviceGetCount(count);
    if (rc == CUDA_NOT_INITIALIZED) {
        rc = d->cuInit(0);
        if (rc == CUDA_OK)
            rc = d->cuDeviceGetCount(count);
    }
    return rc;
}

int cuda_get_device(int *device) {
    struct driver *d = find(0);
    *device = -1;
    if (!d)
        return CUDA_NOT_INITIALIZED;
    int rc = d->cuCtxGetDevice(device);
    if (rc == CUDA_INVALID_CONTEXT || rc == CUDA_NOT_INITIALIZED) { /* none is current: no error here */
        *device = -1;
        return CUDA_OK;
    }
    return rc;
}

int cuda_set_device(int device) {
    struct driver *d = find(0);
    context_t ctx = NULL;
    if (!d)
        return CUDA_NOT_INITIALIZED;
    int rc = device == -1 ? CUDA_OK : primary_context(d, device, &ctx);
    if (rc != CUDA_OK)
        return rc;
    rc = d->cuCtxSetCurrent(ctx);
    return device == -1 && rc == CUDA_NOT_INITIALIZED ? CUDA_OK : rc;
}

int cuda_device_enter(int device, void **saved) {
    struct driver *d = find(0);
    context_t ctx = NULL, before = NULL;
    *saved = NULL;
    if (!d)
        return CUDA_NOT_INITIALIZED;
    int rc = primary_context(d, device, &ctx);
    if (rc == CUDA_OK)
        rc = d->cuCtxGetCurrent(&before);
    if (rc == CUDA_OK && before != ctx)
        rc = d->cuCtxSetCurrent(ctx);
    if (rc == CUDA_OK)
        *saved = before;
    return rc;
}

int cuda_device_leave(void *saved) {
    struct driver *d = find(0);
    return d ? d->cuCtxSetCurrent((context_t)saved) : CUDA_NOT_INITIALIZED;
}

/* ---- streams --------------------------------------------------------------------------------- */

/* One event per thread and context is enough: a wait takes the event as it was recorded when the wait was
 * submitted, so the next ordering may record it anew. */
enum { EVENTS_PER_THREAD = 16 };
struct event_slot {
    unsigned long long key; /* of the context; 0: free */
    event_t event;
};
static _Thread_local struct event_slot events[EVENTS_PER_THREAD];
static _Thread_local unsigned int next_victim;

static pthread_key_t thread_exit;
static pthread_once_t thread_exit_once = PTHREAD_ONCE_INIT;

static void drop_event(struct driver *d, struct event_slot *slot) {
    if (slot->event)
        d->cuEventDestroy_v2(slot->event);
    slot->event = NULL;
    slot->key = 0;
}

static void at_thread_exit(void *d) {
    for (int i = 0; i < EVENTS_PER_THREAD; i++)
        drop_event(d, &events[i]);
}

static void make_thread_exit(void) { pthread_key_create(&thread_exit, at_thread_exit); }

/* A context's address can be used again by a later context; its id cannot. */
static unsigned long long key_of(struct driver *d, context_t ctx) {
    unsigned long long id = 0;
    if (d->cuCtxGetId && d->cuCtxGetId(ctx, &id) == CUDA_OK && id)
        return id;
    return (unsigned long long)(uintptr_t)ctx;
}

/* The calling thread's event for the context that is current, made at first use (then *made is set). */
static int event_of(struct driver *d, context_t ctx, struct event_slot **out, int *made) {
    unsigned long long key = key_of(d, ctx);
    struct event_slot *slot = NULL;
    *made = 0;
    for (int i = 0; i < EVENTS_PER_THREAD; i++) {
        if (events[i].key == key) {
            *out = &events[i];
            return CUDA_OK;
        }
        if (!slot && !events[i].key)
            slot = &events[i];
    }
    if (!slot) /* more contexts than slots: the oldest one's event goes */
        slot = &events[next_victim++ % EVENTS_PER_THREAD];
    drop_event(d, slot);
    int rc = d->cuEventCreate(&slot->event, EVENT_DISABLE_TIMING);
    if (rc != CUDA_OK) {
        slot->event = NULL;
        return rc;
    }
    slot->key = key;
    *made = 1;
    pthread_once(&thread_exit_once, make_thread_exit);
    pthread_setspecific(thread_exit, d);
    *out = slot;
    return CUDA_OK;
}

static uintptr_t normal(uintptr_t stream) { return stream ? stream : STREAM_LEGACY; }

/* A default stream belongs to whatever context is current, a created one to its own. Of a producer and a
 * consumer the created one decides: both work on the same array, so on the same device. */
static int context_for(struct driver *d, uintptr_t producer, uintptr_t consumer, context_t *ctx) {
    int rc;
    if (producer > STREAM_PER_THREAD)
        rc = d->cuStreamGetCtx((stream_t)producer, ctx);
    else if (consumer > STREAM_PER_THREAD)
        rc = d->cuStreamGetCtx((stream_t)consumer, ctx);
    else
        rc = d->cuCtxGetCurrent(ctx);
    return rc == CUDA_OK && !*ctx ? CUDA_INVALID_CONTEXT : rc;
}

/* With the right context current. */
static int order(struct driver *d, context_t ctx, uintptr_t producer, uintptr_t consumer) {
    int status = CAPTURE_NONE;
    int rc = d->cuStreamIsCapturing((stream_t)consumer, &status);
    if (rc != CUDA_OK || status != CAPTURE_NONE)
        return rc;
    struct event_slot *slot;
    int made;
    do {
        rc = event_of(d, ctx, &slot, &made);
        if (rc != CUDA_OK)
            return rc;
        rc = d->cuEventRecord(slot->event, (stream_t)producer);
        if (rc == CUDA_OK)
            return d->cuStreamWaitEvent((stream_t)consumer, slot->event, 0);
        drop_event(d, slot);
    } while (!made); /* a kept event dies with its context's reset: a new one tells whether that was it */
    return rc;
}

int cuda_stream_wait(uintptr_t producer, uintptr_t consumer) {
    producer = normal(producer);
    consumer = normal(consumer);
    if (producer == consumer)
        return CUDA_OK;
    struct driver *d = find(0);
    if (!d)
        return CUDA_NOT_INITIALIZED;
    context_t ctx = NULL, current = NULL;
    int rc = context_for(d, producer, consumer, &ctx);
    if (rc == CUDA_OK)
        rc = d->cuCtxGetCurrent(&current);
    if (rc != CUDA_OK)
        return rc;
    if (ctx == current)
        return order(d, ctx, producer, consumer);
    rc = d->cuCtxPushCurrent_v2(ctx);
    if (rc != CUDA_OK)
        return rc;
    rc = order(d, ctx, producer, consumer);
    int popped = d->cuCtxPopCurrent_v2(&current);
    return rc ? rc : popped;
}

int cuda_stream_sync(uintptr_t stream) {
    struct driver *d = find(0);
    return d ? d->cuStreamSynchronize((stream_t)normal(stream)) : CUDA_NOT_INITIALIZED;
}

/* ---- errors ---------------------------------------------------------------------------------- */

const char *cuda_error(int code) {
    static _Thread_local char text[160];
    const char *name = NULL, *meaning = NULL;
    struct driver *d = find(0);
    if (!d && code == CUDA_NOT_INITIALIZED)
        return "no CUDA driver is loaded";
    if (d && d->cuGetErrorName(code, &name) == CUDA_OK && d->cuGetErrorString(code, &meaning) == CUDA_OK)
        snprintf(text, sizeof text, "%s (%s)", meaning, name);
    else
        snprintf(text, sizeof text, "unknown CUDA error %d", code);
    return text;
}
