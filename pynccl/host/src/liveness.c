/* Diagnosis of a stalled work: dead, departed and aborted peers, ranks that this very thread would have to
 * serve, timeouts, and the warning after ten seconds.
 *
 * A peer that left fails this rank only if this rank needs something that the peer has not published. A
 * rank publishes first and leaves afterwards, so the order here is: see that it left, then look once more
 * whether something is missing.
 *
 * Apart from the timeout an error needs proof. Dead: the process is gone, a zombie, or another one with the
 * same number. Unservable: the missing rank belongs to this process, and this process has no other thread
 * that could make the call. The binding's hook can say so (PYNCCL_HOST_ALONE) although there are others,
 * because arithmetic libraries keep threads that never call anything; without a hook every thread counts.
 *
 * A rank that finds a dead peer writes that into the peer's seat, so the others need not look themselves.
 */
#include "liveness.h"

#include "window.h"

#include <ctype.h>
#include <dirent.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#ifndef SYS_pidfd_open
#define SYS_pidfd_open 434
#endif

#define WARN_NS UINT64_C(10000000000)

/* ---- processes ------------------------------------------------------------------------------------- */

/* State letter and start time from /proc/PID/stat; 0 if there is no such process, -1 if it cannot be told. */
static int read_stat(int pid, char *state, uint64_t *start) {
    char path[64], text[1024];
    snprintf(path, sizeof path, "/proc/%d/stat", pid);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return access("/proc/self/stat", R_OK) == 0 ? 0 : -1;
    ssize_t got = read(fd, text, sizeof text - 1);
    close(fd);
    if (got <= 0)
        return 0;
    text[got] = 0;
    /* The command may contain anything; the last ")" ends it. Start time is field 22, state field 3. */
    char *at = strrchr(text, ')');
    if (!at || at[1] != ' ')
        return -1;
    *state = at[2];
    at += 2;
    for (int field = 3; field < 22 && at; field++)
        at = strchr(at + 1, ' ');
    *start = at ? strtoull(at, NULL, 10) : 0;
    return 1;
}

uint64_t host_process_start(int pid) {
    char state;
    uint64_t start = 0;
    return read_stat(pid, &state, &start) == 1 ? start : 0;
}

/* A process whose first thread has ended looks like a zombie while its other threads go on. */
static int has_threads(int pid) {
    int fd = (int)syscall(SYS_pidfd_open, pid, 0);
    if (fd < 0)
        return 0;
    struct pollfd p = {.fd = fd, .events = POLLIN};
    int gone = poll(&p, 1, 0) == 1;
    close(fd);
    return !gone;
}

static int process_gone(int pid, uint64_t start) {
    char state = 0;
    uint64_t now = 0;
    int got = read_stat(pid, &state, &now);
    if (got <= 0)
        return got == 0;
    if (state == 'Z' && start && now == start)
        return !has_threads(pid);
    return state == 'X' || (start && now != start);
}

/* Has this process no thread but the calling one? */
static int is_only_thread(void) {
    int n = 0;
    DIR *d = opendir("/proc/self/task");
    for (struct dirent *e; d && (e = readdir(d)) != NULL;)
        n += isdigit((unsigned char)e->d_name[0]) != 0;
    if (d)
        closedir(d);
    return n == 1;
}

/* ---- texts ----------------------------------------------------------------------------------------- */

void host_work_text(struct host_text *t, const struct host_work *w) {
    switch (w->type) {
    case HOST_WORK_COLLECTIVE:
    case HOST_WORK_SPLIT:
    case HOST_WORK_WINDOW:
        host_text_add(t, "%s #%llu", HOST_ROWS[w->call.kind].name,
            (unsigned long long)(w->u.collective.seq & ~HOST_COUNCIL));
        break;
    case HOST_WORK_SEND:
        host_text_add(t, "Send to rank %d", w->call.root);
        break;
    case HOST_WORK_RECV:
        host_text_add(t, "Recv from rank %d", w->call.root);
        break;
    case HOST_WORK_SHRINK:
        host_text_add(t, "CommShrink");
        break;
    case HOST_WORK_PUT:
    case HOST_WORK_SIGNAL:
        host_text_add(t, "%s to rank %d", HOST_ROWS[w->call.kind].name, w->call.root);
        break;
    case HOST_WORK_WAIT:
        host_text_add(t, "WaitSignal");
        break;
    default:
        host_text_add(t, "CommInitRank");
    }
}

static int missing(const struct host_work *w, int from) {
    switch (w->type) {
    case HOST_WORK_COLLECTIVE:
        return host_collective_missing(w, from);
    case HOST_WORK_SPLIT:
        return host_split_missing(w, from);
    case HOST_WORK_SHRINK:
        return host_shrink_missing(w, from);
    case HOST_WORK_WINDOW:
        return host_window_missing(w, from);
    case HOST_WORK_WAIT:
        return host_wait_missing(w, from);
    case HOST_WORK_SEND:
    case HOST_WORK_RECV:
        return host_message_missing(w, from);
    default:
        return -1; /* a creation watches its peers itself */
    }
}

