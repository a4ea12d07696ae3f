/* Calls on streams: order, waiting, errors, and the end of a communicator with calls queued. */
#include "world.h"

static cudaStream_t new_stream(void) {
    cudaStream_t s;
    OK(pyncclHostStreamCreate(&s));
    return s;
}

/* A send returns although its receive is issued much later, as on a GPU. */
static void send_early(struct seats *at) {
    ncclComm_t c = at->comms[0];
    cudaStream_t s = new_stream();
    int value = 42;
    struct timespec a, b;
    clock_gettime(CLOCK_MONOTONIC, &a);
    if (at->first == 0)
        OK(ncclSend(&value, 1, ncclInt32, 1, c, s));
    clock_gettime(CLOCK_MONOTONIC, &b);
    double ms = (double)(b.tv_sec - a.tv_sec) * 1e3 + (double)(b.tv_nsec - a.tv_nsec) * 1e-6;
    CHECK(ms < 250, "issuing took %g ms", ms);
    if (at->first == 1) {
        usleep(300000);
        value = 0;
        OK(ncclRecv(&value, 1, ncclInt32, 0, c, s));
    }
    OK(pyncclHostStreamSynchronize(s, 10));
    CHECK(value == 42, "%d", value);
    OK(pyncclHostStreamDestroy(s));
}

/* Both ranks send and then receive on one stream: a deadlock, on a GPU as here. The wait ends, and an abort helps. */
static void send_first(struct seats *at) {
    ncclComm_t c = at->comms[0];
    cudaStream_t s = new_stream();
    int peer = 1 - at->first, out = 7 + at->first, in = -1;
    OK(ncclSend(&out, 1, ncclInt32, peer, c, s));
    OK(ncclRecv(&in, 1, ncclInt32, peer, c, s));
    ncclResult_t code = pyncclHostStreamSynchronize(s, 0.3);
    CHECK(code == ncclTimeout || code == ncclRemoteError, "%d", (int)code);
    if (code == ncclTimeout) { /* else the other rank was first to give up */
        has("Send of rank");
        CHECK(pyncclHostStreamQuery(s) == ncclInProgress, "it goes on");
    }
    OK(ncclCommAbort(c));
    code = pyncclHostStreamSynchronize(s, 10);
    CHECK(code != ncclTimeout, "%d", (int)code);
    OK(pyncclHostStreamSynchronize(s, 10)); /* told once */
    OK(pyncclHostStreamDestroy(s));
    FAILS(ncclInvalidArgument, pyncclHostStreamQuery(s));
    at->comms[0] = NULL;
}

/* 2,500 calls on each of four streams; results are checked, and the order of issue is the order of calls. */
static void many(struct seats *at) {
    enum { STREAMS = 4, CALLS = 10000 };
    ncclComm_t c = at->comms[0];
    cudaStream_t streams[STREAMS];
    int64_t *in = malloc(CALLS * sizeof *in), *out = calloc(CALLS, sizeof *out);
    for (int i = 0; i < STREAMS; i++)
        streams[i] = new_stream();
    for (int i = 0; i < CALLS; i++) {
        in[i] = i * (at->first + 1);
        OK(ncclAllReduce(&in[i], &out[i], 1, ncclInt64, ncclSum, c, streams[(i * 7 + at->first) % STREAMS]));
    }
    for (int i = 0; i < STREAMS; i++)
        OK(pyncclHostStreamSynchronize(streams[i], 60));
    for (int64_t i = 0; i < CALLS; i++)
        CHECK(out[i] == i * at->nranks * (at->nranks + 1) / 2, "%lld: %lld", (long long)i, (long long)out[i]);
    for (int i = 0; i < STREAMS; i++)
        OK(pyncclHostStreamDestroy(streams[i]));
    free(in);
    free(out);
}

static void add_one(void *argument) {
    usleep(20000);
    ++*(int *)argument;
}

