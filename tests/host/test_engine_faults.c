/* What the other ranks get when one calls something else, calls nothing, leaves, dies, or is aborted: the
 * right code, a text that names the culprit, within the time, and nothing written to receive buffers. Ranks
 * are processes unless a test is about threads. */
#include "world.h"

#include <dirent.h>

static int nprocs; /* of the world being run */

static void within(double begin, double low, double high) {
    double took = seconds_now() - begin;
    CHECK(took >= low && took <= high, "took %.3f s: %s", took, pyncclHostLastError());
}

/* ---- calls that do not agree ---- */

static float in[64], out[64];

static void untouched(void) {
    for (int i = 0; i < 64; i++)
        CHECK(out[i] == -1, "element %d was written", i);
}

static ncclResult_t odd_call(int which, int odd, ncclComm_t c) {
    size_t count = which == 1 && odd ? 5 : 4;
    ncclDataType_t type = which == 2 && odd ? ncclInt32 : ncclFloat32;
    ncclRedOp_t op = which == 3 && odd ? ncclMax : ncclSum;
    switch (which) {
    case 0: /* another kind */
        return odd ? ncclBroadcast(in, out, 6, type, 0, c, NULL) : ncclAllReduce(in, out, 4, type, op, c, NULL);
    case 4:
        return ncclReduce(in, out, count, type, op, odd, c, NULL);
    case 5: { /* one short, one in the pipeline */
        static float big_in[100000], big_out[100000];
        ncclResult_t code = ncclAllReduce(big_in, big_out, odd ? 100000 : 2, type, op, c, NULL);
        CHECK(big_out[0] == 0 && big_out[99999] == 0, "written");
        return code;
    }
    default:
        return ncclAllReduce(in, out, count, type, op, c, NULL);
    }
}

static int which;

static void disagree(struct seats *s) {
    static const char *const texts[][2] = {
        {"called AllReduce(count=4, float32, sum)", "called Broadcast(count=6, float32, root=0)"},
        {"called AllReduce(count=4, float32, sum)", "called AllReduce(count=5, float32, sum)"},
        {"called AllReduce(count=4, float32, sum)", "called AllReduce(count=4, int32, sum)"},
        {"called AllReduce(count=4, float32, sum)", "called AllReduce(count=4, float32, max)"},
        {"called Reduce(count=4, float32, sum, root=0)", "called Reduce(count=4, float32, sum, root=1)"},
        {"AllReduce(count=2, float32, sum)", "AllReduce(count=100000, float32, sum)"},
    };
    for (int i = 0; i < 64; i++)
        in[i] = 1, out[i] = -1;
    float x = 1;
    OK(ncclAllReduce(&x, &x, 1, ncclFloat32, ncclSum, s->comms[0], NULL));
    double begin = seconds_now();
    FAILS(ncclInvalidUsage, odd_call(which, s->first == s->nranks - 1, s->comms[0]));
    within(begin, 0, 1);
    has("#2: rank");
    has(texts[which][0]);
    has(texts[which][1]);
    untouched();
    FAILS(ncclInvalidUsage, ncclAllReduce(in, out, 4, ncclFloat32, ncclSum, s->comms[0], NULL));
    has("#2: rank");
    ncclResult_t async;
    int n;
    OK(ncclCommGetAsyncError(s->comms[0], &async));
    OK(ncclCommCount(s->comms[0], &n));
    CHECK(async == ncclInvalidUsage && n == s->nranks, "%d %d", (int)async, n);
}

static void wrong_size(struct seats *s) {
    for (int i = 0; i < 64; i++)
        out[i] = -1;
    if (s->first == 0)
        FAILS(ncclInvalidUsage, ncclSend(in, 4, ncclFloat32, 1, s->comms[0], NULL));
    else
        FAILS(ncclInvalidUsage, ncclRecv(out, 6, ncclFloat32, 0, s->comms[0], NULL));
    has("rank 0 called Send(count=4, float32) = 16 bytes, rank 1 called Recv(count=6, float32) = 24 bytes");
    untouched();
}

/* ---- ranks that leave ---- */

enum leaving { KILLED, EXITS, DESTROYS, ABORTS, FINALIZES, SLEEPS };

static enum leaving leaving;
static int big;

static ncclResult_t wait_for(ncclComm_t c, int rank) {
    static float data[200000];
    if (which == 1)
        return ncclRecv(data, 4, ncclFloat32, 1, c, NULL);
    if (which == 2)
        return ncclSend(data, 4, ncclFloat32, 1, c, NULL);
    (void)rank;
    return ncclAllReduce(data, data, big ? 200000 : 4, ncclFloat32, ncclSum, c, NULL);
}

