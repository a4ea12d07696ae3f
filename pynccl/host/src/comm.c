/* Communicator handles of this process: birth, use, death; and what happens to them at fork and exit.
 *
 * A handle is memory that never goes away: destroyed ones are kept for a while (SPENT_MIN of them) as
 * tombstones and then recycled under a new serial, so a late use of a handle is an error and not a crash.
 *
 * Who may touch what: `next` and the lists under host_lock; `life`, `busy`, `stop` and `broken` are atomic;
 * everything else belongs to the thread that is inside (host_comm_enter to host_comm_leave). Entering
 * stores `busy` and then looks at `stop`, aborting stores `stop` and then looks at `busy`, both with full
 * fences: one of the two sees the other.
 *
 * At a normal exit the destructor marks every live handle EXITED, so that peers need not find out from a
 * dead process. A forked child inherits handles but not ranks: its generation differs, and everything it
 * tries with them is refused without touching shared memory.
 */
#include "comm.h"

#include "window.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#define MAGIC UINT64_C(0x6d6d6f4374736f68)

enum { SPENT_MIN = 256, IDS_KEPT = 4096 };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static host_u32 generation;
static struct ncclComm *live;
static struct ncclComm *spent, **spent_end = &spent;
static int nspent;
static uint32_t next_serial;
static uint8_t ids[IDS_KEPT][HOST_ID];
static unsigned ids_count;
static _Thread_local uint32_t thread_id;

void host_lock(void) {
    pthread_mutex_lock(&lock);
}

void host_unlock(void) {
    pthread_mutex_unlock(&lock);
}

static void after_fork_in_child(void) {
    thread_id = 0;
    host_add32(&generation, 1);
    pthread_mutex_unlock(&lock);
}

__attribute__((constructor)) static void start(void) {
    /* The lock is taken across fork, so that the child never inherits it locked or the lists half changed. */
    pthread_atfork(host_lock, host_unlock, after_fork_in_child);
}

__attribute__((destructor)) static void finish(void) {
    host_lock();
    for (struct ncclComm *c = live; c; c = c->next)
        if (c->generation == host_generation() && c->map)
            host_seat_leave(host_seat(c->map, c->rank), HOST_EXITED);
    host_unlock();
}

uint32_t host_generation(void) {
    return host_peek32(&generation);
}

uint32_t host_thread_id(void) {
    if (!thread_id)
        thread_id = (uint32_t)syscall(SYS_gettid);
    return thread_id;
}

/* ---- birth and death ------------------------------------------------------------------------------- */

struct ncclComm *host_comm_new(void) {
    host_lock();
    struct ncclComm *c = NULL;
    if (nspent > SPENT_MIN) {
        c = spent;
        spent = c->next;
        nspent--;
    }
    host_unlock();
    if (!c && !(c = malloc(sizeof *c)))
        return NULL;
    memset(c, 0, sizeof *c);
    c->magic = MAGIC;
    host_publish32(&c->life, HOST_LIFE_NEW);
    c->generation = host_generation();
    c->creator = host_thread_id();
    host_publish32(&c->last, c->creator);
    c->marker = -1;
    host_lock();
    c->serial = ++next_serial;
    host_unlock();
    return c;
}

struct host_traits host_comm_traits(const struct ncclComm *c) {
    return (struct host_traits){c->nonblocking, c->contexts, c->signals};
}

void host_comm_set_traits(struct ncclComm *c, const struct host_traits *traits) {
    c->nonblocking = traits->nonblocking;
    c->contexts = traits->contexts;
    c->signals = traits->signals;
}

uint32_t host_comm_creator(const struct host_map *map, int rank) {
    uint32_t thread = 0;
    host_lock();
    for (const struct ncclComm *c = live; c && !thread; c = c->next)
        if (c->map == map && c->rank == rank)
            thread = c->creator;
    host_unlock();
    return thread;
}

