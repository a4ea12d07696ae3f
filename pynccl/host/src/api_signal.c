/* One-sided communication: the exported functions and their argument checks.
 *
 * The checks run in NCCL's order: communicator, readiness, peer, type; then context, index, flags; then windows.
 * Behind them come three that NCCL does not make, and whose mistakes would write to or wait for something
 * else: a put beyond the end of the peer's window, a negative number of descriptors, and a peer in one that does
 * not exist. No state.
 */
#include "api.h"
#include "window.h"

static ncclResult_t begin(struct ncclComm *c, const char *name) {
    ncclResult_t code = host_comm_check(c, name);
    return code ? code : host_comm_ensure(c, name);
}

static ncclResult_t check_counter(const struct ncclComm *c, int index, int context) {
    if (context < 0 || context >= c->contexts)
        return host_fail(ncclInvalidArgument, "Context %d is invalid (must be in [0, %d))", context, c->contexts);
    if (index < 0 || index >= c->signals)
        return host_fail(ncclInvalidArgument, "Signal index %d is invalid (must be in [0, %d))", index, c->signals);
    return ncclSuccess;
}

/* ---- putting and signalling -------------------------------------------------------------------------- */

static ncclResult_t check_peer(
    const struct ncclComm *c, const struct host_call *call, const struct host_onesided *o, unsigned flags) {
    const char *name = HOST_ROWS[call->kind].name;
    if (call->root < 0 || call->root >= c->nranks)
        return host_fail(ncclInvalidArgument, "%s : invalid root %d (root should be in the 0..%d range)", name,
            call->root, c->nranks - 1);
    if (call->dtype < 0 || call->dtype >= ncclNumTypes)
        return host_fail(ncclInvalidArgument, "%s : invalid type %d", name, call->dtype);
    ncclResult_t code = check_counter(c, o->index, o->context);
    if (!code && flags)
        code = host_fail(ncclInvalidArgument, "%s : flags %#x are invalid (must be 0)", name, flags);
    return code;
}

static ncclResult_t check_windows(struct ncclComm *c, struct host_call *call, const struct host_onesided *o) {
    struct host_target t;
    size_t esize = host_dtype_size(call->dtype);
    if (!o->window)
        return host_fail(ncclInvalidArgument, "PutSignal : peerWin is NULL");
    if (!call->send)
        return host_fail(ncclInvalidArgument, "srcBuff is NULL");
    if (call->count > SIZE_MAX / 2 / esize)
        return host_fail(ncclInvalidArgument, "PutSignal : count %zu is more than there is memory", call->count);
    call->nbytes = call->count * esize;
    if (!host_window_holds(c, call->send, call->nbytes, NCCL_WIN_COLL_SYMMETRIC))
        return host_fail(ncclInvalidArgument, "srcWinHost is not in a valid symmetric window");
    if (!host_window_find(c, o->window, call->root, &t))
        return host_fail(
            ncclInvalidArgument, "PutSignal : %p is not a window of this communicator", (void *)o->window);
    if (o->offset > t.size || call->nbytes > t.size - o->offset)
        return host_fail(ncclInvalidArgument,
            "PutSignal : %zu bytes at offset %zu go beyond the window of rank %d, which has %zu", call->nbytes,
            o->offset, call->root, t.size);
    return ncclSuccess;
}

/* For both; a signal has nothing to put. */
static ncclResult_t put(
    struct ncclComm *c, struct host_call *call, const struct host_onesided *o, unsigned flags, cudaStream_t stream) {
    const char *name = HOST_ROWS[call->kind].name;
    int puts = call->kind == HOST_PUT_SIGNAL;
    ncclResult_t code = begin(c, name);
    if (code)
        return host_group_poison(code);
    code = check_peer(c, call, o, flags);
    if (!code && puts)
        code = check_windows(c, call, o);
    if (!code)
        code = host_api_check_stream(name, stream);
    if (code)
        return host_group_poison(host_api_stick(c, code));
    if (host_log_on(HOST_LOG_INFO))
        host_log(HOST_LOG_INFO, "%s: buff %p count %zu datatype %d peer %d window %p offset %zu signal %d context %d "
            "comm %p [nranks=%d] stream %p", name, call->send, call->count, call->dtype, call->root,
            (void *)o->window, o->offset, o->index, o->context, (void *)c, c->nranks, (void *)stream);
    call->stream = (uintptr_t)stream;
    struct host_work local, *w = host_group_work(&local);
    if (!w)
        return ncclSystemError;
    host_work_set(w, puts ? HOST_WORK_PUT : HOST_WORK_SIGNAL, c, call);
    w->u.onesided = *o;
    return host_group_submit(w);
}

