/* Calls on streams, as far as the rest of the library knows them. See queue.c, and item.h for what lies behind. */
#ifndef PYNCCL_HOST_QUEUE_H
#define PYNCCL_HOST_QUEUE_H

#include "work.h"

/* 0, 1 and 2 are CUDA's default streams, on which calls are complete when they return. */
static inline int host_is_queue(uintptr_t stream) {
    return stream > 2;
}

/* Is it a stream that this process has made and not destroyed? Nothing is read through the handle. */
int host_queue_exists(uintptr_t stream);

/* The calls of a group as one item, which waits for everything before it on each of their streams; what comes
 * later on them waits for it. If a default stream is among them this returns when it is done. Takes the works. */
ncclResult_t host_queue_submit(struct host_work **works, int n);
/* The same for one call, which is copied. */
ncclResult_t host_queue_submit_one(const struct host_work *w);

/* Wait until nothing is queued that concerns the communicator, and run what has not started. Fails if the
 * interrupt hook says stop; how those calls went is what the communicator says. */
ncclResult_t host_queue_flush(struct ncclComm *c, const char *what);

/* Stop the communicator, let go what is queued and has not started, and wait until it is empty. */
int host_queue_drain(struct ncclComm *c, enum host_stop why, uint64_t ns);

/* The next item that the calling thread queues holds `owner` until it is done; then `release` is called, by any
 * thread. Returns what the thread gave before and no item has taken. */
void *host_queue_keep(void *owner, void (*release)(void *));

#endif