void host_comm_wait_outside(const struct ncclComm *waiting, uint32_t pid) {
    host_lock();
    for (const struct ncclComm *c = live; c; c = c->next)
        if (c != waiting && c->map && c->generation == host_generation() &&
            host_peek32((host_u32 *)&c->last) == host_thread_id())
            host_publish32(&host_seat(c->map, c->rank)->waits_outside, pid);
    host_unlock();
}

int host_comm_ready(struct ncclComm *c) {
    c->peers = calloc((size_t)c->nranks, sizeof *c->peers);
    if (!c->peers)
        return 0;
    /* With a processor each, ranks answer within a microsecond: poll. Otherwise the one that is waited for
     * needs this processor: give it up soon. */
    c->spins = c->most_spins = c->nranks <= host_cpus() ? HOST_MANY_SPINS : HOST_FEW_SPINS;
    /* Every rank reduces everything in the one-shot path: n times the work, for one synchronisation. */
    c->one_shot = c->nranks <= 2 ? HOST_SLOT : (size_t)HOST_SLOT / (size_t)c->nranks;
    host_publish32(&c->life, HOST_LIFE_LIVE);
    host_lock();
    c->next = live;
    live = c;
    host_unlock();
    return 1;
}

static void unlist(struct ncclComm *c) {
    host_lock();
    struct ncclComm **p = &live;
    while (*p && *p != c)
        p = &(*p)->next;
    if (*p)
        *p = c->next;
    host_unlock();
}

static void bury(struct ncclComm *c, const char *by) {
    host_lock();
    c->ended_by = by;
    host_publish32(&c->life, HOST_LIFE_GONE);
    c->next = NULL;
    if (nspent == 0)
        spent_end = &spent;
    *spent_end = c;
    spent_end = &c->next;
    nspent++;
    host_unlock();
}

void host_seat_leave(struct host_seat *seat, enum host_state state) {
    if (host_claim32(&seat->state, HOST_ACTIVE, state) || host_claim32(&seat->state, HOST_FINALIZED, state))
        return;
    /* Why it failed stays; that it has gone for good is told beside it. */
    if (state != HOST_BROKEN && state != HOST_REVOKED)
        host_claim32(&seat->gone, 0, state);
}

static void ring_all(const struct host_map *map) {
    for (int r = 0; r < map->nranks; r++)
        host_bell_ring(&host_seat(map, r)->bell);
}

void host_comm_finalize(struct ncclComm *c) {
    host_claim32(&host_seat(c->map, c->rank)->state, HOST_ACTIVE, HOST_FINALIZED);
    ring_all(c->map);
    host_publish32(&c->life, HOST_LIFE_FINALIZED);
}

void host_comm_end(struct ncclComm *c, enum host_state state, const char *by) {
    struct host_map *map = c->map;
    unlist(c); /* others look at the map and rank of what is listed */
    c->map = NULL;
    host_windows_end(c);
    if (map) {
        host_seat_leave(host_seat(map, c->rank), state);
        ring_all(map);
    }
    bury(c, by);
    if (map)
        host_segment_detach(map);
    if (c->marker >= 0)
        close(c->marker);
    for (int r = 0; c->peers && r < c->nranks; r++)
        free(c->peers[r].awaited);
    free(c->peers);
    free(c->ops);
    free(c->shrunk);
    free(c->broken_text);
    host_comm_forget_told(c);
    c->peers = NULL;
    c->ops = NULL;
    c->shrunk = NULL;
    c->nops = c->nshrunk = 0;
    c->broken_text = NULL;
    c->marker = -1;
}

/* ---- use ------------------------------------------------------------------------------------------- */

static enum host_life life_of(const struct ncclComm *c) {
    return (enum host_life)host_observe32((host_u32 *)&c->life);
}

