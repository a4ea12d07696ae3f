/* Work: one queued operation as a state machine, and the loop that drives a set of them.
 *
 * Every type of work has a step function that never blocks and a function that names the ranks it waits
 * for. One loop (engine.c) drives them all, so one thread can serve several ranks, and the messages of a
 * group progress together.
 */
#ifndef PYNCCL_HOST_WORK_H
#define PYNCCL_HOST_WORK_H

#include "call.h"

enum host_step {
    HOST_STALLED, /* nothing could be done: somebody else must publish first */
    HOST_MOVED,   /* something was done or published */
    HOST_FINISHED,
    HOST_FAILED, /* work->result and the text of host_fail say why */
};

enum host_type { HOST_WORK_COLLECTIVE, HOST_WORK_SEND, HOST_WORK_RECV, HOST_WORK_SELF, HOST_WORK_INIT,
    HOST_WORK_SPLIT, HOST_WORK_SHRINK, HOST_WORK_FINALIZE, HOST_WORK_WINDOW, HOST_WORK_PUT, HOST_WORK_SIGNAL,
    HOST_WORK_WAIT };

struct host_collective {
    uint64_t seq, print; /* from HOST_COUNCIL up on a revoked communicator */
    int me, nranks;
    int phase;
    int arrived; /* ranks below have been seen at seq */
    int differs;
    int one_shot;
    /* the pipeline: see collective.c */
    uint64_t base;          /* the first chunk's number */
    uint64_t chunks;        /* how many */
    uint64_t in, red, out;  /* chunks done, counted from base */
    size_t piece;           /* bytes of each block that one chunk holds */
    int at_in, at_red, at_out; /* where the last look at the peers' gears stopped */
};

struct host_message {
    uint64_t number, print;
    size_t done; /* bytes */
    uint64_t peer_print;
    int begun, matched;
};

/* A put or a signal: to where, and which counter tells. */
struct host_onesided {
    ncclWindow_t window; /* looked up when the call has its turn */
    size_t offset;
    int context, index;
};

/* Signals of one counter: how many, and once the wait has begun, which number the counter must reach. */
struct host_await {
    uint64_t value;
    int32_t peer;
    uint16_t context, index;
};

enum { HOST_AWAITS = 6 };

struct host_waiting {
    int n, begun;
    int arrived; /* those in front are there */
    struct host_await await[HOST_AWAITS];
};

struct host_init; /* rendezvous.c */
struct host_registration; /* window.c */

/* What a rank says about its split or growth, and what it hears from the others. */
struct host_wish {
    int32_t color, key;  /* growth: how many ranks there are to be, and whether this one brings the id */
    uint8_t id[HOST_ID]; /* for the child that this rank would be the first of */
};

/* host_work_set fills everything but the union, of which it sets what its type looks at first. */
struct host_work {
    enum host_type type;
    int done;
    int entered; /* this work entered its communicator, for its whole group */
    int pends;   /* it made it pending */
    int refused; /* its turn came when it could not run any more: nothing of its communicator may be touched */
    int warned;
    int tolerant; /* goes on although ranks of comm, or this one, have failed or revoked it */
    ncclResult_t result;
    uint32_t serial;          /* of comm, when this was queued */
    struct ncclComm *comm;    /* for INIT: the one being created */
    struct host_work *before; /* must be done first */
    uint64_t since;           /* when the loop first found it stalled; 0: not yet */
    uint64_t patience;        /* ns that it may wait; 0: what the communicator says */
    struct host_call call;
    union {
        struct host_collective collective;
        struct host_message message;
        struct host_onesided onesided;
        struct host_waiting waiting;
    } u;
    struct host_init *init;     /* INIT, SHRINK, and the second half of SPLIT */
    struct ncclComm **newcomm;  /* where the handle of a creation goes */
    struct host_wish *wishes;   /* SPLIT: one a rank, and this rank's own behind them */
    struct ncclComm *child;     /* INIT: the same as comm; SPLIT, SHRINK: what is being created */
    int *places;                /* SHRINK: a rank's number in the child, or -1 */
    struct host_traits traits;  /* SPLIT: of the child */
    struct host_registration *registration; /* WINDOW */
};

/* ---- the types of work ---- */

