/* Communicators: the exported functions of their life. Children are api_child.c's.
 *
 * Creation becomes a work (rendezvous.c) and follows the rules of groups. Finalize, Destroy, Revoke and Abort
 * are local and immediate: the rank leaves the segment, its peers learn of it when they need something that it
 * has not published. Abort and Revoke may come from another thread while a call is inside, or while a job
 * runs; that call then ends with an error within milliseconds, and only then the memory goes.
 *
 * No state of its own.
 */
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

#include "api.h"
#include "api_config.h"


static const char id_magic[] = PYNCCL_HOST_ID_MAGIC;
_Static_assert(sizeof id_magic - 1 == PYNCCL_HOST_ID_MAGIC_BYTES, "the magic fills its field");

ncclResult_t pncclGetUniqueId(ncclUniqueId *uniqueId) {
    if (!uniqueId)
        return host_fail(ncclInvalidArgument, "GetUniqueId : out argument is NULL");
    memset(uniqueId, 0, sizeof *uniqueId);
    if (getrandom(uniqueId->internal, HOST_ID, 0) != HOST_ID)
        return host_fail(ncclSystemError, "GetUniqueId : no random bytes");
    memcpy(uniqueId->internal + PYNCCL_HOST_ID_OFFSET, id_magic, PYNCCL_HOST_ID_MAGIC_BYTES);
    return ncclSuccess;
}
HOST_EXPORT(ncclGetUniqueId);

/* ---- creation -------------------------------------------------------------------------------------- */

ncclResult_t host_api_check_id(const char *what, const ncclUniqueId *id) {
    if (memcmp(id->internal + PYNCCL_HOST_ID_OFFSET, id_magic, PYNCCL_HOST_ID_MAGIC_BYTES))
        return host_fail(ncclInvalidArgument,
            "%s : this unique id was not made by the host library (by NCCL, or damaged); get it "
            "from the library that creates the communicator", what);
    return ncclSuccess;
}

static ncclResult_t check_ids(int n, const ncclUniqueId *ids) {
    ncclResult_t code = ncclSuccess;
    for (int i = 0; i < n && !code; i++) {
        code = host_api_check_id("CommInitRank", &ids[i]);
        for (int j = 0; j < i && !code; j++)
            if (!memcmp(ids[i].internal, ids[j].internal, HOST_ID))
                code = host_fail(ncclInvalidArgument, "CommInitRank : unique ids %d and %d are the same", j, i);
    }
    return code;
}

static ncclResult_t check_creation(ncclComm_t *newcomm, int nranks, int rank, int nids, const ncclUniqueId *ids,
    ncclConfig_t *config, struct host_traits *traits) {
    ncclConfig_t parsed;
    if (nids <= 0 || nids > nranks)
        return host_fail(ncclInvalidArgument, "improper usage of ncclCommInitRank: nId = %d, nranks=%d", nids,
            nranks);
    if (!newcomm)
        return host_fail(ncclInvalidArgument, "CommInitRank : newcomm argument is NULL");
    if (nranks < 1 || rank < 0 || rank >= nranks)
        return host_fail(ncclInvalidArgument, "Invalid rank requested : %d/%d", rank, nranks);
    ncclResult_t code = host_config_read(config, &parsed);
    if (code)
        return code;
    if (nranks > HOST_MAX_RANKS)
        return host_fail(ncclInvalidArgument, "CommInitRank : %d ranks; the host library serves at most %d",
            nranks, HOST_MAX_RANKS);
    *traits = host_config_traits(&parsed);
    return check_ids(nids, ids);
}

ncclResult_t host_api_create(const struct host_creation *how, ncclComm_t *newcomm, int nranks, int rank,
    int nids, const ncclUniqueId *ids) {
    struct host_work local, *w = host_group_work(&local);
    struct ncclComm *c = w ? host_comm_new() : NULL;
    struct host_init *init = c ? host_init_new(c, nranks, rank, (const uint8_t *)ids[0].internal,
                                     host_timeout_ns(host_init_timeout()))
                               : NULL;
    *newcomm = c;
    if (!init || (nids > 1 && !host_init_set_ids(init, ids, nids))) {
        host_init_free(init);
        *newcomm = NULL;
        if (c)
            host_comm_end(c, HOST_DESTROYED, "the failure of its creation");
        ncclResult_t code = host_fail(ncclSystemError, "CommInitRank : out of memory");
        return w ? host_group_discard(w, code) : code;
    }
    host_publish(&c->timeout, host_timeout_ns(-1));
    c->device = how->device;
    host_comm_set_traits(c, &how->traits);
    host_work_set(w, HOST_WORK_INIT, c, &(struct host_call){0});
    w->newcomm = newcomm;
    w->init = init;
    w->child = c;
    return host_group_submit(w);
}

