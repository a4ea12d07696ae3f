/* PutSignal, Signal and WaitSignal as state machines.
 *
 * A signal counter belongs to an ordered pair of ranks, a context and an index. Its sender alone adds to it, and
 * it never goes back. A put copies into the memory of the peer, who need not do anything, and then signals: the
 * release of the counter makes the data visible to whoever sees the signal. So what one rank puts to another
 * comes in the order of issue; nothing is said about different peers.
 *
 * A wait takes what it waits for off what has come and what earlier waits have not taken: the receiver remembers
 * how far it is (`awaited` of the peer), and compares that with the counter. It sleeps like every other wait.
 *
 * A put does not wait, so nothing looks after its peer's life but the put itself: it reads the peer's seat every
 * time, and looks at the peer's process if it has not for LOOK_NS. What was put before the peer left is lost.
 *
 * No state of its own; these calls leave the sequence of the collectives alone.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "liveness.h"
#include "window.h"

#define LOOK_NS UINT64_C(200000000)

static enum host_step no_memory(struct host_work *w, int err) {
    const char *name = HOST_ROWS[w->call.kind].name;
    w->result = host_fail(ncclSystemError, "%s: no memory for signals: %s", name, strerror(err));
    return HOST_FAILED;
}

/* The page of a counter comes into being: an error here and not a signal later. */
static int prepare(struct host_work *w, int from, int to, int context, uint32_t *ready) {
    struct host_map *map = w->comm->map;
    uint32_t bit = UINT32_C(1) << context;
    if (*ready & bit)
        return 0;
    size_t at = (size_t)((char *)host_signal(map, from, to, context, 0) - map->base);
    int err = host_segment_reserve(map, at, HOST_LINE);
    if (!err)
        *ready |= bit;
    return err;
}

/* ---- putting and signalling -------------------------------------------------------------------------- */

static int peer_is_lost(struct host_work *w) {
    struct host_peer *peer = &w->comm->peers[w->call.root];
    uint64_t now = host_now();
    int look = now - peer->looked >= LOOK_NS;
    if (look)
        peer->looked = now;
    w->result = host_peer_lost(w, w->call.root, look);
    return w->result != ncclSuccess;
}

static int copy(struct host_work *w) {
    const struct host_onesided *o = &w->u.onesided;
    struct host_target t;
    if (!w->call.nbytes)
        return 1;
    if (!host_window_find(w->comm, o->window, w->call.root, &t)) {
        w->result = host_fail(
            ncclInvalidArgument, "PutSignal : the window was deregistered before the call had its turn");
        return 0;
    }
    memmove(t.at + o->offset, w->call.send, w->call.nbytes);
    return 1;
}

enum host_step host_put_step(struct host_work *w) {
    const struct host_onesided *o = &w->u.onesided;
    struct ncclComm *c = w->comm;
    int peer = w->call.root;
    if (peer_is_lost(w))
        return HOST_FAILED;
    int err = prepare(w, c->rank, peer, o->context, &c->peers[peer].signal_ready);
    if (err)
        return no_memory(w, err);
    if (w->type == HOST_WORK_PUT && !copy(w))
        return HOST_FAILED;
    host_u64 *counter = host_signal(c->map, c->rank, peer, o->context, o->index);
    host_publish(counter, host_peek(counter) + 1);
    return HOST_FINISHED;
}

/* ---- waiting ----------------------------------------------------------------------------------------- */

static host_u64 *counter_of(const struct host_work *w, const struct host_await *a) {
    return host_signal(w->comm->map, a->peer, w->comm->rank, a->context, a->index);
}

/* From now on these signals are taken, in the order in which waits were issued. */
static int begin(struct host_work *w) {
    struct host_waiting *all = &w->u.waiting;
    for (int i = 0; i < all->n; i++) {
        struct host_await *a = &all->await[i];
        struct host_peer *peer = &w->comm->peers[a->peer];
        int err = prepare(w, a->peer, w->comm->rank, a->context, &peer->await_ready);
        if (!err && !peer->awaited && !(peer->awaited = calloc(HOST_CONTEXTS * HOST_SIGNALS, sizeof *peer->awaited)))
            err = ENOMEM;
        if (err)
            return err;
        a->value = peer->awaited[a->context * HOST_SIGNALS + a->index] += a->value;
    }
    all->begun = 1;
    return 0;
}

enum host_step host_wait_step(struct host_work *w) {
    struct host_waiting *all = &w->u.waiting;
    int err = all->begun ? 0 : begin(w);
    if (err)
        return no_memory(w, err);
    const struct host_await *a = &all->await[all->arrived];
    for (; all->arrived < all->n && host_observe(counter_of(w, a)) >= a->value; a++)
        all->arrived++;
    return all->arrived == all->n ? HOST_FINISHED : HOST_STALLED;
}

int host_wait_missing(const struct host_work *w, int from) {
    const struct host_waiting *all = &w->u.waiting;
    int first = -1;
    for (int i = all->arrived; i < all->n; i++) {
        const struct host_await *a = &all->await[i];
        if (a->peer >= from && (first < 0 || a->peer < first) && host_observe(counter_of(w, a)) < a->value)
            first = a->peer;
    }
    return first;
}
