/* Creation: the ranks of a new communicator find each other through an abstract unix socket.
 *
 * The socket's name comes from the unique id. Whoever comes first binds it and serves; the others connect
 * and say hello (who they are, how many ranks they expect). When all are there the server makes the segment
 * and sends its descriptor to everybody. Nobody else is needed: not the process that made the id, and no
 * thread, since the server is itself a rank that has nothing to do but wait. Abstract names vanish with
 * their process, so a crash leaves nothing.
 *
 *     START -> SERVE -> (all there) -> done             first comer
 *                    -> LINGER -> failed                tells late comers for a moment why it failed
 *     START -> JOIN -> (verdict) -> done or failed      everybody else
 *
 * A connection stays open until the verdict, so both sides notice at once when the other dies. Whatever goes
 * wrong for one goes wrong for all: the server sends the same code and text to everybody. A second socket,
 * the marker, is bound before the first is closed and lives as long as the server's communicator: whoever
 * finds it knows that the id has been used.
 *
 * Only processes of the same user take part: both sides check the credentials of the other. All state is in
 * struct host_init, which belongs to the thread that creates.
 */
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "liveness.h"
#include "work.h"

enum { START, SERVE, LINGER, JOIN };

#define LINGER_NS UINT64_C(250000000)
#define GRACE_NS UINT64_C(500000000)
#define WARN_NS UINT64_C(10000000000)

struct hello {
    uint32_t stamp;
    int32_t nranks, rank, pid;
    uint64_t start;
    uint64_t ids; /* digest of several ids, 0 for one */
};

/* An empty message after hello asks the server to give up: its sender's time is over. */

struct verdict {
    int32_t code;
    char text[512];
};

struct guest {
    int fd;
    int known; /* hello has arrived */
    int pid;   /* as the kernel names it here; differs from hello.pid in another PID namespace */
    struct hello hello;
};

struct host_init {
    struct ncclComm *comm;
    uint8_t id[HOST_ID];
    struct hello self;
    int state, fd; /* listening, or connected to the server */
    int epoll;     /* of a server: its listener and guests */
    int marker;
    struct guest *guests;
    int nguests, room, here; /* here: ranks that said hello, this one included */
    uint64_t begun, timeout, until; /* until: end of lingering, or of waiting for a last verdict */
    uint8_t (*ids)[HOST_ID]; /* of a creation with several, all of them; they are used up together */
    int nids;
    int asked, warned;
    struct verdict verdict;
};

struct host_init *host_init_new(
    struct ncclComm *c, int nranks, int rank, const uint8_t id[HOST_ID], uint64_t timeout) {
    struct host_init *init = calloc(1, sizeof *init);
    if (!init)
        return NULL;
    init->comm = c;
    memcpy(init->id, id, HOST_ID);
    init->self = (struct hello){
        host_stamp(), nranks, rank, (int32_t)getpid(), host_process_start((int)getpid()), 0};
    init->fd = init->epoll = init->marker = -1;
    init->timeout = timeout;
    return init;
}

static void close_fd(int *fd) {
    if (*fd >= 0)
        close(*fd);
    *fd = -1;
}

static void drop_guest(struct host_init *init, int i) {
    close_fd(&init->guests[i].fd);
    init->guests[i] = init->guests[--init->nguests];
}

void host_init_free(struct host_init *init) {
    if (!init)
        return;
    while (init->nguests)
        drop_guest(init, 0);
    close_fd(&init->fd);
    close_fd(&init->epoll);
    close_fd(&init->marker);
    free(init->ids);
    free(init->guests);
    free(init);
}

/* Whatever their order, ranks with the same ids meet under the smallest one, so that a different order or a
 * different other id is found there instead of making them miss each other. */
int host_init_set_ids(struct host_init *init, const ncclUniqueId *ids, int n) {
    init->ids = calloc((size_t)n, sizeof *init->ids);
    if (!init->ids)
        return 0;
    init->nids = n;
    uint64_t digest = 14695981039346656037u;
    for (int i = 0; i < n; i++) {
        memcpy(init->ids[i], ids[i].internal, HOST_ID);
        if (memcmp(init->ids[i], init->id, HOST_ID) < 0)
            memcpy(init->id, init->ids[i], HOST_ID);
        for (int j = 0; j < HOST_ID; j++)
            digest = (digest ^ init->ids[i][j]) * 1099511628211u;
    }
    init->self.ids = digest;
    return 1;
}

static void spend_ids(struct host_init *init) {
    host_id_spend(init->id);
    for (int i = 0; i < init->nids; i++)
        host_id_spend(init->ids[i]);
}