ncclResult_t pncclCommInitRankScalable(ncclComm_t *newcomm, int nranks, int myrank, int nId,
    ncclUniqueId *commIds, ncclConfig_t *config) {
    struct host_creation how = {.device = myrank};
    ncclResult_t code = check_creation(newcomm, nranks, myrank, nId, commIds, config, &how.traits);
    if (!code)
        return host_api_create(&how, newcomm, nranks, myrank, nId, commIds);
    if (newcomm)
        *newcomm = NULL;
    return host_group_poison(code);
}
HOST_EXPORT(ncclCommInitRankScalable);

ncclResult_t pncclCommInitRankConfig(
    ncclComm_t *comm, int nranks, ncclUniqueId commId, int rank, ncclConfig_t *config) {
    return pncclCommInitRankScalable(comm, nranks, rank, 1, &commId, config);
}
HOST_EXPORT(ncclCommInitRankConfig);

ncclResult_t pncclCommInitRank(ncclComm_t *comm, int nranks, ncclUniqueId commId, int rank) {
    return pncclCommInitRankScalable(comm, nranks, rank, 1, &commId, NULL);
}
HOST_EXPORT(ncclCommInitRank);

static int has_duplicate(const int *list, int n) {
    for (int i = 0; i < n; i++)
        for (int j = 0; j < i; j++)
            if (list[i] == list[j])
                return 1;
    return 0;
}

ncclResult_t pncclCommInitAll(ncclComm_t *comm, int ndev, const int *devlist) {
    ncclUniqueId id;
    if (!comm)
        return host_fail(ncclInvalidArgument, "CommInitAll : comms argument is NULL");
    if (ndev < 0)
        return host_fail(ncclInvalidArgument, "Invalid device count requested : %d", ndev);
    for (int i = 0; devlist && i < ndev; i++)
        if (devlist[i] < 0)
            return host_fail(ncclInvalidArgument, "Invalid device %d (devices of the host library are slots "
                                                  "numbered from 0)", devlist[i]);
    if (devlist && has_duplicate(devlist, ndev))
        return host_fail(ncclInvalidUsage, "CommInitAll : a device is listed twice");
    ncclResult_t code = ndev ? pncclGetUniqueId(&id) : ncclSuccess;
    if (code || ndev == 0)
        return code;
    host_group_start();
    for (int r = 0; r < ndev; r++) {
        struct host_creation how = {.device = devlist ? devlist[r] : r};
        code = check_creation(&comm[r], ndev, r, 1, &id, NULL, &how.traits);
        if (code)
            host_group_poison(code);
        else
            host_api_create(&how, &comm[r], ndev, r, 1, &id); /* its error comes with the end */
    }
    return host_group_end();
}
HOST_EXPORT(ncclCommInitAll);

/* ---- end ------------------------------------------------------------------------------------------- */

/* A job of its own, also when a group is open: nothing of that group concerns this communicator. */
static ncclResult_t finalize_later(ncclComm_t comm) {
    struct host_work **works = malloc(sizeof *works), *w = malloc(sizeof *w);
    if (works && w) {
        host_work_set(w, HOST_WORK_FINALIZE, comm, &(struct host_call){0});
        works[0] = w;
        return host_job_start(works, 1);
    }
    free(works);
    free(w);
    return host_fail(ncclSystemError, "CommFinalize : out of memory");
}

ncclResult_t pncclCommFinalize(ncclComm_t comm) {
    if (!comm)
        return ncclSuccess;
    ncclResult_t code = host_comm_check(comm, "CommFinalize");
    if (!code && host_observe32(&comm->revoked))
        code = host_fail(ncclInvalidArgument, "CommFinalize : the communicator was revoked");
    if (!code)
        code = host_comm_ensure(comm, "CommFinalize");
    if (!code && host_group_holds(comm))
        code = host_fail(ncclInvalidUsage, "CommFinalize : the open group holds calls of this communicator");
    if (!code && comm->nonblocking)
        return finalize_later(comm);
    if (!code) /* other calls are complete when they return */
        code = host_queue_flush(comm, "CommFinalize");
    if (!code)
        code = host_comm_ensure(comm, "CommFinalize");
    if (!code)
        code = host_comm_enter(comm, "CommFinalize");
    if (code)
        return host_group_poison(code);
    host_comm_finalize(comm);
    host_comm_leave(comm);
    return ncclSuccess;
}
HOST_EXPORT(ncclCommFinalize);

static ncclResult_t end(ncclComm_t comm, const char *what, const char *by, enum host_state state) {
    ncclResult_t code = host_comm_check(comm, what);
    if (!code && host_group_holds(comm))
        code = host_fail(ncclInvalidUsage, "%s : the open group holds calls of this communicator", what);
    if (!code && state != HOST_ABORTED)
        code = host_comm_ensure_idle(comm);
    if (!code && state == HOST_ABORTED && !host_queue_drain(comm, HOST_STOP_ABORT, HOST_DRAIN_NS))
        code = host_fail(ncclSystemError, "%s : a call on the communicator does not return", what);
    if (!code && state != HOST_ABORTED)
        code = host_queue_flush(comm, what);
    if (!code && state != HOST_ABORTED)
        code = host_comm_enter(comm, what);
    if (code)
        return host_group_poison(code);
    host_comm_end(comm, state, by);
    return ncclSuccess;
}