ncclResult_t host_comm_check(const struct ncclComm *c, const char *what) {
    if (!c)
        return host_fail(ncclInvalidArgument, "%s : comm argument is NULL", what);
    if (c->magic != MAGIC)
        return host_fail(ncclInvalidArgument, "Error: corrupted comm object detected");
    if (life_of(c) == HOST_LIFE_GONE)
        return host_fail(ncclInvalidArgument, "%s : comm %p has already been ended by %s", what,
            (const void *)c, c->ended_by);
    if (c->generation != host_generation())
        return host_fail(ncclInvalidUsage,
            "%s : comm %p was created before a fork, by the parent process; create one in this process", what,
            (const void *)c);
    return ncclSuccess;
}

static ncclResult_t failure_of(const struct ncclComm *c) {
    ncclResult_t broken = (ncclResult_t)host_observe32((host_u32 *)&c->broken);
    if (broken)
        host_fail(broken, "%s", c->broken_text ? c->broken_text : "the communicator has failed");
    return broken;
}

ncclResult_t host_comm_ensure_idle(const struct ncclComm *c) {
    if (host_observe32((host_u32 *)&c->pending))
        return host_fail(ncclInvalidArgument,
            "Attempt to use communicator before the previous operation returned ncclSuccess");
    return ncclSuccess;
}

ncclResult_t host_comm_ensure_alive(const struct ncclComm *c, const char *what) {
    ncclResult_t code = host_comm_ensure_idle(c);
    if (!code && life_of(c) == HOST_LIFE_NEW && !(code = failure_of(c)))
        code = host_fail(ncclInvalidArgument,
            "%s : the communicator is being created by a group that has not ended; it can be used after "
            "ncclGroupEnd", what);
    if (!code && life_of(c) == HOST_LIFE_FINALIZED)
        code = host_fail(ncclInvalidUsage, "%s : the communicator was finalized", what);
    return code;
}

static ncclResult_t ensure_awake(const struct ncclComm *c, const char *what) {
    if (host_observe32((host_u32 *)&c->suspended))
        return host_fail(ncclInvalidUsage, "%s : the communicator is suspended; ncclCommResume makes it usable", what);
    return ncclSuccess;
}

ncclResult_t host_comm_ensure(const struct ncclComm *c, const char *what) {
    uint32_t odd = host_observe32((host_u32 *)&c->revoked) | host_observe32((host_u32 *)&c->pending) |
                   host_observe32((host_u32 *)&c->broken) | host_peek32((host_u32 *)&c->suspended);
    if (!odd && life_of(c) == HOST_LIFE_LIVE)
        return ncclSuccess;
    if (host_observe32((host_u32 *)&c->revoked))
        return host_fail(ncclInvalidUsage, "%s: communicator was revoked", what);
    ncclResult_t code = host_comm_ensure_idle(c);
    if (!code)
        code = failure_of(c);
    if (!code)
        code = host_comm_ensure_alive(c, what);
    return code ? code : ensure_awake(c, what);
}

ncclResult_t host_comm_enter(struct ncclComm *c, const char *what) {
    if (!host_claim32(&c->busy, 0, host_thread_id()))
        return host_fail(ncclInvalidUsage,
            "%s : thread %u uses the communicator while thread %u is inside a call on it; a communicator "
            "serves one thread at a time", what, host_thread_id(), host_peek32(&c->busy) & ~HOST_BUSY_QUEUE);
    if (host_observe32(&c->stop)) {
        host_comm_leave(c);
        return host_fail(ncclInvalidUsage, "%s : the communicator is being aborted, revoked or shrunk", what);
    }
    host_publish32(&c->last, host_thread_id());
    return ncclSuccess;
}

void host_comm_leave(struct ncclComm *c) {
    host_publish32(&c->busy, 0);
}

int host_comm_enter_late(struct ncclComm *c) {
    while (!host_claim32(&c->busy, 0, host_thread_id() | HOST_BUSY_QUEUE)) {
        if (host_observe32(&c->stop))
            return 0;
        host_nap(50000);
    }
    if (host_observe32(&c->stop)) {
        host_comm_leave(c);
        return 0;
    }
    host_publish32(&c->last, host_thread_id());
    return 1;
}

