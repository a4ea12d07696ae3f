/* Communicators made from others: the exported functions of split, shrink and growth.
 *
 * All become works of their parent (split.c) and follow the rules of groups. A child takes its parent's device
 * and timeout; without a config it is blocking or not as its parent is. The new ranks of a growth have no
 * parent: for them it is a creation. No state of its own.
 */
#include <stdlib.h>
#include <string.h>

#include "api.h"
#include "api_config.h"

/* What the child is to be. Without a config it is as its parent; NULL: it has none. */
static ncclResult_t read_config(
    const struct ncclComm *parent, const ncclConfig_t *config, struct host_traits *traits) {
    ncclConfig_t parsed;
    ncclResult_t code = host_config_read(config, &parsed);
    if (!config && parent) {
        parsed.blocking = !parent->nonblocking;
        parsed.numRmaCtx = parent->contexts;
        parsed.numRmaSig = parent->signals;
    }
    *traits = host_config_traits(&parsed);
    return code;
}

/* Hand over a work, if it could be prepared. */
static ncclResult_t submit(struct host_work *w, int prepared, ncclComm_t *newcomm, const char *what) {
    if (!prepared)
        return host_group_discard(w, host_fail(ncclSystemError, "%s : out of memory", what));
    w->newcomm = newcomm;
    return host_group_submit(w);
}

ncclResult_t pncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t *newcomm, ncclConfig_t *config) {
    struct host_traits traits = {0, 0, 0};
    ncclResult_t code = host_comm_check(comm, "CommSplit");
    if (!code && !newcomm)
        code = host_fail(ncclInvalidArgument, "CommSplit : newcomm argument is NULL");
    if (!code)
        code = host_observe32(&comm->revoked) ? host_comm_ensure_alive(comm, "CommSplit")
                                              : host_comm_ensure(comm, "CommSplit");
    if (!code)
        code = read_config(comm, config, &traits);
    if (newcomm)
        *newcomm = NULL;
    if (code)
        return host_group_poison(code);
    struct host_work local, *w = host_group_work(&local);
    if (!w)
        return ncclSystemError;
    return submit(w, host_split_set(w, comm, color, key, &traits), newcomm, "CommSplit");
}
HOST_EXPORT(ncclCommSplit);

/* ---- shrinking ------------------------------------------------------------------------------------- */

static int by_value(const void *a, const void *b) {
    int x = *(const int *)a, y = *(const int *)b;
    return (x > y) - (x < y);
}

/* Sorts the caller's list, as NCCL does. */
static ncclResult_t check_excluded(const struct ncclComm *c, int *list, int n) {
    for (int i = 0; i < n; i++)
        if (list[i] == c->rank)
            return host_fail(ncclInvalidArgument,
                "CommShrink : rank %d is in its own list of ranks to leave out; only the others call", c->rank);
    qsort(list, (size_t)n, sizeof *list, by_value);
    for (int i = 0; i < n; i++) {
        if (list[i] < 0 || list[i] >= c->nranks)
            return host_fail(ncclInvalidArgument, "CommShrink : there is no rank %d to leave out (ranks are 0..%d)",
                list[i], c->nranks - 1);
        if (i && list[i] == list[i - 1])
            return host_fail(ncclInvalidArgument, "CommShrink : rank %d is listed twice", list[i]);
    }
    return ncclSuccess;
}

/* End what another thread or a job has under way: it returns an error, and the communicator has failed. */
static ncclResult_t stop_calls(struct ncclComm *c) {
    if (!host_queue_drain(c, HOST_STOP_SHRINK, HOST_DRAIN_NS))
        return host_fail(ncclSystemError, "CommShrink : a call on the communicator does not return");
    host_comm_reopen(c, HOST_STOP_SHRINK);
    return ncclSuccess;
}

static ncclResult_t check_shrink(struct ncclComm *c, int *list, int n, ncclComm_t *newcomm, int flags) {
    ncclResult_t code = host_comm_check(c, "CommShrink");
    int abort = flags == NCCL_SHRINK_ABORT;
    if (!code && !newcomm)
        code = host_fail(ncclInvalidArgument, "CommShrink : newcomm argument is NULL");
    if (!code && !list)
        code = host_fail(ncclInvalidArgument, "CommShrink : excludeRanksList argument is NULL");
    if (!code && n <= 0)
        code = host_fail(ncclInvalidArgument, "CommShrink : %d ranks to leave out", n);
    if (!code && flags != NCCL_SHRINK_DEFAULT && !abort)
        code = host_fail(ncclInvalidArgument, "CommShrink : invalid flags %d", flags);
    if (!code && host_group_holds(c))
        code = host_fail(ncclInvalidUsage, "CommShrink : the open group holds calls of this communicator");
    if (!code && abort && host_observe32(&c->life) == HOST_LIFE_LIVE)
        code = stop_calls(c);
    if (!code)
        code = abort || host_observe32(&c->revoked) ? host_comm_ensure_alive(c, "CommShrink")
                                                    : host_comm_ensure(c, "CommShrink");
    return code ? code : check_excluded(c, list, n);
}

