/* Many ranks: 128 as threads, as groups of one thread, and as processes. Each size class once: in the line,
 * in slots, through the pipeline; a ring of messages; all values compared. */
#include "world.h"

static void all_reduce(struct seats *s, size_t count) {
    float *data[s->n], base = 0;
    for (int r = 0; r < s->nranks; r++)
        base += (float)(r % 7);
    for (int i = 0; i < s->n; i++) {
        data[i] = malloc(count * sizeof(float));
        for (size_t j = 0; j < count; j++)
            data[i][j] = (float)((size_t)((s->first + i) % 7) + j % 3);
    }
    OK(ncclGroupStart());
    for (int i = 0; i < s->n; i++)
        OK(ncclAllReduce(data[i], data[i], count, ncclFloat32, ncclSum, s->comms[i], NULL));
    OK(ncclGroupEnd());
    for (int i = 0; i < s->n; i++) {
        for (size_t j = 0; j < count; j++) {
            float want = base + (float)((size_t)s->nranks * (j % 3));
            CHECK(data[i][j] == want, "element %zu: %g, not %g", j, (double)data[i][j], (double)want);
        }
        free(data[i]);
    }
}

static void pass_on(struct seats *s) {
    int n = s->nranks, out[s->n], in[s->n];
    OK(ncclGroupStart());
    for (int i = 0; i < s->n; i++) {
        int rank = s->first + i;
        out[i] = rank;
        OK(ncclSend(&out[i], 1, ncclInt32, (rank + 1) % n, s->comms[i], NULL));
        OK(ncclRecv(&in[i], 1, ncclInt32, (rank + n - 1) % n, s->comms[i], NULL));
    }
    OK(ncclGroupEnd());
    for (int i = 0; i < s->n; i++)
        CHECK(in[i] == (s->first + i + n - 1) % n, "%d", in[i]);
}

static void body(struct seats *s) {
    all_reduce(s, 3);
    all_reduce(s, 100);
    all_reduce(s, 100000);
    pass_on(s);
}

int main(void) {
    static const struct {
        int nprocs, nlocal;
        enum world_mode mode;
    } worlds[] = {{1, 128, WORLD_THREADS}, {1, 128, WORLD_GROUPED}, {32, 4, WORLD_THREADS}, {16, 8, WORLD_GROUPED}};
    for (size_t i = 0; i < sizeof worlds / sizeof *worlds; i++) {
        double begin = seconds_now();
        if (world_run(worlds[i].nprocs, worlds[i].nlocal, worlds[i].mode, 50, body))
            return 1;
        printf("%d x %d: %.2f s\n", worlds[i].nprocs, worlds[i].nlocal, seconds_now() - begin);
        fflush(stdout);
    }
    return 0;
}
