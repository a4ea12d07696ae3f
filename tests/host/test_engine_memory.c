/* Registration, suspension and statistics of memory: what is refused; that the pages really go when all ranks are
 * suspended and not before; that every value is right afterwards, however the ranks' suspensions interleave. */
#include "world.h"

enum { N = 3, LARGE = 300000 };

static pthread_barrier_t together;

static long shared_kib(void) {
    char line[256];
    long kib = -1;
    FILE *f = fopen("/proc/self/status", "r");
    while (f && fgets(line, sizeof line, f))
        sscanf(line, "RssShmem: %ld", &kib);
    if (f)
        fclose(f);
    return kib;
}

static uint64_t stat_of(ncclComm_t c, ncclCommMemStat_t which) {
    uint64_t value = ~UINT64_C(0);
    OK(ncclCommMemStats(c, which, &value));
    return value;
}

/* Everything that uses buffers: slots, pipeline, a ring. */
static void use(struct seats *s, int salt) {
    static _Thread_local int in[LARGE], out[LARGE];
    int me = s->first, n = s->nranks;
    for (int count = 5; count <= LARGE; count = count < 1000 ? 4000 : count < LARGE ? LARGE : LARGE + 1) {
        for (int i = 0; i < count; i++)
            in[i] = i * (me + 1) + salt;
        OK(ncclAllReduce(in, out, (size_t)count, ncclInt32, ncclSum, s->comms[0], NULL));
        for (int i = 0; i < count; i += 97)
            CHECK(out[i] == i * n * (n + 1) / 2 + n * salt, "rank %d, element %d of %d", me, i, count);
        OK(ncclGroupStart());
        OK(ncclSend(in, (size_t)count, ncclInt32, (me + 1) % n, s->comms[0], NULL));
        OK(ncclRecv(out, (size_t)count, ncclInt32, (me + n - 1) % n, s->comms[0], NULL));
        OK(ncclGroupEnd());
        for (int i = 0; i < count; i += 97)
            CHECK(out[i] == i * ((me + n - 1) % n + 1) + salt, "rank %d, element %d of %d", me, i, count);
    }
}

static void refusals(struct seats *s) {
    ncclComm_t c = s->comms[0];
    uint64_t value = 7;
    void *handle = &value;
    int x = 1, y = 0;
    OK(ncclCommRegister(c, &x, sizeof x, &handle));
    CHECK(!handle, "%p", handle);
    OK(ncclCommDeregister(c, NULL));
    FAILS(ncclInvalidUsage, ncclCommDeregister(c, &x));
    FAILS(ncclInvalidArgument, ncclCommRegister(c, &x, 0, &handle));
    FAILS(ncclInvalidArgument, ncclCommRegister(c, NULL, 4, &handle));
    FAILS(ncclInvalidArgument, ncclCommRegister(NULL, &x, 4, &handle));
    FAILS(ncclInvalidArgument, ncclCommMemStats(c, (ncclCommMemStat_t)4, &value));
    FAILS(ncclInvalidArgument, ncclCommMemStats(c, ncclStatGpuMemTotal, NULL));
    FAILS(ncclInvalidArgument, ncclCommSuspend(c, 0));
    FAILS(ncclInvalidUsage, ncclCommResume(c));
    OK(ncclGroupStart());
    OK(ncclAllReduce(&x, &y, 1, ncclInt32, ncclSum, c, NULL));
    FAILS(ncclInvalidUsage, ncclCommSuspend(c, NCCL_SUSPEND_MEM));
    FAILS(ncclInvalidUsage, ncclGroupEnd());
    CHECK(value == 7 && y == 0, "something was written");
}

static void pages(struct seats *s) {
    ncclComm_t c = s->comms[0];
    CHECK(stat_of(c, ncclStatGpuMemSuspend) == 0, "a new communicator holds no buffers");
    refusals(s);
    use(s, 1);
    uint64_t buffers = stat_of(c, ncclStatGpuMemSuspend), control = stat_of(c, ncclStatGpuMemPersist);
    CHECK(buffers > 1 << 20 && control > 4096, "%lu, %lu", (unsigned long)buffers, (unsigned long)control);
    CHECK(stat_of(c, ncclStatGpuMemTotal) == buffers + control, "the sum");
    pthread_barrier_wait(&together);
    long before = shared_kib();
    pthread_barrier_wait(&together);
    if (s->first) /* all but one: nothing may go yet */
        OK(ncclCommSuspend(c, NCCL_SUSPEND_MEM));
    pthread_barrier_wait(&together);
    CHECK(shared_kib() >= before - 64, "%ld KiB of %ld", shared_kib(), before);
    pthread_barrier_wait(&together);
    if (!s->first)
        OK(ncclCommSuspend(c, NCCL_SUSPEND_MEM));
    pthread_barrier_wait(&together);
    CHECK(shared_kib() < before - 3 * 1024, "%ld KiB of %ld", shared_kib(), before);
    int x = 1;
    FAILS(ncclInvalidUsage, ncclCommSuspend(c, NCCL_SUSPEND_MEM));
    FAILS(ncclInvalidUsage, ncclAllReduce(&x, &x, 1, ncclInt32, ncclSum, c, NULL));
    CHECK(stat_of(c, ncclStatGpuMemSuspended) == 1 && stat_of(c, ncclStatGpuMemSuspend) == buffers, "statistics");
    pthread_barrier_wait(&together);
    OK(ncclCommResume(c));
    FAILS(ncclInvalidUsage, ncclCommResume(c));
    CHECK(stat_of(c, ncclStatGpuMemSuspended) == 0 && stat_of(c, ncclStatGpuMemSuspend) == 0, "statistics");
    use(s, 2);
    CHECK(stat_of(c, ncclStatGpuMemSuspend) == buffers, "%lu", (unsigned long)buffers);
}

/* Some ranks still suspend while others have long resumed and wait for them in a call. */
static void interleaved(struct seats *s) {
    unsigned seed = (unsigned)s->first + 1;
    for (int i = 0; i < 30; i++) {
        use(s, i);
        OK(ncclCommSuspend(s->comms[0], NCCL_SUSPEND_MEM));
        if (rand_r(&seed) % 3 == 0)
            usleep((useconds_t)(rand_r(&seed) % 500));
        OK(ncclCommResume(s->comms[0]));
    }
}

/* A rank that has left counts as one that rests. */
static void without_the_last(struct seats *s) {
    use(s, 3);
    pthread_barrier_wait(&together);
    long before = shared_kib();
    pthread_barrier_wait(&together);
    if (s->first == 2) {
        OK(ncclCommDestroy(s->comms[0]));
        s->comms[0] = NULL;
    }
    pthread_barrier_wait(&together);
    if (s->first != 2)
        OK(ncclCommSuspend(s->comms[0], NCCL_SUSPEND_MEM));
    pthread_barrier_wait(&together);
    CHECK(shared_kib() < before - 3 * 1024, "%ld KiB of %ld", shared_kib(), before);
    pthread_barrier_wait(&together);
}

int main(void) {
    pthread_barrier_init(&together, NULL, N);
    return world_run(1, N, WORLD_THREADS, 30, pages) || world_run(1, N, WORLD_THREADS, 60, interleaved) ||
           world_run(3, 1, WORLD_THREADS, 60, interleaved) || world_run(1, N, WORLD_THREADS, 30, without_the_last);
}
