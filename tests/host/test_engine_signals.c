/* Puts, signals and waits: that the data is there when its signal is, in every order in which calls can be made;
 * that waits take what they wait for and no more; what is refused; and what a wait or a put gets when its peer
 * is gone. */
#include "world.h"

enum { PAGE = 4096, MOST = 8 };

/* The memory of one rank, and its window. */
struct part {
    ncclComm_t comm;
    int rank;
    int64_t *at;
    ncclWindow_t win;
};

/* A window of `bytes` for every rank that this thread serves. */
static void open_windows(struct seats *s, struct part *parts, size_t bytes) {
    OK(ncclGroupStart());
    for (int i = 0; i < s->n; i++) {
        parts[i] = (struct part){s->comms[i], s->first + i, NULL, NULL};
        OK(ncclMemAlloc((void **)&parts[i].at, bytes));
        memset(parts[i].at, 0, bytes);
        OK(ncclCommWindowRegister(s->comms[i], parts[i].at, bytes, &parts[i].win, NCCL_WIN_COLL_SYMMETRIC));
    }
    OK(ncclGroupEnd());
    for (int i = 0; i < s->n; i++)
        CHECK(parts[i].win, "no window");
}

static void close_windows(struct seats *s, struct part *parts) {
    for (int i = 0; i < s->n; i++) {
        OK(ncclCommWindowDeregister(s->comms[i], parts[i].win));
        OK(ncclMemFree(parts[i].at));
    }
}

static ncclResult_t wait_one(ncclComm_t c, int peer, int count) {
    ncclWaitSignalDesc_t d = {.opCnt = count, .peer = peer};
    return ncclWaitSignal(1, &d, c, NULL);
}

/* Everybody signals everybody, also itself; with more than six ranks the wait is more than one work. */
static void barrier(struct seats *s) {
    OK(ncclGroupStart());
    for (int i = 0; i < s->n; i++) {
        ncclWaitSignalDesc_t all[MOST * MOST];
        for (int r = 0; r < s->nranks; r++) {
            OK(ncclSignal(r, 0, 0, 0, s->comms[i], NULL));
            all[r] = (ncclWaitSignalDesc_t){.opCnt = 1, .peer = r};
        }
        OK(ncclWaitSignal(s->nranks, all, s->comms[i], NULL));
    }
    OK(ncclGroupEnd());
}

/* ---- rings and barriers ---- */

static void ring(struct seats *s) {
    static const size_t counts[] = {0, 1, 3, 511, 512, 40000};
    struct part parts[MOST];
    int n = s->nranks;
    open_windows(s, parts, 2 * 40000 * sizeof(int64_t));
    for (size_t k = 0; k < sizeof counts / sizeof *counts; k++) {
        size_t count = counts[k];
        for (int i = 0; i < s->n; i++)
            for (size_t j = 0; j < count; j++)
                parts[i].at[j] = (int64_t)(j * 7 + k) + 1000000 * parts[i].rank;
        OK(ncclGroupStart());
        for (int i = 0; i < s->n; i++) {
            struct part *p = &parts[i];
            OK(ncclPutSignal(p->at, count, ncclInt64, (p->rank + 1) % n, p->win, 40000 * sizeof(int64_t), 0, 0, 0,
                p->comm, NULL));
            OK(wait_one(p->comm, (p->rank + n - 1) % n, 1));
        }
        OK(ncclGroupEnd());
        for (int i = 0; i < s->n; i++)
            for (size_t j = 0; j < count; j++)
                CHECK(parts[i].at[40000 + j] == (int64_t)(j * 7 + k) + 1000000 * ((parts[i].rank + n - 1) % n),
                    "element %zu of %zu", j, count);
        barrier(s);
    }
    close_windows(s, parts);
}

/* Nobody passes a barrier before everybody has come: what all had put before is there. Collectives in between,
 * a different number of one-sided calls on each rank. */
