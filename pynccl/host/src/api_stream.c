/* Streams and events of the host library: the exported functions, which NCCL leaves to CUDA.
 *
 * An event is a reference to the last item that its stream had when it was recorded. Owns the table of events,
 * under the lock of item.c.
 */
#include "api.h"
#include "item.h"

struct event {
    struct host_named name;
    struct host_item *item; /* NULL: the stream was empty, or a default stream */
    uint64_t when;          /* host_now, where there is no item */
    int recorded;
};

static struct host_table events = {.tag = 0x7065};

static ncclResult_t unknown_stream(const char *what, cudaStream_t stream) {
    return host_fail(ncclInvalidArgument, "%s : unknown stream %p", what, (void *)stream);
}

static ncclResult_t unknown_event(const char *what, cudaEvent_t event) {
    return host_fail(ncclInvalidArgument, "%s : unknown event %p", what, (void *)event);
}

static uint64_t deadline(double seconds) {
    return host_now() + host_timeout_ns(seconds);
}

/* What became of a wait; `what` may have been replaced by a failed call's text. */
static ncclResult_t waited(ncclResult_t code, const char *what, uint64_t since, const char *for_what) {
    if (code == ncclTimeout)
        return host_fail(code, "%s : timed out after %.3g s; %s", what, (double)(host_now() - since) * 1e-9, for_what);
    return code ? host_fail(code, "%s : interrupted", what) : code;
}

/* ---- streams ----------------------------------------------------------------------------------------- */

ncclResult_t pyncclHostStreamCreate(cudaStream_t *stream) {
    if (!stream)
        return host_fail(ncclInvalidArgument, "pyncclHostStreamCreate : stream argument is NULL");
    host_items_start();
    host_items_lock();
    ncclResult_t code;
    struct host_stream *s = host_stream_new(&code);
    *stream = s ? (cudaStream_t)s->name.handle : NULL;
    host_items_unlock();
    return code;
}

ncclResult_t pyncclHostStreamDestroy(cudaStream_t stream) {
    host_items_lock();
    struct host_stream *s = host_stream_find((uintptr_t)stream);
    if (s)
        host_stream_close(s);
    host_items_unlock();
    return s ? ncclSuccess : unknown_stream("pyncclHostStreamDestroy", stream);
}

ncclResult_t pyncclHostStreamQuery(cudaStream_t stream) {
    if (!host_is_queue((uintptr_t)stream))
        return ncclSuccess;
    host_items_lock();
    struct host_stream *s = host_stream_find((uintptr_t)stream);
    int busy = s && s->head;
    host_items_unlock();
    return !s ? unknown_stream("pyncclHostStreamQuery", stream) : busy ? ncclInProgress : ncclSuccess;
}

/* What a stream is busy with, for a text. Locked. */
static void say_head(struct host_text *t, const struct host_stream *s) {
    static const char *const kinds[] = {"", "a wait for another stream", "a function"};
    int behind = 0;
    for (const struct host_item *i = s->head; i; i = i->next)
        behind++;
    const struct host_item *head = s->head;
    if (!head)
        host_text_add(t, "nothing is left");
    else if (head->kind != HOST_ITEM_CALLS || !head->works)
        host_text_add(t, "%s is under way", head->works ? kinds[head->kind] : "something");
    else
        host_text_add(t, "%s of rank %d of %d is under way", HOST_ROWS[head->works[0]->call.kind].name,
            head->works[0]->comm->rank, head->works[0]->comm->nranks);
    if (behind > 1)
        host_text_add(t, ", and %d more behind it", behind - 1);
}