static void leave(struct seats *s) {
    ncclComm_t c = s->comms[0];
    float x = 1;
    OK(ncclAllReduce(&x, &x, 1, ncclFloat32, ncclSum, c, NULL));
    if (s->first == 1) {
        usleep(50000);
        if (leaving == KILLED)
            kill(getpid(), SIGKILL);
        if (leaving == EXITS)
            exit(0);
        if (leaving == DESTROYS)
            OK(ncclCommDestroy(c));
        if (leaving == ABORTS)
            OK(ncclCommAbort(c));
        if (leaving == FINALIZES)
            OK(ncclCommFinalize(c));
        s->comms[0] = NULL;
        usleep(leaving == SLEEPS ? 700000 : 500000);
        return;
    }
    if (leaving == SLEEPS)
        OK(pyncclHostSetTimeout(c, 0.3));
    double begin = seconds_now();
    FAILS(leaving == SLEEPS ? ncclTimeout : ncclRemoteError, wait_for(c, s->first));
    within(begin, leaving == SLEEPS ? 0.25 : 0, leaving == SLEEPS ? 0.8 : 1.2);
    static const char *const said[] = {"has died", "has exited", "has destroyed", "has aborted", "has finalized",
        "timed out"};
    has(said[leaving]);
    has("rank 1 (pid ");
    FAILS(leaving == SLEEPS ? ncclTimeout : ncclRemoteError, wait_for(c, s->first));
}

/* ---- creation ---- */

static void create(void) {
    /* which: 0 nranks disagree, 1 duplicate, 2 missing, 3 used twice, 4 not ours */
    struct {
        ncclUniqueId id;
    } shared;
    OK(ncclGetUniqueId(&shared.id));
    if (which == 4)
        memset(shared.id.internal + 96, 0, 32);
    pid_t children[2];
    for (int p = 0; p < 2; p++) {
        if ((children[p] = fork()) != 0)
            continue;
        alarm(5);
        ncclComm_t c, d;
        double begin = seconds_now();
        pyncclHostSetInitTimeout(0.4);
        int nranks = which == 0 ? 2 + p : which == 2 ? 3 : 2, rank = which == 1 ? 0 : p;
        if (which == 3) {
            OK(ncclCommInitRank(&c, 2, shared.id, p));
            FAILS(ncclInvalidUsage, ncclCommInitRank(&d, 2, shared.id, p));
            has("already been used");
            OK(ncclCommDestroy(c));
        } else {
            static const ncclResult_t codes[] = {
                ncclInvalidUsage, ncclInvalidUsage, ncclTimeout, 0, ncclInvalidArgument};
            static const char *const texts[] = {
                "nranks=2", "rank 0 of 2 was given twice", "missing rank 2", "", "not made by the host library"};
            FAILS(codes[which], ncclCommInitRank(&c, nranks, shared.id, rank));
            has(texts[which]);
            CHECK(c == NULL, "a communicator came out of it");
            within(begin, which == 2 ? 0.35 : 0, 1);
        }
        exit(0);
    }
    for (int p = 0, status; p < 2; p++)
        CHECK(waitpid(children[p], &status, 0) > 0 && status == 0, "creation case %d: status %#x", which, status);
}

/* ---- threads ---- */

static void *abort_later(void *c) {
    usleep(100000);
    OK(ncclCommAbort(c));
    return NULL;
}

static void aborted_from_outside(struct seats *s) {
    float x = 1;
    if (s->first == 1) {
        usleep(500000);
        return;
    }
    pthread_t t;
    pthread_create(&t, NULL, abort_later, s->comms[0]);
    double begin = seconds_now();
    FAILS(ncclInvalidUsage, ncclAllReduce(&x, &x, 1, ncclFloat32, ncclSum, s->comms[0], NULL));
    within(begin, 0.05, 1.2);
    has("aborted");
    pthread_join(t, NULL);
    FAILS(ncclInvalidArgument, ncclAllReduce(&x, &x, 1, ncclFloat32, ncclSum, s->comms[0], NULL));
    s->comms[0] = NULL;
}

static int hook_calls;

static int stop_hook(void) {
    return ++hook_calls > 3 ? PYNCCL_HOST_STOP : 0;
}

static int alone_hook(void) {
    return PYNCCL_HOST_ALONE;
}

static void interrupted(struct seats *s) {
    float x = 1;
    if (s->first == 1) {
        usleep(300000);
        FAILS(ncclRemoteError, ncclAllReduce(&x, &x, 1, ncclFloat32, ncclSum, s->comms[0], NULL));
        has("was interrupted");
        return;
    }
    pyncclHostSetInterrupt(stop_hook);
    double begin = seconds_now();
    FAILS(ncclSystemError, ncclRecv(&x, 1, ncclFloat32, 1, s->comms[0], NULL));
    within(begin, 0, 1);
    has("interrupted");
}

