/* Groups: the calls that a thread has queued. See group.c. */
#ifndef PYNCCL_HOST_GROUP_H
#define PYNCCL_HOST_GROUP_H

#include "work.h"

void host_group_start(void);
ncclResult_t host_group_end(void);
int host_group_open(void);

/* A call failed its checks: an open group remembers it, and will launch nothing. Returns the code. */
ncclResult_t host_group_poison(ncclResult_t code);

/* Run a checked work now, or queue it in the open group. Takes what the work owns. */
ncclResult_t host_group_submit(struct host_work *w);

/* Has the calling thread queued something for this communicator? */
int host_group_holds(const struct ncclComm *c);

#endif