static int is_spent(const struct host_init *init) {
    int yes = host_id_is_spent(init->id);
    for (int i = 0; i < init->nids && !yes; i++)
        yes = host_id_is_spent(init->ids[i]);
    return yes;
}

int host_init_fd(const struct host_init *init) {
    return init->epoll >= 0 ? init->epoll : init->fd;
}

/* ---- sockets --------------------------------------------------------------------------------------- */

static socklen_t name_of(const struct host_init *init, const char *suffix, struct sockaddr_un *out) {
    char hex[2 * HOST_ID + 1];
    for (int i = 0; i < HOST_ID; i++)
        snprintf(hex + 2 * i, 3, "%02x", init->id[i]);
    memset(out, 0, sizeof *out);
    out->sun_family = AF_UNIX;
    int n = snprintf(out->sun_path + 1, sizeof out->sun_path - 1, "pynccl-%s%s", hex, suffix);
    return (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + (size_t)n);
}

static int is_marked(const struct host_init *init) {
    struct sockaddr_un name;
    socklen_t size = name_of(init, "-used", &name);
    int fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    int marked = fd >= 0 && connect(fd, (struct sockaddr *)&name, size) == 0;
    close_fd(&fd);
    return marked;
}

static void mark(struct host_init *init) {
    struct sockaddr_un name;
    socklen_t size = name_of(init, "-used", &name);
    init->marker = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    if (init->marker >= 0 && bind(init->marker, (struct sockaddr *)&name, size) != 0)
        close_fd(&init->marker);
}

static int same_user(int fd, int *pid) {
    struct ucred cred;
    socklen_t size = sizeof cred;
    if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &cred, &size) != 0 || cred.uid != geteuid())
        return 0;
    *pid = (int)cred.pid;
    return 1;
}

static void send_verdict(int to, const struct verdict *v, int segment) {
    char control[CMSG_SPACE(sizeof segment)] = {0};
    struct iovec part = {(void *)(uintptr_t)v, sizeof *v};
    struct msghdr msg = {.msg_iov = &part, .msg_iovlen = 1};
    if (segment >= 0) {
        msg.msg_control = control;
        msg.msg_controllen = sizeof control;
        struct cmsghdr *c = CMSG_FIRSTHDR(&msg);
        c->cmsg_level = SOL_SOCKET;
        c->cmsg_type = SCM_RIGHTS;
        c->cmsg_len = CMSG_LEN(sizeof segment);
        memcpy(CMSG_DATA(c), &segment, sizeof segment);
    }
    /* A guest that has gone is found out by others as a dead peer. */
    (void)!sendmsg(to, &msg, MSG_NOSIGNAL | MSG_DONTWAIT);
}

/* ---- texts ----------------------------------------------------------------------------------------- */

static enum host_step fail(struct host_work *w, ncclResult_t code, const char *text) {
    w->result = host_fail(code, "%s", text);
    spend_ids(w->init);
    return HOST_FAILED;
}

static enum host_step fail_errno(struct host_work *w, const char *what) {
    char text[256];
    snprintf(text, sizeof text, "CommInitRank: %s: %s", what, strerror(errno));
    return fail(w, ncclSystemError, text);
}

static const struct hello *hello_of(const struct host_init *init, int rank) {
    if (init->self.rank == rank)
        return &init->self;
    for (int i = 0; i < init->nguests; i++)
        if (init->guests[i].known && init->guests[i].hello.rank == rank)
            return &init->guests[i].hello;
    return NULL;
}

static void list_missing(const struct host_init *init, struct host_text *t) {
    int missing = init->self.nranks - init->here, said = 0;
    host_text_add(t, "missing rank%s", missing == 1 ? "" : "s");
    for (int r = 0; r < init->self.nranks && said < 16; r++)
        if (!hello_of(init, r))
            host_text_add(t, "%s %d", said++ ? "," : "", r);
    if (missing > said)
        host_text_add(t, " and %d more", missing - said);
}

/* ---- serving --------------------------------------------------------------------------------------- */

/* Tell everybody, and go on telling late comers for a moment. */
static void give_up(struct host_init *init, ncclResult_t code, const char *text) {
    init->verdict.code = code;
    snprintf(init->verdict.text, sizeof init->verdict.text, "%s", text);
    for (int i = 0; i < init->nguests; i++)
        send_verdict(init->guests[i].fd, &init->verdict, -1);
    init->state = LINGER;
    init->until = host_now() + LINGER_NS;
}