ncclResult_t pncclPutSignal(const void *localbuff, size_t count, ncclDataType_t datatype, int peer,
    ncclWindow_t peerWin, size_t peerWinOffset, int sigIdx, int ctx, unsigned int flags, ncclComm_t comm,
    cudaStream_t stream) {
    struct host_call call = {
        .kind = HOST_PUT_SIGNAL, .send = localbuff, .count = count, .dtype = (int)datatype, .root = peer};
    struct host_onesided o = {peerWin, peerWinOffset, ctx, sigIdx};
    return put(comm, &call, &o, flags, stream);
}
HOST_EXPORT(ncclPutSignal);

ncclResult_t pncclSignal(
    int peer, int sigIdx, int ctx, unsigned int flags, ncclComm_t comm, cudaStream_t stream) {
    struct host_call call = {.kind = HOST_SIGNAL, .dtype = ncclInt8, .root = peer};
    struct host_onesided o = {NULL, 0, ctx, sigIdx};
    return put(comm, &call, &o, flags, stream);
}
HOST_EXPORT(ncclSignal);

/* ---- waiting ----------------------------------------------------------------------------------------- */

static ncclResult_t check_wait(
    const struct ncclComm *c, int n, const ncclWaitSignalDesc_t *all, cudaStream_t stream) {
    ncclResult_t code = ncclSuccess;
    if (!all || n <= 0)
        return host_fail(ncclInvalidArgument, "ncclWaitSignal: invalid arguments");
    for (int i = 0; i < n && !code; i++) {
        const ncclWaitSignalDesc_t *d = &all[i];
        if (d->opCnt <= 0)
            code = host_fail(ncclInvalidArgument,
                "ncclWaitSignal: descriptor %d: opCnt %d is invalid (must be above 0)", i, d->opCnt);
        if (!code)
            code = check_counter(c, d->sigIdx, d->ctx);
        if (!code && (d->peer < 0 || d->peer >= c->nranks))
            code = host_fail(ncclInvalidArgument,
                "ncclWaitSignal: descriptor %d: peer %d is invalid (must be in [0, %d))", i, d->peer, c->nranks);
    }
    return code ? code : host_api_check_stream("WaitSignal", stream);
}

static ncclResult_t submit_wait(struct ncclComm *c, int n, const ncclWaitSignalDesc_t *all, cudaStream_t stream) {
    struct host_call call = {.kind = HOST_WAIT_SIGNAL, .dtype = ncclInt8, .stream = (uintptr_t)stream};
    struct host_work local, *w = host_group_work(&local);
    if (!w)
        return ncclSystemError;
    host_work_set(w, HOST_WORK_WAIT, c, &call);
    struct host_waiting *waiting = &w->u.waiting;
    waiting->n = n;
    waiting->begun = waiting->arrived = 0;
    for (int i = 0; i < n; i++)
        waiting->await[i] = (struct host_await){
            (uint64_t)all[i].opCnt, all[i].peer, (uint16_t)all[i].ctx, (uint16_t)all[i].sigIdx};
    return host_group_submit(w);
}

ncclResult_t pncclWaitSignal(int nDesc, ncclWaitSignalDesc_t *signalDescs, ncclComm_t comm, cudaStream_t stream) {
    ncclResult_t code = begin(comm, "WaitSignal");
    if (code)
        return host_group_poison(code);
    code = check_wait(comm, nDesc, signalDescs, stream);
    if (code)
        return host_group_poison(host_api_stick(comm, code));
    if (nDesc <= HOST_AWAITS)
        return submit_wait(comm, nDesc, signalDescs, stream);
    /* One work holds so many; more of them are a group. */
    host_group_start();
    for (int at = 0; at < nDesc && !code; at += HOST_AWAITS)
        code = submit_wait(comm, nDesc - at < HOST_AWAITS ? nDesc - at : HOST_AWAITS, signalDescs + at, stream);
    ncclResult_t end = host_group_end();
    return code ? code : end;
}
HOST_EXPORT(ncclWaitSignal);
