/* How long queued calls would take: the cost model of ncclGroupSimulateEnd.
 *
 * A call costs one meeting of the ranks and the memory that this rank moves, which collective.c and message.c
 * state at their heads. Two rates of this machine are measured, once a process, at the first question: copying
 * a chunk that lies in a near cache, and waking another thread. Calls of one thread add up, since the thread
 * runs them one after the other; threads and processes beyond the processors share them.
 *
 * The promise: positive, never less for more bytes, and of the right order on an idle machine. State: the two
 * rates, written under pthread_once.
 */
#include "simulate.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

static pthread_once_t once = PTHREAD_ONCE_INIT;
static double copy_ns;  /* a byte */
static double yield_ns; /* one trip to another thread, when it has to be scheduled first */

enum { TRIES = 7, SPIN_NS = 250 /* one cache line there and back, twice */ };

static double quicker(double a, double b) {
    return a < b ? a : b;
}

static void measure(void) {
    static char from[HOST_CHUNK], to[HOST_CHUNK];
    copy_ns = yield_ns = 1e9;
    memset(from, 1, sizeof from);
    for (int i = 0; i < TRIES; i++) {
        uint64_t begun = host_now();
        memcpy(to, from, sizeof to);
        __asm__ __volatile__("" : : "r"(to) : "memory"); /* somebody might read it */
        copy_ns = quicker(copy_ns, (double)(host_now() - begun) / sizeof to);
        begun = host_now();
        for (int k = 0; k < 16; k++)
            host_yield();
        yield_ns = quicker(yield_ns, (double)(host_now() - begun) / 16);
    }
    copy_ns = copy_ns < 0.01 ? 0.01 : copy_ns;
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
    if (row->reduces && in <= (double)w->comm->one_shot)
        return in + n * bytes; /* everything is combined here */
    return in + out + (row->reduces ? in : 0);
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
        ns += meeting + 100 + share * copy_ns * traffic(works[i]);
    }
    return ns * 1e-3;
}