static void *idle(void *seconds) {
    usleep((useconds_t)(*(double *)seconds * 1e6));
    return NULL;
}

/* One thread, two ranks, no group; hopeless only if no other thread can call. */
static void ungrouped(int others, int hook) {
    ncclComm_t c[2];
    float x = 1;
    double second = 1;
    pthread_t t;
    pyncclHostSetInterrupt(hook ? alone_hook : NULL);
    OK(ncclCommInitAll(c, 2, NULL));
    if (others)
        pthread_create(&t, NULL, idle, &second);
    OK(pyncclHostSetTimeout(c[0], 0.3));
    double begin = seconds_now();
    FAILS(others && !hook ? ncclTimeout : ncclInvalidUsage,
        ncclAllReduce(&x, &x, 1, ncclFloat32, ncclSum, c[0], NULL));
    within(begin, 0, others && !hook ? 1.2 : 0.25);
    has("ncclGroupStart");
    if (others)
        pthread_join(t, NULL);
    OK(ncclCommDestroy(c[0]));
    OK(ncclCommDestroy(c[1]));
    pyncclHostSetInterrupt(NULL);
}

/* ---- forked children, misuse, leaks ---- */

static void forked(struct seats *s) {
    float x = 1;
    pid_t child = fork();
    if (child == 0) {
        FAILS(ncclInvalidUsage, ncclAllReduce(&x, &x, 1, ncclFloat32, ncclSum, s->comms[0], NULL));
        has("fork");
        exit(0); /* and this exit must not count as the parent's */
    }
    int status;
    waitpid(child, &status, 0);
    CHECK(status == 0, "%#x", status);
    OK(ncclAllReduce(&x, &x, 1, ncclFloat32, ncclSum, s->comms[0], NULL));
    CHECK(x == (float)s->nranks, "%g", (double)x);
}

static int open_files(void) {
    int n = 0;
    DIR *d = opendir("/proc/self/fd");
    while (readdir(d))
        n++;
    closedir(d);
    return n;
}

static int mappings(void) {
    int n = 0;
    FILE *f = fopen("/proc/self/maps", "r");
    char line[512];
    while (fgets(line, sizeof line, f))
        n += strstr(line, "memfd:pynccl") != NULL;
    fclose(f);
    return n;
}

static void nothing_leaks(void) {
    int files = open_files();
    for (int i = 0; i < 300; i++) {
        ncclComm_t c[3], d[3];
        float x[3] = {1, 2, 3};
        OK(ncclCommInitAll(c, 3, NULL));
        OK(ncclGroupStart());
        for (int r = 0; r < 3; r++)
            OK(ncclCommSplit(c[r], 0, 0, &d[r], NULL));
        OK(ncclGroupEnd());
        OK(ncclGroupStart());
        for (int r = 0; r < 3; r++)
            OK(ncclAllReduce(&x[r], &x[r], 1, ncclFloat32, ncclSum, d[r], NULL));
        OK(ncclGroupEnd());
        CHECK(x[0] == 6 && x[1] == 6 && x[2] == 6, "%g", (double)x[0]);
        for (int r = 0; r < 3; r++) {
            OK(ncclCommDestroy(c[r]));
            OK(i % 2 ? ncclCommAbort(d[r]) : ncclCommDestroy(d[r]));
        }
        FAILS(ncclInvalidArgument, ncclCommDestroy(c[0]));
        has("ncclCommDestroy");
    }
    CHECK(open_files() == files, "%d files, %d before", open_files(), files);
    CHECK(mappings() == 0, "%d mappings", mappings());
}

