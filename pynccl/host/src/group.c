/* Groups, and the way of every checked call into the loop.
 *
 * All state is thread-local, as in NCCL: a group is opened, filled and ended by one thread. Nothing is
 * published before the outermost end; a call that failed its checks poisons the group, which then drops
 * everything and returns the last such code. Inner ends always succeed.
 *
 * Inside a group all collectives of a communicator go in the order of issue, so do the messages of a pair
 * and direction, and everything else at once. A creation that fails takes the other creations of its group
 * with it.
 */
#include "group.h"

#include <stdlib.h>
#include <string.h>

#include "queue.h"
#include "simulate.h"
#include "window.h"

static _Thread_local struct {
    int depth;
    int nonblocking; /* the last call's communicator is */
    ncclResult_t error;
    struct host_work **works;
    int n, room;
} group;

void host_group_start(void) {
    group.depth++;
}

int host_group_open(void) {
    return group.depth > 0;
}

ncclResult_t host_group_poison(ncclResult_t code) {
    if (group.depth)
        group.error = code;
    return code;
}

int host_group_holds(const struct ncclComm *c) {
    for (int i = 0; i < group.n; i++)
        if (group.works[i]->comm == c)
            return 1;
    return 0;
}

/* ---- what a work owns ------------------------------------------------------------------------------ */

/* After the run, or instead of it. `keep`: a created communicator is handed out. */
static void dispose(struct host_work *w, int keep) {
    host_window_settle(w);
    host_init_free(w->init);
    free(w->wishes);
    free(w->places);
    w->init = NULL;
    w->wishes = NULL;
    w->places = NULL;
    if (w->newcomm)
        *w->newcomm = keep ? w->child : NULL;
    if (w->child && !keep)
        host_comm_end(w->child, HOST_DESTROYED, "the failure of its creation");
}

/* ---- order and pairing ----------------------------------------------------------------------------- */

static void follow(struct host_work *w, struct host_work **last) {
    w->before = *last;
    *last = w;
}

static struct host_work **last_of(struct host_work *w) {
    switch (w->type) {
    case HOST_WORK_COLLECTIVE:
    case HOST_WORK_SPLIT:
    case HOST_WORK_WINDOW:
        return &w->comm->last_collective;
    case HOST_WORK_SEND:
        return &w->comm->peers[w->call.root].last_send;
    case HOST_WORK_RECV:
        return &w->comm->peers[w->call.root].last_recv;
    default:
        return NULL;
    }
}

static int is_self(const struct host_work *w, enum host_type type) {
    return w->type == type && !w->done && w->call.root == w->comm->rank;
}

/* The i-th message of a rank to itself goes to its i-th receive from itself. */
ncclResult_t host_works_pair(struct host_work **works, int n) {
    for (int i = 0; i < n; i++) {
        struct host_work *send = works[i], *recv = NULL;
        if (!is_self(send, HOST_WORK_SEND))
            continue;
        for (int j = 0; j < n && !recv; j++)
            if (works[j]->comm == send->comm && is_self(works[j], HOST_WORK_RECV))
                recv = works[j];
        if (!recv)
            return host_fail(ncclInvalidUsage, "Trying to send to self without a matching recv");
        if (recv->call.nbytes != send->call.nbytes)
            return host_fail(ncclInvalidUsage,
                "rank %d sends %zu bytes to itself and receives %zu; a send and its receive must be of equal "
                "size", send->comm->rank, send->call.nbytes, recv->call.nbytes);
        send->type = HOST_WORK_SELF;
        send->call.recv = recv->call.recv;
        recv->done = 1;
    }
    for (int i = 0; i < n; i++)
        if (is_self(works[i], HOST_WORK_RECV))
            return host_fail(ncclInvalidUsage, "Trying to recv to self without a matching send");
    return ncclSuccess;
}

/* ---- entering -------------------------------------------------------------------------------------- */

static ncclResult_t check(const struct host_work *w, const char *what) {
    ncclResult_t code = host_comm_check(w->comm, what);
    if (!code && w->comm->serial != w->serial)
        code = host_fail(ncclInvalidArgument, "%s : the communicator was ended before ncclGroupEnd", what);
    if (!code)
        code = w->tolerant ? host_comm_ensure_alive(w->comm, what) : host_comm_ensure(w->comm, what);
    return code;
}