ncclResult_t pyncclHostStreamSynchronize(cudaStream_t stream, double seconds) {
    static const char what[] = "pyncclHostStreamSynchronize";
    char buffer[HOST_TEXT] = "";
    struct host_text t = {buffer, sizeof buffer, 0};
    if (!host_is_queue((uintptr_t)stream))
        return ncclSuccess;
    uint64_t since = host_now();
    host_items_lock();
    struct host_stream *s = host_stream_find((uintptr_t)stream);
    ncclResult_t code = s && s->tail ? host_item_await(s->tail, deadline(seconds)) : ncclSuccess;
    ncclResult_t failed = s && !code ? host_stream_tell(s, what) : ncclSuccess;
    if (code)
        say_head(&t, s);
    host_items_unlock();
    if (!s)
        return unknown_stream(what, stream);
    return failed ? failed : waited(code, what, since, buffer);
}

/* The stream's last item, once everything before it is done, waits for `on` as well. Takes the item. Locked. */
static ncclResult_t append(struct host_stream *s, struct host_item *item) {
    if (!item)
        return host_fail(ncclSystemError, "no memory for an item of a stream");
    if (!host_item_prepare(s)) {
        host_item_drop(item);
        return host_fail(ncclSystemError, "no thread for a stream");
    }
    host_item_append(s, item);
    return ncclSuccess;
}

/* A default stream waits in the calling thread, as long as any wait may take. Locked. */
static ncclResult_t wait_for(struct host_stream *s, struct host_item *on, const char *what) {
    if (!on || on->done)
        return ncclSuccess;
    uint64_t since = host_now();
    if (!s)
        return waited(host_item_await(on, deadline(-1)), what, since, "the other stream is not done");
    if (on->stream == s)
        return ncclSuccess;
    struct host_item *item = host_item_new(HOST_ITEM_WAIT, 1);
    if (item)
        host_item_depend(item, on);
    return append(s, item);
}

ncclResult_t pyncclHostStreamWaitEvent(cudaStream_t stream, cudaEvent_t event) {
    static const char what[] = "pyncclHostStreamWaitEvent";
    host_items_lock();
    struct host_stream *s = host_stream_find((uintptr_t)stream);
    struct event *e = host_table_find(&events, (uintptr_t)event);
    int known = s || !host_is_queue((uintptr_t)stream);
    ncclResult_t code = known && e ? wait_for(s, e->item, what) : ncclSuccess;
    host_items_unlock();
    return !known ? unknown_stream(what, stream) : !e ? unknown_event(what, event) : code;
}

ncclResult_t pyncclHostStreamWaitStream(cudaStream_t stream, cudaStream_t other) {
    static const char what[] = "pyncclHostStreamWaitStream";
    host_items_lock();
    struct host_stream *s = host_stream_find((uintptr_t)stream), *o = host_stream_find((uintptr_t)other);
    int known = s || !host_is_queue((uintptr_t)stream), other_known = o || !host_is_queue((uintptr_t)other);
    ncclResult_t code = known && o ? wait_for(s, o->tail, what) : ncclSuccess;
    host_items_unlock();
    return !known ? unknown_stream(what, stream) : !other_known ? unknown_stream(what, other) : code;
}

ncclResult_t pyncclHostStreamCall(cudaStream_t stream, void (*function)(void *), void *argument) {
    static const char what[] = "pyncclHostStreamCall";
    if (!function)
        return host_fail(ncclInvalidArgument, "%s : function argument is NULL", what);
    if (!host_is_queue((uintptr_t)stream)) {
        function(argument);
        return ncclSuccess;
    }
    struct host_item *item = host_item_new(HOST_ITEM_FUNCTION, 1);
    if (item) {
        item->function = function;
        item->argument = argument;
    }
    host_items_lock();
    struct host_stream *s = host_stream_find((uintptr_t)stream);
    ncclResult_t code = s ? append(s, item) : ncclSuccess;
    host_items_unlock();
    if (s)
        return code;
    if (item)
        host_item_drop(item);
    return unknown_stream(what, stream);
}

void *pyncclHostKeep(void *owner, void (*release)(void *)) {
    return host_queue_keep(owner, release);
}

/* ---- events ------------------------------------------------------------------------------------------ */

