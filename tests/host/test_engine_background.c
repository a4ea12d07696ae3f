/* Nonblocking communicators: every call answers at once, and the communicator says how it goes; errors stay;
 * aborts, forks and exits in the middle; nothing is left behind by any of it, or by a thousand communicators. */
#include "world.h"

#include <dirent.h>

/* A call that may have ended before it returned. */
#define BEGINS(call) \
    do { \
        ncclResult_t got_ = (call); \
        CHECK(got_ == ncclInProgress || got_ == ncclSuccess, "%d: %s", (int)got_, pyncclHostLastError()); \
    } while (0)

static ncclResult_t settle(ncclComm_t c, double seconds) {
    ncclResult_t state = ncclInProgress;
    for (double end = seconds_now() + seconds; state == ncclInProgress && seconds_now() < end; usleep(200))
        OK(ncclCommGetAsyncError(c, &state));
    return state;
}

static int entries(const char *folder) {
    int n = 0;
    DIR *d = opendir(folder);
    CHECK(d, "%s", folder);
    for (struct dirent *e; (e = readdir(d)) != NULL;)
        n += e->d_name[0] != '.';
    closedir(d);
    return n;
}

/* What a process holds; a thread that has said its last word may need a moment to end. */
struct holdings {
    int fds, threads, shm, maps;
};

static struct holdings count(void) {
    struct holdings h = {entries("/proc/self/fd"), entries("/proc/self/task"), entries("/dev/shm"), 0};
    FILE *f = fopen("/proc/self/maps", "r");
    for (char line[4096]; fgets(line, sizeof line, f);)
        h.maps += strstr(line, "memfd:pynccl") != NULL;
    fclose(f);
    return h;
}

static void nothing_left(struct holdings before) {
    struct holdings now = count();
    for (int i = 0; i < 2000 && now.threads > before.threads; i++, now = count())
        usleep(1000);
    CHECK(now.fds == before.fds && now.threads == before.threads && now.shm <= before.shm && now.maps == before.maps,
        "fds %d to %d, threads %d to %d, shm %d to %d, maps %d to %d", before.fds, now.fds, before.threads, now.threads,
        before.shm, now.shm, before.maps, now.maps);
}

static ncclConfig_t nonblocking(void) {
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    return config;
}

/* ---- the life of a nonblocking communicator ---- */

struct rank {
    ncclUniqueId id;
    int rank, nranks;
};

static void *life(void *argument) {
    struct rank *r = argument;
    ncclConfig_t config = nonblocking();
    ncclComm_t c = NULL, part = NULL, less = NULL;
    BEGINS(ncclCommInitRankConfig(&c, r->nranks, r->id, r->rank, &config));
    CHECK(c, "no handle");
    CHECK(settle(c, 10) == ncclSuccess, "%s", pyncclHostLastError());
    int n = 0, x[3] = {r->rank, 1, 2}, big_n = 300000;
    OK(ncclCommCount(c, &n));
    CHECK(n == r->nranks, "%d ranks", n);
    BEGINS(ncclAllReduce(x, x, 3, ncclInt32, ncclSum, c, NULL));
    CHECK(settle(c, 10) == ncclSuccess, "%s", pyncclHostLastError());
    CHECK(x[0] == n * (n - 1) / 2 && x[1] == n, "%d %d", x[0], x[1]);
    int *big = malloc(sizeof *big * (size_t)big_n);
    for (int i = 0; i < big_n; i++)
        big[i] = i + r->rank;
    OK(ncclGroupStart());
    OK(ncclAllReduce(big, big, (size_t)big_n, ncclInt32, ncclMax, c, NULL));
    OK(ncclBroadcast(x, x, 3, ncclInt32, 1, c, NULL));
    BEGINS(ncclGroupEnd());
    CHECK(settle(c, 10) == ncclSuccess, "%s", pyncclHostLastError());
    for (int i = 0; i < big_n; i++)
        CHECK(big[i] == i + n - 1, "element %d is %d", i, big[i]);
    free(big);
    BEGINS(ncclCommSplit(c, r->rank % 2, 0, &part, NULL));
    CHECK(settle(c, 10) == ncclSuccess && part, "%s", pyncclHostLastError());
    BEGINS(ncclAllReduce(x, x, 3, ncclInt32, ncclSum, part, NULL)); /* it is as its parent */
    CHECK(settle(part, 10) == ncclSuccess, "%s", pyncclHostLastError());
    OK(ncclCommDestroy(part));
    if (r->rank) {
        int exclude[] = {0};
        BEGINS(ncclCommShrink(c, exclude, 1, &less, NULL, NCCL_SHRINK_DEFAULT));
        CHECK(settle(c, 10) == ncclSuccess && less, "%s", pyncclHostLastError());
        BEGINS(ncclCommFinalize(less));
        CHECK(settle(less, 10) == ncclSuccess, "%s", pyncclHostLastError());
        OK(ncclCommDestroy(less));
    }
    OK(ncclCommDestroy(c));
    return NULL;
}