static void barriers(struct seats *s) {
    struct part parts[MOST];
    int n = s->nranks;
    open_windows(s, parts, PAGE);
    for (int k = 1; k <= 300; k++) {
        OK(ncclGroupStart());
        for (int i = 0; i < s->n; i++) {
            struct part *p = &parts[i];
            p->at[100] = k;
            for (int r = 0; r < n; r++)
                OK(ncclPutSignal(&p->at[100], 1, ncclInt64, r, p->win, (size_t)p->rank * 8, 0, 0, 0, p->comm, NULL));
        }
        OK(ncclGroupEnd());
        barrier(s);
        for (int i = 0; i < s->n; i++) {
            for (int r = 0; r < n; r++)
                CHECK(parts[i].at[r] == k, "%lld in round %d", (long long)parts[i].at[r], k);
            for (int r = 0; r < n; r++) /* the signals of the puts: one was taken by the barrier */
                OK(wait_one(parts[i].comm, r, 1));
        }
        if (k % 10 == 0) {
            int64_t x[MOST];
            OK(ncclGroupStart());
            for (int i = 0; i < s->n; i++) {
                x[i] = k;
                OK(ncclAllReduce(&x[i], &x[i], 1, ncclInt64, ncclSum, s->comms[i], NULL));
            }
            OK(ncclGroupEnd());
            for (int i = 0; i < s->n; i++)
                CHECK(x[i] == (int64_t)n * k, "%lld", (long long)x[i]);
        }
        barrier(s);
    }
    close_windows(s, parts);
}

/* ---- order ---- */

/* 10,000 puts, each signalled; waited for one by one, by hundreds, and all at once. */
static void ordered(struct seats *s) {
    enum { PUTS = 10000 };
    struct part p;
    open_windows(s, &p, (PUTS + 1) * 8);
    for (int step = 1; step <= PUTS; step *= 100) {
        if (s->first == 0)
            for (int i = 0; i < PUTS; i++) {
                p.at[PUTS] = i + step;
                OK(ncclPutSignal(&p.at[PUTS], 1, ncclInt64, 1, p.win, (size_t)i * 8, 0, 0, 0, p.comm, NULL));
            }
        if (s->first == 1)
            for (int i = 0; i < PUTS; i += step) {
                OK(wait_one(p.comm, 0, step));
                for (int k = i; k < i + step; k++)
                    CHECK(p.at[k] == k + step, "%lld at %d", (long long)p.at[k], k);
            }
        barrier(s);
    }
    OK(pyncclHostSetTimeout(p.comm, 0.2));
    if (s->first == 0)
        usleep(600000);
    if (s->first == 1) { /* nothing is left */
        FAILS(ncclTimeout, wait_one(p.comm, 0, 1));
        has("WaitSignal");
        has("rank 0 (pid ");
    }
}

/* ---- contexts, indices, oneself ---- */

static void counters(struct seats *s) {
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.numRmaCtx = 3;
    config.numRmaSig = 5;
    ncclComm_t c, child;
    OK(ncclCommSplit(s->comms[0], 0, 0, &c, &config));
    OK(ncclCommSplit(c, 0, 0, &child, NULL)); /* inherits them */
    FAILS(ncclInvalidArgument, ncclSignal(0, 0, 3, 0, c, NULL));
    has("Context 3 is invalid (must be in [0, 3))");
    FAILS(ncclInvalidArgument, ncclSignal(0, 5, 0, 0, child, NULL));
    has("Signal index 5 is invalid (must be in [0, 5))");
    FAILS(ncclInvalidArgument, ncclSignal(0, -1, 0, 0, child, NULL));
    int next = (s->first + 1) % s->nranks, previous = (s->first + s->nranks - 1) % s->nranks;
    ncclComm_t comms[] = {c, child};
    for (int k = 0; k < 2; k++) {
        for (int i = 0; i < 15; i++)
            for (int j = 0; j <= i; j++)
                OK(ncclSignal(next, i % 5, i / 5, 0, comms[k], NULL));
        ncclWaitSignalDesc_t d[30]; /* each counter in two parts */
        for (int i = 0; i < 15; i++)
            d[15 + i] = (ncclWaitSignalDesc_t){.opCnt = 1, .peer = previous, .sigIdx = i % 5, .ctx = i / 5};
        for (int i = 0; i < 15; i++) {
            d[i] = d[15 + i];
            d[i].opCnt = i ? i : 1;
        }
        OK(ncclWaitSignal(15, d, comms[k], NULL));
        OK(ncclWaitSignal(14, d + 16, comms[k], NULL)); /* of the first there was only one */
    }
    OK(ncclCommDestroy(child));
    OK(ncclCommDestroy(c));
}

