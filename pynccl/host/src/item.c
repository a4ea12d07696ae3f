/* Items: what lies on the streams, in which order it runs, and who runs it.
 *
 * Every stream is a queue with a thread of its own, made at its first item. An item runs when it is at the head of
 * its stream and everything in its `after` is done; these are always older items, so there are no circles. The
 * items of a communicator are a chain through `after` whatever their streams, because all ranks must make their
 * calls in one order, and that is the order in which they were issued.
 *
 *     appended --> driven --> done
 *                  |    ^
 *                  v    |
 *                  let go: its driver's time was over; anybody can go on with it
 *
 * Whoever waits for an item works instead of sleeping: it drives the oldest item in the way that nobody drives yet.
 * So a call that is issued and at once waited for costs no change of threads, and a wait makes progress also where
 * no thread of a stream ever gets a processor. Functions are left to the stream's thread: they may take any time.
 *
 * A stream's thread that has just been busy naps and looks again for ALERT_NS, and only then sleeps until it is
 * woken. So issuing many calls in a row needs no system call.
 *
 * What an item needs of its communicators it does through the functions of group.c, like any call. If it fails, the
 * communicators are broken as after any call; the text stays with the item and its stream until somebody waits.
 */
#include "item.h"

#include <signal.h>
#include <stdlib.h>
#include <string.h>

#include "group.h"

#define ALERT_NS UINT64_C(5000000)
#define NAP_NS UINT64_C(100000)
#define SLICE_NS UINT64_C(5000000) /* how long a waiting thread does without looking at the hook */

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_once_t started = PTHREAD_ONCE_INIT;

void host_items_lock(void) {
    pthread_mutex_lock(&lock);
}

void host_items_unlock(void) {
    pthread_mutex_unlock(&lock);
}

static void after_fork_in_child(void) {
    host_publish32(&host_items, 0); /* they are the parent's */
    pthread_mutex_unlock(&lock);
}

static void register_handlers(void) {
    pthread_atfork(host_items_lock, host_items_unlock, after_fork_in_child);
}

void host_items_start(void) {
    pthread_once(&started, register_handlers);
}

/* ---- memory ------------------------------------------------------------------------------------------ */

struct host_item *host_item_new(enum host_item_kind kind, int nafter) {
    struct host_item *item = malloc(sizeof *item);
    if (!item)
        return NULL;
    memset(item, 0, offsetof(struct host_item, one_after));
    item->kind = kind;
    item->refs = 1;
    item->after = nafter > 1 ? calloc((size_t)nafter, sizeof *item->after) : item->one_after;
    if (item->after)
        return item;
    free(item);
    return NULL;
}

static void release(struct host_item *item) {
    if (item->after != item->one_after)
        free(item->after);
    if (item->comms != item->one_comm)
        free(item->comms);
    if (item->part_of)
        host_item_unref(item->part_of);
    free(item->text);
    free(item);
}

/* The works have no use once it is done, however long somebody refers to it. */
static void free_works(struct host_item *item) {
    if (item->works && item->works != item->one_work)
        host_works_free(item->works, item->n);
    item->works = NULL;
    item->n = 0;
}

void host_item_drop(struct host_item *item) {
    free_works(item);
    release(item);
}

void host_item_unref(struct host_item *item) {
    if (--item->refs == 0)
        release(item);
}

/* ---- order ------------------------------------------------------------------------------------------- */

void host_item_depend(struct host_item *item, struct host_item *on) {
    if (!on || on->done)
        return;
    for (int i = 0; i < item->nafter; i++)
        if (item->after[i] == on)
            return;
    on->refs++;
    item->after[item->nafter++] = on;
}

/* What it waits for beside its stream, or NULL. What is done is forgotten, so that chains do not grow. */
static struct host_item *held_by(struct host_item *item) {
    while (item->nafter && item->after[item->nafter - 1]->done)
        host_item_unref(item->after[--item->nafter]);
    return item->nafter ? item->after[item->nafter - 1] : NULL;
}

