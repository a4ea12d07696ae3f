/* Windows: memory of all ranks of a communicator that each of them can write to. See window.c. */
#ifndef PYNCCL_HOST_WINDOW_H
#define PYNCCL_HOST_WINDOW_H

#include "memory.h"
#include "work.h"

/* host_work_set for a registration of [buff, buff + size), whose handle goes to *out: NULL if this or another
 * rank's memory is none that others can map. `block` holds the memory, with one reference, which is taken over;
 * or it is NULL. 0 if there is no memory. */
int host_window_set(struct host_work *w, struct ncclComm *c, void *buff, size_t size, int flags,
    struct host_block *block, ncclWindow_t *out);
enum host_step host_window_step(struct host_work *w);
int host_window_missing(const struct host_work *w, int from);
/* The work is over: write its handle if it is done, drop everything if not. */
void host_window_settle(struct host_work *w);

/* A window as one of the communicator's ranks finds it there. */
struct host_target {
    char *at; /* of its first byte, in this process */
    size_t size;
    int flags;
    void *user; /* this rank's own memory, as it was registered */
};

/* 0: the communicator has no such window. Nothing is read through the handle. */
int host_window_find(struct ncclComm *c, ncclWindow_t handle, int rank, struct host_target *out);
/* Does [at, at + bytes) lie in a window of c that was registered with these flags, as memory of its own? */
int host_window_holds(struct ncclComm *c, const void *at, size_t bytes, int flags);
/* 0: there is no such window. */
int host_window_end(struct ncclComm *c, ncclWindow_t handle);
/* All of them, with their communicator. */
void host_windows_end(struct ncclComm *c);

#endif
