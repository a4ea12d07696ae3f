/* The one loop in which the library waits.
 *
 * It steps every work in turn, so nothing that could go on is held up by something that cannot. When a
 * whole round moved nothing it waits, in three stages: it polls, gives up the processor for a millisecond,
 * and then sleeps on a bell in shared memory, at most SLEEP_NS at a stretch. Only between sleeps does it look at
 * anything that costs time: abort requests, the states of peers, their processes, deadlines, the interrupt
 * hook. So a call that is answered quickly pays for none of it.
 *
 * How often it polls depends on where the peer runs. With more ranks than processors, 8 times: the peer
 * probably needs this one. Otherwise up to 256 times, but learning from the last waits: when polling was in
 * vain (another program holds the second processor, and the peer waits for this one) it halves, when it was
 * not, it doubles.
 *
 * Everything here belongs to the calling thread, except the hooks, which are atomic pointers.
 */
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "liveness.h"
#include "window.h"

#define YIELD_NS UINT64_C(1000000)
#define SLEEP_NS UINT64_C(5000000)
#define NAP_NS UINT64_C(1000000)
#define LOOK_NS UINT64_C(200000000)
#define DEFAULT_TIMEOUT 1800.0

static int (*_Atomic interrupt_hook)(void);
static _Thread_local double init_timeout = -1;
static _Thread_local int background;

void host_set_interrupt(int (*hook)(void)) {
    atomic_store(&interrupt_hook, hook);
}

void host_be_background(void) {
    background = 1;
}

void host_set_init_timeout(double seconds) {
    init_timeout = seconds;
}

double host_init_timeout(void) {
    return init_timeout;
}

uint64_t host_timeout_ns(double seconds) {
    if (!(seconds >= 0)) {
        const char *text = getenv("PYNCCL_TIMEOUT");
        char *end = NULL;
        seconds = text ? strtod(text, &end) : 0;
        if (!text || end == text || !(seconds >= 0))
            seconds = DEFAULT_TIMEOUT;
    }
    return seconds < 1e9 ? (uint64_t)(seconds * 1e9) : (uint64_t)1e18;
}

uint64_t host_init_patience(void) {
    return init_timeout >= 0 ? host_timeout_ns(init_timeout) + 1 : 0;
}

host_u32 host_items;

struct round {
    struct host_limit *limit;
    int left; /* the limit was reached */
    struct host_work **works;
    int n;
    int spins;         /* polls before giving up the processor */
    int polls;
    uint64_t stalled;  /* when the present wait began */
    uint64_t looked;   /* when processes were last looked at */
    int first;         /* where to begin looking */
    struct host_bell *bell; /* armed: one more round, then sleep */
    host_u32 *sleepers;
    uint32_t armed;
    ncclResult_t error;
};

/* ---- finishing ------------------------------------------------------------------------------------- */

static void notify(const struct ncclComm *c) {
    struct host_map *map = c->map;
    if (!map || !host_peek32(&host_header(map)->sleepers))
        return;
    for (int r = 0; r < map->nranks; r++)
        if (r != c->rank)
            host_bell_ring(&host_seat(map, r)->bell);
}

static void fail(struct round *r, struct host_work *w, const char *cause) {
    w->done = 1;
    if (!r->error)
        r->error = w->result;
    /* A shrink that failed may be tried again without whoever is missing now. What is created by a blocking
     * call ends with it. */
    if (w->type == HOST_WORK_INIT ? w->comm->nonblocking : w->type != HOST_WORK_SHRINK)
        host_comm_break(w->comm, w->result, host_fail_text(), cause);
}

/* ---- waiting --------------------------------------------------------------------------------------- */

static void disarm(struct round *r) {
    if (r->bell)
        host_bell_disarm(r->bell, r->sleepers);
    r->bell = NULL;
}

static void sleep_on_sockets(struct round *r) {
    struct pollfd fds[64];
    int n = 0, others = 0;
    for (int i = 0; i < r->n; i++) {
        struct host_work *w = r->works[i];
        int fd = w->init && !w->done ? host_init_fd(w->init) : -1;
        if (fd >= 0 && n < 64)
            fds[n++] = (struct pollfd){.fd = fd, .events = POLLIN};
        else
            others |= !w->done;
    }
    poll(fds, (nfds_t)n, others ? 1 : (int)(SLEEP_NS / 1000000));
}