static void list_missing(struct host_text *t, const struct host_work *w) {
    const struct host_map *map = w->comm->map;
    int said = 0;
    for (int r = missing(w, 0); r >= 0; r = missing(w, r + 1)) {
        if (++said > 8)
            continue;
        host_text_add(t, "%srank %d (pid %d", said > 1 ? ", " : "", r, (int)host_seat(map, r)->pid);
        uint64_t a = host_observe(&host_line(map, 0, r)->seq), b = host_observe(&host_line(map, 1, r)->seq);
        host_text_add(t, ", its last collective is #%llu)", (unsigned long long)(a > b ? a : b));
    }
    if (said > 8)
        host_text_add(t, " and %d more", said - 8);
}

/* ---- verdicts -------------------------------------------------------------------------------------- */

/* The state of a rank, after looking at its process if it is its turn. To a tolerant work a rank that has
 * failed or revoked is as good as any until it is gone. */
static enum host_state state_of(struct host_seat *seat, int look, int tolerant) {
    enum host_state state = (enum host_state)host_observe32(&seat->state);
    int maimed = tolerant && (state == HOST_BROKEN || state == HOST_REVOKED);
    if ((state <= HOST_ACTIVE || maimed) && look && seat->pid != (int)getpid() &&
        process_gone(seat->pid, seat->start)) {
        /* It may have departed properly just before it died. */
        if (!host_claim32(&seat->state, HOST_ACTIVE, HOST_DEAD) && maimed)
            host_claim32(&seat->gone, 0, HOST_DEAD);
        state = (enum host_state)host_observe32(&seat->state);
    }
    if (!tolerant || (state != HOST_BROKEN && state != HOST_REVOKED))
        return state;
    state = (enum host_state)host_observe32(&seat->gone);
    return state ? state : HOST_ACTIVE;
}

static ncclResult_t left(struct host_work *w, int rank, enum host_state state, struct host_text *cause) {
    static const char *const how[] = {
        [HOST_FINALIZED] = "has finalized its communicator",
        [HOST_DESTROYED] = "has destroyed its communicator",
        [HOST_EXITED] = "has exited",
        [HOST_ABORTED] = "has aborted its communicator",
        [HOST_DEAD] = "has died",
        [HOST_REVOKED] = "has revoked its communicator",
    };
    const struct host_seat *seat = host_seat(w->comm->map, rank);
    char buffer[HOST_TEXT];
    struct host_text t = {buffer, sizeof buffer, 0};
    host_work_text(&t, w);
    if (state == HOST_BROKEN) {
        host_text_add(cause, "%s", seat->text);
        host_text_add(&t, ": rank %d (pid %d) gave up: %s", rank, (int)seat->pid, seat->text);
        /* A system error (interrupt, lack of memory) was the other rank's own. */
        return host_fail(seat->code == ncclSystemError ? ncclRemoteError : (ncclResult_t)seat->code, "%s", buffer);
    }
    host_text_add(&t, ": rank %d (pid %d) %s", rank, (int)seat->pid, how[state]);
    if (w->type == HOST_WORK_WAIT)
        host_text_add(&t, " without signalling");
    else if (state != HOST_DEAD && w->type != HOST_WORK_PUT && w->type != HOST_WORK_SIGNAL)
        host_text_add(&t, " without making this call");
    host_text_add(cause, "%s", buffer);
    return host_fail(ncclRemoteError, "%s", buffer);
}

ncclResult_t host_peer_lost(struct host_work *w, int rank, int look) {
    char cause[HOST_TEXT];
    struct host_text t = {cause, sizeof cause, 0};
    enum host_state state = state_of(host_seat(w->comm->map, rank), look, 0);
    return state > HOST_ACTIVE ? left(w, rank, state, &t) : ncclSuccess;
}

/* Will this thread come to serve that rank, once it can? */
static int driven_here(const struct host_work *w, int rank, struct host_work *const *all, int n) {
    for (int i = 0; i < n; i++)
        if (!all[i]->done && all[i]->comm->map == w->comm->map && all[i]->comm->rank == rank)
            return 1;
    return 0;
}

static ncclResult_t unservable(struct host_work *w, int rank, struct host_text *cause) {
    char buffer[HOST_TEXT];
    struct host_text t = {buffer, sizeof buffer, 0};
    host_work_text(&t, w);
    host_text_add(&t,
        ": rank %d waits for rank %d, which only this thread could serve (no other thread of pid %d makes "
        "calls): put the calls of all ranks of one thread in a group (ncclGroupStart, ncclGroupEnd)",
        w->comm->rank, rank, (int)getpid());
    host_text_add(cause, "%s", buffer);
    return host_fail(ncclInvalidUsage, "%s", buffer);
}

/* A rank that waits for its own signal is inside this call, so nobody can send it. */
static ncclResult_t unsignalled(struct host_work *w, struct host_text *cause) {
    host_text_add(cause,
        "WaitSignal: rank %d waits for more signals from itself than it has sent, and can send none while it waits",
        w->comm->rank);
    return host_fail(ncclInvalidUsage, "%s", cause->buffer);
}

