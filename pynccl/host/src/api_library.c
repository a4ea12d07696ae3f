/* The library itself: version, error texts, groups, memory, and the extensions of the host library.
 *
 * State: the list of ncclMemAlloc's blocks, guarded by `lock`, so that ncclMemFree knows their sizes and
 * refuses what is not one of them.
 */
#include <pthread.h>
#include <stdlib.h>
#include <sys/mman.h>

#include "api.h"

ncclResult_t pncclGetVersion(int *version) {
    if (!version)
        return ncclInvalidArgument; /* NCCL leaves the last error alone here */
    *version = NCCL_VERSION_CODE;
    return ncclSuccess;
}
HOST_EXPORT(ncclGetVersion);

const char *pncclGetErrorString(ncclResult_t result) {
    switch (result) {
    case ncclSuccess:
        return "no error";
    case ncclUnhandledCudaError:
        return "unhandled cuda error (run with NCCL_DEBUG=INFO for details)";
    case ncclSystemError:
        return "unhandled system error (run with NCCL_DEBUG=INFO for details)";
    case ncclInternalError:
        return "internal error - please report this issue to the NCCL developers";
    case ncclInvalidArgument:
        return "invalid argument (run with NCCL_DEBUG=WARN for details)";
    case ncclInvalidUsage:
        return "invalid usage (run with NCCL_DEBUG=WARN for details)";
    case ncclRemoteError:
        return "remote process exited or there was a network error";
    case ncclInProgress:
        return "NCCL operation in progress";
    case ncclTimeout:
        return "timeout";
    default:
        return "unknown result code";
    }
}
HOST_EXPORT(ncclGetErrorString);

const char *pncclGetLastError(ncclComm_t comm) {
    (void)comm;
    return host_fail_any_text();
}
HOST_EXPORT(ncclGetLastError);

/* ---- groups ---------------------------------------------------------------------------------------- */

ncclResult_t pncclGroupStart(void) {
    host_group_start();
    return ncclSuccess;
}
HOST_EXPORT(ncclGroupStart);

ncclResult_t pncclGroupEnd(void) {
    return host_group_end();
}
HOST_EXPORT(ncclGroupEnd);

ncclResult_t pncclGroupSimulateEnd(ncclSimInfo_t *simInfo) {
    return host_group_simulate(simInfo);
}
HOST_EXPORT(ncclGroupSimulateEnd);

/* ---- memory ---------------------------------------------------------------------------------------- */

struct block {
    struct block *next;
    void *at;
    size_t size;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct block *blocks;

ncclResult_t pncclMemAlloc(void **ptr, size_t size) {
    if (!ptr || !size) /* what CUDA's allocator would say */
        return host_fail(ncclUnhandledCudaError, "ncclMemAlloc : %s", ptr ? "size is 0" : "ptr is NULL");
    struct block *b = malloc(sizeof *b);
    void *at = b && size <= SIZE_MAX / 2
                   ? mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)
                   : MAP_FAILED;
    if (at == MAP_FAILED) {
        free(b);
        return host_fail(ncclUnhandledCudaError, "ncclMemAlloc : no memory for %zu bytes", size);
    }
    *b = (struct block){NULL, at, size};
    pthread_mutex_lock(&lock);
    b->next = blocks;
    blocks = b;
    pthread_mutex_unlock(&lock);
    *ptr = at;
    return ncclSuccess;
}
HOST_EXPORT(ncclMemAlloc);

ncclResult_t pncclMemFree(void *ptr) {
    if (!ptr)
        return ncclSuccess;
    pthread_mutex_lock(&lock);
    struct block **p = &blocks, *b;
    while (*p && (*p)->at != ptr)
        p = &(*p)->next;
    if ((b = *p) != NULL)
        *p = b->next;
    pthread_mutex_unlock(&lock);
    if (!b)
        return host_fail(ncclUnhandledCudaError, "ncclMemFree : %p is not from ncclMemAlloc", ptr);
    munmap(b->at, b->size);
    free(b);
    return ncclSuccess;
}
HOST_EXPORT(ncclMemFree);

/* ---- extensions ------------------------------------------------------------------------------------ */

int pyncclHostStamp(void) {
    return (int)host_stamp();
}

const char *pyncclHostLastError(void) {
    return host_fail_text();
}

void pyncclHostSetInterrupt(int (*hook)(void)) {
    host_set_interrupt(hook);
}

void pyncclHostSetInitTimeout(double seconds) {
    host_set_init_timeout(seconds);
}

ncclResult_t pyncclHostSetTimeout(ncclComm_t comm, double seconds) {
    ncclResult_t code = host_comm_check(comm, "pyncclHostSetTimeout");
    if (!code)
        host_publish(&comm->timeout, host_timeout_ns(seconds));
    return code;
}