static void oneself(struct seats *s) {
    struct part p;
    int me = s->first;
    open_windows(s, &p, PAGE);
    p.at[0] = 42;
    OK(ncclPutSignal(p.at, 1, ncclInt64, me, p.win, 16, 0, 0, 0, p.comm, NULL));
    OK(ncclSignal(me, 0, 0, 0, p.comm, NULL));
    OK(wait_one(p.comm, me, 2));
    CHECK(p.at[2] == 42, "%lld", (long long)p.at[2]);
    OK(ncclGroupStart()); /* the wait may come first */
    OK(wait_one(p.comm, me, 1));
    OK(ncclSignal(me, 0, 0, 0, p.comm, NULL));
    OK(ncclGroupEnd());
    close_windows(s, &p);
    double begin = seconds_now();
    FAILS(ncclInvalidUsage, wait_one(p.comm, me, 1));
    has("waits for more signals from itself than it has sent");
    CHECK(seconds_now() - begin < 1, "after %g s", seconds_now() - begin);
}

/* ---- mixed groups and streams ---- */

static void mixed(struct seats *s, cudaStream_t a, cudaStream_t b) {
    struct part p;
    int n = s->nranks, me = s->first, next = (me + 1) % n, previous = (me + n - 1) % n;
    open_windows(s, &p, PAGE);
    for (int k = 0; k < 100; k++) {
        int64_t sum = 0, got = 0, mine = me + k;
        p.at[0] = k * 10 + me;
        OK(ncclGroupStart());
        OK(ncclRecv(&got, 1, ncclInt64, previous, p.comm, b));
        OK(ncclAllReduce(&mine, &sum, 1, ncclInt64, ncclSum, p.comm, a));
        OK(wait_one(p.comm, previous, 1));
        OK(ncclPutSignal(p.at, 1, ncclInt64, next, p.win, 8, 0, 0, 0, p.comm, b));
        OK(ncclSend(&mine, 1, ncclInt64, next, p.comm, a));
        OK(ncclGroupEnd());
        CHECK(p.at[1] == k * 10 + previous && got == previous + k && sum == n * k + n * (n - 1) / 2, "round %d", k);
        barrier(s);
    }
    close_windows(s, &p);
}

static void mixed_groups(struct seats *s) {
    mixed(s, NULL, NULL);
}

static void streams(struct seats *s) {
    cudaStream_t a, b;
    struct part p;
    int n = s->nranks, me = s->first, next = (me + 1) % n, previous = (me + n - 1) % n;
    OK(pyncclHostStreamCreate(&a));
    OK(pyncclHostStreamCreate(&b));
    mixed(s, a, b); /* the wait on the default stream makes the end of the group wait */
    open_windows(s, &p, 2 * PAGE);
    for (int i = 0; i < 100; i++)
        p.at[i] = i + 100 * me;
    for (int i = 0; i < 100; i++) {
        ncclWaitSignalDesc_t d = {.opCnt = 1, .peer = previous};
        OK(ncclPutSignal(&p.at[i], 1, ncclInt64, next, p.win, PAGE + (size_t)i * 8, 0, 0, 0, p.comm, i % 2 ? a : b));
        OK(ncclWaitSignal(1, &d, p.comm, i % 3 ? a : b));
    }
    OK(pyncclHostStreamSynchronize(a, 20));
    OK(pyncclHostStreamSynchronize(b, 20));
    for (int i = 0; i < 100; i++)
        CHECK(p.at[PAGE / 8 + i] == i + 100 * previous, "%lld", (long long)p.at[PAGE / 8 + i]);
    barrier(s);
    if (me == 0) { /* a wait on a stream returns at once */
        ncclWaitSignalDesc_t d = {.opCnt = 1, .peer = 1};
        OK(ncclWaitSignal(1, &d, p.comm, a));
        FAILS(ncclInProgress, pyncclHostStreamQuery(a));
    } else if (me == 1) {
        usleep(100000);
        OK(ncclSignal(0, 0, 0, 0, p.comm, b));
    }
    close_windows(s, &p); /* which waits for what is queued */
    OK(pyncclHostStreamSynchronize(a, 20));
    OK(pyncclHostStreamDestroy(a));
    OK(pyncclHostStreamDestroy(b));
}