/* A new work of the given type; nothing of *w is read before. (Field by field: a call of 8 bytes would
 * otherwise spend a tenth of its time clearing memory.) */
void host_work_set(struct host_work *w, enum host_type type, struct ncclComm *c, const struct host_call *call);

enum host_step host_collective_step(struct host_work *w);
enum host_step host_send_step(struct host_work *w);
enum host_step host_recv_step(struct host_work *w);
enum host_step host_split_step(struct host_work *w);
enum host_step host_init_step(struct host_work *w);
enum host_step host_put_step(struct host_work *w); /* PUT and SIGNAL */
enum host_step host_wait_step(struct host_work *w);

/* The lowest rank >= from that this work waits for, or -1. */
int host_collective_missing(const struct host_work *w, int from);
int host_message_missing(const struct host_work *w, int from);
int host_split_missing(const struct host_work *w, int from);
int host_wait_missing(const struct host_work *w, int from);

/* The rank whose answer the second half of a split waits for, or -1; for messages only: a process may hold
 * several ranks. */
int host_split_server(const struct host_work *w);

/* host_work_set for a split of c, with the traits that the child is to have; 0 if there is no memory. */
int host_split_set(struct host_work *w, struct ncclComm *c, int color, int key, const struct host_traits *traits);
/* The same for this rank's part in the growth of c to `nranks`; `id` is NULL where another rank brings it. */
int host_grow_set(struct host_work *w, struct ncclComm *c, int nranks, const uint8_t *id,
    const struct host_traits *traits);
/* The same for a shrink: `exclude` is sorted, without repetition, and this rank is not in it. */
int host_shrink_set(struct host_work *w, struct ncclComm *c, const int *exclude, int n,
    const struct host_traits *traits);
int host_shrink_missing(const struct host_work *w, int from);

/* "AllReduce #17". */
void host_work_text(struct host_text *t, const struct host_work *w);

/* ---- creation (rendezvous.c) ---- */

/* The communicator must be new; it stays the caller's. `timeout` in ns. NULL if there is no memory. */
struct host_init *host_init_new(struct ncclComm *c, int nranks, int rank, const uint8_t id[HOST_ID],
    uint64_t timeout);
/* The ids of a creation with several: all ranks must have the same ones in the same order. 0 without memory. */
int host_init_set_ids(struct host_init *init, const ncclUniqueId *ids, int n);
void host_init_free(struct host_init *init);
/* The descriptor to poll while the creation waits, or -1. */
int host_init_fd(const struct host_init *init);
/* Has this rank of the new communicator come? Only the rank that gathers the others can say no. */
int host_init_here(const struct host_init *init, int rank);
/* The process that gathers the ranks, where this one waits for its answer; else 0. */
int host_init_server(const struct host_init *init);
/* The creation fails for a reason that its own means cannot see: let those who have come know. 1 if this rank
 * is the one to tell them: it goes on telling late comers for a moment, and then fails with this. */
int host_init_tell(struct host_init *init, ncclResult_t code, const char *text);

/* ---- the loop (engine.c) ---- */

/* Drive n works to their ends. The first failure's code, whose text is the thread's last; every work has
 * its own result. Failed communicators are broken. The communicators must have been entered. */
ncclResult_t host_run(struct host_work **works, int n);

/* The same, but when the time is over or the hook says stop, the works stay as they are, and any thread can go
 * on with them: done or not is what each of them says. */
struct host_limit {
    uint64_t until; /* host_now */
    int interrupted;
};
ncclResult_t host_run_until(struct host_work **works, int n, struct host_limit *limit);

/* Does the hook want the calling thread to stop what it waits for? */
int host_interrupted(void);

/* How many items wait or run on the streams of this process: calls that will be made without any thread of the
 * program's. */
extern host_u32 host_items;

/* The calling thread is one of the library's: signals and hooks are not its business. */
void host_be_background(void);

/* Hooks and defaults of the process or thread. */
void host_set_interrupt(int (*hook)(void));
void host_set_init_timeout(double seconds);
double host_init_timeout(void);
uint64_t host_timeout_ns(double seconds);
/* What the calling thread has set for creations, 0 if nothing. */
uint64_t host_init_patience(void);

#endif
