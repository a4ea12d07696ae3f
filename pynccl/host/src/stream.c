/* Streams: their handles, their birth and death, and the injected delays.
 *
 * Owns the table of streams, guarded by the lock of item.c. A stream's memory is never given back, but its place is
 * used again under another handle; so an item's pointer to its stream is always good. A destroyed stream has no
 * handle any more and lives until it is empty. The streams of a parent process are unknown in a forked child.
 *
 * Streams are like CUDA's non-blocking ones: they do not wait for the default streams, nor these for them. (But a
 * call on a default stream waits for what is queued of its communicator: queue.c.)
 */
#include <stdlib.h>
#include <unistd.h>

#include "item.h"

enum { PLACE_BITS = 24, SERIAL_BITS = 24 };

/* ---- handles ----------------------------------------------------------------------------------------- */

static struct host_named *new_row(struct host_table *table, size_t size) {
    if (table->n == table->room) {
        uint32_t room = table->room ? 2 * table->room : 16;
        struct host_named **more = room < UINT32_C(1) << PLACE_BITS ? realloc(table->rows, room * sizeof *more) : NULL;
        if (!more)
            return NULL;
        table->rows = more;
        table->room = room;
    }
    struct host_named *row = calloc(1, size);
    if (row) {
        row->place = table->n;
        table->rows[table->n++] = row;
    }
    return row;
}

void *host_table_add(struct host_table *table, size_t size) {
    struct host_named *row = table->free ? table->free : new_row(table, size);
    if (!row)
        return NULL;
    table->free = row->next;
    row->next = NULL;
    row->generation = host_generation();
    uintptr_t serial = ++table->serial & ((UINT32_C(1) << SERIAL_BITS) - 1);
    row->handle = table->tag << (PLACE_BITS + SERIAL_BITS) | serial << PLACE_BITS | row->place;
    return row;
}

void *host_table_find(const struct host_table *table, uintptr_t handle) {
    uintptr_t place = handle & ((UINT32_C(1) << PLACE_BITS) - 1);
    struct host_named *row = place < table->n ? table->rows[place] : NULL;
    /* 0 is no handle, and what free places have. */
    return row && handle && row->handle == handle && row->generation == host_generation() ? row : NULL;
}

void host_table_remove(struct host_table *table, struct host_named *row) {
    row->handle = 0;
    row->next = table->free;
    table->free = row;
}

/* ---- delays ------------------------------------------------------------------------------------------ */

/* "20", "0-20" or "0-20:SEED", in milliseconds. */
static int read_delay(struct host_stream *s, const char *text) {
    char *end;
    double least = strtod(text, &end), most = least;
    int good = end != text;
    if (good && *end == '-') {
        const char *second = end + 1;
        most = strtod(second, &end);
        good = end != second;
    }
    /* Without a seed every process throws its own dice. */
    uint64_t seed = (uint64_t)getpid() << 32 ^ host_now();
    if (good && *end == ':') {
        const char *number = end + 1;
        seed = strtoull(number, &end, 10);
        good = end != number;
    }
    if (!good || *end || !(least >= 0) || !(most >= least) || most > 1e9)
        return 0;
    s->delay = (uint64_t)(least * 1e6);
    s->spread = (uint64_t)((most - least) * 1e6);
    s->dice = seed;
    return 1;
}

static uint64_t mixed(uint64_t x) {
    x = (x ^ x >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    x = (x ^ x >> 27) * UINT64_C(0x94d049bb133111eb);
    return x ^ x >> 31;
}

uint64_t host_stream_delay(struct host_stream *s, int rank) {
    if (!s->delay && !s->spread)
        return 0;
    s->dice += UINT64_C(0x9e3779b97f4a7c15);
    return s->delay + (s->spread ? mixed(s->dice + mixed((uint64_t)rank + 1)) % (s->spread + 1) : 0);
}

/* ---- streams ----------------------------------------------------------------------------------------- */

static struct host_table streams = {.tag = 0x7079};

struct host_stream *host_stream_find(uintptr_t handle) {
    return host_table_find(&streams, handle);
}

struct host_stream *host_stream_at(uint32_t place) {
    return place < streams.n ? (struct host_stream *)(void *)streams.rows[place] : NULL;
}

int host_queue_exists(uintptr_t stream) {
    host_items_lock();
    int yes = host_stream_find(stream) != NULL;
    host_items_unlock();
    return yes;
}

static void prepare_condition(struct host_stream *s) {
    pthread_condattr_t how;
    pthread_condattr_init(&how);
    pthread_condattr_setclock(&how, CLOCK_MONOTONIC);
    pthread_cond_init(&s->changed, &how);
    pthread_condattr_destroy(&how);
    s->prepared = 1;
}

struct host_stream *host_stream_new(ncclResult_t *code) {
    *code = ncclSuccess;
    struct host_stream *s = host_table_add(&streams, sizeof *s);
    if (!s) {
        *code = host_fail(ncclSystemError, "pyncclHostStreamCreate : no memory");
        return NULL;
    }
    if (!s->prepared)
        prepare_condition(s);
    s->closed = 0;
    s->delay = s->spread = s->dice = 0;
    const char *delay = getenv("PYNCCL_HOST_DELAY");
    if (!delay || !*delay || read_delay(s, delay))
        return s;
    host_table_remove(&streams, &s->name);
    *code = host_fail(ncclInvalidArgument,
        "PYNCCL_HOST_DELAY=%s : must be milliseconds, or LEAST-MOST, or LEAST-MOST:SEED", delay);
    return NULL;
}

void host_stream_free(struct host_stream *s) {
    s->error = ncclSuccess;
    free(s->text);
    s->text = NULL;
    host_table_remove(&streams, &s->name);
}

void host_stream_close(struct host_stream *s) {
    if (!s->worker) {
        host_stream_free(s);
        return;
    }
    s->closed = 1;
    s->name.handle = 0;
    pthread_cond_broadcast(&s->changed);
}

ncclResult_t host_stream_tell(struct host_stream *s, const char *what) {
    ncclResult_t code = s->error;
    if (code)
        host_fail(code, "%s : %s", what, s->text ? s->text : "a call failed");
    s->error = ncclSuccess;
    free(s->text);
    s->text = NULL;
    return code;
}