static void lives(void) {
    enum { N = 4 };
    struct holdings before = count();
    pthread_t threads[N];
    struct rank r[N];
    OK(ncclGetUniqueId(&r[0].id));
    for (int i = 0; i < N; i++) {
        r[i] = (struct rank){r[0].id, i, N};
        pthread_create(&threads[i], NULL, life, &r[i]);
    }
    for (int i = 0; i < N; i++)
        pthread_join(threads[i], NULL);
    nothing_left(before);
}

/* One thread creates and drives all ranks without a group, which only nonblocking ones allow. */
static void one_thread(void) {
    enum { N = 3 };
    struct holdings before = count();
    ncclConfig_t config = nonblocking();
    ncclUniqueId id;
    ncclComm_t c[N], again;
    int x[N];
    OK(ncclGetUniqueId(&id));
    for (int i = 0; i < N; i++)
        BEGINS(ncclCommInitRankConfig(&c[i], N, id, i, &config));
    for (int i = 0; i < N; i++)
        CHECK(settle(c[i], 10) == ncclSuccess, "%s", pyncclHostLastError());
    for (int i = 0; i < N; i++) {
        x[i] = i;
        BEGINS(ncclAllReduce(&x[i], &x[i], 1, ncclInt32, ncclSum, c[i], NULL));
        if (i == 0) { /* it cannot end before the others come */
            ncclResult_t state;
            int n;
            ncclRedOp_t op;
            OK(ncclCommGetAsyncError(c[0], &state));
            CHECK(state == ncclInProgress, "%d", (int)state);
            FAILS(ncclInvalidArgument, ncclAllReduce(&x[0], &x[0], 1, ncclInt32, ncclSum, c[0], NULL));
            has("Attempt to use communicator before the previous operation returned ncclSuccess");
            FAILS(ncclInvalidArgument, ncclCommCount(c[0], &n));
            FAILS(ncclInvalidArgument, ncclCommUserRank(c[0], &n));
            FAILS(ncclInvalidArgument, ncclRedOpCreatePreMulSum(&op, x, ncclInt32, ncclScalarHostImmediate, c[0]));
            FAILS(ncclInvalidArgument, ncclCommSplit(c[0], 0, 0, &again, NULL));
            FAILS(ncclInvalidArgument, ncclCommFinalize(c[0]));
            FAILS(ncclInvalidArgument, ncclCommDestroy(c[0]));
        }
    }
    for (int i = 0; i < N; i++) {
        CHECK(settle(c[i], 10) == ncclSuccess && x[i] == 3, "%d: %s", x[i], pyncclHostLastError());
        OK(ncclCommDestroy(c[i]));
    }
    nothing_left(before);
}

/* ---- errors ---- */

