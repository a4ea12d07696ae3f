/* Ranks for the tests of the host library: processes, threads in them, or several ranks of one thread.
 *
 * world_run forks `nprocs` processes of `nlocal` ranks each. In GROUPED mode one thread creates and drives the
 * ranks of its process through groups, otherwise every rank has its thread. `body` runs once per thread with
 * the communicators that the thread serves; a process reports through its exit status, and a run that takes
 * longer than `seconds` is killed and fails.
 */
#ifndef PYNCCL_TEST_WORLD_H
#define PYNCCL_TEST_WORLD_H

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "nccl_abi.h"

#define WORLD_DECLARE(ret, name, version, args) ret name args;
NCCL_SYMBOLS(WORLD_DECLARE)
HOST_SYMBOLS(WORLD_DECLARE)

enum world_mode { WORLD_THREADS, WORLD_GROUPED };

struct world {
    int nprocs, nlocal;
    enum world_mode mode;
    double seconds;
    ncclUniqueId id;
};

/* The ranks that one thread serves. */
struct seats {
    int n, first, nranks;
    ncclComm_t *comms;
    struct world *world;
};

typedef void (*world_body)(struct seats *);

#define CHECK(condition, ...) \
    do { \
        if (!(condition)) { \
            fprintf(stderr, "%s:%d: %s: ", __FILE__, __LINE__, #condition); \
            fprintf(stderr, __VA_ARGS__); \
            fprintf(stderr, "\n"); \
            exit(1); \
        } \
    } while (0)

#define OK(call) \
    do { \
        ncclResult_t code_ = (call); \
        CHECK(code_ == ncclSuccess, "%d, %s", (int)code_, pyncclHostLastError()); \
    } while (0)

#define FAILS(expected, call) \
    do { \
        ncclResult_t got_ = (call); \
        CHECK(got_ == (expected), "%d instead of %d: %s", (int)got_, (int)(expected), pyncclHostLastError()); \
    } while (0)

/* The last error says this. */
static inline void has(const char *part) {
    CHECK(strstr(pyncclHostLastError(), part), "\"%s\" is not in: %s", part, pyncclHostLastError());
}

struct world_thread {
    struct world *world;
    world_body body;
    int first, n;
};

static inline void *world_thread(void *argument) {
    struct world_thread *t = argument;
    struct world *w = t->world;
    int nranks = w->nprocs * w->nlocal;
    ncclComm_t comms[t->n];
    if (t->n > 1)
        OK(ncclGroupStart());
    for (int i = 0; i < t->n; i++)
        OK(ncclCommInitRank(&comms[i], nranks, w->id, t->first + i));
    if (t->n > 1)
        OK(ncclGroupEnd());
    struct seats seats = {t->n, t->first, nranks, comms, w};
    t->body(&seats);
    for (int i = 0; i < t->n; i++)
        if (comms[i])
            OK(ncclCommDestroy(comms[i]));
    return NULL;
}

static inline void world_process(struct world *w, int process, world_body body) {
    int first = process * w->nlocal, threads = w->mode == WORLD_GROUPED ? 1 : w->nlocal;
    struct world_thread t[threads];
    pthread_t ids[threads];
    for (int i = 0; i < threads; i++) {
        t[i] = (struct world_thread){w, body, first + i, w->mode == WORLD_GROUPED ? w->nlocal : 1};
        pthread_create(&ids[i], NULL, world_thread, &t[i]);
    }
    for (int i = 0; i < threads; i++)
        pthread_join(ids[i], NULL);
}

/* 0 if all processes left with 0. With one process nothing is forked, so sanitizers see it all. */
static inline int world_run(int nprocs, int nlocal, enum world_mode mode, double seconds, world_body body) {
    struct world w = {.nprocs = nprocs, .nlocal = nlocal, .mode = mode, .seconds = seconds};
    OK(ncclGetUniqueId(&w.id));
    if (nprocs == 1) {
        world_process(&w, 0, body);
        return 0;
    }
    pid_t pids[nprocs];
    fflush(NULL);
    for (int p = 0; p < nprocs; p++) {
        pids[p] = fork();
        if (pids[p] == 0) {
            alarm((unsigned)seconds + 1);
            world_process(&w, p, body);
            exit(0);
        }
    }
    int bad = 0;
    for (int p = 0; p < nprocs; p++) {
        int status = 0;
        while (waitpid(pids[p], &status, 0) < 0 && errno == EINTR) {
        }
        if (status)
            fprintf(stderr, "process %d of %d: status %#x\n", p, nprocs, status);
        bad |= status != 0;
    }
    return bad;
}

static inline double seconds_now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

#endif