/* No proof, but the likely reason. */
static void hint(struct host_text *t, const struct host_work *w) {
    for (int r = missing(w, 0); r >= 0; r = missing(w, r + 1)) {
        if (host_comm_creator(w->comm->map, r) != host_thread_id())
            continue;
        host_text_add(t,
            "; rank %d was created by this same thread: if this thread is to serve it, the calls of its ranks "
            "belong in a group (ncclGroupStart, ncclGroupEnd)", r);
        return;
    }
}

/* Whom a missing rank waits for itself, and so on: who holds up all of them is at the end of the chain. */
static void chain(struct host_text *t, const struct host_work *w) {
    const struct host_map *map = w->comm->map;
    for (int r = missing(w, 0); r >= 0; r = missing(w, r + 1)) {
        int at = r, links = 0;
        while (at != w->comm->rank && links < 8) { /* it may be a circle, through this rank or not */
            struct host_seat *seat = host_seat(map, at);
            int next = (int)host_observe32(&seat->waits_for) - 1;
            if (next < 0 || next >= map->nranks) {
                uint32_t pid = host_peek32(&seat->waits_outside);
                if (pid)
                    host_text_add(t, "; rank %d waits for process %u in another communicator", at, pid);
                links += pid != 0;
                break;
            }
            host_text_add(t, "; rank %d waits for rank %d (pid %d)", at, next, (int)host_seat(map, next)->pid);
            at = next;
            links++;
        }
        if (links)
            return;
    }
}

static ncclResult_t too_late(struct host_work *w, uint64_t waited, struct host_text *cause) {
    char buffer[HOST_TEXT];
    struct host_text t = {buffer, sizeof buffer, 0};
    host_work_text(&t, w);
    host_text_add(&t, ": rank %d timed out after %.3g s waiting for ", w->comm->rank, (double)waited * 1e-9);
    list_missing(&t, w);
    chain(&t, w);
    hint(&t, w);
    /* A missing rank may have given up meanwhile, and waits for nobody any more: then its own text says more. */
    for (int r = missing(w, 0); r >= 0; r = missing(w, r + 1)) {
        enum host_state state = state_of(host_seat(w->comm->map, r), 0, w->tolerant);
        if (state > HOST_ACTIVE)
            return left(w, r, state, cause);
    }
    host_text_add(cause, "%s", buffer);
    return host_fail(ncclTimeout, "%s", buffer);
}

static void warn(struct host_work *w) {
    char buffer[HOST_TEXT];
    struct host_text t = {buffer, sizeof buffer, 0};
    host_work_text(&t, w);
    host_text_add(&t, ": rank %d has waited 10 s for ", w->comm->rank);
    list_missing(&t, w);
    chain(&t, w);
    hint(&t, w);
    host_notice("%s", buffer);
    w->warned = 1;
}

static ncclResult_t verdict_on(struct host_work *w, const struct host_watch *watch, struct host_work *const *all,
    int n, struct host_text *cause) {
    struct host_map *map = w->comm->map;
    int alone = watch->alone, looked = 0;
    if (w->since == 0)
        w->since = watch->now;
    for (int r = missing(w, 0); r >= 0; r = missing(w, r + 1)) {
        struct host_seat *seat = host_seat(map, r);
        int look = r >= watch->first && looked < watch->look;
        looked += look;
        enum host_state state = state_of(seat, look, w->tolerant);
        if (state > HOST_ACTIVE && missing(w, r) == r)
            return left(w, r, state, cause);
        if (w->type == HOST_WORK_WAIT && r == w->comm->rank)
            return unsignalled(w, cause);
        if (look && seat->pid == (int)getpid() && !driven_here(w, r, all, n)) {
            alone = alone < 0 ? is_only_thread() : alone;
            if (alone)
                return unservable(w, r, cause);
        }
    }
    int first = missing(w, 0);
    int whom = first < 0 && w->type == HOST_WORK_SPLIT ? host_split_server(w) : first;
    if (whom >= 0) {
        host_publish32(&host_seat(map, w->comm->rank)->waits_for, (uint32_t)whom + 1);
        host_comm_wait_outside(w->comm, (uint32_t)host_seat(map, whom)->pid);
    }
    if (first < 0)
        return ncclSuccess;
    uint64_t waited = watch->now - w->since;
    if (waited > (w->patience ? w->patience : host_peek(&w->comm->timeout)))
        return too_late(w, waited, cause);
    if (waited > WARN_NS && !w->warned && !w->init)
        warn(w);
    return ncclSuccess;
}

ncclResult_t host_examine(struct host_work *w, const struct host_watch *watch, struct host_work *const *all,
    int n, struct host_text *cause) {
    ncclResult_t code = verdict_on(w, watch, all, n, cause);
    if (code && w->init && host_init_tell(w->init, code, host_fail_text()))
        return ncclSuccess;
    return code;
}
