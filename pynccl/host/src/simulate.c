/* How long queued calls would take: the cost model of ncclGroupSimulateEnd.
 *
 * A call costs one meeting of the ranks and the memory that this rank moves, which collective.c and message.c
 * state at their heads. Three rates of this machine are measured, once a process, at the first question: copying
 * a chunk that lies in a near cache, copying more than the caches hold, and waking another thread. What another
 * processor wrote costs half as much again as a near copy. Calls of one thread add up, since the thread runs them one
 * after the other; threads and processes beyond the processors share them.
 *
 * The promise: positive, and never less for more bytes. How near it comes to a machine's real times is for
 * bench/estimate.py to say. State: the rates, written under pthread_once.
 */
#include "simulate.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

static pthread_once_t once = PTHREAD_ONCE_INIT;
static double near_ns, far_ns; /* a byte */
static double yield_ns; /* one trip to another thread, when it has to be scheduled first */

enum {
    TRIES = 7,
    SPIN_NS = 200,    /* one cache line there and back, twice */
    CACHED = 8 << 20, /* bytes that a call may move before the caches are too small */
    FAR = 8 << 20,
};

static double quicker(double a, double b) {
    return a < b ? a : b;
}

/* ns for a byte, the best of some tries. */
static double copy_rate(char *to, const char *from, size_t bytes, int tries) {
    double best = 1e3;
    for (int i = 0; i < tries; i++) {
        uint64_t begun = host_now();
        memcpy(to, from, bytes);
        __asm__ __volatile__("" : : "r"(to) : "memory"); /* somebody might read it */
        best = quicker(best, (double)(host_now() - begun) / (double)bytes);
    }
    return best > 0.01 ? best : 0.01;
}

static void measure(void) {
    char *room = malloc(2 * FAR);
    near_ns = far_ns = 0.2; /* without memory to try it */
    if (room) {
        memset(room, 1, 2 * FAR);
        near_ns = copy_rate(room, room + FAR, HOST_CHUNK, TRIES);
        far_ns = copy_rate(room, room + FAR, FAR, 2);
        far_ns = far_ns > near_ns ? far_ns : near_ns;
        free(room);
    }
    yield_ns = 1e9;
    for (int i = 0; i < TRIES; i++) {
        uint64_t begun = host_now();
        for (int k = 0; k < 16; k++)
            host_yield();
        yield_ns = quicker(yield_ns, (double)(host_now() - begun) / 16);
    }
}

static double moving(double bytes) {
    double beyond = bytes > CACHED ? bytes - CACHED : 0;
    return 1.5 * near_ns * (bytes - beyond) + far_ns * beyond;
}

/* Bytes that this rank copies or combines. */
static double traffic(const struct host_work *w) {
    double n = w->comm->nranks, bytes = (double)w->call.nbytes;
    const struct host_row *row = &HOST_ROWS[w->call.kind];
    if (w->type != HOST_WORK_COLLECTIVE)
        return bytes;
    double in = row->spreads ? n * bytes : bytes, out = row->gathers ? n * bytes : bytes;
    if (row->from_root && w->comm->rank != w->call.root)
        in = 0;
    if (row->to_root && w->comm->rank != w->call.root)
        out = 0;
    double edge = row->spreads ? HOST_SLOT : (double)w->comm->one_shot;
    if (!row->reduces)
        return in + out;
    if (in <= edge) /* every rank with a result combines everything itself */
        return out > 0 ? in + n * bytes : in;
    double pipeline = 2 * in + out, before = out <= 0 ? edge : row->spreads ? 2 * edge : (n + 1) * edge;
    return pipeline > before ? pipeline : before;
}

/* Threads that the call needs at the same time: all ranks, but those that this thread serves itself are one. */
static double drivers(const struct host_work *w, struct host_work *const *works, int n) {
    int here = 0;
    for (int i = 0; i < n; i++) {
        int first = works[i]->comm->map == w->comm->map;
        for (int j = 0; j < i && first; j++)
            first = works[j]->comm != works[i]->comm;
        here += first;
    }
    return w->comm->nranks - here + 1;
}

double host_simulate(struct host_work *const *works, int n) {
    double ns = 0, cpus = host_cpus();
    pthread_once(&once, measure);
    for (int i = 0; i < n; i++) {
        double threads = drivers(works[i], works, n);
        double share = threads > cpus ? threads / cpus : 1;
        double meeting = threads <= 1 ? 0 : threads <= cpus ? SPIN_NS : SPIN_NS + yield_ns * threads;
        ns += meeting + 100 + share * moving(traffic(works[i]));
    }
    return ns * 1e-3;
}