ncclResult_t pncclCommDestroy(ncclComm_t comm) {
    return comm ? end(comm, "CommDestroy", "ncclCommDestroy", HOST_DESTROYED) : ncclSuccess;
}
HOST_EXPORT(ncclCommDestroy);

ncclResult_t pncclCommAbort(ncclComm_t comm) {
    return comm ? end(comm, "CommAbort", "ncclCommAbort", HOST_ABORTED) : ncclSuccess;
}
HOST_EXPORT(ncclCommAbort);

ncclResult_t pncclCommRevoke(ncclComm_t comm, int revokeFlags) {
    if (!comm)
        return ncclSuccess;
    ncclResult_t code = host_comm_check(comm, "CommRevoke");
    if (!code && revokeFlags != NCCL_REVOKE_DEFAULT)
        code = host_fail(ncclInvalidArgument, "CommRevoke : invalid flags %d", revokeFlags);
    if (!code && host_observe32(&comm->life) == HOST_LIFE_FINALIZED)
        code = host_fail(ncclInvalidArgument, "CommRevoke : the communicator was finalized");
    if (!code && host_observe32(&comm->revoked))
        code = host_fail(ncclInvalidArgument, "CommRevoke : the communicator has been revoked already");
    if (!code && host_observe32(&comm->life) == HOST_LIFE_NEW)
        code = host_comm_ensure_alive(comm, "CommRevoke");
    if (!code && host_group_holds(comm))
        code = host_fail(ncclInvalidUsage, "CommRevoke : the open group holds calls of this communicator");
    if (code)
        return host_group_poison(code);
    ncclResult_t before = (ncclResult_t)host_observe32(&comm->broken);
    if (!host_queue_drain(comm, HOST_STOP_REVOKE, HOST_DRAIN_NS))
        return host_group_poison(host_fail(ncclSystemError, "CommRevoke : a call on the communicator does not return"));
    host_comm_revoke(comm, !before); /* what was under way has ended as it should */
    host_comm_reopen(comm, HOST_STOP_REVOKE);
    return ncclSuccess;
}
HOST_EXPORT(ncclCommRevoke);

/* ---- questions ------------------------------------------------------------------------------------- */

ncclResult_t pncclCommGetAsyncError(ncclComm_t comm, ncclResult_t *asyncError) {
    ncclResult_t code = host_comm_check(comm, "ncclGetAsyncError");
    if (code)
        return code;
    if (!asyncError)
        return host_fail(ncclInvalidArgument, "ncclGetAsyncError : asyncError argument is NULL");
    if (host_observe32(&comm->pending)) {
        *asyncError = ncclInProgress;
        return ncclSuccess;
    }
    uint32_t told = host_observe32(&comm->told);
    *asyncError = told ? (ncclResult_t)(told - 1) : (ncclResult_t)host_observe32(&comm->broken);
    const char *text = told ? comm->told_text : comm->broken_text;
    if (*asyncError && text) /* which another thread may have met */
        host_fail_recall(text);
    return ncclSuccess;
}
HOST_EXPORT(ncclCommGetAsyncError);

static ncclResult_t ask(const ncclComm_t comm, const char *what, const char *argument, int *out) {
    ncclResult_t code = host_comm_check(comm, what);
    if (!code && !out)
        code = host_fail(ncclInvalidArgument, "%s : %s argument is NULL", what, argument);
    if (!code)
        code = host_comm_ensure_idle(comm);
    if (!code && host_observe32(&comm->life) == HOST_LIFE_NEW)
        code = host_comm_ensure(comm, what);
    return code;
}

ncclResult_t pncclCommCount(const ncclComm_t comm, int *count) {
    ncclResult_t code = ask(comm, "CommCount", "count", count);
    if (!code)
        *count = comm->nranks;
    return code;
}
HOST_EXPORT(ncclCommCount);

ncclResult_t pncclCommCuDevice(const ncclComm_t comm, int *device) {
    ncclResult_t code = ask(comm, "CommCuDevice", "device", device);
    if (!code)
        *device = comm->device;
    return code;
}
HOST_EXPORT(ncclCommCuDevice);

ncclResult_t pncclCommUserRank(const ncclComm_t comm, int *rank) {
    ncclResult_t code = ask(comm, "CommUserRank", "rank", rank);
    if (!code)
        *rank = comm->rank;
    return code;
}
HOST_EXPORT(ncclCommUserRank);
