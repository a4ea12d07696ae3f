/* Split after a revocation, shrink, grow, several unique ids: who is in the child, that it works, and what
 * happens when a rank is dead, hangs, or does something else. */
#include "world.h"

static void sums_to(ncclComm_t c, int expected) {
    int rank = -1, x = 0;
    OK(ncclCommUserRank(c, &rank));
    x = rank + 1;
    OK(ncclAllReduce(&x, &x, 1, ncclInt32, ncclSum, c, NULL));
    CHECK(x == expected, "%d instead of %d", x, expected);
}

static void is_place(ncclComm_t c, int rank, int nranks) {
    int r = -1, n = -1;
    OK(ncclCommUserRank(c, &r));
    OK(ncclCommCount(c, &n));
    CHECK(r == rank && n == nranks, "%d of %d instead of %d of %d", r, n, rank, nranks);
}

/* ---- shrink ---- */

static void shrink_twice(struct seats *s) {
    for (int round = 0; round < 2; round++) { /* the same set again is another child */
        int exclude[] = {3, 1};
        ncclComm_t child = NULL;
        if (s->first == 1 || s->first == 3)
            continue;
        OK(ncclCommShrink(s->comms[0], exclude, 2, &child, NULL, NCCL_SHRINK_DEFAULT));
        CHECK(exclude[0] == 1 && exclude[1] == 3, "not sorted");
        is_place(child, s->first / 2, 2);
        sums_to(child, 3);
        OK(ncclCommDestroy(child));
    }
    sums_to(s->comms[0], 10); /* the parent goes on */
}

static void shrink_refuses(struct seats *s) {
    ncclComm_t c = s->comms[0], child;
    int self[] = {s->first}, out[] = {9}, twice[] = {1 - s->first, 1 - s->first};
    FAILS(ncclInvalidArgument, ncclCommShrink(NULL, out, 1, &child, NULL, 0));
    FAILS(ncclInvalidArgument, ncclCommShrink(c, out, 1, NULL, NULL, 0));
    FAILS(ncclInvalidArgument, ncclCommShrink(c, NULL, 1, &child, NULL, 0));
    FAILS(ncclInvalidArgument, ncclCommShrink(c, out, 0, &child, NULL, 0));
    FAILS(ncclInvalidArgument, ncclCommShrink(c, out, 1, &child, NULL, 2));
    FAILS(ncclInvalidArgument, ncclCommShrink(c, self, 1, &child, NULL, 0));
    FAILS(ncclInvalidArgument, ncclCommShrink(c, out, 1, &child, NULL, 0));
    has("no rank 9");
    FAILS(ncclInvalidArgument, ncclCommShrink(c, twice, 2, &child, NULL, 0));
    has("listed twice");
    CHECK(!child, "a handle");
    sums_to(c, 3);
}

/* Rank 2 dies; the others are inside a call, at different ones, and go on without it. */
static void shrink_after_death(struct seats *s) {
    ncclComm_t c = s->comms[0], child = NULL;
    int x = 0, exclude[] = {2};
    sums_to(c, 10);
    if (s->first == 2)
        _exit(0);
    FAILS(ncclRemoteError, ncclAllReduce(&x, &x, 1, ncclInt32, ncclSum, c, NULL));
    FAILS(ncclRemoteError, ncclCommShrink(c, exclude, 1, &child, NULL, NCCL_SHRINK_DEFAULT));
    OK(ncclCommShrink(c, exclude, 1, &child, NULL, NCCL_SHRINK_ABORT));
    is_place(child, s->first == 3 ? 2 : s->first, 3);
    sums_to(child, 6);
    OK(ncclCommDestroy(child));
}

/* Rank 3 dies after the collective has failed: the shrink that counts on it fails, the next one succeeds. */
static void shrink_after_two_deaths(struct seats *s) {
    ncclComm_t c = s->comms[0], child = NULL;
    int x = 0, exclude[] = {2, 3};
    sums_to(c, 10);
    if (s->first == 2)
        _exit(0);
    FAILS(ncclRemoteError, ncclAllReduce(&x, &x, 1, ncclInt32, ncclSum, c, NULL));
    if (s->first == 3)
        _exit(0);
    double begin = seconds_now();
    FAILS(ncclRemoteError, ncclCommShrink(c, exclude, 1, &child, NULL, NCCL_SHRINK_ABORT));
    CHECK(seconds_now() - begin < 3, "late");
    has("rank 3");
    OK(ncclCommShrink(c, exclude, 2, &child, NULL, NCCL_SHRINK_ABORT));
    is_place(child, s->first, 2);
    sums_to(child, 3);
    OK(ncclCommDestroy(child));
}