ncclResult_t pyncclHostEventCreate(cudaEvent_t *event) {
    if (!event)
        return host_fail(ncclInvalidArgument, "pyncclHostEventCreate : event argument is NULL");
    host_items_start();
    host_items_lock();
    struct event *e = host_table_add(&events, sizeof *e);
    *event = e ? (cudaEvent_t)e->name.handle : NULL;
    host_items_unlock();
    return e ? ncclSuccess : host_fail(ncclSystemError, "pyncclHostEventCreate : no memory");
}

static void forget(struct event *e) {
    if (e->item)
        host_item_unref(e->item);
    e->item = NULL;
    e->recorded = 0;
}

ncclResult_t pyncclHostEventDestroy(cudaEvent_t event) {
    host_items_lock();
    struct event *e = host_table_find(&events, (uintptr_t)event);
    if (e) {
        forget(e);
        host_table_remove(&events, &e->name);
    }
    host_items_unlock();
    return e ? ncclSuccess : unknown_event("pyncclHostEventDestroy", event);
}

ncclResult_t pyncclHostEventRecord(cudaEvent_t event, cudaStream_t stream) {
    static const char what[] = "pyncclHostEventRecord";
    host_items_lock();
    struct host_stream *s = host_stream_find((uintptr_t)stream);
    struct event *e = host_table_find(&events, (uintptr_t)event);
    int known = s || !host_is_queue((uintptr_t)stream);
    if (e && known) {
        forget(e);
        e->item = s ? s->tail : NULL;
        if (e->item)
            e->item->refs++;
        e->when = host_now();
        e->recorded = 1;
    }
    host_items_unlock();
    return !known ? unknown_stream(what, stream) : !e ? unknown_event(what, event) : ncclSuccess;
}

ncclResult_t pyncclHostEventQuery(cudaEvent_t event) {
    host_items_lock();
    struct event *e = host_table_find(&events, (uintptr_t)event);
    int busy = e && e->item && !e->item->done;
    host_items_unlock();
    return !e ? unknown_event("pyncclHostEventQuery", event) : busy ? ncclInProgress : ncclSuccess;
}

ncclResult_t pyncclHostEventSynchronize(cudaEvent_t event, double seconds) {
    static const char what[] = "pyncclHostEventSynchronize";
    char buffer[HOST_TEXT] = "";
    struct host_text t = {buffer, sizeof buffer, 0};
    uint64_t since = host_now();
    host_items_lock();
    struct event *e = host_table_find(&events, (uintptr_t)event);
    struct host_item *item = e ? e->item : NULL;
    ncclResult_t code = ncclSuccess, failed = ncclSuccess;
    if (item) {
        item->refs++; /* another thread may destroy the event */
        code = host_item_await(item, deadline(seconds));
        if (code)
            say_head(&t, item->stream);
        else if (item->result)
            failed = host_fail(item->result, "%s : %s", what, item->text ? item->text : "a call failed");
        host_item_unref(item);
    }
    host_items_unlock();
    if (!e)
        return unknown_event(what, event);
    return failed ? failed : waited(code, what, since, buffer);
}

static int is_past(const struct event *e) {
    return e && e->recorded && (!e->item || e->item->done);
}

static uint64_t time_of(const struct event *e) {
    return e->item ? e->item->ended : e->when;
}

ncclResult_t pyncclHostEventElapsed(float *milliseconds, cudaEvent_t start, cudaEvent_t end) {
    static const char what[] = "pyncclHostEventElapsed";
    if (!milliseconds)
        return host_fail(ncclInvalidArgument, "%s : milliseconds argument is NULL", what);
    host_items_lock();
    struct event *a = host_table_find(&events, (uintptr_t)start), *b = host_table_find(&events, (uintptr_t)end);
    int recorded = a && b && a->recorded && b->recorded, past = is_past(a) && is_past(b);
    if (past)
        *milliseconds = (float)((double)(int64_t)(time_of(b) - time_of(a)) * 1e-6);
    host_items_unlock();
    if (!a || !b)
        return unknown_event(what, a ? end : start);
    if (!recorded)
        return host_fail(ncclInvalidArgument, "%s : an event has not been recorded", what);
    return past ? ncclSuccess : ncclInProgress;
}
