/* Every collective over every mix of processes, threads and grouped ranks, every root, sizes on both sides
 * of each change of algorithm, out of place and in place: all elements are compared, and the guards around
 * the outputs. Inputs are small integers in float32, so every order of summation gives the same bits. */
#include "world.h"

enum { GUARD = 16, POISON = 0x5a };

static const size_t counts[] = {1, 2, 12, 13, 1000, 4097, 16384, 16385, 70000, 300001};

static float input(int rank, size_t i) {
    return (float)((size_t)(rank + 1) * 3 + i % 17 + (size_t)rank * (i % 5));
}

struct buffer {
    char *base;
    float *data;
    size_t bytes;
};

static struct buffer make(size_t count) {
    struct buffer b = {.bytes = count * sizeof(float)};
    b.base = malloc(b.bytes + 2 * GUARD);
    memset(b.base, POISON, b.bytes + 2 * GUARD);
    b.data = (float *)(void *)(b.base + GUARD);
    return b;
}

static void done(struct buffer *b) {
    for (int i = 0; i < GUARD; i++)
        CHECK(b->base[i] == POISON && b->base[GUARD + b->bytes + (size_t)i] == POISON, "guard %d", i);
    free(b->base);
}

enum kind { ALL_REDUCE, AVERAGE, REDUCE, BROADCAST, ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL, GATHER, SCATTER, KINDS };

static int in_blocks(enum kind k, int n) {
    return k == REDUCE_SCATTER || k == ALL_TO_ALL || k == SCATTER ? n : 1;
}

static int out_blocks(enum kind k, int n) {
    return k == ALL_GATHER || k == ALL_TO_ALL || k == GATHER ? n : 1;
}

static float expected(enum kind k, int rank, int n, int root, size_t count, size_t i) {
    float sum = 0;
    switch (k) {
    case ALL_REDUCE:
    case REDUCE:
    case REDUCE_SCATTER:
        for (int r = 0; r < n; r++)
            sum += input(r, k == REDUCE_SCATTER ? (size_t)rank * count + i : i);
        return sum;
    case AVERAGE: /* one rounding for each rank's input */
        for (int r = 0; r < n; r++)
            sum += input(r, i) * (1.0f / (float)n);
        return sum;
    case BROADCAST:
        return input(root, i);
    case ALL_GATHER:
    case GATHER:
        return input((int)(i / count), i % count);
    case ALL_TO_ALL:
        return input((int)(i / count), (size_t)rank * count + i % count);
    default:
        return input(root, (size_t)rank * count + i);
    }
}

static void call(enum kind k, const float *s, float *r, size_t count, int root, ncclComm_t c) {
    switch (k) {
    case ALL_REDUCE:
        OK(ncclAllReduce(s, r, count, ncclFloat32, ncclSum, c, NULL));
        break;
    case AVERAGE:
        OK(ncclAllReduce(s, r, count, ncclFloat32, ncclAvg, c, NULL));
        break;
    case REDUCE:
        OK(ncclReduce(s, r, count, ncclFloat32, ncclSum, root, c, NULL));
        break;
    case BROADCAST:
        OK(ncclBroadcast(s, r, count, ncclFloat32, root, c, NULL));
        break;
    case ALL_GATHER:
        OK(ncclAllGather(s, r, count, ncclFloat32, c, NULL));
        break;
    case REDUCE_SCATTER:
        OK(ncclReduceScatter(s, r, count, ncclFloat32, ncclSum, c, NULL));
        break;
    case ALL_TO_ALL:
        OK(ncclAlltoAll(s, r, count, ncclFloat32, c, NULL));
        break;
    case GATHER:
        OK(ncclGather(s, r, count, ncclFloat32, root, c, NULL));
        break;
    default:
        OK(ncclScatter(s, r, count, ncclFloat32, root, c, NULL));
    }
}

static int has_input(enum kind k, int rank, int root) {
    return (k != BROADCAST && k != SCATTER) || rank == root;
}

static int has_output(enum kind k, int rank, int root) {
    return (k != REDUCE && k != GATHER) || rank == root;
}

static void one(struct seats *seats, enum kind k, size_t count, int root, int in_place) {
    int n = seats->nranks;
    struct buffer in[seats->n], out[seats->n];
    float *send[seats->n], *recv[seats->n];
    for (int i = 0; i < seats->n; i++) {
        int rank = seats->first + i;
        in[i] = make(count * (size_t)in_blocks(k, n));
        out[i] = make(count * (size_t)out_blocks(k, n));
        send[i] = has_input(k, rank, root) ? in[i].data : NULL;
        recv[i] = has_output(k, rank, root) ? out[i].data : NULL;
        if (in_place && in_blocks(k, n) == 1 && recv[i] && send[i])
            send[i] = recv[i] + (out_blocks(k, n) > 1 ? (size_t)rank * count : 0);
        else if (in_place && k != ALL_TO_ALL && recv[i] && send[i])
            recv[i] = send[i] + (size_t)rank * count;
        for (size_t j = 0; send[i] && j < count * (size_t)in_blocks(k, n); j++)
            send[i][j] = input(rank, j);
    }
    if (seats->n > 1)
        OK(ncclGroupStart());
    for (int i = 0; i < seats->n; i++)
        call(k, send[i], recv[i], count, root, seats->comms[i]);
    if (seats->n > 1)
        OK(ncclGroupEnd());
    for (int i = 0; i < seats->n; i++) {
        int rank = seats->first + i;
        for (size_t j = 0; recv[i] && j < count * (size_t)out_blocks(k, n); j++) {
            float want = expected(k, rank, n, root, count, j);
            CHECK(recv[i][j] == want, "kind %d rank %d of %d count %zu root %d in place %d element %zu: %g, not %g",
                (int)k, rank, n, count, root, in_place, j, (double)recv[i][j], (double)want);
        }
        done(&in[i]);
        done(&out[i]);
    }
}

static void body(struct seats *seats) {
    for (size_t c = 0; c < sizeof counts / sizeof *counts; c++)
        for (int k = 0; k < KINDS; k++)
            for (int root = 0; root < (k == REDUCE || k == BROADCAST || k >= GATHER ? seats->nranks : 1); root++)
                for (int in_place = 0; in_place < 2; in_place++)
                    if (counts[c] < 100000 || root == seats->nranks - 1 || root == 0)
                        one(seats, (enum kind)k, counts[c], root, in_place);
}

int main(void) {
    static const struct {
        int nprocs, nlocal;
        enum world_mode mode;
    } worlds[] = {{1, 1, WORLD_THREADS}, {1, 2, WORLD_THREADS}, {1, 2, WORLD_GROUPED}, {1, 3, WORLD_THREADS},
        {1, 4, WORLD_GROUPED}, {1, 4, WORLD_THREADS}, {2, 1, WORLD_THREADS}, {3, 1, WORLD_THREADS},
        {4, 1, WORLD_THREADS}, {2, 2, WORLD_THREADS}, {2, 2, WORLD_GROUPED}, {3, 2, WORLD_GROUPED}};
    for (size_t i = 0; i < sizeof worlds / sizeof *worlds; i++) {
        double begin = seconds_now();
        if (world_run(worlds[i].nprocs, worlds[i].nlocal, worlds[i].mode, 50, body))
            return 1;
        printf("%d x %d%s: %.2f s\n", worlds[i].nprocs, worlds[i].nlocal,
            worlds[i].mode == WORLD_GROUPED ? " grouped" : "", seconds_now() - begin);
        fflush(stdout);
    }
    return 0;
}
