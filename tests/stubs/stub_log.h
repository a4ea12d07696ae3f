/* The log that both stubs keep: which function was called, with what, in which order.
 *
 * A call is made by log_begin, filled by the thread that began it, and readable once log_end has counted it.
 * Calls are allocated one by one and never move. `lock` guards the table of pointers; the order of calls is
 * the order of log_begin.
 *
 * Included by one C file of each stub, which exports the accessors under its own prefix.
 */
#ifndef STUB_LOG_H
#define STUB_LOG_H

#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#define STUB_EXPORT __attribute__((visibility("default")))

enum { LOG_ARGS = 12, LOG_ATTACHED = 4, LOG_CALLS = 1 << 16 };

struct attached { /* what a pointer argument pointed at */
    const char *name;
    size_t size;
    void *data;
};

struct call {
    const char *function;
    int nargs;
    int nattached;
    struct {
        const char *name;
        char kind; /* i integer, p pointer, d double */
        int64_t value;
    } args[LOG_ARGS];
    struct attached attached[LOG_ATTACHED];
    long thread;
    int device;              /* current when it was called, -1 unknown */
    unsigned long long tick; /* order among the calls of all stubs that share a clock */
};

static struct {
    pthread_mutex_t lock;
    int count;
    struct call *calls[LOG_CALLS];
} recorded = {.lock = PTHREAD_MUTEX_INITIALIZER};

static inline struct call *log_begin(const char *function, int device, unsigned long long tick) {
    struct call *call = calloc(1, sizeof *call);
    if (!call)
        abort();
    call->function = function;
    call->thread = syscall(SYS_gettid);
    call->device = device;
    call->tick = tick;
    return call;
}

static inline void log_arg(struct call *call, const char *name, char kind, int64_t value) {
    if (call->nargs == LOG_ARGS)
        abort();
    call->args[call->nargs].name = name;
    call->args[call->nargs].kind = kind;
    call->args[call->nargs++].value = value;
}

static inline void log_attach(struct call *call, const char *name, const void *data, size_t size) {
    if (!data || call->nattached == LOG_ATTACHED)
        return;
    struct attached *a = &call->attached[call->nattached++];
    a->name = name;
    a->size = size;
    a->data = malloc(size ? size : 1);
    if (!a->data)
        abort();
    memcpy(a->data, data, size);
}

static inline void log_end(struct call *call) {
    pthread_mutex_lock(&recorded.lock);
    if (recorded.count == LOG_CALLS)
        abort();
    recorded.calls[recorded.count++] = call;
    pthread_mutex_unlock(&recorded.lock);
}

static inline void log_clear(void) {
    pthread_mutex_lock(&recorded.lock);
    for (int i = 0; i < recorded.count; i++) {
        for (int k = 0; k < recorded.calls[i]->nattached; k++)
            free(recorded.calls[i]->attached[k].data);
        free(recorded.calls[i]);
    }
    recorded.count = 0;
    pthread_mutex_unlock(&recorded.lock);
}

static inline const struct call *log_at(int i) {
    const struct call *call = NULL;
    pthread_mutex_lock(&recorded.lock);
    if (i >= 0 && i < recorded.count)
        call = recorded.calls[i];
    pthread_mutex_unlock(&recorded.lock);
    return call;
}

/* ---- accessors, for ctypes; out of range: NULL or -1 ----------------------------------------- */

STUB_EXPORT int stub_count(void) {
    pthread_mutex_lock(&recorded.lock);
    int count = recorded.count;
    pthread_mutex_unlock(&recorded.lock);
    return count;
}

STUB_EXPORT const char *stub_function(int i) {
    const struct call *call = log_at(i);
    return call ? call->function : NULL;
}

STUB_EXPORT int stub_nargs(int i) {
    const struct call *call = log_at(i);
    return call ? call->nargs : -1;
}

/* The name of the k-th argument; its kind and value through the pointers. */
STUB_EXPORT const char *stub_arg(int i, int k, char *kind, int64_t *value) {
    const struct call *call = log_at(i);
    if (!call || k < 0 || k >= call->nargs)
        return NULL;
    *kind = call->args[k].kind;
    *value = call->args[k].value;
    return call->args[k].name;
}

/* The name of the k-th thing that an argument pointed at; its size and address through the pointers. */
STUB_EXPORT const char *stub_attached(int i, int k, size_t *size, const void **data) {
    const struct call *call = log_at(i);
    if (!call || k < 0 || k >= call->nattached)
        return NULL;
    *size = call->attached[k].size;
    *data = call->attached[k].data;
    return call->attached[k].name;
}

STUB_EXPORT long stub_thread(int i) {
    const struct call *call = log_at(i);
    return call ? call->thread : -1;
}

STUB_EXPORT int stub_device(int i) {
    const struct call *call = log_at(i);
    return call ? call->device : -1;
}

STUB_EXPORT unsigned long long stub_tick(int i) {
    const struct call *call = log_at(i);
    return call ? call->tick : 0;
}

#endif /* STUB_LOG_H */