static ncclResult_t enter(struct host_work *w) {
    const char *what = HOST_ROWS[w->call.kind].name;
    ncclResult_t code = check(w, what);
    return code ? code : host_comm_enter(w->comm, what);
}

ncclResult_t host_works_check(struct host_work **works, int n) {
    ncclResult_t code = ncclSuccess;
    for (int i = 0; i < n && !code; i++)
        if (works[i]->type != HOST_WORK_INIT)
            code = check(works[i], HOST_ROWS[works[i]->call.kind].name);
    return code;
}

/* A call that was queued has its turn. */
static ncclResult_t admit(struct host_work *w) {
    const char *what = HOST_ROWS[w->call.kind].name;
    if (!host_comm_enter_late(w->comm))
        return host_fail(ncclInvalidUsage, "%s : the communicator is being aborted, revoked or shrunk", what);
    ncclResult_t code = w->tolerant ? ncclSuccess : (ncclResult_t)host_observe32(&w->comm->broken);
    if (code)
        host_fail(code, "%s", w->comm->broken_text ? w->comm->broken_text : "the communicator has failed");
    else if (!w->tolerant && host_observe32(&w->comm->revoked))
        code = host_fail(ncclInvalidUsage, "%s: communicator was revoked", what);
    if (code)
        host_comm_leave(w->comm);
    return code;
}

/* The first work of the same communicator: it enters for all of them. */
static struct host_work *leader(struct host_work **works, const struct host_work *w) {
    while ((*works)->comm != w->comm)
        works++;
    return *works;
}

ncclResult_t host_works_admit(struct host_work **works, int n) {
    ncclResult_t code = ncclSuccess;
    for (int i = 0; i < n; i++) {
        struct host_work *w = works[i], *first = leader(works, w);
        if (w->type == HOST_WORK_INIT || w->result)
            continue;
        if (w == first) {
            w->result = admit(w);
            code = w->result ? w->result : code;
            w->entered = !w->result;
            if (w->entered)
                w->comm->group = works;
        }
        if (first->result) {
            w->result = first->result;
            w->done = w->refused = 1;
        }
    }
    return code;
}

/* Each communicator once. */
ncclResult_t host_works_enter(struct host_work **works, int n) {
    for (int i = 0; i < n; i++) {
        struct host_work *w = works[i];
        if (w->type == HOST_WORK_INIT || w->comm->group == works)
            continue;
        ncclResult_t code = enter(w);
        if (code)
            return code;
        w->comm->group = works;
        w->entered = 1;
    }
    return ncclSuccess;
}

/* Once left, a communicator may be used by another thread: nothing of it is touched afterwards. */
void host_works_leave(struct host_work **works, int n) {
    for (int i = 0; i < n; i++) {
        int mine = !works[i]->refused && works[i]->comm->group == works;
        struct host_work **last = mine ? last_of(works[i]) : NULL;
        if (last)
            *last = NULL;
    }
    for (int i = 0; i < n; i++)
        if (works[i]->entered)
            works[i]->comm->group = NULL;
    for (int i = 0; i < n; i++)
        if (works[i]->entered)
            host_comm_leave(works[i]->comm);
}

/* ---- running --------------------------------------------------------------------------------------- */

void host_works_chain(struct host_work **works, int n) {
    for (int i = 0; i < n; i++) {
        struct host_work **last = works[i]->done ? NULL : last_of(works[i]);
        if (last)
            follow(works[i], last);
    }
}

static ncclResult_t drive(struct host_work **works, int n) {
    ncclResult_t code = host_works_pair(works, n);
    if (!code) {
        host_works_chain(works, n);
        code = host_run(works, n);
    }
    for (int i = 0; i < n; i++) /* messages to oneself are in no chain */
        if (works[i]->type == HOST_WORK_SELF)
            works[i]->type = HOST_WORK_SEND;
    return code;
}

/* What was created is handed out only if nothing of its group's creations failed. */
static void settle(struct host_work **works, int n, ncclResult_t code) {
    int failed = 0;
    for (int i = 0; i < n; i++)
        failed |= works[i]->child != NULL && (!works[i]->done || works[i]->result);
    for (int i = 0; i < n; i++)
        dispose(works[i], code == ncclSuccess || (!failed && works[i]->child));
}