static void wake(struct host_stream *s) {
    pthread_cond_broadcast(&s->changed);
}

void host_item_append(struct host_stream *s, struct host_item *item) {
    item->stream = s;
    if (s->tail)
        s->tail->next = item;
    else
        s->head = item;
    s->tail = item;
    s->active = host_now();
    item->due = s->active;
    for (int i = 0; i < item->ncomms; i++) {
        struct ncclComm *c = item->comms[i];
        if (c->last_item)
            host_item_unref(c->last_item);
        c->last_item = item;
        item->refs++;
        host_publish32(&c->queued, host_peek32(&c->queued) + 1);
    }
    host_add32(&host_items, 1);
    if (s->asleep)
        wake(s);
}

void host_item_forget(struct host_item *item, struct ncclComm *c) {
    for (int i = 0; i < item->ncomms; i++)
        if (item->comms[i] == c)
            item->comms[i] = NULL;
    if (c->last_item == item) {
        c->last_item = NULL;
        item->refs--;
    }
    host_publish32(&c->queued, host_peek32(&c->queued) - 1);
}

static void let_go_of_comms(struct host_item *item) {
    for (int i = 0; i < item->ncomms; i++)
        if (item->comms[i])
            host_item_forget(item, item->comms[i]);
    item->ncomms = 0;
}

static char *copy_of(const char *text) {
    return text ? strdup(text) : NULL;
}

void host_item_fail(struct host_item *item, ncclResult_t code, const char *text) {
    if (!code || item->result)
        return;
    item->result = code;
    item->text = copy_of(text);
}

/* The head of its stream is done. An error stays with the stream until it has been told, and goes
 * to every item behind it until then. */
static void finish_one(struct host_item *item) {
    struct host_stream *s = item->stream;
    s->head = item->next;
    if (!s->head)
        s->tail = NULL;
    item->ended = s->active = host_now();
    if (item->part_of)
        host_item_fail(item, item->part_of->result, item->part_of->text);
    if (!item->result)
        host_item_fail(item, s->error, s->text);
    else if (!s->error)
        s->text = copy_of(item->text), s->error = item->result;
    let_go_of_comms(item);
    while (item->nafter)
        host_item_unref(item->after[--item->nafter]);
    item->done = 1;
    host_add32(&host_items, (uint32_t)-1);
    host_item_unref(item);
}

static int is_plain_wait(struct host_item *item) {
    return item && item->kind == HOST_ITEM_WAIT && !held_by(item);
}

/* With it goes what only waited for it here. */
static void finish(struct host_item *item) {
    struct host_stream *s = item->stream;
    finish_one(item);
    while (is_plain_wait(s->head))
        finish_one(s->head);
    if (s->waiters)
        wake(s);
}

/* ---- driving ----------------------------------------------------------------------------------------- */

static void begin(struct host_item *item) {
    host_item_fail(item, host_works_admit(item->works, item->n), host_fail_text());
    host_works_chain(item->works, item->n);
}

static int all_done(const struct host_item *item) {
    int done = 1;
    for (int i = 0; i < item->n; i++)
        done &= item->works[i]->done;
    return done;
}

/* Without the lock, by the one thread that drives it. `fresh`: nobody has before. 1: it is done but for `finish`. */
static int drive(struct host_item *item, int fresh, struct host_limit *limit) {
    if (item->kind == HOST_ITEM_FUNCTION)
        item->function(item->argument);
    if (item->kind != HOST_ITEM_CALLS)
        return 1;
    if (fresh)
        begin(item);
    if (!all_done(item))
        host_item_fail(item, host_run_until(item->works, item->n, limit), host_fail_text());
    if (!all_done(item))
        return 0;
    host_works_leave(item->works, item->n);
    return 1;
}

