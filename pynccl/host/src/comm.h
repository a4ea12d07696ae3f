/* One rank's handle on a communicator. See comm.c for who may touch what. */
#ifndef PYNCCL_HOST_COMM_H
#define PYNCCL_HOST_COMM_H

#include "error.h"
#include "host.h"
#include "reduce.h"

enum host_life {
    HOST_LIFE_FREE,
    HOST_LIFE_NEW, /* being created: by a group that has not ended yet, or in the background; or that failed */
    HOST_LIFE_LIVE,
    HOST_LIFE_FINALIZED,
    HOST_LIFE_GONE, /* destroyed or aborted; the handle stays readable to say so */
};

/* Why a communicator is wanted empty. */
enum host_stop { HOST_STOP_NOT, HOST_STOP_ABORT, HOST_STOP_REVOKE, HOST_STOP_SHRINK };

enum { HOST_FEW_SPINS = 8, HOST_MANY_SPINS = 256 };

/* Beside the thread in `busy`: it is a queued call that is inside. */
#define HOST_BUSY_QUEUE UINT32_C(0x80000000)

struct host_work;
struct host_item;
struct host_window;

/* What a configuration says of a communicator. */
struct host_traits {
    int nonblocking; /* its calls run in the background */
    int contexts, signals; /* of one-sided communication: how many there are */
};

/* What a rank remembers of a peer it exchanges messages with. */
struct host_peer {
    uint64_t sent, received;         /* messages begun */
    uint64_t put, taken;             /* ring chunks */
    int send_ready;                  /* pages of the ring exist */
    struct host_work *last_send, *last_recv; /* of the group being run: the order in which they go */
    uint32_t signal_ready, await_ready; /* by context: the pages of the signals to and from it exist */
    uint64_t *awaited; /* signals from it that were waited for, by context and index; NULL: none */
    uint64_t looked;   /* when a put last looked at its process */
};

struct host_userop {
    int live;
    int dtype;
    struct host_op op;
    const void *scalar; /* ncclScalarDevice: read when the collective runs */
};

struct ncclComm {
    uint64_t magic;
    host_u32 life;       /* enum host_life */
    uint32_t serial;     /* of the process; a recycled handle gets a new one */
    uint32_t generation; /* of forks */
    uint32_t creator;    /* thread */
    const char *ended_by;
    struct ncclComm *next; /* in the list of complete handles, or of spent ones */

    host_u32 busy; /* thread inside a call, 0 if none */
    host_u32 last; /* thread inside the last call */
    host_u32 stop; /* enum host_stop: somebody wants the communicator empty */
    host_u32 pending; /* a job (job.c) works for it; the last thing that the job clears */
    host_u32 revoked;

    int rank, nranks, device;
    int nonblocking, contexts, signals; /* struct host_traits */
    int spins, most_spins; /* polls before the processor is given up: now, and at most */
    size_t one_shot;  /* largest reduction that goes through slots */
    host_u64 timeout; /* ns */
    struct host_map *map;
    int marker; /* descriptor that says "this id is used", on the rank that served; else -1 */

    host_u64 seq;   /* collectives begun; written by the thread that is inside */
    uint64_t councils; /* the same after a revocation */
    uint64_t chunk; /* chunks begun */
    int slot_ready, stage_ready; /* pages of my slots and stage exist */
    struct host_peer *peers;     /* nranks of them */
    struct host_work *last_collective; /* of the group being run */
    const void *group;                 /* the group that entered, while it runs */

    host_u32 queued; /* items on streams (queue.c) that concern it and are not done; under the lock of queues */
    struct host_item *last_item; /* the newest of them; under the same lock */

    host_u32 suspended;
    size_t suspended_bytes; /* what it held when it was suspended */

    struct host_userop *ops;
    int nops;

    struct host_window *windows; /* under host_lock */

    uint8_t (*shrunk)[HOST_ID]; /* sets of ranks that a shrink has kept, one entry for each time */
    int nshrunk;