static void nonblocking(struct seats *s) {
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    ncclComm_t c;
    ncclResult_t state;
    OK(ncclCommSplit(s->comms[0], 0, 0, &c, &config));
    ncclWaitSignalDesc_t d[20];
    for (int i = 0; i < 20; i++)
        d[i] = (ncclWaitSignalDesc_t){.opCnt = 1, .peer = 1 - s->first};
    for (int i = 0; i < 21; i++) {
        ncclResult_t code =
            i < 20 ? ncclSignal(1 - s->first, 0, 0, 0, c, NULL) : ncclWaitSignal(20, d, c, NULL);
        CHECK(code == ncclInProgress, "%d: %s", (int)code, pyncclHostLastError());
        do {
            usleep(100);
            OK(ncclCommGetAsyncError(c, &state));
        } while (state == ncclInProgress);
        CHECK(!state, "%d", (int)state);
    }
    FAILS(ncclInvalidArgument, ncclWaitSignal(0, d, c, NULL)); /* stays */
    OK(ncclCommGetAsyncError(c, &state));
    CHECK(state == ncclInvalidArgument, "%d", (int)state);
    OK(ncclCommAbort(c));
}

/* ---- what is refused ---- */

static void refusals(struct seats *s) {
    struct part p, q;
    ncclComm_t c = s->comms[0];
    int64_t outside = 0;
    open_windows(s, &p, PAGE);
    OK(ncclMemAlloc((void **)&q.at, PAGE));
    OK(ncclCommWindowRegister(c, q.at, PAGE, &q.win, NCCL_WIN_DEFAULT));
#define PUT(from, count, type, peer, win, offset, index, context, flags, comm) \
    FAILS(ncclInvalidArgument, \
        ncclPutSignal(from, count, (ncclDataType_t)(type), peer, win, offset, index, context, flags, comm, NULL))
    PUT(p.at, 1, ncclInt64, 0, p.win, 0, 0, 0, 0, NULL);
    has("PutSignal : comm argument is NULL");
    PUT(p.at, 1, ncclInt64, s->nranks, p.win, 0, 0, 1, 0, c);
    has("PutSignal : invalid root 2 (root should be in the 0..1 range)");
    PUT(p.at, 1, 77, 0, p.win, 0, 0, 1, 0, c);
    has("PutSignal : invalid type 77");
    PUT(p.at, 1, ncclInt64, 0, p.win, 0, 1, 1, 1, c);
    has("Context 1 is invalid (must be in [0, 1))");
    PUT(p.at, 1, ncclInt64, 0, p.win, 0, 1, 0, 1, c);
    has("Signal index 1 is invalid (must be in [0, 1))");
    PUT(p.at, 1, ncclInt64, 0, NULL, 0, 0, 0, 1, c);
    has("flags 0x1");
    PUT(NULL, 1, ncclInt64, 0, NULL, 0, 0, 0, 0, c);
    has("peerWin is NULL");
    PUT(NULL, 1, ncclInt64, 0, p.win, 0, 0, 0, 0, c);
    has("srcBuff is NULL");
    PUT(&outside, 1, ncclInt64, 0, p.win, 0, 0, 0, 0, c);
    has("srcWinHost is not in a valid symmetric window");
    PUT(q.at, 1, ncclInt64, 0, p.win, 0, 0, 0, 0, c); /* registered, but not as a symmetric one */
    has("srcWinHost is not in a valid symmetric window");
    PUT(p.at + PAGE / 8 - 1, 2, ncclInt64, 0, p.win, 0, 0, 0, 0, c);
    has("srcWinHost is not in a valid symmetric window");
    PUT(p.at, 1, ncclInt64, 0, (ncclWindow_t)(uintptr_t)p.at, 0, 0, 0, 0, c);
    has("is not a window of this communicator");
    PUT(p.at, 2, ncclInt64, 0, p.win, PAGE - 8, 0, 0, 0, c);
    has("PutSignal : 16 bytes at offset 4088 go beyond the window of rank 0, which has 4096");
    PUT(p.at, 1, ncclInt8, 0, p.win, SIZE_MAX, 0, 0, 0, c);
    has("go beyond the window");
    PUT(p.at, SIZE_MAX, ncclInt64, 0, p.win, 0, 0, 0, 0, c);
    FAILS(ncclInvalidArgument, ncclSignal(0, 0, 0, 0, NULL, NULL));
    has("Signal : comm argument is NULL");
    FAILS(ncclInvalidArgument, ncclSignal(-1, 0, 0, 0, c, NULL));
    has("Signal : invalid root -1 (root should be in the 0..1 range)");
    FAILS(ncclInvalidArgument, ncclSignal(0, 0, 0, 2, c, NULL));
    FAILS(ncclInvalidArgument, ncclSignal(0, 0, 0, 0, c, (cudaStream_t)(uintptr_t)99));
    has("Signal : unknown stream");
    ncclWaitSignalDesc_t good = {.opCnt = 1, .peer = 1}, d = good;
    FAILS(ncclInvalidArgument, ncclWaitSignal(1, &d, NULL, NULL));
    has("WaitSignal : comm argument is NULL");
    static const int counts[] = {0, -1, -1000};
    for (int i = 0; i < 3; i++) {
        FAILS(ncclInvalidArgument, ncclWaitSignal(counts[i], &d, c, NULL));
        has("ncclWaitSignal: invalid arguments");
    }
    FAILS(ncclInvalidArgument, ncclWaitSignal(1, NULL, c, NULL));
    has("ncclWaitSignal: invalid arguments");
    d.opCnt = 0;
    FAILS(ncclInvalidArgument, ncclWaitSignal(1, &d, c, NULL));
    has("opCnt 0 is invalid");
    d = good, d.sigIdx = 1;
    FAILS(ncclInvalidArgument, ncclWaitSignal(1, &d, c, NULL));
    has("Signal index 1 is invalid");
    d = good, d.ctx = -1;
    FAILS(ncclInvalidArgument, ncclWaitSignal(1, &d, c, NULL));
    has("Context -1 is invalid");
    d = good, d.peer = 2;
    FAILS(ncclInvalidArgument, ncclWaitSignal(1, &d, c, NULL));
    has("peer 2 is invalid (must be in [0, 2))");
    OK(ncclGroupStart()); /* and a group is poisoned */
    OK(ncclSignal(1 - s->first, 0, 0, 0, c, NULL));
    FAILS(ncclInvalidUsage, ncclCommWindowDeregister(c, p.win));
    FAILS(ncclInvalidArgument, ncclSignal(9, 0, 0, 0, c, NULL));
    FAILS(ncclInvalidArgument, ncclGroupEnd());
    ncclSimInfo_t info = NCCL_SIM_INFO_INITIALIZER;
    OK(ncclGroupStart()); /* only priced */
    OK(ncclSignal(1 - s->first, 0, 0, 0, c, NULL));
    OK(ncclWaitSignal(1, &good, c, NULL));
    OK(ncclPutSignal(p.at, 100, ncclInt64, 1 - s->first, p.win, 0, 0, 0, 0, c, NULL));
    OK(ncclGroupSimulateEnd(&info));
    CHECK(info.estimatedTime > 0, "%g", (double)info.estimatedTime);
    int x = 1; /* nothing of all this went out, and the communicator is well */
    OK(ncclAllReduce(&x, &x, 1, ncclInt32, ncclSum, c, NULL));
    OK(pyncclHostSetTimeout(c, 0.2));
    FAILS(ncclTimeout, wait_one(c, 1 - s->first, 1));
}

