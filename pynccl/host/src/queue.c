/* Calls on streams: how they become items, and how the rest of the library lives with them.
 *
 * A call on a stream is checked like any other, and its errors of that sort come from the call. Then it is queued
 * and the call returns. One item is one call or one group. It follows the last item of its stream and of each of
 * its communicators. A group on several streams lies on the first; the others get an item that waits for it.
 *
 * A call that is not queued (a default stream, a split, the end of a communicator) first waits for what is queued of
 * its communicator: order of issue is all that ranks can agree on. Abort, revoke and shrink with abort do not
 * wait: what has not begun never will, what runs is stopped as if a thread were inside.
 *
 * State: what the calling thread wants kept with its next item. The rest is in items and streams, under their lock.
 */
#include "queue.h"

#include <stdlib.h>
#include <string.h>

#include "group.h"
#include "item.h"

static _Thread_local struct {
    void *owner;
    void (*release)(void *);
} kept;

void *host_queue_keep(void *owner, void (*release)(void *)) {
    void *before = kept.owner;
    kept.owner = owner;
    kept.release = release;
    return before;
}

/* ---- becoming an item -------------------------------------------------------------------------------- */

/* What a group is about to become. */
struct plan {
    struct host_item *item;
    struct host_item **waits; /* one for each stream but the first */
    uintptr_t *streams;
    int nstreams;
    int joins; /* there are calls on a default stream */
};

static void note_comm(struct host_item *item, struct ncclComm *c) {
    int i = 0;
    while (i < item->ncomms && item->comms[i] != c)
        i++;
    if (i == item->ncomms)
        item->comms[item->ncomms++] = c;
}

static void note_stream(struct plan *p, uintptr_t stream) {
    int i = 0;
    if (!host_is_queue(stream)) {
        p->joins = 1;
        return;
    }
    while (i < p->nstreams && p->streams[i] != stream)
        i++;
    if (i == p->nstreams)
        p->streams[p->nstreams++] = stream;
}

static void drop_plan(struct plan *p) {
    for (int i = 1; i < p->nstreams && p->waits; i++)
        if (p->waits[i])
            host_item_drop(p->waits[i]);
    free(p->waits);
    free(p->streams);
    if (p->item) {
        p->item->works = NULL; /* the caller's still */
        host_item_drop(p->item);
    }
}

static int make_plan(struct plan *p, struct host_work **works, int n) {
    *p = (struct plan){.streams = calloc((size_t)n, sizeof *p->streams)};
    struct ncclComm **comms = malloc((size_t)n * sizeof *comms);
    p->item = host_item_new(HOST_ITEM_CALLS, 2 * n);
    if (!p->streams || !comms || !p->item) {
        free(comms);
        if (p->item)
            p->item->comms = NULL;
        return 0;
    }
    p->item->comms = comms;
    p->item->works = works;
    p->item->n = n;
    for (int i = 0; i < n; i++) {
        note_comm(p->item, works[i]->comm);
        note_stream(p, works[i]->call.stream);
    }
    p->waits = calloc((size_t)p->nstreams, sizeof *p->waits);
    int good = p->waits != NULL;
    for (int i = 1; i < p->nstreams && good; i++)
        good = (p->waits[i] = host_item_new(HOST_ITEM_WAIT, 1)) != NULL;
    return good;
}

/* A thread is inside a call of the communicator, or somebody wants it empty. */
static ncclResult_t check_free(struct ncclComm *c, const char *what) {
    uint32_t busy = host_observe32(&c->busy);
    if (host_observe32(&c->stop))
        return host_fail(ncclInvalidUsage, "%s : the communicator is being aborted, revoked or shrunk", what);
    if (busy && !(busy & HOST_BUSY_QUEUE) && !host_observe32(&c->pending))
        return host_fail(ncclInvalidUsage,
            "%s : thread %u uses the communicator while thread %u is inside a call on it; a communicator "
            "serves one thread at a time", what, host_thread_id(), busy);
    return ncclSuccess;
}

/* The items before this one: what is last on its communicators. Locked. */
static void follow_comms(struct host_item *item, struct host_stream *home) {
    for (int i = 0; i < item->ncomms; i++) {
        struct host_item *last = item->comms[i]->last_item;
        if (last && last->stream != home) /* else it is before this one anyway */
            host_item_depend(item, last);
    }
}

static void append(struct host_stream *s, struct host_item *item) {
    item->owner = kept.owner;
    item->release = kept.release;
    kept.owner = NULL;
    uint64_t delay = host_stream_delay(s, item->comms[0]->rank);
    host_item_append(s, item);
    item->due += delay;
}

static ncclResult_t no_thread(void) {
    return host_fail(ncclSystemError, "no thread for a stream");
}

/* Locked. After success the plan's items belong to the streams. */
static ncclResult_t link_plan(struct plan *p) {
    struct host_stream *home = host_stream_find(p->streams[0]);
    for (int i = 0; i < p->nstreams; i++) {
        struct host_stream *s = host_stream_find(p->streams[i]);
        if (!s)
            return host_fail(ncclInvalidArgument, "stream %p was destroyed before ncclGroupEnd", (void *)p->streams[i]);
        if (!host_item_prepare(s))
            return no_thread();
        if (i)
            host_item_depend(p->item, s->tail);
    }
    follow_comms(p->item, home);
    append(home, p->item);
    for (int i = 1; i < p->nstreams; i++) {
        struct host_item *wait = p->waits[i];
        host_item_depend(wait, p->item);
        wait->part_of = p->item;
        p->item->refs++;
        host_item_append(host_stream_find(p->streams[i]), wait);
    }
    return ncclSuccess;
}