    host_u32 broken;   /* ncclResult_t of a lasting error, repeated by every later call */
    char *broken_text; /* written before it */

    /* What ncclCommGetAsyncError says in its place: 1 + the result of the last job, where that was a shrink or
     * a split which does not care for the communicator's own failure, nor cause one. Else 0. */
    host_u32 told;
    char *told_text;
};

/* How many forks lie between the start of the library and this process. */
uint32_t host_generation(void);
/* The one lock of process-wide state (handles, mappings, used ids). Never held across a wait. */
void host_lock(void);
void host_unlock(void);
uint32_t host_thread_id(void);

struct ncclComm *host_comm_new(void);
struct host_traits host_comm_traits(const struct ncclComm *c);
void host_comm_set_traits(struct ncclComm *c, const struct host_traits *traits);
/* The thread that created the given rank, if the rank lives in this process; else 0. */
uint32_t host_comm_creator(const struct host_map *map, int rank);
/* The calling thread waits for process `pid` and cannot serve the other communicators that it served last:
 * tell their ranks. 0: it waits no more. */
void host_comm_wait_outside(const struct ncclComm *waiting, uint32_t pid);
/* The communicator is complete: ranks, map and device are set. 0 if there is no memory. */
int host_comm_ready(struct ncclComm *c);
/* This rank will make no more calls. */
void host_comm_finalize(struct ncclComm *c);
/* Leave the segment as `state`, free what the handle holds, keep the handle as a tombstone. `by` is the
 * name of the call that did it. */
void host_comm_end(struct ncclComm *c, enum host_state state, const char *by);

/* Is it a live handle of this process? `what` names the call in the text: "AllReduce". */
ncclResult_t host_comm_check(const struct ncclComm *c, const char *what);
/* The same, and ready for operations: created, not in progress, not finalized, not broken, not revoked. */
ncclResult_t host_comm_ensure(const struct ncclComm *c, const char *what);
/* Created, not in progress and not finalized: what a split or a shrink of a failed communicator needs. */
ncclResult_t host_comm_ensure_alive(const struct ncclComm *c, const char *what);
/* ncclInvalidArgument with NCCL's text if a job works for it. */
ncclResult_t host_comm_ensure_idle(const struct ncclComm *c);

/* A call begins to use what the handle holds; one thread at a time. */
ncclResult_t host_comm_enter(struct ncclComm *c, const char *what);
void host_comm_leave(struct ncclComm *c);
/* The same for a thread of the library, which waits while another call is inside. 0: the communicator is being
 * emptied. */
int host_comm_enter_late(struct ncclComm *c);
/* The communicator is wanted empty: nobody can enter until host_comm_reopen; after an abort nobody ever can. 0 if
 * another thread wants it empty already. */
int host_comm_stop(struct ncclComm *c, enum host_stop why);
/* Wait until no call is inside and none is queued; 0, and it is open again, if one still is after `ns`. */
int host_comm_drain(struct ncclComm *c, enum host_stop why, uint64_t ns);
void host_comm_reopen(struct ncclComm *c, enum host_stop why);
/* No operations any more. The communicator must be drained. `well`: it had not failed before. */
void host_comm_revoke(struct ncclComm *c, int well);

/* The communicator has failed for good: remember it, and tell the peers, who get `code` and `cause`. */
void host_comm_break(struct ncclComm *c, ncclResult_t code, const char *text, const char *cause);
/* How a job went that says nothing about the communicator itself. `text` counts for errors. */
void host_comm_tell(struct ncclComm *c, ncclResult_t code, const char *text);
void host_comm_forget_told(struct ncclComm *c);
/* Change this rank's state in the segment unless it has already left. */
void host_seat_leave(struct host_seat *seat, enum host_state state);

/* Ids that this process has used up, for a communicator or for a creation that failed. */
int host_id_is_spent(const uint8_t id[HOST_ID]);
void host_id_spend(const uint8_t id[HOST_ID]);

#endif