static void errors_stay(void) {
    ncclConfig_t config = nonblocking();
    ncclUniqueId id;
    ncclComm_t c;
    ncclResult_t state;
    int x = 1;
    OK(ncclGetUniqueId(&id));
    BEGINS(ncclCommInitRankConfig(&c, 1, id, 0, &config));
    CHECK(settle(c, 5) == ncclSuccess, "%s", pyncclHostLastError());
    FAILS(ncclInvalidArgument, ncclAllReduce(&x, &x, 1, (ncclDataType_t)99, ncclSum, c, NULL));
    has("invalid type 99");
    OK(ncclCommGetAsyncError(c, &state));
    CHECK(state == ncclInvalidArgument, "%d", (int)state);
    FAILS(ncclInvalidArgument, ncclAllReduce(&x, &x, 1, ncclInt32, ncclSum, c, NULL));
    has("invalid type 99");
    OK(ncclCommAbort(c));
    FAILS(ncclInvalidArgument, ncclCommGetAsyncError(c, &state));

    ncclComm_t blocking;
    OK(ncclGetUniqueId(&id));
    OK(ncclCommInitRank(&blocking, 1, id, 0));
    ncclUniqueId two[2];
    ncclComm_t a = NULL, b = NULL;
    OK(ncclGetUniqueId(&two[0]));
    OK(ncclGetUniqueId(&two[1]));
    OK(ncclGroupStart());
    OK(ncclCommInitRank(&a, 1, two[0], 0));
    FAILS(ncclInvalidArgument, ncclCommInitRankConfig(&b, 1, two[1], 0, &config));
    has("Blocking and nonblocking communicators are not allowed in the same group.");
    FAILS(ncclInvalidArgument, ncclGroupEnd());
    CHECK(!a && !b, "handles");

    OK(ncclGroupStart()); /* a group that fails takes its creations with it */
    OK(ncclCommInitRankConfig(&b, 1, two[1], 0, &config));
    OK(ncclCommGetAsyncError(b, &state));
    FAILS(ncclInvalidArgument, ncclAllReduce(&x, &x, 1, ncclInt32, ncclSum, b, NULL));
    has("being created by a group");
    FAILS(ncclInvalidArgument, ncclGroupEnd());
    CHECK(!b, "a handle");

    FAILS(ncclInProgress, ncclCommInitRankConfig(&b, 1, two[1], 0, &config));
    CHECK(settle(b, 5) == ncclSuccess, "%s", pyncclHostLastError());
    for (int last = 0; last < 2; last++) { /* in a mixed group of operations the last one decides */
        int y[2] = {1, 2};
        OK(ncclGroupStart());
        for (int i = 0; i < 2; i++)
            OK(ncclAllReduce(&x, &y[i], 1, ncclInt32, ncclSum, i == last ? b : blocking, NULL));
        FAILS(last ? ncclInProgress : ncclSuccess, ncclGroupEnd());
        CHECK(settle(blocking, 5) == ncclSuccess && settle(b, 5) == ncclSuccess, "%s", pyncclHostLastError());
        CHECK(y[0] == x && y[1] == x, "%d %d", y[0], y[1]);
    }
    OK(ncclCommDestroy(b));
    OK(ncclCommDestroy(blocking));
}

/* The acceptance line: 2 s of patience, an error after 2 to 4 s, nothing left, and the process goes on. */
static void missing_rank(void) {
    struct holdings before = count();
    ncclConfig_t config = nonblocking();
    ncclUniqueId id;
    ncclComm_t c = NULL;
    OK(ncclGetUniqueId(&id));
    pyncclHostSetInitTimeout(2);
    double begin = seconds_now();
    FAILS(ncclInProgress, ncclCommInitRankConfig(&c, 2, id, 0, &config));
    CHECK(seconds_now() - begin < 0.5, "it waited");
    pyncclHostSetInitTimeout(-1);
    CHECK(settle(c, 10) == ncclTimeout, "%s", pyncclHostLastError());
    double took = seconds_now() - begin;
    CHECK(took > 1.9 && took < 4, "took %.2f s", took);
    has("missing rank 1");
    int n;
    FAILS(ncclTimeout, ncclCommCount(c, &n));
    OK(ncclCommAbort(c));
    nothing_left(before);
    one_thread();
}

static void abort_in_progress(void) {
    struct holdings before = count();
    ncclConfig_t config = nonblocking();
    ncclUniqueId id;
    ncclComm_t c[2];
    OK(ncclGetUniqueId(&id));
    BEGINS(ncclCommInitRankConfig(&c[0], 2, id, 0, &config)); /* of a creation */
    double begin = seconds_now();
    OK(ncclCommAbort(c[0]));
    CHECK(seconds_now() - begin < 1, "late");
    OK(ncclGetUniqueId(&id));
    for (int i = 0; i < 2; i++)
        BEGINS(ncclCommInitRankConfig(&c[i], 2, id, i, &config));
    for (int i = 0; i < 2; i++)
        CHECK(settle(c[i], 5) == ncclSuccess, "%s", pyncclHostLastError());
    int x = 1;
    FAILS(ncclInProgress, ncclAllReduce(&x, &x, 1, ncclInt32, ncclSum, c[0], NULL)); /* of a call */
    begin = seconds_now();
    OK(ncclCommAbort(c[0]));
    CHECK(seconds_now() - begin < 1, "late");
    /* Its peer can use what was published before, and hears of the abort when it needs more. */
    BEGINS(ncclAllReduce(&x, &x, 1, ncclInt32, ncclSum, c[1], NULL));
    CHECK(settle(c[1], 5) == ncclSuccess, "%s", pyncclHostLastError());
    BEGINS(ncclAllReduce(&x, &x, 1, ncclInt32, ncclSum, c[1], NULL));
    CHECK(settle(c[1], 5) == ncclRemoteError, "%s", pyncclHostLastError());
    has("aborted");
    OK(ncclCommAbort(c[1]));
    nothing_left(before);
}