static void accept_guests(struct host_init *init) {
    for (;;) {
        int fd = accept4(init->fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
        if (fd < 0)
            return;
        int pid;
        if (!same_user(fd, &pid) || init->nguests >= 2 * HOST_MAX_RANKS) {
            close(fd);
            continue;
        }
        if (init->nguests == init->room) {
            int room = init->room ? 2 * init->room : 8;
            struct guest *more = realloc(init->guests, (size_t)room * sizeof *more);
            if (!more) {
                close(fd);
                continue;
            }
            init->guests = more;
            init->room = room;
        }
        init->guests[init->nguests++] = (struct guest){.fd = fd, .pid = pid};
        struct epoll_event e = {.events = EPOLLIN};
        epoll_ctl(init->epoll, EPOLL_CTL_ADD, fd, &e);
    }
}

/* A guest introduced itself: is that consistent with what is known? */
static void check_hello(struct host_init *init, const struct guest *g) {
    char text[512];
    const struct hello *h = &g->hello, *self = &init->self, *other;
    if (h->stamp != self->stamp) {
        snprintf(text, sizeof text,
            "CommInitRank: rank %d (pid %d) and rank %d (pid %d) use different builds of the host library "
            "(format %08x and %08x)", self->rank, self->pid, h->rank, h->pid, self->stamp, h->stamp);
        give_up(init, ncclInvalidUsage, text);
    } else if (h->nranks != self->nranks) {
        snprintf(text, sizeof text,
            "CommInitRank: ranks disagree about their number: rank %d (pid %d) says nranks=%d, rank %d "
            "(pid %d) says nranks=%d", self->rank, self->pid, self->nranks, h->rank, h->pid, h->nranks);
        give_up(init, ncclInvalidUsage, text);
    } else if (h->ids != self->ids) {
        snprintf(text, sizeof text,
            "CommInitRank: ranks disagree about the unique ids: rank %d (pid %d) and rank %d (pid %d) have other ids, "
            "or the same in another order", self->rank, self->pid, h->rank, h->pid);
        give_up(init, ncclInvalidUsage, text);
    } else if (h->pid != g->pid) { /* then nobody could tell whether the other is alive */
        snprintf(text, sizeof text,
            "CommInitRank: rank %d (pid %d) and rank %d (pid %d, here %d) live in different PID namespaces; run "
            "all ranks in one container", self->rank, self->pid, h->rank, h->pid, g->pid);
        give_up(init, ncclInvalidUsage, text);
    } else if ((other = hello_of(init, h->rank)) != NULL) {
        snprintf(text, sizeof text,
            "CommInitRank: rank %d of %d was given twice: to pid %d and to pid %d", h->rank, h->nranks,
            other->pid, h->pid);
        give_up(init, ncclInvalidUsage, text);
    }
}

static void lost_guest(struct host_init *init, const struct guest *g) {
    char text[256];
    if (!g->known || init->state != SERVE)
        return;
    snprintf(text, sizeof text, "CommInitRank: rank %d (pid %d) went away while the communicator was created",
        g->hello.rank, g->hello.pid);
    give_up(init, ncclRemoteError, text);
}

static void time_out(struct host_init *init, int rank) {
    char text[512];
    struct host_text t = {text, sizeof text, 0};
    host_text_add(&t, "CommInitRank: rank %d waited %.3g s for the other ranks: %d of %d are here, ", rank,
        (double)(host_now() - init->begun) * 1e-9, init->here, init->self.nranks);
    list_missing(init, &t);
    give_up(init, ncclTimeout, text);
}

/* Read what guest i has to say; 0 if it was dropped. */
static int hear_guest(struct host_init *init, int i) {
    struct guest *g = &init->guests[i];
    struct hello h;
    ssize_t got = recv(g->fd, &h, sizeof h, MSG_DONTWAIT);
    if (got < 0)
        return errno == EAGAIN || errno == EINTR ? -1 : 0;
    if (!g->known) {
        if (got != (ssize_t)sizeof h) {
            drop_guest(init, i);
            return 0;
        }
        g->hello = h;
        if (init->state == SERVE)
            check_hello(init, g);
        if (init->state == LINGER)
            send_verdict(g->fd, &init->verdict, -1);
        g->known = 1;
        init->here++;
        return 1;
    }
    if (got == 1) { /* it asks us to give up */
        if (init->state == SERVE)
            time_out(init, g->hello.rank);
        return 1;
    }
    struct guest gone = *g;
    drop_guest(init, i);
    init->here--;
    lost_guest(init, &gone);
    return 0;
}

static enum host_step take_seats(struct host_work *w) {
    struct host_init *init = w->init;
    struct ncclComm *c = init->comm;
    int n = init->self.nranks;
    int fd = host_segment_create(n, init->id, &c->map);
    if (fd < 0) {
        char text[256];
        snprintf(text, sizeof text, "CommInitRank: rank %d could not make the shared memory: %s",
            init->self.rank, strerror(errno));
        give_up(init, ncclSystemError, text);
        return HOST_MOVED;
    }
    for (int r = 0; r < n; r++) {
        const struct hello *h = hello_of(init, r);
        struct host_seat *seat = host_seat(c->map, r);
        seat->pid = h->pid;
        seat->start = h->start;
        host_publish32(&seat->state, HOST_ACTIVE);
    }
    mark(init);
    struct verdict good = {.code = ncclSuccess};
    for (int i = 0; i < init->nguests; i++)
        if (init->guests[i].known)
            send_verdict(init->guests[i].fd, &good, fd);
    close(fd);
    c->marker = init->marker;
    init->marker = -1;
    return HOST_FINISHED;
}

static enum host_step serve(struct host_work *w) {
    struct host_init *init = w->init;
    int before = init->here;
    accept_guests(init);
    for (int i = init->nguests - 1; i >= 0; i--)
        while (i < init->nguests && hear_guest(init, i) > 0) {
        }
    if (init->state == LINGER)
        return host_now() < init->until ? HOST_STALLED : fail(w, init->verdict.code, init->verdict.text);
    if (init->here == init->self.nranks)
        return take_seats(w);
    uint64_t waited = host_now() - init->begun;
    if (waited > init->timeout)
        time_out(init, init->self.rank);
    else if (waited > WARN_NS && !init->warned) {
        char text[256];
        struct host_text t = {text, sizeof text, 0};
        list_missing(init, &t);
        host_notice("rank %d has waited 10 s for the creation of a communicator of %d: %s", init->self.rank,
            init->self.nranks, text);
        init->warned = 1;
    }
    return init->here > before ? HOST_MOVED : HOST_STALLED;
}

int host_init_here(const struct host_init *init, int rank) {
    return init->state != SERVE || hello_of(init, rank) != NULL;
}

int host_init_tell(struct host_init *init, ncclResult_t code, const char *text) {
    if (init->state != SERVE)
        return 0;
    accept_guests(init); /* who has knocked must hear it, too */
    give_up(init, code, text);
    return 1;
}

/* ---- joining --------------------------------------------------------------------------------------- */

int host_init_server(const struct host_init *init) {
    int pid; /* of the process that bound the socket, which is the one that listens */
    return init->state == JOIN && same_user(init->fd, &pid) ? pid : 0;
}

static enum host_step heed(struct host_work *w, const struct verdict *v, int segment) {
    struct host_init *init = w->init;
    if (v->code != ncclSuccess)
        return fail(w, (ncclResult_t)v->code, v->text);
    init->comm->map = host_segment_attach(segment, init->self.nranks, init->id);
    return init->comm->map ? HOST_FINISHED : fail_errno(w, "cannot map the shared memory");
}

/* Receive the verdict and the segment that comes with it; 0 or -1 where there is none. */
static ssize_t take_verdict(int fd, struct verdict *v, int *segment) {
    char control[CMSG_SPACE(sizeof(int))];
    struct iovec part = {v, sizeof *v};
    struct msghdr msg = {
        .msg_iov = &part, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control};
    ssize_t got = recvmsg(fd, &msg, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
    struct cmsghdr *c = got > 0 ? CMSG_FIRSTHDR(&msg) : NULL;
    if (c && c->cmsg_type == SCM_RIGHTS)
        memcpy(segment, CMSG_DATA(c), sizeof *segment);
    return got;
}

static enum host_step join(struct host_work *w) {
    struct host_init *init = w->init;
    struct verdict v;
    int segment = -1;
    ssize_t got = take_verdict(init->fd, &v, &segment);
    /* An end may be told before the last message: Linux looks at the queue and at the other end's close one
     * after the other, and a reset comes first.  What was sent before is there at the second look. */
    if (got == 0 || (got < 0 && errno == ECONNRESET))
        got = take_verdict(init->fd, &v, &segment);
    if (got == (ssize_t)sizeof v) {
        enum host_step step = heed(w, &v, segment);
        close_fd(&segment);
        return step;
    }
    if (got >= 0 || (errno != EAGAIN && errno != EINTR)) {
        char text[256];
        snprintf(text, sizeof text,
            "CommInitRank: rank %d: the rank that gathered the others (pid %d) went away while the communicator "
            "was created", init->self.rank, host_init_server(init));
        return fail(w, ncclRemoteError, text);
    }
    uint64_t now = host_now();
    if (now - init->begun <= init->timeout)
        return HOST_STALLED;
    if (!init->asked) { /* only the server knows who is missing */
        init->asked = 1;
        init->until = now + GRACE_NS;
        (void)!send(init->fd, "?", 1, MSG_NOSIGNAL | MSG_DONTWAIT);
    }
    if (now < init->until)
        return HOST_STALLED;
    char text[256];
    snprintf(text, sizeof text,
        "CommInitRank: rank %d timed out after %.3g s, and the rank that gathers the others (pid %d) does not answer",
        init->self.rank, (double)init->timeout * 1e-9, host_init_server(init));
    return fail(w, ncclTimeout, text);
}

/* ---- start ----------------------------------------------------------------------------------------- */

static enum host_step spent(struct host_work *w) {
    char text[256];
    snprintf(text, sizeof text,
        "CommInitRank: rank %d (pid %d): this unique id has already been used, or its creation has failed; every "
        "communicator needs a new one from ncclGetUniqueId", w->init->self.rank, w->init->self.pid);
    return fail(w, ncclInvalidUsage, text);
}

static enum host_step become_server(struct host_work *w, int fd) {
    struct host_init *init = w->init;
    init->fd = fd;
    /* The id's previous server binds the marker before it lets go of this name. */
    if (is_marked(init))
        return spent(w);
    init->epoll = epoll_create1(EPOLL_CLOEXEC);
    struct epoll_event e = {.events = EPOLLIN};
    if (init->epoll < 0 || listen(fd, HOST_MAX_RANKS) != 0 ||
        epoll_ctl(init->epoll, EPOLL_CTL_ADD, fd, &e) != 0)
        return fail_errno(w, "cannot listen");
    init->state = SERVE;
    init->here = 1;
    return serve(w);
}

static enum host_step become_guest(struct host_work *w, int fd) {
    struct host_init *init = w->init;
    int pid;
    init->fd = fd;
    if (!same_user(fd, &pid))
        return fail(w, ncclInvalidUsage, "CommInitRank: this unique id is in use by another user's process");
    if (send(fd, &init->self, sizeof init->self, MSG_NOSIGNAL | MSG_DONTWAIT) < 0)
        return fail_errno(w, "cannot greet the other ranks");
    init->state = JOIN;
    return HOST_MOVED;
}

static enum host_step start(struct host_work *w) {
    struct host_init *init = w->init;
    if (!init->begun) {
        init->begun = host_now();
        if (is_spent(init) || is_marked(init))
            return spent(w);
    }
    struct sockaddr_un name;
    socklen_t size = name_of(init, "", &name);
    int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0)
        return fail_errno(w, "no socket");
    if (bind(fd, (struct sockaddr *)&name, size) == 0)
        return become_server(w, fd);
    int err = errno;
    if (err == EADDRINUSE && connect(fd, (struct sockaddr *)&name, size) == 0)
        return become_guest(w, fd);
    if (err == EADDRINUSE)
        err = errno;
    close(fd);
    /* Refused: bound but not yet listening, or closed this moment. Full: too many at once. Try again. */
    if (err == ECONNREFUSED || err == EAGAIN || err == EADDRINUSE || err == EINTR) {
        if (host_now() - init->begun > init->timeout)
            return fail(w, ncclTimeout, "CommInitRank: timed out before the other ranks could be reached");
        host_nap(200000);
        return HOST_STALLED;
    }
    errno = err;
    return fail_errno(w, "cannot reach the other ranks");
}

static enum host_step alone(struct host_work *w) {
    struct host_init *init = w->init;
    if (is_spent(init))
        return spent(w);
    int fd = host_segment_create(1, init->id, &init->comm->map);
    if (fd < 0)
        return fail_errno(w, "cannot make the shared memory");
    close(fd);
    struct host_seat *seat = host_seat(init->comm->map, 0);
    seat->pid = init->self.pid;
    seat->start = init->self.start;
    host_publish32(&seat->state, HOST_ACTIVE);
    return HOST_FINISHED;
}

enum host_step host_init_step(struct host_work *w) {
    struct host_init *init = w->init;
    enum host_step step;
    if (init->self.nranks == 1)
        step = alone(w);
    else if (init->state == START)
        step = start(w);
    else
        step = init->state == JOIN ? join(w) : serve(w);
    if (step == HOST_FINISHED) {
        init->comm->rank = init->self.rank;
        init->comm->nranks = init->self.nranks;
        spend_ids(init);
        if (!host_comm_ready(init->comm))
            step = fail(w, ncclSystemError, "CommInitRank: out of memory");
    }
    return step;
}
