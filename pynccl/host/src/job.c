/* Jobs: the calls of nonblocking communicators, run by a thread of the library.
 *
 *     idle  --a call, or the end of a group-->  pending  --the job ends-->  idle
 *                                                         --it failed---->  broken: the error stays
 *
 * A call checks its arguments, enters the communicators it concerns, marks them pending, starts a thread and
 * returns ncclInProgress. The thread drives the works as a blocking call would and ends with them; there is
 * one thread for each call or group, and none while nothing is under way. While a communicator is pending
 * every call on it is refused but ncclCommGetAsyncError, ncclCommRevoke and ncclCommAbort, which end the job.
 *
 * `pending` is cleared after everything else, with a release store: who finds it clear finds the results, the
 * failure and the handles that the job wrote, and an empty communicator. Signals are blocked in the thread, and
 * it never asks the interrupt hook: both are the business of the program's own threads. A forked child has none
 * of these threads, and its parent's communicators are refused there anyway. At exit they are left where they
 * are; the library is never unloaded.
 *
 * A job owns its works and itself. No other state.
 */
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>

#include "group.h"
#include "queue.h"

struct job {
    struct host_work **works;
    int n;
    int late; /* it enters the communicators itself, when what is queued before is done */
};

/* Each communicator once, through the work that made it pending: the moment it is let go it may be in another
 * job. */
static void set_pending(struct job *j, uint32_t value) {
    for (int i = 0; i < j->n; i++)
        if (j->works[i]->pends)
            host_publish32(&j->works[i]->comm->pending, value);
}

/* A communicator that is being created is entered here: nobody else can use it, but an abort must wait. */
static ncclResult_t enter_new(struct job *j) {
    ncclResult_t code = ncclSuccess;
    for (int i = 0; i < j->n && !code; i++) {
        struct host_work *w = j->works[i];
        if (w->type != HOST_WORK_INIT)
            continue;
        code = host_comm_enter(w->comm, "CommInitRank");
        w->entered = !code;
    }
    return code;
}

static ncclResult_t enter(struct job *j) {
    ncclResult_t code = host_works_enter(j->works, j->n);
    return code ? code : enter_new(j);
}

/* Something is queued on streams, which goes first. The job waits for it, not the caller. */
static int must_wait(const struct job *j) {
    int waits = 0;
    for (int i = 0; i < j->n; i++)
        waits |= host_observe32(&j->works[i]->comm->queued) != 0;
    return waits;
}

/* Who makes which communicator pending. */
static void mark(struct job *j) {
    for (int i = 0; i < j->n; i++) {
        int k = 0;
        while (j->works[k]->comm != j->works[i]->comm)
            k++;
        j->works[i]->pends = k == i;
    }
}

static void enter_late(struct job *j) {
    for (int i = 0; i < j->n; i++)
        host_queue_flush(j->works[i]->comm, HOST_ROWS[j->works[i]->call.kind].name);
    host_works_admit(j->works, j->n);
    enter_new(j);
}

static void *job_main(void *argument) {
    struct job *j = argument;
    host_be_background();
    if (j->late)
        enter_late(j);
    host_works_run(j->works, j->n);
    host_works_leave(j->works, j->n);
    set_pending(j, 0);
    host_works_free(j->works, j->n);
    free(j);
    return NULL;
}

static int start_thread(struct job *j) {
    pthread_t thread;
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int failed = pthread_create(&thread, NULL, job_main, j);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (!failed)
        pthread_detach(thread);
    return !failed;
}

ncclResult_t host_job_start(struct host_work **works, int n) {
    struct job *j = malloc(sizeof *j);
    if (!j) {
        host_works_drop(works, n);
        host_works_free(works, n);
        return host_fail(ncclSystemError, "no memory for a nonblocking call");
    }
    *j = (struct job){works, n, 0};
    j->late = must_wait(j);
    ncclResult_t code = j->late ? host_works_check(works, n) : enter(j);
    if (!code) {
        mark(j);
        for (int i = 0; i < n; i++)
            if (works[i]->pends)
                host_comm_forget_told(works[i]->comm);
        set_pending(j, 1);
        if (start_thread(j))
            return ncclInProgress;
        set_pending(j, 0);
        code = host_fail(ncclSystemError, "no thread for a nonblocking call");
    }
    host_works_leave(works, n);
    host_works_drop(works, n);
    host_works_free(works, n);
    free(j);
    return code;
}
