/* Is a rank that is waited for still able to answer? See liveness.c. */
#ifndef PYNCCL_HOST_LIVENESS_H
#define PYNCCL_HOST_LIVENESS_H

#include "work.h"

/* When a process began, as /proc knows it; 0 if it cannot be told. Together with the pid it names a process
 * even if the pid is used again. */
uint64_t host_process_start(int pid);

struct host_watch {
    uint64_t now;
    int look;  /* how many processes may be looked at, which costs system calls; 0: not this time */
    int first; /* rank to begin with, so that all have their turn */
    int alone; /* 1: no other thread of this process makes calls; -1: not known, count its threads */
};

/* A stalled work: is there proof that it can never go on, or has it waited long enough? Success if neither;
 * otherwise the code, with its text recorded, and in `cause` what the peers are to be told. `all` is
 * everything that this thread drives. */
ncclResult_t host_examine(struct host_work *w, const struct host_watch *watch, struct host_work *const *all,
    int n, struct host_text *cause);

/* Has that rank left the communicator, or failed, or died? Its process is looked at if `look`. Success if not;
 * otherwise the code, with its text recorded. */
ncclResult_t host_peer_lost(struct host_work *w, int rank, int look);

#endif
