/* Collectives with a configuration, and groups that are only priced.
 *
 * Every Config function must do what its plain twin does; a wrong configuration is an error that moves nothing
 * and does not poison an open group. A priced group moves nothing, leaves the communicator as it was, and still
 * makes the communicators that it creates. */
#include "world.h"

enum { N = 3, COUNT = 6 };

static ncclCollConfig_t some_config(void) {
    ncclCollConfig_t config = NCCL_COLLCONFIG_INITIALIZER;
    config.minCTAs = 2;
    config.maxCTAs = 4;
    config.algSelection = "RING";
    config.CTAPolicy = NCCL_CTA_POLICY_EFFICIENCY;
    config.userProfilerTag = 77;
    return config;
}

/* Collective k of rank i on the N ranks of one thread, with a configuration or without. */
static ncclResult_t issue(int k, const int *in, int *out, ncclComm_t c, const ncclCollConfig_t *with) {
    switch (k) {
    case 0:
        return with ? ncclAllReduceConfig(in, out, COUNT, ncclInt32, ncclSum, c, NULL, with)
                    : ncclAllReduce(in, out, COUNT, ncclInt32, ncclSum, c, NULL);
    case 1:
        return with ? ncclReduceConfig(in, out, COUNT, ncclInt32, ncclMax, 1, c, NULL, with)
                    : ncclReduce(in, out, COUNT, ncclInt32, ncclMax, 1, c, NULL);
    case 2:
        return with ? ncclBroadcastConfig(in, out, COUNT, ncclInt32, 2, c, NULL, with)
                    : ncclBroadcast(in, out, COUNT, ncclInt32, 2, c, NULL);
    case 3:
        return with ? ncclAllGatherConfig(in, out, COUNT, ncclInt32, c, NULL, with)
                    : ncclAllGather(in, out, COUNT, ncclInt32, c, NULL);
    case 4:
        return with ? ncclReduceScatterConfig(in, out, COUNT, ncclInt32, ncclSum, c, NULL, with)
                    : ncclReduceScatter(in, out, COUNT, ncclInt32, ncclSum, c, NULL);
    case 5:
        return with ? ncclAlltoAllConfig(in, out, COUNT, ncclInt32, c, NULL, with)
                    : ncclAlltoAll(in, out, COUNT, ncclInt32, c, NULL);
    case 6:
        return with ? ncclGatherConfig(in, out, COUNT, ncclInt32, 2, c, NULL, with)
                    : ncclGather(in, out, COUNT, ncclInt32, 2, c, NULL);
    default:
        return with ? ncclScatterConfig(in, out, COUNT, ncclInt32, 1, c, NULL, with)
                    : ncclScatter(in, out, COUNT, ncclInt32, 1, c, NULL);
    }
}

enum { KINDS = 8, ROOM = N * COUNT };

static void fill(int in[N][ROOM], int out[N][ROOM]) {
    for (int i = 0; i < N; i++)
        for (int j = 0; j < ROOM; j++) {
            in[i][j] = 1000 * i + j * j;
            out[i][j] = -1;
        }
}

static void twins(struct seats *s) {
    ncclCollConfig_t config = some_config();
    for (int k = 0; k < KINDS; k++) {
        int in[N][ROOM], plain[N][ROOM], with[N][ROOM];
        fill(in, plain);
        fill(in, with);
        OK(ncclGroupStart());
        for (int i = 0; i < N; i++)
            OK(issue(k, in[i], plain[i], s->comms[i], NULL));
        OK(ncclGroupEnd());
        OK(ncclGroupStart());
        for (int i = 0; i < N; i++)
            OK(issue(k, in[i], with[i], s->comms[i], i == 1 ? NULL : &config));
        OK(ncclGroupEnd());
        CHECK(!memcmp(plain, with, sizeof plain), "collective %d", k);
        CHECK(plain[1][0] != -1 || plain[2][0] != -1, "collective %d did nothing", k);
    }
}

static void refusals(struct seats *s) {
    ncclCollConfig_t bad[5];
    for (int i = 0; i < 5; i++)
        bad[i] = some_config();
    bad[0].magic = 1;
    bad[1].size = 8;
    bad[2].forceAlgSelection = 2;
    bad[3].CTAPolicy = 4;
    bad[4].CTAPolicy = -1;
    int in[N][ROOM], out[N][ROOM], untouched[N][ROOM];
    fill(in, out);
    fill(in, untouched);
    OK(ncclGroupStart());
    for (int k = 0; k < KINDS; k++)
        for (int i = 0; i < 5; i++)
            FAILS(ncclInvalidArgument, issue(k, in[0], out[0], s->comms[0], &bad[i]));
    CHECK(!memcmp(out, untouched, sizeof out), "something moved");
    for (int i = 0; i < N; i++)
        OK(issue(0, in[i], out[i], s->comms[i], NULL));
    OK(ncclGroupEnd()); /* as in NCCL, such an error is the call's alone */
    CHECK(out[2][1] == 3003, "%d", out[2][1]);
    ncclCollConfig_t event = some_config();
    event.launchCompletionEvent = (cudaEvent_t)(uintptr_t)8;
    FAILS(ncclInvalidArgument, issue(0, in[0], out[0], s->comms[0], &event));
    event.size = 64; /* a caller of a release that had no events */
    OK(ncclGroupStart());
    for (int i = 0; i < N; i++)
        OK(issue(0, in[i], out[i], s->comms[i], &event));
    OK(ncclGroupEnd());
}