ncclResult_t pncclCommShrink(ncclComm_t comm, int *excludeRanksList, int excludeRanksCount, ncclComm_t *newcomm,
    ncclConfig_t *config, int shrinkFlags) {
    struct host_traits traits = {0, 0, 0};
    ncclResult_t code = check_shrink(comm, excludeRanksList, excludeRanksCount, newcomm, shrinkFlags);
    if (!code)
        code = read_config(comm, config, &traits);
    if (newcomm)
        *newcomm = NULL;
    if (code)
        return host_group_poison(code);
    struct host_work local, *w = host_group_work(&local);
    if (!w)
        return ncclSystemError;
    return submit(
        w, host_shrink_set(w, comm, excludeRanksList, excludeRanksCount, &traits), newcomm, "CommShrink");
}
HOST_EXPORT(ncclCommShrink);

/* ---- growing --------------------------------------------------------------------------------------- */

ncclResult_t pncclCommGetUniqueId(ncclComm_t comm, ncclUniqueId *uniqueId) {
    ncclResult_t code = host_comm_check(comm, "ncclCommGetUniqueId");
    if (!code && !uniqueId)
        code = host_fail(ncclInvalidArgument, "ncclCommGetUniqueId : uniqueId argument is NULL");
    if (!code)
        code = host_comm_ensure(comm, "ncclCommGetUniqueId");
    if (!code && getenv("NCCL_COMM_ID"))
        code = host_fail(ncclInvalidUsage, "ncclCommGetUniqueId : not with NCCL_COMM_ID set");
    return code ? code : pncclGetUniqueId(uniqueId);
}
HOST_EXPORT(ncclCommGetUniqueId);

/* The place of one who has no parent. */
static ncclResult_t check_newcomer(int nranks, const ncclUniqueId *id, int rank) {
    if (rank < 0)
        return host_fail(ncclInvalidArgument, "ncclCommGrow: new ranks must pass valid rank >= 0, got %d", rank);
    if (!id)
        return host_fail(ncclInvalidArgument, "ncclCommGrow: new ranks must pass non-NULL uniqueId");
    if (rank >= nranks)
        return host_fail(ncclInvalidArgument, "ncclCommGrow: new rank %d exceeds total ranks %d", rank, nranks);
    return host_api_check_id("CommGrow", id);
}

static ncclResult_t check_grow(const struct ncclComm *c, int nranks, const ncclUniqueId *id, int rank) {
    ncclResult_t code = c ? host_comm_check(c, "CommGrow") : ncclSuccess;
    if (!code && c)
        code = host_comm_ensure(c, "CommGrow");
    if (!code && nranks <= 0)
        code = host_fail(ncclInvalidArgument, "ncclCommGrow: total ranks must be positive, got %d", nranks);
    if (!code && nranks > HOST_MAX_RANKS)
        code = host_fail(ncclInvalidArgument, "CommGrow : %d ranks; the host library serves at most %d", nranks,
            HOST_MAX_RANKS);
    if (code || !c)
        return code ? code : check_newcomer(nranks, id, rank);
    if (nranks <= c->nranks)
        return host_fail(ncclInvalidArgument, "ncclCommGrow: total ranks %d is less than current ranks %d", nranks,
            c->nranks);
    if (rank != -1)
        return host_fail(
            ncclInvalidArgument, "ncclCommGrow: an existing rank keeps its rank and passes -1, got %d", rank);
    return id ? host_api_check_id("CommGrow", id) : ncclSuccess;
}

ncclResult_t pncclCommGrow(ncclComm_t comm, int nRanks, const ncclUniqueId *uniqueId, int rank,
    ncclComm_t *newcomm, ncclConfig_t *config) {
    struct host_creation how = {.device = rank};
    if (!newcomm)
        return host_group_poison(ncclInvalidArgument); /* NCCL says nothing either */
    ncclResult_t code = check_grow(comm, nRanks, uniqueId, rank);
    if (!code)
        code = read_config(comm, config, &how.traits);
    *newcomm = NULL;
    if (code)
        return host_group_poison(code);
    if (!comm)
        return host_api_create(&how, newcomm, nRanks, rank, 1, uniqueId);
    struct host_work local, *w = host_group_work(&local);
    if (!w)
        return ncclSystemError;
    const uint8_t *id = uniqueId ? (const uint8_t *)uniqueId->internal : NULL;
    return submit(w, host_grow_set(w, comm, nRanks, id, &how.traits), newcomm, "CommGrow");
}
HOST_EXPORT(ncclCommGrow);
