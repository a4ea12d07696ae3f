/* Send and Recv over every mix of ranks: all pairs in one group, rings, messages to oneself, sizes around
 * the mail, a chunk and a full ring, several messages of a pair in order, messages beside collectives; and
 * splitting, whose children are used at once and outlive their parent. */
#include "world.h"

static const size_t sizes[] = {0, 1, 47, 48, 49, 5000, 65536, 65537, 262144, 1000003};

static unsigned char byte_of(int from, int to, int message, size_t i) {
    return (unsigned char)((size_t)from * 31 + (size_t)to * 17 + (size_t)message * 7 + i * (i % 251 + 1));
}

struct letter {
    unsigned char *out, *in;
    size_t size;
};

/* Everybody sends everybody (oneself, too) `count` messages of growing size, all in one group. */
static void all_pairs(struct seats *s, size_t size, int count) {
    int n = s->nranks;
    struct letter *letters = calloc((size_t)(s->n * n * count), sizeof *letters);
    OK(ncclGroupStart());
    for (int i = 0; i < s->n; i++)
        for (int peer = 0; peer < n; peer++)
            for (int m = 0; m < count; m++) {
                struct letter *l = &letters[(i * n + peer) * count + m];
                l->size = size + (size_t)m;
                l->out = malloc(l->size + 1);
                l->in = calloc(1, l->size + 1);
                for (size_t b = 0; b < l->size; b++)
                    l->out[b] = byte_of(s->first + i, peer, m, b);
                OK(ncclSend(l->out, l->size, ncclUint8, peer, s->comms[i], NULL));
                OK(ncclRecv(l->in, l->size, ncclInt8, peer, s->comms[i], NULL));
            }
    OK(ncclGroupEnd());
    for (int i = 0; i < s->n; i++)
        for (int peer = 0; peer < n; peer++)
            for (int m = 0; m < count; m++) {
                struct letter *l = &letters[(i * n + peer) * count + m];
                for (size_t b = 0; b < l->size; b++)
                    CHECK(l->in[b] == byte_of(peer, s->first + i, m, b), "%d to %d, message %d, byte %zu of %zu",
                        peer, s->first + i, m, b, l->size);
                CHECK(l->in[l->size] == 0, "wrote beyond the end");
                free(l->out);
                free(l->in);
            }
    free(letters);
}

/* One value handed round the ring without groups: everybody but rank 0 receives first. */
static void hand_round(struct seats *s) {
    int n = s->nranks, rank = s->first;
    if (s->n > 1 || n == 1)
        return;
    int64_t value = 0;
    if (rank)
        OK(ncclRecv(&value, 1, ncclInt64, rank - 1, s->comms[0], NULL));
    value += rank + 1;
    OK(ncclSend(&value, 1, ncclInt64, (rank + 1) % n, s->comms[0], NULL));
    if (rank == 0) {
        OK(ncclRecv(&value, 1, ncclInt64, n - 1, s->comms[0], NULL));
        CHECK(value == (int64_t)n * (n + 1) / 2, "%lld", (long long)value);
    }
}

/* A group of collectives and messages of all ranks of this thread. */
static void mixed(struct seats *s) {
    int n = s->nranks;
    float sum[s->n], in[s->n], *gathered = calloc((size_t)(s->n * n), sizeof(float));
    OK(ncclGroupStart());
    for (int i = 0; i < s->n; i++) {
        int rank = s->first + i;
        sum[i] = (float)rank;
        OK(ncclSend(&sum[i], 0, ncclFloat32, (rank + 1) % n, s->comms[i], NULL));
        OK(ncclAllReduce(&sum[i], &sum[i], 1, ncclFloat32, ncclSum, s->comms[i], NULL));
        OK(ncclRecv(&in[i], 0, ncclFloat32, (rank + n - 1) % n, s->comms[i], NULL));
        OK(ncclAllGather(&sum[i], gathered + i * n, 1, ncclFloat32, s->comms[i], NULL));
    }
    OK(ncclGroupEnd());
    float want = (float)(n * (n - 1)) / 2;
    for (int i = 0; i < s->n; i++)
        for (int r = 0; r < n; r++) /* in the order of issue: the gather sees the sum */
            CHECK(gathered[i * n + r] == want, "%g, not %g", (double)gathered[i * n + r], (double)want);
    free(gathered);
}

/* Odd and even ranks part, in reversed order; rank 0 stays out. The parents are destroyed first. */
static void split(struct seats *s) {
    ncclComm_t child[s->n];
    OK(ncclGroupStart());
    for (int i = 0; i < s->n; i++) {
        int rank = s->first + i;
        OK(ncclCommSplit(s->comms[i], rank ? rank % 2 : NCCL_SPLIT_NOCOLOR, -rank, &child[i], NULL));
    }
    OK(ncclGroupEnd());
    for (int i = 0; i < s->n; i++) {
        OK(ncclCommDestroy(s->comms[i]));
        s->comms[i] = NULL;
    }
    int32_t value[s->n];
    OK(ncclGroupStart());
    for (int i = 0; i < s->n; i++) {
        int rank = s->first + i, n = 0, me = -1;
        value[i] = rank;
        if (rank == 0) {
            CHECK(child[i] == NULL, "a communicator without a colour");
            continue;
        }
        OK(ncclCommCount(child[i], &n));
        OK(ncclCommUserRank(child[i], &me));
        int last = (s->nranks - 1) % 2 == rank % 2 ? s->nranks - 1 : s->nranks - 2;
        CHECK(me == (last - rank) / 2, "rank %d is %d of %d", rank, me, n);
        OK(ncclBroadcast(&value[i], &value[i], 1, ncclInt32, 0, child[i], NULL));
    }
    OK(ncclGroupEnd());
    for (int i = 0; i < s->n; i++) {
        int rank = s->first + i, last = (s->nranks - 1) % 2 == rank % 2 ? s->nranks - 1 : s->nranks - 2;
        CHECK(value[i] == (rank ? last : 0), "rank %d got %d", rank, value[i]);
        OK(ncclCommDestroy(child[i]));
    }
}

static void body(struct seats *s) {
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        all_pairs(s, sizes[i], sizes[i] < 10000 ? 5 : 2);
    for (int i = 0; i < 50; i++) {
        hand_round(s);
        mixed(s);
    }
    split(s);
}

int main(void) {
    static const struct {
        int nprocs, nlocal;
        enum world_mode mode;
    } worlds[] = {{1, 1, WORLD_THREADS}, {1, 2, WORLD_THREADS}, {1, 3, WORLD_GROUPED}, {1, 4, WORLD_THREADS},
        {2, 1, WORLD_THREADS}, {4, 1, WORLD_THREADS}, {2, 2, WORLD_THREADS}, {2, 2, WORLD_GROUPED}};
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
