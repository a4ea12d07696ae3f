/* Groups: the calls that a thread has queued. See group.c. */
#ifndef PYNCCL_HOST_GROUP_H
#define PYNCCL_HOST_GROUP_H

#include "work.h"

void host_group_start(void);
ncclResult_t host_group_end(void);
/* The same, but collectives and messages are priced and not run. NULL: run. */
ncclResult_t host_group_simulate(ncclSimInfo_t *info);
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

/* ---- the parts of a run, for job.c and queue.c ---- */

/* Enter every communicator that the works use, each once. After a failure as after a success,
 * host_works_leave must follow, after which the communicators may be used by others. */
ncclResult_t host_works_enter(struct host_work **works, int n);
/* Could they be entered now? */
ncclResult_t host_works_check(struct host_work **works, int n);
void host_works_leave(struct host_work **works, int n);
/* Enter them by a thread of the library: it waits while a call is inside. Works that cannot run any more are done,
 * with their error; the last one is returned. */
ncclResult_t host_works_admit(struct host_work **works, int n);
/* The messages of a rank to itself, sends with their receives. */
ncclResult_t host_works_pair(struct host_work **works, int n);
/* Their order among themselves; the communicators have been entered. */
void host_works_chain(struct host_work **works, int n);
/* Drive them to their ends, and hand out what they made. Each communicator knows how it went. */
void host_works_run(struct host_work **works, int n);
/* Take back what works that did not run own; free the works themselves. */
void host_works_drop(struct host_work **works, int n);
void host_works_free(struct host_work **works, int n);

/* Run them in the background (job.c): ncclInProgress, or why they could not be begun. Takes the works. */
ncclResult_t host_job_start(struct host_work **works, int n);

/* Has the calling thread queued something for this communicator? */
int host_group_holds(const struct ncclComm *c);

#endif