static void groups(void) {
    ncclComm_t c[2];
    float x[2] = {1, 2}, y[4];
    OK(ncclCommInitAll(c, 2, NULL));
    FAILS(ncclInvalidUsage, ncclGroupEnd());
    /* A wrong call poisons the group, inner ends succeed, nothing is launched. */
    OK(ncclGroupStart());
    OK(ncclGroupStart());
    OK(ncclAllReduce(&x[0], &x[0], 1, ncclFloat32, ncclSum, c[0], NULL));
    OK(ncclAllReduce(&x[1], &x[1], 1, ncclFloat32, ncclSum, c[1], NULL));
    FAILS(ncclInvalidArgument, ncclReduce(&x[1], &x[1], 1, ncclFloat32, ncclSum, 7, c[1], NULL));
    has("Reduce : invalid root 7 (root should be in the 0..1 range)");
    OK(ncclGroupEnd());
    FAILS(ncclInvalidArgument, ncclGroupEnd());
    CHECK(x[0] == 1 && x[1] == 2, "launched");
    FAILS(ncclInvalidUsage, ncclSend(x, 1, ncclFloat32, 0, c[0], NULL));
    OK(ncclGroupStart());
    OK(ncclSend(x, 1, ncclFloat32, 0, c[0], NULL));
    FAILS(ncclInvalidUsage, ncclGroupEnd());
    has("Trying to send to self without a matching recv");
    OK(ncclGroupStart());
    OK(ncclRecv(y, 1, ncclFloat32, 0, c[0], NULL));
    FAILS(ncclInvalidUsage, ncclGroupEnd());
    has("Trying to recv to self without a matching send");
    FAILS(ncclInvalidArgument, ncclAllReduce(x, y, 1, ncclFloat32, ncclSum, c[0], (cudaStream_t)3));
    has("unknown stream");
    FAILS(ncclInvalidArgument, ncclAllReduce(x, y, 1, (ncclDataType_t)12, ncclSum, c[0], NULL));
    FAILS(ncclInvalidArgument, ncclAllReduce(x, y, 1, ncclFloat32, (ncclRedOp_t)77, c[0], NULL));
    has("reduction operation 77 unknown to this communicator");
    OK(ncclAllReduce(NULL, NULL, 0, ncclFloat32, ncclSum, c[0], NULL)); /* zero elements need no partner */
    ncclRedOp_t op;
    float two = 2;
    OK(ncclRedOpCreatePreMulSum(&op, &two, ncclFloat32, ncclScalarHostImmediate, c[0]));
    FAILS(ncclInvalidArgument, ncclAllReduce(x, y, 1, ncclFloat32, op, c[1], NULL));
    FAILS(ncclInvalidArgument, ncclAllReduce(x, y, 1, ncclInt32, op, c[0], NULL));
    OK(ncclRedOpDestroy(op, c[0]));
    FAILS(ncclInvalidArgument, ncclRedOpDestroy(op, c[0]));
    for (int r = 0; r < 2; r++)
        OK(ncclCommDestroy(c[r]));
}

/* A call that hangs says after ten seconds for whom it waits; runs beside the other tests. */
static void hangs(struct seats *s) {
    float x = 1;
    if (s->first == 1)
        sleep(12);
    OK(ncclAllReduce(&x, &x, 1, ncclFloat32, ncclSum, s->comms[0], NULL));
}

static FILE *start_hanging(void) {
    int ends[2];
    CHECK(pipe(ends) == 0, "no pipe");
    if (fork() == 0) {
        dup2(ends[1], 2);
        close(ends[1]);
        _exit(world_run(2, 1, WORLD_THREADS, 30, hangs));
    }
    close(ends[1]);
    return fdopen(ends[0], "r");
}

static void end_hanging(FILE *f) {
    char line[1024] = "", rest[64];
    int status;
    CHECK(fgets(line, sizeof line, f) && strstr(line, "AllReduce #1: rank 0 has waited 10 s for rank 1 (pid "),
        "%s", line);
    CHECK(!fgets(rest, sizeof rest, f), "more than one line: %s", rest);
    CHECK(wait(&status) > 0 && status == 0, "%#x", status);
    fclose(f);
}

int main(void) {
    double begin = seconds_now();
    groups();
    nothing_leaks();
    FILE *hanging = start_hanging();
    ungrouped(0, 0);
    ungrouped(1, 0);
    ungrouped(1, 1);
    for (which = 0; which < 5; which++)
        create();
    for (nprocs = 2; nprocs <= 3; nprocs++)
        for (which = 0; which < 6; which++)
            CHECK(!world_run(nprocs, 1, WORLD_THREADS, 10, disagree), "%d processes, case %d", nprocs, which);
    CHECK(!world_run(2, 1, WORLD_THREADS, 10, wrong_size), "sizes");
    for (which = 0; which < 3; which++)
        for (big = 0; big < (which ? 1 : 2); big++)
            for (leaving = KILLED; leaving <= SLEEPS; leaving++) {
                int bad = world_run(2, 1, WORLD_THREADS, 10, leave);
                CHECK(bad == (leaving == KILLED), "leaving %d, case %d, big %d", (int)leaving, which, big);
            }
    CHECK(!world_run(2, 1, WORLD_THREADS, 10, interrupted), "interrupt");
    CHECK(!world_run(2, 1, WORLD_THREADS, 10, forked), "fork");
    CHECK(!world_run(1, 2, WORLD_THREADS, 10, aborted_from_outside), "abort");
    end_hanging(hanging);
    printf("%.2f s\n", seconds_now() - begin);
    return 0;
}