static void *waits_for_ever(void *argument) {
    int x = 1;
    FAILS(ncclInvalidUsage, ncclAllReduce(&x, &x, 1, ncclInt32, ncclSum, argument, NULL));
    has("shrunk during the call");
    return NULL;
}

/* Another thread of the survivor is inside a call that rank 1 never makes. */
static void shrink_stops_calls(struct seats *s) {
    ncclComm_t c = s->comms[0], child = NULL;
    if (s->first == 1) {
        usleep(400000);
        return;
    }
    pthread_t thread;
    pthread_create(&thread, NULL, waits_for_ever, c);
    usleep(50000);
    int exclude[] = {1};
    OK(ncclCommShrink(c, exclude, 1, &child, NULL, NCCL_SHRINK_ABORT));
    pthread_join(thread, NULL);
    sums_to(child, 3);
    OK(ncclCommDestroy(child));
}

/* ---- grow ---- */

static int grown_ready[2];

static void grow_by_two(struct seats *s) {
    ncclComm_t c = s->comms[0], child = NULL;
    FAILS(ncclInvalidArgument, ncclCommGrow(c, 2, NULL, -1, &child, NULL));
    FAILS(ncclInvalidArgument, ncclCommGrow(c, 4, NULL, 2, &child, NULL));
    ncclUniqueId id;
    if (s->first == 1) {
        OK(ncclCommGetUniqueId(c, &id));
        for (int i = 0; i < 2; i++)
            CHECK(write(grown_ready[1], &id, sizeof id) == sizeof id, "pipe");
    }
    OK(ncclCommGrow(c, 4, s->first == 1 ? &id : NULL, -1, &child, NULL));
    is_place(child, s->first, 4);
    sums_to(child, 10);
    OK(ncclCommDestroy(child));
    sums_to(c, 3);
    FAILS(ncclInvalidUsage, ncclCommGrow(c, 4, NULL, -1, &child, NULL));
    has("no rank brings a unique id");
}

static void *newcomer(void *argument) {
    ncclUniqueId id;
    ncclComm_t c = NULL;
    int rank = (int)(intptr_t)argument;
    CHECK(read(grown_ready[0], &id, sizeof id) == sizeof id, "pipe");
    FAILS(ncclInvalidArgument, ncclCommGrow(NULL, 4, &id, 4, &c, NULL));
    OK(ncclCommGrow(NULL, 4, &id, rank, &c, NULL));
    is_place(c, rank, 4);
    sums_to(c, 10);
    OK(ncclCommDestroy(c));
    return NULL;
}

static int grow(int nprocs, int nlocal) {
    pthread_t threads[2];
    CHECK(pipe(grown_ready) == 0, "pipe");
    if (nprocs == 1) {
        for (int i = 0; i < 2; i++)
            pthread_create(&threads[i], NULL, newcomer, (void *)(intptr_t)(2 + i));
    } else if (fork() == 0) {
        pthread_create(&threads[0], NULL, newcomer, (void *)(intptr_t)2);
        newcomer((void *)(intptr_t)3);
        pthread_join(threads[0], NULL);
        exit(0);
    }
    int bad = world_run(nprocs, nlocal, WORLD_THREADS, 20, grow_by_two);
    if (nprocs == 1)
        for (int i = 0; i < 2; i++)
            pthread_join(threads[i], NULL);
    else {
        int status = 0;
        wait(&status);
        bad |= status != 0;
    }
    close(grown_ready[0]);
    close(grown_ready[1]);
    return bad;
}

/* ---- revoke ---- */

/* The ranks stop at different calls; all revoke, and split what is left of it. */
static void revoke_and_split(struct seats *s) {
    ncclComm_t c = s->comms[0], child = NULL;
    int x = 1, exclude[] = {0};
    sums_to(c, 10);
    if (s->first > 1)
        FAILS(ncclRemoteError, ncclAllReduce(&x, &x, 1, ncclInt32, ncclSum, c, NULL));
    else
        usleep(20000);
    OK(ncclCommRevoke(c, NCCL_REVOKE_DEFAULT));
    FAILS(ncclInvalidArgument, ncclCommRevoke(c, NCCL_REVOKE_DEFAULT));
    FAILS(ncclInvalidArgument, ncclCommFinalize(c));
    FAILS(ncclInvalidUsage, ncclAllReduce(&x, &x, 1, ncclInt32, ncclSum, c, NULL));
    has("AllReduce: communicator was revoked");
    for (int round = 0; round < 3; round++) {
        OK(ncclCommSplit(c, s->first % 2, 0, &child, NULL));
        is_place(child, s->first / 2, 2);
        sums_to(child, 3);
        OK(ncclCommDestroy(child));
    }
    if (s->first) {
        OK(ncclCommShrink(c, exclude, 1, &child, NULL, NCCL_SHRINK_DEFAULT));
        sums_to(child, 6);
        OK(ncclCommDestroy(child));
    }
}