/* What has been queued on streams before comes first. */
static ncclResult_t flush(struct host_work **works, int n) {
    ncclResult_t code = ncclSuccess;
    for (int i = 0; i < n && !code; i++)
        code = host_queue_flush(works[i]->comm, HOST_ROWS[works[i]->call.kind].name);
    return code;
}

static ncclResult_t run(struct host_work **works, int n) {
    ncclResult_t code = flush(works, n);
    if (!code) {
        code = host_works_enter(works, n);
        if (!code)
            code = drive(works, n);
        host_works_leave(works, n);
    }
    settle(works, n, code);
    return code;
}

/* The user holds the handle of a nonblocking creation already, and learns from it that it failed. */
static void keep_handles(struct host_work **works, int n, ncclResult_t code) {
    for (int i = 0; i < n; i++) {
        struct host_work *w = works[i];
        if (w->type != HOST_WORK_INIT || !w->comm->nonblocking)
            continue;
        if (code) /* another creation of the group may be the one that failed */
            host_comm_break(w->comm, code, host_fail_text(), "gave up the creation");
        w->child = NULL;
        w->newcomm = NULL;
    }
}

void host_works_run(struct host_work **works, int n) {
    ncclResult_t code = drive(works, n);
    keep_handles(works, n, code);
    for (int i = 0; i < n; i++)
        if (works[i]->entered && works[i]->tolerant)
            host_comm_tell(works[i]->comm, code, host_fail_text());
    settle(works, n, code);
}

void host_works_drop(struct host_work **works, int n) {
    for (int i = 0; i < n; i++)
        dispose(works[i], 0);
}

void host_works_free(struct host_work **works, int n) {
    for (int i = 0; i < n; i++)
        free(works[i]);
    free(works);
}

static int makes_comm(const struct host_work *w) {
    return w->type == HOST_WORK_INIT || w->type == HOST_WORK_SPLIT || w->type == HOST_WORK_SHRINK;
}

/* What is done in the call itself, be a stream given or only a price asked for. */
static int makes_something(const struct host_work *w) {
    return makes_comm(w) || w->type == HOST_WORK_WINDOW;
}

/* Those that make communicators and windows to the front, each kind in its order. How many they are. */
static int creations_first(struct host_work **works, int n) {
    int real = 0;
    for (int i = 0; i < n; i++) {
        struct host_work *w = works[i];
        if (!makes_something(w))
            continue;
        memmove(&works[real + 1], &works[real], (size_t)(i - real) * sizeof *works);
        works[real++] = w;
    }
    return real;
}

static int any_queued(struct host_work **works, int n) {
    int any = 0;
    for (int i = 0; i < n; i++)
        any |= host_is_queue(works[i]->call.stream);
    return any;
}

static ncclResult_t run_all(struct host_work **works, int n, int nonblocking) {
    if (nonblocking)
        return host_job_start(works, n);
    ncclResult_t code = run(works, n);
    host_works_free(works, n);
    return code;
}

/* Some of it goes to a stream. What makes communicators or windows is done first, in this call; then the rest is
 * queued as one. */
static ncclResult_t queue_all(struct host_work **works, int n) {
    int real = creations_first(works, n);
    if (!real)
        return host_queue_submit(works, n);
    struct host_work **rest = malloc((size_t)(n - real) * sizeof *rest);
    if (!rest) {
        host_works_drop(works, n);
        host_works_free(works, n);
        return host_fail(ncclSystemError, "no memory for the end of a group");
    }
    memcpy(rest, works + real, (size_t)(n - real) * sizeof *rest);
    ncclResult_t first = run_all(works, real, works[real - 1]->comm->nonblocking);
    if (first != ncclSuccess && first != ncclInProgress) {
        host_works_free(rest, n - real);
        return first;
    }
    ncclResult_t code = host_queue_submit(rest, n - real);
    return code ? code : first;
}