/* Functions, events and waits between streams; then a call on a default stream, which comes after all of it. */
static void ordered(struct seats *at) {
    ncclComm_t c = at->comms[0];
    cudaStream_t a = new_stream(), b = new_stream();
    cudaEvent_t start, end;
    int value = at->first, sum = 0, total = 0;
    float ms = -1;
    OK(pyncclHostEventCreate(&start));
    OK(pyncclHostEventCreate(&end));
    FAILS(ncclInvalidArgument, pyncclHostEventElapsed(&ms, start, end));
    OK(pyncclHostEventRecord(start, a));
    OK(pyncclHostStreamCall(a, add_one, &value));
    OK(pyncclHostEventRecord(end, a));
    OK(pyncclHostStreamWaitEvent(b, end));
    OK(ncclAllReduce(&value, &sum, 1, ncclInt32, ncclSum, c, b));
    OK(ncclGroupStart());
    OK(ncclAllReduce(&sum, &sum, 1, ncclInt32, ncclMax, c, a)); /* of two streams: behind both */
    OK(ncclAllReduce(&sum, &sum, 1, ncclInt32, ncclMax, c, b));
    OK(ncclGroupEnd());
    OK(ncclAllReduce(&sum, &total, 1, ncclInt32, ncclSum, c, NULL));
    int n = at->nranks, expected = n * (n - 1) / 2 + n;
    CHECK(sum == expected && total == n * expected, "%d %d", sum, total);
    OK(pyncclHostEventSynchronize(end, 10));
    OK(pyncclHostEventQuery(end));
    OK(pyncclHostEventElapsed(&ms, start, end));
    CHECK(ms >= 15 && ms < 20000, "%g", (double)ms);
    OK(pyncclHostStreamWaitStream(a, b));
    OK(pyncclHostStreamSynchronize(a, 10));
    OK(pyncclHostEventDestroy(start));
    OK(pyncclHostEventDestroy(end));
    OK(pyncclHostStreamDestroy(a));
    OK(pyncclHostStreamDestroy(b));
}

/* Destroying waits for what is queued, also where it is late. */
static void destroyed(struct seats *at) {
    cudaStream_t s = new_stream();
    int64_t value = at->first + 1, sum = 0;
    OK(ncclAllReduce(&value, &sum, 1, ncclInt64, ncclSum, at->comms[0], s));
    OK(ncclCommDestroy(at->comms[0]));
    at->comms[0] = NULL;
    CHECK(sum == at->nranks * (at->nranks + 1) / 2, "%lld", (long long)sum);
    OK(pyncclHostStreamDestroy(s));
}

static _Atomic int released;

static void release(void *owner) {
    CHECK(owner == &released, "another owner");
    released++;
}

/* An item holds what it was given until it is done, and no longer; a call that fails takes nothing. */
static void kept(struct seats *at) {
    ncclComm_t c = at->comms[0];
    cudaStream_t s = new_stream();
    int value = 1, before = released;
    pyncclHostKeep(&released, release);
    FAILS(ncclInvalidArgument, ncclAllReduce(&value, &value, 1, ncclInt32, ncclSum, c, (cudaStream_t)(uintptr_t)0x1234));
    has("unknown stream");
    OK(ncclAllReduce(&value, &value, 1, ncclInt32, ncclSum, c, s));
    CHECK(pyncclHostKeep(NULL, NULL) == NULL, "taken");
    OK(pyncclHostStreamSynchronize(s, 10));
    for (int i = 0; i < 1000 && released == before; i++)
        usleep(1000);
    CHECK(released == before + 1 && value == at->nranks, "%d %d", released, value);
    OK(pyncclHostStreamDestroy(s));
}

int main(void) {
    int failed = 0;
    failed |= world_run(2, 1, WORLD_THREADS, 30, send_early);
    failed |= world_run(2, 1, WORLD_THREADS, 30, send_first);
    failed |= world_run(2, 1, WORLD_THREADS, 90, many);
    failed |= world_run(3, 1, WORLD_THREADS, 60, ordered);
    failed |= world_run(2, 1, WORLD_THREADS, 60, kept);
    setenv("PYNCCL_HOST_DELAY", "0-60:7", 1);
    failed |= world_run(3, 1, WORLD_THREADS, 60, destroyed);
    return failed;
}