int host_comm_stop(struct ncclComm *c, enum host_stop why) {
    if (why == HOST_STOP_ABORT)
        host_swap32(&c->stop, why); /* goes before everything else */
    else if (!host_claim32(&c->stop, HOST_STOP_NOT, why))
        return 0;
    return 1;
}

static int is_empty(struct ncclComm *c) {
    /* A job and an item leave first and say that they are done last. */
    return !host_observe32(&c->queued) && !host_observe32(&c->pending) && !host_observe32(&c->busy);
}

int host_comm_drain(struct ncclComm *c, enum host_stop why, uint64_t ns) {
    for (uint64_t until = host_now() + ns; !is_empty(c);) {
        if (host_now() > until) {
            host_comm_reopen(c, why);
            return 0;
        }
        if (c->map)
            host_bell_ring(&host_seat(c->map, c->rank)->bell);
        host_nap(100000);
    }
    return 1;
}

void host_comm_forget_told(struct ncclComm *c) {
    host_publish32(&c->told, 0);
    free(c->told_text);
    c->told_text = NULL;
}

void host_comm_reopen(struct ncclComm *c, enum host_stop why) {
    if (why != HOST_STOP_ABORT)
        host_claim32(&c->stop, why, HOST_STOP_NOT);
}

void host_comm_revoke(struct ncclComm *c, int well) {
    host_comm_forget_told(c);
    if (well) {
        host_publish32(&c->broken, ncclSuccess);
        free(c->broken_text);
        c->broken_text = NULL;
    }
    host_publish32(&c->revoked, 1);
    host_seat_leave(host_seat(c->map, c->rank), HOST_REVOKED);
    ring_all(c->map);
}

/* As what an enduring error makes a rank leave. */
static enum host_state failed_as(struct ncclComm *c) {
    switch ((enum host_stop)host_observe32(&c->stop)) {
    case HOST_STOP_ABORT: /* the peers of an aborted rank hear of an abort, not of an error to be repeated */
        return HOST_ABORTED;
    case HOST_STOP_REVOKE:
        return HOST_REVOKED;
    default:
        return HOST_BROKEN;
    }
}

void host_comm_tell(struct ncclComm *c, ncclResult_t code, const char *text) {
    host_comm_forget_told(c);
    c->told_text = code ? strdup(text) : NULL;
    host_publish32(&c->told, 1 + (uint32_t)code);
}

void host_comm_break(struct ncclComm *c, ncclResult_t code, const char *text, const char *cause) {
    /* The lock: a call that fails its checks and a queued one that runs may both come here. */
    host_lock();
    int first = !host_peek32(&c->broken);
    if (first) {
        c->broken_text = strdup(text);
        host_publish32(&c->broken, code);
    }
    host_unlock();
    if (!first || !c->map)
        return;
    struct host_seat *seat = host_seat(c->map, c->rank);
    seat->code = code;
    snprintf(seat->text, sizeof seat->text, "%s", cause);
    host_seat_leave(seat, failed_as(c));
    ring_all(c->map);
}

/* ---- used ids -------------------------------------------------------------------------------------- */

static int is_spent(const uint8_t id[HOST_ID]) {
    unsigned n = ids_count < IDS_KEPT ? ids_count : IDS_KEPT, i = 0;
    while (i < n && memcmp(ids[i], id, HOST_ID))
        i++;
    return i < n;
}

int host_id_is_spent(const uint8_t id[HOST_ID]) {
    host_lock();
    int yes = is_spent(id);
    host_unlock();
    return yes;
}

void host_id_spend(const uint8_t id[HOST_ID]) {
    host_lock();
    if (!is_spent(id))
        memcpy(ids[ids_count++ % IDS_KEPT], id, HOST_ID);
    host_unlock();
}
