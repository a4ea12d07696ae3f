/* Handing a descriptor to another process of the same user. See fdpass.c. */
#ifndef PYNCCL_HOST_FDPASS_H
#define PYNCCL_HOST_FDPASS_H

#include <stdint.h>

/* A listener with a random name. -1, and errno. */
int host_fdpass_listen(uint64_t *name);

/* Give `fd`, as rank `from`, to the listener of process `pid`. 1: done; 0: it cannot be reached now; -1, and
 * errno: it never can. */
int host_fdpass_give(uint64_t name, int pid, int from, int fd);

/* One side of a listener: a connection that has not said anything yet. */
struct host_fdpass {
    int listener, guest;
    uint64_t name;
};

/* The next descriptor that has come: 1, from whom (rank and process) and the descriptor, which is then the
 * caller's. 0: nothing is there. */
int host_fdpass_take(struct host_fdpass *p, int *from, int *pid, int *fd);

void host_fdpass_close(struct host_fdpass *p);

#endif
