/* Groups: the calls that a thread has queued. See group.c. */
#ifndef PYNCCL_HOST_GROUP_H
#define PYNCCL_HOST_GROUP_H

#include "work.h"

void host_group_start(void);
ncclResult_t host_group_end(void);
int host_group_open(void);

/* A call failed its checks: an open group remembers it, and will launch nothing. Returns the code. */
ncclResult_t host_group_poison(ncclResult_t code);

/* Where to set up a work: `local` if it will run at once, memory of the open group otherwise. NULL, and the
 * group is poisoned, if there is none. */
struct host_work *host_group_work(struct host_work *local);
/* Run it now, or queue it in the open group. Takes what the work owns. */
ncclResult_t host_group_submit(struct host_work *w);
/* Give up a work that was not submitted. Returns `code`, and poisons the group with it. */
ncclResult_t host_group_discard(struct host_work *w, ncclResult_t code);

/* Has the calling thread queued something for this communicator? */
int host_group_holds(const struct ncclComm *c);

#endif