static void *revoked_inside(void *argument) {
    int x = 1;
    FAILS(ncclInvalidUsage, ncclAllReduce(&x, &x, 1, ncclInt32, ncclSum, argument, NULL));
    has("revoked during the call");
    return NULL;
}

static void revoke_stops_calls(struct seats *s) {
    ncclComm_t c = s->comms[0];
    ncclResult_t async = ncclInternalError;
    if (s->first == 1) {
        usleep(400000);
        return;
    }
    pthread_t thread;
    pthread_create(&thread, NULL, revoked_inside, c);
    usleep(50000);
    FAILS(ncclInvalidArgument, ncclCommRevoke(c, 1));
    OK(ncclCommRevoke(c, 0));
    pthread_join(thread, NULL);
    OK(ncclCommGetAsyncError(c, &async));
    CHECK(async == ncclSuccess, "%d", (int)async);
}

/* ---- several unique ids ---- */

struct scalable {
    ncclUniqueId ids[3];
    int rank, odd;
    ncclResult_t expected;
};

static void *scalable(void *argument) {
    struct scalable *s = argument;
    ncclComm_t c = NULL;
    if (s->odd) {
        ncclUniqueId first = s->ids[0];
        s->ids[0] = s->ids[2];
        s->ids[2] = first;
    }
    FAILS(s->expected, ncclCommInitRankScalable(&c, 3, s->rank, 3, s->ids, NULL));
    if (s->expected) {
        /* or, a moment later in the same process, that they are used up */
        CHECK(strstr(pyncclHostLastError(), "disagree about the unique ids") ||
                  strstr(pyncclHostLastError(), "its creation has failed"),
            "%s", pyncclHostLastError());
        CHECK(!c, "a handle");
        return NULL;
    }
    sums_to(c, 6);
    OK(ncclCommDestroy(c));
    FAILS(ncclInvalidUsage, ncclCommInitRankScalable(&c, 3, s->rank, 2, s->ids + 1, NULL));
    has("already been used");
    return NULL;
}

static void several_ids(int odd) {
    struct scalable s[3];
    pthread_t threads[3];
    for (int i = 0; i < 3; i++)
        OK(ncclGetUniqueId(&s[0].ids[i]));
    for (int r = 0; r < 3; r++) {
        memcpy(s[r].ids, s[0].ids, sizeof s[r].ids);
        s[r].rank = r;
        s[r].odd = odd && r == 2;
        s[r].expected = odd ? ncclInvalidUsage : ncclSuccess;
    }
    for (int r = 0; r < 3; r++)
        pthread_create(&threads[r], NULL, scalable, &s[r]);
    for (int r = 0; r < 3; r++)
        pthread_join(threads[r], NULL);
    ncclUniqueId same[] = {s[0].ids[0], s[0].ids[0]};
    ncclComm_t c;
    FAILS(ncclInvalidArgument, ncclCommInitRankScalable(&c, 3, 0, 2, same, NULL));
    FAILS(ncclInvalidArgument, ncclCommInitRankScalable(&c, 3, 0, 4, s[0].ids, NULL));
}

int main(void) {
    alarm(100);
    for (int local = 1; local <= 4; local += 3) {
        CHECK(!world_run(4 / local, local, WORLD_THREADS, 20, shrink_twice), "shrink");
        CHECK(!world_run(4 / local, local, WORLD_THREADS, 20, revoke_and_split), "revoke, split");
    }
    CHECK(!world_run(2, 1, WORLD_THREADS, 20, shrink_refuses), "shrink: arguments");
    CHECK(!world_run(4, 1, WORLD_THREADS, 20, shrink_after_death), "shrink: a dead rank");
    CHECK(!world_run(4, 1, WORLD_THREADS, 20, shrink_after_two_deaths), "shrink: two dead ranks");
    CHECK(!world_run(1, 3, WORLD_THREADS, 20, shrink_stops_calls), "shrink: calls under way");
    CHECK(!grow(1, 2) && !grow(2, 1), "grow");
    CHECK(!world_run(1, 2, WORLD_THREADS, 20, revoke_stops_calls), "revoke: calls under way");
    several_ids(0);
    several_ids(1);
    return 0;
}