/* ---- ranks that leave ---- */

static int how; /* 0 killed, 1 destroys, 2 aborts, 3 exits */

static void leaves(struct seats *s) {
    static const char *const said[] = {"has died", "has destroyed", "has aborted", "has exited"};
    struct part p;
    open_windows(s, &p, PAGE);
    if (s->first == 1) {
        OK(ncclSignal(0, 0, 0, 0, p.comm, NULL));
        usleep(100000);
        if (how == 0)
            kill(getpid(), SIGKILL);
        if (how == 3)
            exit(0);
        OK(how == 1 ? ncclCommDestroy(p.comm) : ncclCommAbort(p.comm));
        s->comms[0] = NULL;
        usleep(1500000);
        return;
    }
    double begin = seconds_now();
    if (s->first == 0) {
        OK(wait_one(p.comm, 1, 1)); /* what it had sent counts */
        FAILS(ncclRemoteError, wait_one(p.comm, 1, 1));
        has("WaitSignal: rank 1 (pid ");
    } else { /* a put notices it by itself */
        ncclResult_t code;
        do
            code = ncclPutSignal(p.at, 8, ncclInt64, 1, p.win, 64, 0, 0, 0, p.comm, NULL);
        while (!code && seconds_now() < begin + 5);
        CHECK(code == ncclRemoteError, "%d", (int)code);
        has("PutSignal to rank 1: rank 1 (pid ");
    }
    has(said[how]);
    CHECK(seconds_now() - begin < 1.5, "after %g s", seconds_now() - begin);
}

