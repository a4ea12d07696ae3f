/* Memory of ncclMemAlloc: what windows can be made of. See memory.c. */
#ifndef PYNCCL_HOST_MEMORY_H
#define PYNCCL_HOST_MEMORY_H

#include <stddef.h>
#include <stdint.h>

#include "error.h"

struct host_block {
    struct host_block *next;
    char *at;
    size_t bytes; /* whole pages */
    int fd;
    int refs;     /* the user's, and one for each view of a window in this process */
    int windows;  /* windows of this process's ranks whose own memory lies in it */
    int exported; /* another process may still map it: never to be used again */
    uint32_t generation; /* of forks */
};

ncclResult_t host_memory_alloc(void **ptr, size_t size);
ncclResult_t host_memory_free(void *ptr);

/* The block of this process that holds the byte at `at`, with one more reference; or NULL. */
struct host_block *host_block_hold(const void *at);
void host_block_release(struct host_block *b);
/* A window on it begins or ends. */
void host_block_cover(struct host_block *b, int more);
/* Its descriptor goes to another process. */
void host_block_export(struct host_block *b);

#endif