ncclResult_t host_group_end(void) {
    if (!group.depth)
        return host_fail(ncclInvalidUsage, "ncclGroupEnd: not in a group call.");
    if (--group.depth)
        return ncclSuccess;
    /* The thread's group is closed before anything runs, so a failure leaves nothing open. */
    struct host_work **works = group.works;
    int n = group.n;
    ncclResult_t code = group.error;
    int nonblocking = group.nonblocking;
    group.works = NULL;
    group.n = group.room = 0;
    group.error = ncclSuccess;
    group.nonblocking = 0;
    if (!code && n)
        return any_queued(works, n) ? queue_all(works, n) : run_all(works, n, nonblocking);
    host_works_drop(works, n);
    host_works_free(works, n);
    return code;
}

/* Creations and the like are done all the same: that is where NCCL stops pretending, too. The rest is only
 * priced, and dropped. */
static ncclResult_t run_or_price(struct host_work **works, int n, ncclSimInfo_t *info) {
    int real = creations_first(works, n);
    if (n > real)
        info->estimatedTime = (float)host_simulate(works + real, n - real);
    return real ? run(works, real) : ncclSuccess;
}

ncclResult_t host_group_simulate(ncclSimInfo_t *info) {
    if (group.depth != 1 || !info)
        return host_group_end();
    struct host_work **works = group.works;
    int n = group.n;
    ncclResult_t code = group.error;
    memset(&group, 0, sizeof group);
    if (!code && info->magic != PYNCCL_SIM_INFO_MAGIC)
        code = host_fail(
            ncclInvalidArgument, "ncclSimInfo_t argument not initialized via NCCL_SIM_INFO_INITIALIZER");
    if (code)
        host_works_drop(works, n);
    else if (n)
        code = run_or_price(works, n, info);
    host_works_free(works, n);
    return code;
}

/* The job outlives this call, and the work on the stack with it. */
static ncclResult_t start_now(const struct host_work *w) {
    struct host_work **works = malloc(sizeof *works), *copy = malloc(sizeof *copy);
    if (works && copy) {
        *copy = *w;
        works[0] = copy;
        return host_job_start(works, 1);
    }
    free(works);
    free(copy);
    struct host_work dropped = *w;
    dispose(&dropped, 0);
    return host_fail(ncclSystemError, "no memory for a nonblocking call");
}

/* Calls queued before this one may have broken the communicator meanwhile. */
static ncclResult_t after_queued(struct host_work *w, const char *what) {
    ncclResult_t code = host_queue_flush(w->comm, what);
    return code ? code : host_comm_ensure(w->comm, what);
}

static ncclResult_t run_now(struct host_work *w) {
    const char *what = HOST_ROWS[w->call.kind].name;
    if (host_is_queue(w->call.stream))
        return host_queue_submit_one(w);
    if (w->comm->nonblocking)
        return start_now(w);
    if (makes_something(w))
        return run(&w, 1);
    ncclResult_t code = host_observe32(&w->comm->queued) ? after_queued(w, what) : ncclSuccess;
    if (!code)
        code = host_comm_enter(w->comm, what);
    if (code)
        return code;
    code = host_run(&w, 1);
    host_comm_leave(w->comm);
    return code;
}

static int make_room(void) {
    if (group.n < group.room)
        return 1;
    int room = group.room ? 2 * group.room : 16;
    struct host_work **more = realloc(group.works, (size_t)room * sizeof *more);
    if (!more)
        return 0;
    group.works = more;
    group.room = room;
    return 1;
}

struct host_work *host_group_work(struct host_work *local) {
    if (!group.depth)
        return local;
    struct host_work *w = make_room() ? malloc(sizeof *w) : NULL;
    if (!w)
        host_group_poison(host_fail(ncclSystemError, "no memory for a call in a group"));
    return w;
}

ncclResult_t host_group_submit(struct host_work *w) {
    if (!group.depth)
        return run_now(w);
    for (int i = 0; i < group.n && makes_comm(w); i++)
        if (makes_comm(group.works[i]) && group.works[i]->comm->nonblocking != w->comm->nonblocking) {
            ncclResult_t code = host_fail(
                ncclInvalidArgument, "Blocking and nonblocking communicators are not allowed in the same group.");
            dispose(w, 0);
            return host_group_discard(w, code);
        }
    group.nonblocking = w->comm->nonblocking; /* as in NCCL, the last one decides */
    group.works[group.n++] = w;
    return ncclSuccess;
}

ncclResult_t host_group_discard(struct host_work *w, ncclResult_t code) {
    if (group.depth)
        free(w);
    return host_group_poison(code);
}