static int run_leaving(void) {
    struct world w = {.nprocs = 3, .nlocal = 1, .seconds = 20};
    pid_t pids[3];
    int bad = 0;
    OK(ncclGetUniqueId(&w.id));
    fflush(NULL);
    for (int p = 0; p < 3; p++)
        if ((pids[p] = fork()) == 0) {
            alarm(20);
            world_process(&w, p, leaves);
            exit(0);
        }
    for (int p = 0; p < 3; p++) {
        int status = 0;
        waitpid(pids[p], &status, 0);
        bad |= p == 1 && how == 0 ? !WIFSIGNALED(status) : status != 0;
    }
    return bad;
}

int main(void) {
    int bad = world_run(1, 3, WORLD_THREADS, 30, ring) || world_run(1, 8, WORLD_GROUPED, 30, ring) ||
              world_run(3, 1, WORLD_THREADS, 30, ring) || world_run(2, 2, WORLD_THREADS, 30, ring) ||
              world_run(1, 1, WORLD_THREADS, 30, ring) || world_run(1, 3, WORLD_THREADS, 30, barriers) ||
              world_run(2, 4, WORLD_GROUPED, 60, barriers) || world_run(3, 1, WORLD_THREADS, 60, barriers) ||
              world_run(1, 2, WORLD_THREADS, 60, ordered) || world_run(2, 1, WORLD_THREADS, 60, ordered) ||
              world_run(1, 3, WORLD_THREADS, 30, counters) || world_run(2, 1, WORLD_THREADS, 30, counters) ||
              world_run(2, 1, WORLD_THREADS, 30, oneself) || world_run(1, 1, WORLD_THREADS, 30, oneself) ||
              world_run(1, 3, WORLD_THREADS, 30, mixed_groups) || world_run(3, 1, WORLD_THREADS, 30, mixed_groups) ||
              world_run(1, 2, WORLD_THREADS, 30, refusals) || world_run(2, 1, WORLD_THREADS, 30, refusals) ||
              world_run(3, 1, WORLD_THREADS, 30, streams) || world_run(2, 1, WORLD_THREADS, 30, nonblocking);
    for (how = 0; how < 4 && !bad; how++)
        bad = run_leaving();
    /* Last: the library's threads may outlive their calls for a moment, and a process with threads should not fork. */
    return bad || world_run(1, 2, WORLD_THREADS, 30, streams) || world_run(1, 2, WORLD_THREADS, 30, nonblocking);
}
