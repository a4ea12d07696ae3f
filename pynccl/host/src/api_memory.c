/* Memory, and what a communicator holds of it: the exported functions. Windows are api_window.c's.
 *
 * Registration: all memory of a host can be sent from as it is, and NCCL says of host memory that there is
 * nothing to register: success, and no handle.
 *
 * Suspension is local and never waits. A rank that is suspended is outside of every call, so once all ranks
 * that have not left are, nobody reads or writes the buffers (slots, stages, results, rings), and the one who
 * comes last gives their pages back to the system. `releasing` of the header keeps those who resume out for
 * that moment. No state of its own.
 */
#include <sys/mman.h>

#include "api.h"
#include "memory.h"

/* Longer than any release takes; who meets a process that died in the middle of one goes on. */
#define RELEASE_NS UINT64_C(2000000000)

ncclResult_t pncclMemAlloc(void **ptr, size_t size) {
    return host_memory_alloc(ptr, size);
}
HOST_EXPORT(ncclMemAlloc);

ncclResult_t pncclMemFree(void *ptr) {
    return host_memory_free(ptr);
}
HOST_EXPORT(ncclMemFree);

/* ---- registration ---------------------------------------------------------------------------------- */

ncclResult_t pncclCommRegister(const ncclComm_t comm, void *buff, size_t size, void **handle) {
    ncclResult_t code = host_comm_check(comm, "ncclCommRegister");
    if (!code && (!buff || !size || !handle))
        code = host_fail(ncclInvalidArgument, "ncclCommRegister : invalid pointer %p, size %zu or handle", buff, size);
    if (!code)
        *handle = NULL;
    return code;
}
HOST_EXPORT(ncclCommRegister);

ncclResult_t pncclCommDeregister(const ncclComm_t comm, void *handle) {
    ncclResult_t code = host_comm_check(comm, "ncclCommRegister"); /* the name that NCCL says here */
    if (!code && handle)
        code = host_fail(ncclInvalidUsage, "Deregister: Could not find handle");
    return code;
}
HOST_EXPORT(ncclCommDeregister);

/* ---- suspension ------------------------------------------------------------------------------------ */

static size_t held(const struct ncclComm *c) {
    size_t bytes = c->slot_ready ? 2 * HOST_SLOT : 0;
    bytes += c->stage_ready ? HOST_PLACES * HOST_CHUNK * (c->rank ? 1 : 2) : 0; /* rank 0 reserves the results */
    for (int r = 0; r < c->nranks; r++)
        bytes += c->peers[r].send_ready ? HOST_PLACES * c->map->at.ring_chunk : 0;
    return bytes;
}

static int all_rest(const struct host_map *map) {
    for (int r = 0; r < map->nranks; r++) {
        struct host_seat *seat = host_seat(map, r);
        if (host_observe32(&seat->state) <= HOST_ACTIVE && !host_add32(&seat->suspended, 0))
            return 0;
    }
    return 1;
}

static void release_if_last(const struct host_map *map) {
    struct host_header *header = host_header(map);
    if (!all_rest(map) || !host_claim32(&header->releasing, 0, 1))
        return;
    if (all_rest(map)) /* nobody has resumed in between, and whoever does so now waits */
        madvise(map->base + map->at.slot, map->at.signal - map->at.slot, MADV_REMOVE);
    host_publish32(&header->releasing, 0);
}

static ncclResult_t begin(ncclComm_t comm, const char *what) {
    ncclResult_t code = host_comm_check(comm, what);
    if (!code && host_group_holds(comm))
        code = host_fail(ncclInvalidUsage, "%s : the open group holds calls of this communicator", what);
    return code;
}

ncclResult_t pncclCommSuspend(ncclComm_t comm, int flags) {
    ncclResult_t code = begin(comm, "ncclCommSuspend");
    if (!code && flags != NCCL_SUSPEND_MEM)
        code = host_fail(ncclInvalidArgument, "ncclCommSuspend : invalid flags %#x", (unsigned)flags);
    if (!code && host_observe32(&comm->suspended))
        code = host_fail(ncclInvalidUsage, "MemManager: Already suspended");
    if (!code)
        code = host_comm_ensure(comm, "ncclCommSuspend");
    if (!code)
        code = host_queue_flush(comm, "ncclCommSuspend");
    if (!code)
        code = host_comm_enter(comm, "ncclCommSuspend");
    if (code)
        return host_group_poison(code);
    comm->suspended_bytes = held(comm);
    host_publish32(&comm->suspended, 1);
    host_swap32(&host_seat(comm->map, comm->rank)->suspended, 1);
    release_if_last(comm->map);
    host_comm_leave(comm);
    return ncclSuccess;
}
HOST_EXPORT(ncclCommSuspend);

ncclResult_t pncclCommResume(ncclComm_t comm) {
    ncclResult_t code = begin(comm, "ncclCommResume");
    if (!code && !host_observe32(&comm->suspended))
        code = host_fail(ncclInvalidUsage, "MemManager: Not in suspended state");
    if (!code)
        code = host_queue_flush(comm, "ncclCommResume");
    if (!code)
        code = host_comm_enter(comm, "ncclCommResume");
    if (code)
        return host_group_poison(code);
    host_swap32(&host_seat(comm->map, comm->rank)->suspended, 0);
    uint64_t until = host_now() + RELEASE_NS;
    while (host_add32(&host_header(comm->map)->releasing, 0) && host_now() < until)
        host_nap(100000);
    /* The pages may be gone: they are asked for again before they are used, so that lack of memory is an error. */
    comm->slot_ready = comm->stage_ready = 0;
    for (int r = 0; r < comm->nranks; r++)
        comm->peers[r].send_ready = 0;
    host_publish32(&comm->suspended, 0);
    host_comm_leave(comm);
    return ncclSuccess;
}
HOST_EXPORT(ncclCommResume);

ncclResult_t pncclCommMemStats(ncclComm_t comm, ncclCommMemStat_t stat, uint64_t *value) {
    ncclResult_t code = host_comm_check(comm, "ncclCommMemStats");
    if (!code && !value)
        code = host_fail(ncclInvalidArgument, "ncclCommMemStats : value argument is NULL");
    if (!code && ((int)stat < ncclStatGpuMemSuspend || (int)stat > ncclStatGpuMemTotal))
        code = host_fail(ncclInvalidArgument, "ncclCommMemStats : unknown statistic %d", (int)stat);
    if (!code)
        code = host_comm_ensure_alive(comm, "ncclCommMemStats");
    if (!code)
        code = host_queue_flush(comm, "ncclCommMemStats");
    if (!code)
        code = host_comm_enter(comm, "ncclCommMemStats");
    if (code)
        return code;
    int rests = (int)host_observe32(&comm->suspended);
    uint64_t buffers = rests ? comm->suspended_bytes : held(comm);
    uint64_t control = comm->map->at.slot / (size_t)comm->nranks; /* this rank's share of it */
    *value = stat == ncclStatGpuMemSuspend     ? buffers
             : stat == ncclStatGpuMemSuspended ? (uint64_t)rests
             : stat == ncclStatGpuMemPersist   ? control
                                               : buffers + control;
    host_comm_leave(comm);
    return ncclSuccess;
}
HOST_EXPORT(ncclCommMemStats);