static void sleep_once(struct round *r) {
    struct ncclComm *c = NULL;
    int several = 0, sockets = 0;
    for (int i = 0; i < r->n; i++) {
        struct host_work *w = r->works[i];
        if (w->done)
            continue;
        sockets |= w->init != NULL;
        several |= c && c != w->comm;
        c = c ? c : w->comm;
    }
    if (sockets) {
        sleep_on_sockets(r);
    } else if (several || !c) {
        host_nap(NAP_NS); /* there is no sleeping on two bells */
    } else if (!r->bell) {
        r->bell = &host_seat(c->map, c->rank)->bell;
        r->sleepers = &host_header(c->map)->sleepers;
        r->armed = host_bell_arm(r->bell, r->sleepers);
    } else {
        host_bell_sleep(r->bell, r->armed, SLEEP_NS);
        disarm(r);
    }
}

static void give_up_all(struct round *r, ncclResult_t code, const char *what, const char *cause) {
    for (int i = 0; i < r->n; i++) {
        struct host_work *w = r->works[i];
        if (w->done)
            continue;
        char text[HOST_TEXT], tell[HOST_TEXT];
        struct host_text t = {text, sizeof text, 0}, c = {tell, sizeof tell, 0};
        host_work_text(&t, w);
        host_text_add(&t, ": %s", what);
        host_text_add(&c, "rank %d %s", w->comm->rank, cause);
        w->result = host_fail(code, "%s", text);
        fail(r, w, tell);
    }
}

/* The hook's flags; PYNCCL_HOST_STOP and PYNCCL_HOST_ALONE. */
static int ask_hook(void) {
    int (*hook)(void) = background ? NULL : atomic_load(&interrupt_hook);
    return hook ? hook() : 0;
}

/* How many processes to look at this time, and from which rank on. */
static void set_look(struct round *r, struct host_watch *watch) {
    int most = 0;
    if (r->looked && watch->now - r->looked < LOOK_NS)
        return;
    /* A quarter of a large communicator at a time: everybody within a second. */
    for (int i = 0; i < r->n; i++)
        most = r->works[i]->comm->nranks > most ? r->works[i]->comm->nranks : most;
    watch->look = 8 + most / 4;
    watch->first = r->first < most ? r->first : 0;
    r->first = watch->first + watch->look;
    r->looked = watch->now;
}

/* Somebody wants the communicator empty. */
static void stop(struct round *r, struct host_work *w, enum host_stop why) {
    static const char *const words[] = {
        [HOST_STOP_ABORT] = "aborted", [HOST_STOP_REVOKE] = "revoked", [HOST_STOP_SHRINK] = "shrunk"};
    char text[HOST_TEXT];
    snprintf(text, sizeof text, "the communicator was %s during the call", words[why]);
    if (w->init) /* those who have come must not wait for this one */
        host_init_tell(w->init, ncclRemoteError, "CommInitRank: another rank gave up its communicator");
    w->result = host_fail(ncclInvalidUsage, "%s", text);
    fail(r, w, words[why]);
}

int host_interrupted(void) {
    return (ask_hook() & PYNCCL_HOST_STOP) != 0;
}

/* Is the caller to go, and leave the works as they are? */
static int is_over(struct round *r, uint64_t now, int flags) {
    struct host_limit *limit = r->limit;
    if (!limit)
        return 0;
    limit->interrupted |= (flags & PYNCCL_HOST_STOP) != 0;
    r->left = limit->interrupted || now >= limit->until;
    return r->left;
}

/* Can only the calling thread make the calls of this process? 0: no, -1: it must be found out. */
static int only_this(const struct round *r, int flags) {
    if (background || r->limit || host_peek32(&host_items))
        return 0;
    return flags & PYNCCL_HOST_ALONE ? 1 : -1;
}

/* What is looked at between sleeps. */
static void examine(struct round *r, uint64_t now) {
    int flags = ask_hook();
    if (is_over(r, now, flags))
        return;
    if (flags & PYNCCL_HOST_STOP) {
        give_up_all(r, ncclSystemError, "interrupted", "was interrupted");
        return;
    }
    struct host_watch watch = {.now = now, .alone = only_this(r, flags)};
    set_look(r, &watch);
    for (int i = 0; i < r->n; i++) {
        struct host_work *w = r->works[i];
        if (w->done || (w->before && !w->before->done))
            continue;
        enum host_stop why = (enum host_stop)host_observe32(&w->comm->stop);
        if (why)
            stop(r, w, why);
        if (why || w->type == HOST_WORK_INIT)
            continue;
        char cause[HOST_TEXT] = "";
        struct host_text t = {cause, sizeof cause, 0};
        if ((w->result = host_examine(w, &watch, r->works, r->n, &t)) != ncclSuccess)
            fail(r, w, cause);
    }
}

/* A wait is over: was it right to poll so long? */
static void learn(struct round *r) {
    struct ncclComm *c = r->works[0]->comm;
    int next = r->stalled ? r->spins / 2 : 2 * r->spins;
    r->spins = next < HOST_FEW_SPINS ? HOST_FEW_SPINS : next > c->most_spins ? c->most_spins : next;
    c->spins = r->spins;
}