/* A shrink says how it went itself: it succeeds on a communicator that has failed, and its failure is none of
 * the communicator's. */
static void shrink_in_progress(void) {
    struct holdings before = count();
    enum { N = 3 };
    ncclConfig_t config = nonblocking();
    ncclUniqueId id;
    ncclComm_t c[N], less[2] = {NULL, NULL}, none = NULL;
    ncclResult_t state;
    int x[] = {1, 1, 1}, exclude[] = {1}, others[] = {0};
    OK(ncclGetUniqueId(&id));
    for (int i = 0; i < N; i++)
        BEGINS(ncclCommInitRankConfig(&c[i], N, id, i, &config));
    for (int i = 0; i < N; i++)
        CHECK(settle(c[i], 5) == ncclSuccess, "%s", pyncclHostLastError());
    FAILS(ncclInProgress, ncclAllReduce(&x[0], &x[0], 1, ncclInt32, ncclSum, c[0], NULL));
    FAILS(ncclInProgress, ncclCommShrink(c[0], exclude, 1, &less[0], NULL, NCCL_SHRINK_ABORT));
    FAILS(ncclInvalidArgument, ncclCommShrink(c[0], exclude, 1, &none, NULL, NCCL_SHRINK_DEFAULT));
    BEGINS(ncclCommShrink(c[2], exclude, 1, &less[1], NULL, NCCL_SHRINK_ABORT));
    for (int i = 0; i < 2; i++) {
        CHECK(settle(c[2 * i], 5) == ncclSuccess && less[i], "%s", pyncclHostLastError());
        BEGINS(ncclAllReduce(&x[i], &x[i], 1, ncclInt32, ncclSum, less[i], NULL));
    }
    for (int i = 0; i < 2; i++) {
        CHECK(settle(less[i], 5) == ncclSuccess, "%s", pyncclHostLastError());
        OK(ncclCommDestroy(less[i]));
    }
    FAILS(ncclInvalidUsage, ncclAllReduce(&x[0], &x[0], 1, ncclInt32, ncclSum, c[0], NULL)); /* it has failed all the same */
    has("shrunk during the call");
    OK(ncclCommDestroy(c[1])); /* the survivor that the next one counts on */
    FAILS(ncclInProgress, ncclCommShrink(c[2], others, 1, &none, NULL, NCCL_SHRINK_DEFAULT));
    CHECK(settle(c[2], 5) == ncclRemoteError && !none, "%s", pyncclHostLastError());
    has("rank 1");
    FAILS(ncclInvalidArgument, ncclAllReduce(x, x, 1, (ncclDataType_t)99, ncclSum, c[2], NULL));
    OK(ncclCommGetAsyncError(c[2], &state));
    CHECK(state == ncclInvalidArgument, "%d", (int)state);
    OK(ncclCommRevoke(c[2], 0));
    OK(ncclCommDestroy(c[0]));
    OK(ncclCommDestroy(c[2]));
    nothing_left(before);
}

/* A fork in the middle of a creation: the child is told, and may create its own; the parent goes on. An exit
 * in the middle neither hangs nor crashes. */
