/* What the host library's calls cost through its C functions, without Python: `bench_engine [-n ranks]
 * [-t ranks per process] [op ...]`. For every operation and size: median and minimum over batches of the
 * time of one call in microseconds, the slowest rank counting. Above the table stands the round trip of a
 * flag between two processors of this machine, which decides all small sizes and changes with where the
 * virtual machine happens to run: compare only numbers of one run. */
#include <sched.h>
#include <stdatomic.h>
#include <sys/mman.h>

#include "../tests/host/world.h"

enum { BATCHES = 9, MAX = 16 << 20 };

static const char *const names[] = {"all_reduce", "all_reduce_in_place", "reduce", "broadcast", "all_gather",
    "reduce_scatter", "all_to_all", "exchange", "ping_pong"};
enum { OPS = sizeof names / sizeof *names };
static const size_t sizes[] = {8, 48, 1024, 16384, 65536, 262144, 1 << 20, 16 << 20};
enum { SIZES = sizeof sizes / sizeof *sizes };

static struct {
    _Atomic int arrived, round;
    _Atomic uint32_t ping, pong;
    double took[64];
} *shared;
static int wanted[OPS], any_wanted, ranks_per_process = 1;
static double batch_seconds = 0.03;

static void barrier(int n) {
    int round = atomic_load(&shared->round);
    if (atomic_fetch_add(&shared->arrived, 1) == n - 1) {
        atomic_store(&shared->arrived, 0);
        atomic_fetch_add(&shared->round, 1);
    }
    while (atomic_load(&shared->round) == round)
        sched_yield();
}

static void round_trip(int rank) {
    enum { TIMES = 20000 };
    double begin = seconds_now();
    for (uint32_t i = 1; i <= TIMES && rank < 2; i++) {
        if (rank == 0) {
            atomic_store_explicit(&shared->ping, i, memory_order_release);
            while (atomic_load_explicit(&shared->pong, memory_order_acquire) < i) {
            }
        } else {
            while (atomic_load_explicit(&shared->ping, memory_order_acquire) < i) {
            }
            atomic_store_explicit(&shared->pong, i, memory_order_release);
        }
    }
    if (rank == 0)
        printf("flag round trip %.3f us\n", (seconds_now() - begin) / TIMES * 1e6);
}

static void call(int op, const char *in, char *out, size_t bytes, int rank, int n, ncclComm_t c) {
    size_t count = bytes / 4, each = count / (size_t)n ? count / (size_t)n : 1;
    int peer = rank ^ 1;
    switch (op) {
    case 0:
        OK(ncclAllReduce(in, out, count, ncclFloat32, ncclSum, c, NULL));
        break;
    case 1:
        OK(ncclAllReduce(out, out, count, ncclFloat32, ncclMax, c, NULL));
        break;
    case 2:
        OK(ncclReduce(in, out, count, ncclFloat32, ncclSum, 0, c, NULL));
        break;
    case 3:
        OK(ncclBroadcast(in, out, count, ncclFloat32, 0, c, NULL));
        break;
    case 4:
        OK(ncclAllGather(in, out, each, ncclFloat32, c, NULL));
        break;
    case 5:
        OK(ncclReduceScatter(in, out, each, ncclFloat32, ncclSum, c, NULL));
        break;
    case 6:
        OK(ncclAlltoAll(in, out, each, ncclFloat32, c, NULL));
        break;
    case 7:
        if (peer >= n)
            return;
        OK(ncclGroupStart());
        OK(ncclSend(in, count, ncclFloat32, peer, c, NULL));
        OK(ncclRecv(out, count, ncclFloat32, peer, c, NULL));
        OK(ncclGroupEnd());
        break;
    default:
        if (peer >= n)
            return;
        if (rank & 1)
            OK(ncclRecv(out, count, ncclFloat32, peer, c, NULL));
        OK(ncclSend(in, count, ncclFloat32, peer, c, NULL));
        if (!(rank & 1))
            OK(ncclRecv(out, count, ncclFloat32, peer, c, NULL));
    }
}

static double slowest(struct seats *s, double mine) {
    double t = 0;
    shared->took[s->first] = mine;
    barrier(s->nranks);
    for (int r = 0; r < s->nranks; r++)
        t = shared->took[r] > t ? shared->took[r] : t;
    barrier(s->nranks);
    return t;
}

static double batch(struct seats *s, int op, const char *in, char *out, size_t bytes, int times) {
    barrier(s->nranks);
    double begin = seconds_now();
    for (int i = 0; i < times; i++)
        call(op, in, out, bytes, s->first, s->nranks, s->comms[0]);
    return slowest(s, (seconds_now() - begin) / times);
}

static int by_value(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static void body(struct seats *s) {
    char *in = aligned_alloc(4096, MAX), *out = aligned_alloc(4096, MAX);
    memset(in, 0, MAX);
    memset(out, 0, MAX);
    round_trip(s->first);
    for (int op = 0; op < OPS; op++) {
        if (any_wanted && !wanted[op])
            continue;
        for (int i = 0; i < SIZES; i++) {
            double t[BATCHES];
            batch(s, op, in, out, sizes[i], 2);
            double once = batch(s, op, in, out, sizes[i], 3);
            int times = (int)(batch_seconds / once) + 1;
            for (int b = 0; b < BATCHES; b++)
                t[b] = batch(s, op, in, out, sizes[i], times) * (op == OPS - 1 ? 0.5 : 1);
            qsort(t, BATCHES, sizeof *t, by_value);
            if (s->first == 0)
                printf("%-20s %9zu %10.3f %10.3f\n", names[op], sizes[i], t[BATCHES / 2] * 1e6, t[0] * 1e6);
        }
        fflush(stdout);
    }
    free(in);
    free(out);
}

int main(int argc, char **argv) {
    int n = 2;
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "-n") == 0 && i + 1 < argc)
            n = atoi(argv[++i]);
        else if (strcmp(argv[i], "-t") == 0 && i + 1 < argc)
            ranks_per_process = atoi(argv[++i]);
        for (int op = 0; op < OPS; op++)
            if (strcmp(argv[i], names[op]) == 0)
                wanted[op] = any_wanted = 1;
    }
    shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (n < 1 || n > 64 || ranks_per_process < 1 || n % ranks_per_process || shared == MAP_FAILED)
        return 2;
    printf("%d ranks, %d a process; %-9s %10s %10s\n", n, ranks_per_process, "bytes", "median us", "min us");
    return world_run(n / ranks_per_process, ranks_per_process, WORLD_THREADS, 300, body);
}