/* The calls on default streams are complete when the group's end returns. Locked. */
static ncclResult_t join(struct host_item *item) {
    if (host_item_await(item, UINT64_MAX))
        return host_fail(ncclSystemError, "ncclGroupEnd: interrupted; the calls go on");
    if (item->result)
        host_fail(item->result, "%s", item->text ? item->text : "a call failed");
    return item->result;
}

static ncclResult_t queue_plan(struct plan *p, int *linked) {
    struct host_item *item = p->item;
    host_items_lock();
    ncclResult_t code = link_plan(p);
    *linked = !code;
    if (*linked) {
        item->refs++;
        code = p->joins ? join(item) : ncclSuccess;
        host_item_unref(item);
        p->item = NULL;
        memset(p->waits, 0, (size_t)p->nstreams * sizeof *p->waits);
    }
    while (!*linked && item->nafter)
        host_item_unref(item->after[--item->nafter]);
    host_items_unlock();
    return code;
}

static ncclResult_t check_all(struct host_work **works, int n) {
    ncclResult_t code = host_works_check(works, n);
    for (int i = 0; i < n && !code; i++)
        code = check_free(works[i]->comm, HOST_ROWS[works[i]->call.kind].name);
    return code ? code : host_works_pair(works, n);
}

ncclResult_t host_queue_submit(struct host_work **works, int n) {
    struct plan plan = {0};
    int linked = 0;
    ncclResult_t code = check_all(works, n);
    if (!code && !make_plan(&plan, works, n))
        code = host_fail(ncclSystemError, "no memory for calls on a stream");
    if (!code)
        code = queue_plan(&plan, &linked);
    drop_plan(&plan);
    if (!linked) {
        host_works_drop(works, n);
        host_works_free(works, n);
    }
    return code;
}

/* Locked. */
static ncclResult_t link_one(struct host_item *item) {
    const struct host_call *call = &item->work.call;
    struct host_stream *s = host_stream_find(call->stream);
    if (!s)
        return host_fail(ncclInvalidArgument, "%s : unknown stream %p", HOST_ROWS[call->kind].name, (void *)call->stream);
    if (!host_item_prepare(s))
        return no_thread();
    follow_comms(item, s);
    append(s, item);
    return ncclSuccess;
}

ncclResult_t host_queue_submit_one(const struct host_work *w) {
    ncclResult_t code = check_free(w->comm, HOST_ROWS[w->call.kind].name);
    if (code)
        return code;
    struct host_item *item = host_item_new(HOST_ITEM_CALLS, 1);
    if (!item)
        return host_fail(ncclSystemError, "no memory for a call on a stream");
    item->work = *w;
    item->one_work[0] = &item->work;
    item->one_comm[0] = w->comm;
    item->works = item->one_work;
    item->comms = item->one_comm;
    item->n = item->ncomms = 1;
    host_items_lock();
    code = link_one(item);
    host_items_unlock();
    if (code)
        host_item_drop(item);
    return code;
}

/* ---- living with them -------------------------------------------------------------------------------- */

ncclResult_t host_queue_flush(struct ncclComm *c, const char *what) {
    ncclResult_t code = ncclSuccess;
    if (!host_observe32(&c->queued))
        return ncclSuccess;
    host_items_lock();
    while (c->last_item && !code)
        code = host_item_await(c->last_item, UINT64_MAX);
    host_items_unlock();
    if (code)
        return host_fail(code, "%s : interrupted while it waited for calls that are queued on streams", what);
    return ncclSuccess;
}

/* An item that has not begun loses its calls of the communicator. Locked. */
static int strip(struct host_item *item, struct ncclComm *c, const char *text) {
    int found = 0;
    for (int i = 0; i < item->n; i++)
        if (item->works[i]->comm == c) {
            item->works[i]->done = item->works[i]->refused = 1;
            item->works[i]->result = ncclInvalidUsage;
            found = 1;
        }
    if (!found)
        return 0;
    host_item_forget(item, c);
    host_item_fail(item, ncclInvalidUsage, text);
    return 1;
}

static void cancel(struct ncclComm *c, enum host_stop why) {
    static const char *const words[] = {
        [HOST_STOP_ABORT] = "the communicator was aborted before the call had its turn",
        [HOST_STOP_REVOKE] = "the communicator was revoked before the call had its turn",
        [HOST_STOP_SHRINK] = "the communicator was shrunk before the call had its turn"};
    int any = 0;
    host_items_lock();
    struct host_stream *s;
    for (uint32_t i = 0; (s = host_stream_at(i)) != NULL; i++)
        for (struct host_item *item = s->name.generation == host_generation() ? s->head : NULL; item; item = item->next)
            if (!item->driven && !item->begun)
                any |= strip(item, c, words[why]);
    host_items_unlock();
    if (any && why == HOST_STOP_SHRINK) /* as a call that was inside */
        host_comm_break(c, ncclInvalidUsage, words[why], "shrunk");
}

int host_queue_drain(struct ncclComm *c, enum host_stop why, uint64_t ns) {
    if (!host_comm_stop(c, why))
        return 0;
    if (host_observe32(&c->queued))
        cancel(c, why);
    return host_comm_drain(c, why, ns);
}
