/* ncclMemAlloc and ncclMemFree: memory that other processes can map.
 *
 * Every block is a memfd of its own, sealed against resizing, so that whoever maps it can never meet the end of
 * the file. Its pages exist when the call returns: lack of memory is an error of the call and no signal later. A
 * block that comes from the system is zero; one that was freed before and is given out again holds what was left
 * in it. The contents of a new block are therefore undefined, as CUDA's are.
 *
 * Freed blocks stay in a pool (POOL_BLOCKS of them, POOL_BYTES in all) and are found again by size, which makes
 * small ones cheap. A block whose descriptor went to another process is not: that process may still write to it.
 *
 * A block goes away when the user has freed it and no window of this process looks at it, whichever rank's that
 * is. The user cannot free it while a window of the owner covers it.
 *
 * Blocks are not mapped in a forked child, so that it cannot write into its parent's windows; there the table
 * only remembers that they were somebody's, and freeing one does nothing. State: the table and the pool, under
 * host_lock.
 */
#include "memory.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "comm.h"

enum { POOL_BLOCKS = 32, POOL_BYTES = 64 << 20, LARGE = 1 << 20 };

static struct host_block *blocks, *pool;
static int pooled;
static size_t pooled_bytes;

/* Descriptors are inherited whatever their flags say; the child has no use for them. The lock of the tables was
 * held by the thread that forked. */
static void after_fork_in_child(void) {
    for (struct host_block *b = blocks; b; b = b->next)
        if (b->fd >= 0) {
            close(b->fd);
            b->fd = -1;
        }
    while (pool) {
        struct host_block *b = pool;
        pool = b->next;
        close(b->fd);
        free(b);
    }
    pooled = 0;
    pooled_bytes = 0;
}

__attribute__((constructor)) static void start(void) {
    pthread_atfork(NULL, NULL, after_fork_in_child);
}

/* ---- blocks ------------------------------------------------------------------------------------------ */

static size_t whole_pages(size_t size) {
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    return (size + page - 1) / page * page;
}

/* Linux would rather kill a process than refuse pages that it does not have. */
static int is_available(size_t bytes) {
    unsigned long long kib = 0;
    char line[128];
    FILE *f = bytes >= LARGE ? fopen("/proc/meminfo", "re") : NULL;
    int known = 0;
    while (f && !known && fgets(line, sizeof line, f))
        known = sscanf(line, "MemAvailable: %llu", &kib) == 1;
    if (f)
        fclose(f);
    return !known || bytes / 1024 <= kib;
}

/* 0, or errno. */
static int make_pages(struct host_block *b) {
    if (!is_available(b->bytes))
        return ENOMEM;
    b->fd = memfd_create("pynccl-memory", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (b->fd < 0)
        return errno;
    if (ftruncate(b->fd, (off_t)b->bytes) != 0 || fallocate(b->fd, 0, 0, (off_t)b->bytes) != 0 ||
        fcntl(b->fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0)
        return errno;
    void *at = mmap(NULL, b->bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, b->fd, 0);
    if (at == MAP_FAILED)
        return errno;
    madvise(at, b->bytes, MADV_DONTFORK);
    b->at = at;
    return 0;
}

static void destroy(struct host_block *b) {
    if (b->at)
        munmap(b->at, b->bytes);
    if (b->fd >= 0)
        close(b->fd);
    free(b);
}

static struct host_block *make_block(size_t bytes, int *err) {
    struct host_block *b = calloc(1, sizeof *b);
    if (!b) {
        *err = ENOMEM;
        return NULL;
    }
    b->bytes = bytes;
    b->fd = -1;
    b->refs = 1;
    b->generation = host_generation();
    if ((*err = make_pages(b)) == 0)
        return b;
    destroy(b);
    return NULL;
}

/* Locked, as everything down to the functions of memory.h. */
static struct host_block *take_pooled(size_t bytes) {
    struct host_block **p = &pool;
    while (*p && (*p)->bytes != bytes)
        p = &(*p)->next;
    struct host_block *b = *p;
    if (!b)
        return NULL;
    *p = b->next;
    pooled--;
    pooled_bytes -= bytes;
    b->refs = 1;
    return b;
}

static int to_pool(struct host_block *b) {
    if (b->exported || pooled >= POOL_BLOCKS || b->bytes > POOL_BYTES - pooled_bytes)
        return 0;
    b->next = pool;
    pool = b;
    pooled++;
    pooled_bytes += b->bytes;
    return 1;
}

static void unlist(const struct host_block *b) {
    struct host_block **p = &blocks;
    while (*p != b)
        p = &(*p)->next;
    *p = b->next;
}

/* 1: nobody refers to it any more and it does not go to the pool; the caller destroys it without the lock. */
static int unref(struct host_block *b) {
    return --b->refs == 0 && !to_pool(b);
}

/* The block that begins at `at`; what the child of a fork has allocated itself comes before what it inherited. */
static struct host_block *find_first_byte(const void *at) {
    struct host_block *inherited = NULL;
    for (struct host_block *b = blocks; b; b = b->next) {
        if (b->at != at)
            continue;
        if (b->generation == host_generation())
            return b;
        inherited = b;
    }
    return inherited;
}

/* ---- the functions of memory.h ----------------------------------------------------------------------- */

ncclResult_t host_memory_alloc(void **ptr, size_t size) {
    if (!ptr || !size) /* what CUDA's allocator would say */
        return host_fail(ncclUnhandledCudaError, "ncclMemAlloc : %s", ptr ? "size is 0" : "ptr is NULL");
    int err = ENOMEM;
    struct host_block *b = NULL;
    if (size <= SIZE_MAX / 4) {
        size_t bytes = whole_pages(size);
        host_lock();
        b = take_pooled(bytes);
        host_unlock();
        if (!b)
            b = make_block(bytes, &err);
    }
    if (!b)
        return host_fail(ncclUnhandledCudaError, "ncclMemAlloc : no memory for %zu bytes: %s", size, strerror(err));
    host_lock();
    b->next = blocks;
    blocks = b;
    host_unlock();
    *ptr = b->at;
    return ncclSuccess;
}

ncclResult_t host_memory_free(void *ptr) {
    if (!ptr)
        return ncclSuccess;
    host_lock();
    struct host_block *b = find_first_byte(ptr);
    int inherited = b && b->generation != host_generation();
    int covered = b && !inherited && b->windows;
    int last = 0;
    if (b && !covered) {
        unlist(b);
        last = !inherited && unref(b);
    }
    host_unlock();
    if (!b)
        return host_fail(ncclUnhandledCudaError, "ncclMemFree : %p is not from ncclMemAlloc", ptr);
    if (covered)
        return host_fail(ncclInvalidUsage,
            "ncclMemFree : %p is registered in a window; deregister it first (ncclCommWindowDeregister)", ptr);
    if (last)
        destroy(b);
    else if (inherited) /* its pages are not here, and something else may be in their place */
        free(b);
    return ncclSuccess;
}

struct host_block *host_block_hold(const void *at) {
    host_lock();
    struct host_block *b = blocks;
    while (b && (b->generation != host_generation() || (uintptr_t)at - (uintptr_t)b->at >= b->bytes))
        b = b->next;
    if (b)
        b->refs++;
    host_unlock();
    return b;
}

void host_block_release(struct host_block *b) {
    host_lock();
    int last = unref(b);
    host_unlock();
    if (last)
        destroy(b);
}

void host_block_cover(struct host_block *b, int more) {
    host_lock();
    b->windows += more;
    host_unlock();
}

void host_block_export(struct host_block *b) {
    host_lock();
    b->exported = 1;
    host_unlock();
}