static void wait_a_little(struct round *r) {
    if (++r->polls < r->spins) {
        host_pause();
        return;
    }
    uint64_t now = host_now();
    if (!r->stalled)
        r->stalled = now;
    if (now - r->stalled < YIELD_NS) {
        host_yield();
        return;
    }
    if (!r->bell)
        examine(r, now);
    if (!r->left)
        sleep_once(r);
}

/* ---- works ----------------------------------------------------------------------------------------- */

void host_work_set(struct host_work *w, enum host_type type, struct ncclComm *c, const struct host_call *call) {
    w->type = type;
    w->done = w->entered = w->pends = w->refused = w->warned = w->tolerant = 0;
    w->result = ncclSuccess;
    w->serial = c->serial;
    w->comm = c;
    w->before = NULL;
    w->since = w->patience = 0;
    w->init = NULL;
    w->newcomm = NULL;
    w->wishes = NULL;
    w->child = NULL;
    w->places = NULL;
    w->registration = NULL;
    w->call = *call;
    if (type == HOST_WORK_COLLECTIVE || type == HOST_WORK_SPLIT || type == HOST_WORK_WINDOW)
        w->u.collective.seq = 0;
    else
        w->u.message = (struct host_message){0};
}

/* ---- stepping -------------------------------------------------------------------------------------- */

static enum host_step step_of(struct host_work *w) {
    switch (w->type) {
    case HOST_WORK_COLLECTIVE:
        return host_collective_step(w);
    case HOST_WORK_SEND:
        return host_send_step(w);
    case HOST_WORK_RECV:
        return host_recv_step(w);
    case HOST_WORK_SPLIT:
        return host_split_step(w);
    case HOST_WORK_INIT:
    case HOST_WORK_SHRINK:
        return host_init_step(w);
    case HOST_WORK_WINDOW:
        return host_window_step(w);
    case HOST_WORK_PUT:
    case HOST_WORK_SIGNAL:
        return host_put_step(w);
    case HOST_WORK_WAIT:
        return host_wait_step(w);
    case HOST_WORK_FINALIZE:
        host_comm_finalize(w->comm);
        return HOST_FINISHED;
    case HOST_WORK_SELF:
        if (w->call.nbytes && w->call.send != w->call.recv)
            memmove(w->call.recv, w->call.send, w->call.nbytes);
    }
    return HOST_FINISHED;
}

/* A wait is over. If it was long enough for others to be told of it, they are told. */
static void told_no_more(struct host_work *w) {
    if (!w->since)
        return;
    w->since = 0;
    host_publish32(&host_seat(w->comm->map, w->comm->rank)->waits_for, 0);
    host_comm_wait_outside(w->comm, 0);
}

/* One work, one step. True if it went on. */
static int advance(struct round *r, struct host_work *w) {
    ncclResult_t broken = w->type == HOST_WORK_INIT || w->tolerant ? ncclSuccess
                                                                   : (ncclResult_t)host_peek32(&w->comm->broken);
    if (broken) { /* an earlier work of this communicator failed */
        w->done = 1;
        w->result = broken;
        return 1;
    }
    enum host_step step = step_of(w);
    if (step == HOST_STALLED)
        return 0;
    told_no_more(w);
    w->done = step != HOST_MOVED;
    if (step == HOST_FAILED)
        fail(r, w, host_fail_text());
    else if (w->type != HOST_WORK_INIT)
        notify(w->comm);
    return 1;
}

static int pass(struct round *r, int *left) {
    int moved = 0;
    *left = 0;
    for (int i = 0; i < r->n; i++) {
        struct host_work *w = r->works[i];
        if (w->done)
            continue;
        if (!w->before || w->before->done)
            moved |= advance(r, w);
        *left += !w->done;
    }
    return moved;
}

ncclResult_t host_run(struct host_work **works, int n) {
    return host_run_until(works, n, NULL);
}

ncclResult_t host_run_until(struct host_work **works, int n, struct host_limit *limit) {
    struct round r = {.works = works, .n = n, .limit = limit};
    int left = n;
    while (left && !r.left) {
        if (pass(&r, &left)) {
            disarm(&r);
            if (r.polls && r.spins > 1)
                learn(&r);
            r.polls = 0;
            r.stalled = 0;
            continue;
        }
        if (!left)
            break;
        if (!r.spins)
            r.spins = works[0]->comm->spins ? works[0]->comm->spins : 1;
        wait_a_little(&r);
    }
    disarm(&r);
    for (int i = 0; i < n; i++)
        if (works[i]->done)
            told_no_more(works[i]); /* those that failed */
    return r.error;
}