/* The lock is let go while the item is driven. */
static void take(struct host_item *item, struct host_limit *limit) {
    int fresh = !item->begun;
    item->driven = item->begun = 1;
    item->refs++;
    pthread_mutex_unlock(&lock);
    int finished = drive(item, fresh, limit);
    pthread_mutex_lock(&lock);
    item->driven = 0;
    if (finished)
        free_works(item);
    void *owner = finished ? item->owner : NULL;
    void (*give_back)(void *) = item->release;
    if (finished)
        finish(item);
    else
        wake(item->stream); /* its own thread goes on with it */
    host_item_unref(item);
    if (owner) {
        pthread_mutex_unlock(&lock);
        give_back(owner);
        pthread_mutex_lock(&lock);
    }
}

/* ---- waiting ----------------------------------------------------------------------------------------- */

static void sleep_until(struct host_stream *s, uint64_t until) {
    struct timespec t = {(time_t)(until / 1000000000u), (long)(until % 1000000000u)};
    pthread_cond_timedwait(&s->changed, &lock, &t);
}

/* The oldest item that must be done before this one, and itself has nothing before it. */
static struct host_item *first_of(struct host_item *item) {
    for (;;) {
        struct host_item *head = item->stream->head, *other = head->driven || head->begun ? NULL : held_by(head);
        if (!other)
            return head;
        item = other;
    }
}

static void help_or_sleep(struct host_item *item, struct host_limit *limit) {
    struct host_item *first = first_of(item);
    uint64_t now = host_now(), slice = now + SLICE_NS;
    if (!first->driven && first->kind != HOST_ITEM_FUNCTION && first->due <= now) {
        take(first, limit);
        return;
    }
    if (!first->driven && first->due > now && first->due < slice)
        slice = first->due;
    struct host_stream *s = item->stream;
    s->waiters++;
    sleep_until(s, slice < limit->until ? slice : limit->until);
    s->waiters--;
}

ncclResult_t host_item_await(struct host_item *item, uint64_t until) {
    struct host_limit limit = {until, 0};
    ncclResult_t code = ncclSuccess;
    item->refs++;
    while (!item->done && !code) {
        help_or_sleep(item, &limit);
        if (item->done)
            break;
        pthread_mutex_unlock(&lock);
        if (limit.interrupted || host_interrupted())
            code = ncclSystemError;
        pthread_mutex_lock(&lock);
        if (!code && !item->done && host_now() >= until)
            code = ncclTimeout;
    }
    host_item_unref(item);
    return code;
}

/* ---- the thread of a stream -------------------------------------------------------------------------- */

static void rest(struct host_stream *s, int deep) {
    uint64_t now = host_now();
    if (now - s->active < ALERT_NS) {
        pthread_mutex_unlock(&lock);
        host_nap(NAP_NS);
        pthread_mutex_lock(&lock);
        return;
    }
    s->asleep = 1;
    if (deep)
        pthread_cond_wait(&s->changed, &lock);
    else
        sleep_until(s, now + SLICE_NS);
    s->asleep = 0;
}

static void wait_for_other(struct host_item *other) {
    struct host_stream *s = other->stream;
    s->waiters++;
    sleep_until(s, host_now() + SLICE_NS);
    s->waiters--;
}

static void serve(struct host_stream *s) {
    struct host_item *head = s->head, *other = head && !head->driven && !head->begun ? held_by(head) : NULL;
    if (!head)
        rest(s, 1);
    else if (head->driven)
        rest(s, 0);
    else if (other)
        wait_for_other(other);
    else if (head->due > host_now())
        sleep_until(s, head->due);
    else
        take(head, NULL);
}

static void *worker_main(void *argument) {
    struct host_stream *s = argument;
    host_be_background();
    pthread_mutex_lock(&lock);
    while (!s->closed || s->head)
        serve(s);
    s->worker = 0;
    host_stream_free(s);
    pthread_mutex_unlock(&lock);
    return NULL;
}

int host_item_prepare(struct host_stream *s) {
    if (s->worker)
        return 1;
    pthread_t thread;
    sigset_t all, before;
    sigfillset(&all); /* signals are the business of the program's own threads */
    pthread_sigmask(SIG_SETMASK, &all, &before);
    s->worker = pthread_create(&thread, NULL, worker_main, s) == 0;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (s->worker)
        pthread_detach(thread);
    return s->worker;
}