__attribute__((unused)) static void fork_and_exit(void) {
    ncclConfig_t config = nonblocking();
    ncclUniqueId id;
    ncclComm_t c;
    OK(ncclGetUniqueId(&id));
    FAILS(ncclInProgress, ncclCommInitRankConfig(&c, 2, id, 0, &config));
    pid_t child = fork();
    if (child == 0) {
        ncclResult_t state;
        alarm(20);
        FAILS(ncclInvalidUsage, ncclCommGetAsyncError(c, &state));
        has("before a fork");
        OK(ncclGetUniqueId(&id));
        FAILS(ncclInProgress, ncclCommInitRankConfig(&c, 1, id, 0, &config));
        CHECK(settle(c, 5) == ncclSuccess, "%s", pyncclHostLastError());
        OK(ncclCommDestroy(c));
        OK(ncclGetUniqueId(&id));
        FAILS(ncclInProgress, ncclCommInitRankConfig(&c, 2, id, 0, &config));
        exit(7); /* with a job under way */
    }
    int status = 0;
    CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 7, "status %#x", status);
    OK(ncclCommAbort(c));
}

static void environment(void) {
    ncclConfig_t config = nonblocking();
    ncclUniqueId id;
    ncclComm_t c;
    setenv("NCCL_COMM_BLOCKING", "1", 1);
    OK(ncclGetUniqueId(&id));
    OK(ncclCommInitRankConfig(&c, 1, id, 0, &config));
    OK(ncclCommDestroy(c));
    setenv("NCCL_COMM_BLOCKING", "0", 1);
    OK(ncclGetUniqueId(&id));
    FAILS(ncclInProgress, ncclCommInitRank(&c, 1, id, 0));
    CHECK(settle(c, 5) == ncclSuccess, "%s", pyncclHostLastError());
    OK(ncclCommDestroy(c));
    unsetenv("NCCL_COMM_BLOCKING");
}

/* ---- many ---- */

/* Created, used, split, shrunk and destroyed, `times` times by two ranks of one thread: three communicators
 * each time. Nothing may be left; memory is compared from the SETTLED-th time on, since some hundred handles
 * of the dead are kept so that their late use is an error. */
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__) /* which keep freed memory */
enum { SETTLED = 300, PAGES = 1 << 17 };
#else
enum { SETTLED = 300, PAGES = 256 };
#endif

static long resident(void) {
    long pages = 0;
    FILE *f = fopen("/proc/self/statm", "r");
    CHECK(f && fscanf(f, "%*d %ld", &pages) == 1, "statm");
    fclose(f);
    return pages;
}

static void many(int times) {
    struct holdings before = count();
    long settled = 0;
    for (int i = 0; i < times; i++) {
        ncclUniqueId id;
        ncclComm_t c[2], part[2], less = NULL;
        int x[2] = {1, 2}, exclude[] = {1};
        if (i == SETTLED)
            settled = resident();
        OK(ncclGetUniqueId(&id));
        OK(ncclGroupStart());
        for (int r = 0; r < 2; r++)
            OK(ncclCommInitRank(&c[r], 2, id, r));
        OK(ncclGroupEnd());
        OK(ncclGroupStart());
        for (int r = 0; r < 2; r++)
            OK(ncclAllReduce(&x[r], &x[r], 1, ncclInt32, ncclSum, c[r], NULL));
        OK(ncclGroupEnd());
        CHECK(x[0] == 3 && x[1] == 3, "%d %d", x[0], x[1]);
        OK(ncclGroupStart());
        for (int r = 0; r < 2; r++)
            OK(ncclCommSplit(c[r], 0, -r, &part[r], NULL));
        OK(ncclGroupEnd());
        OK(ncclCommShrink(c[0], exclude, 1, &less, NULL, NCCL_SHRINK_DEFAULT));
        OK(ncclCommDestroy(less));
        for (int r = 0; r < 2; r++) {
            OK(ncclCommDestroy(part[r]));
            OK(ncclCommDestroy(c[r]));
        }
    }
    nothing_left(before);
    long more = resident() - settled;
    CHECK(more < PAGES, "%ld pages more", more);
}

static void *nothing(void *argument) {
    return argument;
}

int main(void) {
    alarm(110);
    pthread_t first; /* with which sanitizers start one of their own, to be counted from the beginning */
    pthread_create(&first, NULL, nothing, NULL);
    pthread_join(first, NULL);
    lives();
    one_thread();
    errors_stay();
    missing_rank();
    abort_in_progress();
    shrink_in_progress();
#if !defined(__SANITIZE_THREAD__) /* which allows no thread after a fork */
    fork_and_exit();
#endif
    environment();
    many(SETTLED + 1000);
    return 0;
}