static float price(struct seats *s, char *in, char *out, size_t bytes, int messages) {
    ncclSimInfo_t info = NCCL_SIM_INFO_INITIALIZER;
    OK(ncclGroupStart());
    OK(ncclGroupStart());
    for (int i = 0; i < N; i++) {
        if (messages) {
            OK(ncclSend(in, bytes, ncclInt8, (i + 1) % N, s->comms[i], NULL));
            OK(ncclRecv(out, bytes, ncclInt8, (i + 2) % N, s->comms[i], NULL));
        } else {
            OK(ncclAllReduce(in, out, bytes, ncclInt8, ncclSum, s->comms[i], NULL));
        }
    }
    OK(ncclGroupSimulateEnd(&info)); /* an inner end, which says nothing */
    CHECK(info.estimatedTime == NCCL_UNDEF_FLOAT, "%g", (double)info.estimatedTime);
    OK(ncclGroupSimulateEnd(&info));
    return info.estimatedTime;
}

/* Never less for one byte more: also where the algorithm changes, and for one rank alone. */
static void rising(struct seats *s) {
    static char in[8 << 16], out[8 << 16];
    const size_t edges[] = {48, 16 << 10, 65536 / N, 65536};
    for (size_t e = 0; e < sizeof edges / sizeof *edges; e++)
        for (int kind = 0; kind < 4; kind++)
            for (int me = 0; me < N; me++) {
                float last = 0;
                for (size_t bytes = edges[e] - 2; bytes <= edges[e] + 2; bytes++) {
                    ncclSimInfo_t info = NCCL_SIM_INFO_INITIALIZER;
                    ncclComm_t c = s->comms[me];
                    OK(ncclGroupStart());
                    if (kind == 0)
                        OK(ncclAllReduce(in, out, bytes, ncclInt8, ncclSum, c, NULL));
                    else if (kind == 1)
                        OK(ncclReduce(in, out, bytes, ncclInt8, ncclSum, 1, c, NULL));
                    else if (kind == 2)
                        OK(ncclReduceScatter(in, out, bytes, ncclInt8, ncclSum, c, NULL));
                    else
                        OK(ncclAllGather(in, out, bytes, ncclInt8, c, NULL));
                    OK(ncclGroupSimulateEnd(&info));
                    CHECK(info.estimatedTime >= last, "kind %d, rank %d, %zu bytes: %g us after %g", kind, me, bytes,
                        (double)info.estimatedTime, (double)last);
                    last = info.estimatedTime;
                }
            }
}

static void prices(struct seats *s) {
    static char in[1 << 20], out[1 << 20];
    memset(in, 1, sizeof in);
    for (int messages = 0; messages < 2; messages++) {
        float last = 0;
        for (size_t bytes = 8; bytes <= sizeof in; bytes *= 8) {
            float now = price(s, in, out, bytes, messages);
            CHECK(now > 0 && now >= last, "%zu bytes: %g us after %g", bytes, (double)now, (double)last);
            last = now;
        }
        CHECK(last > 10 && last < 1e6f, "%g us", (double)last);
    }
    CHECK(!out[0] && !memchr(out, 1, sizeof out), "it moved something");
    rising(s);
    twins(s); /* and the communicator is as it was */
}

static void pretended_ends(struct seats *s) {
    ncclSimInfo_t info = NCCL_SIM_INFO_INITIALIZER;
    int in[N][ROOM], out[N][ROOM];
    fill(in, out);
    FAILS(ncclInvalidUsage, ncclGroupSimulateEnd(&info));
    OK(ncclGroupStart());
    for (int i = 0; i < N; i++)
        OK(issue(0, in[i], out[i], s->comms[i], NULL));
    OK(ncclGroupSimulateEnd(NULL)); /* a plain end */
    CHECK(out[1][0] == 3000, "%d", out[1][0]);
    ncclSimInfo_t garbage = {0};
    OK(ncclGroupStart());
    for (int i = 0; i < N; i++)
        OK(issue(0, in[i], out[i], s->comms[i], NULL));
    FAILS(ncclInvalidArgument, ncclGroupSimulateEnd(&garbage));
    OK(ncclGroupStart());
    FAILS(ncclInvalidArgument, ncclAllReduce(in, out, 1, (ncclDataType_t)99, ncclSum, s->comms[0], NULL));
    FAILS(ncclInvalidArgument, ncclGroupSimulateEnd(&info));
    /* Creations are no pretence, wherever they stand. */
    ncclUniqueId id;
    ncclComm_t made[N];
    OK(ncclGetUniqueId(&id));
    fill(in, out);
    OK(ncclGroupStart());
    for (int i = 0; i < N; i++) {
        OK(issue(0, in[i], out[i], s->comms[i], NULL));
        OK(ncclCommInitRank(&made[i], N, id, i));
    }
    OK(ncclGroupSimulateEnd(&info));
    CHECK(info.estimatedTime > 0 && out[0][0] == -1, "%g, %d", (double)info.estimatedTime, out[0][0]);
    struct seats theirs = *s;
    theirs.comms = made;
    twins(&theirs);
    for (int i = 0; i < N; i++)
        OK(ncclCommDestroy(made[i]));
}

static void body(struct seats *s) {
    twins(s);
    refusals(s);
    prices(s);
    pretended_ends(s);
}

int main(void) {
    return world_run(1, N, WORLD_GROUPED, 30, body);
}
