/* Collectives and messages: the exported functions and their argument checks.
 *
 * The checks run in NCCL's order (communicator, readiness, root, type, operation; then nothing if the count
 * of a collective is 0; then the type of a user's operation), because which error a call with two mistakes
 * gets is part of NCCL's behaviour. What NCCL leaves to the GPU comes last: null pointers and streams. No
 * state.
 */
#include <string.h>

#include "api.h"

enum { FORTRAN_BIT = 0x100 };

static const char *name_of(const struct host_call *call) {
    return HOST_ROWS[call->kind].name;
}

static int is_message(const struct host_call *call) {
    return call->kind == HOST_SEND || call->kind == HOST_RECV;
}

static struct host_userop *userop(const struct ncclComm *c, int op) {
    int i = host_op_index(c, op);
    return i >= 0 ? &c->ops[i] : NULL;
}

static ncclResult_t check_arguments(const struct ncclComm *c, const struct host_call *call, int op) {
    const char *name = name_of(call);
    if (call->root < 0 || call->root >= c->nranks)
        return host_fail(ncclInvalidArgument, "%s : invalid root %d (root should be in the 0..%d range)", name,
            call->root, c->nranks - 1);
    if (call->dtype < 0 || call->dtype >= ncclNumTypes)
        return host_fail(ncclInvalidArgument, "%s : invalid type %d", name, call->dtype);
    if (op < 0)
        return host_fail(ncclInvalidArgument, "%s : invalid reduction operation %d", name, op);
    if (op >= ncclNumOps && !userop(c, op))
        return host_fail(
            ncclInvalidArgument, "%s : reduction operation %d unknown to this communicator", name, op);
    return ncclSuccess;
}

static ncclResult_t check_pointers(const struct ncclComm *c, const struct host_call *call) {
    const struct host_row *row = &HOST_ROWS[call->kind];
    int at_root = call->root == c->rank;
    int sends = call->kind != HOST_RECV && (!row->from_root || at_root);
    int receives = call->kind != HOST_SEND && (!row->to_root || at_root);
    if (sends && !call->send)
        return host_fail(ncclInvalidArgument, "%s : sendbuff (nil) is not a valid pointer", row->name);
    if (receives && !call->recv)
        return host_fail(ncclInvalidArgument, "%s : recvbuff (nil) is not a valid pointer", row->name);
    size_t blocks = row->spreads || row->gathers ? (size_t)c->nranks : 1;
    if (call->count > SIZE_MAX / 2 / blocks / host_dtype_size(call->dtype))
        return host_fail(ncclInvalidArgument, "%s : count %zu is more than there is memory", row->name,
            call->count);
    return ncclSuccess;
}

/* The operation as the kernels take it. A user's operation is copied: its handle may be destroyed as soon
 * as this call returns, also inside a group. */
static ncclResult_t set_operation(const struct ncclComm *c, struct host_call *call, int op) {
    call->op.kind = op;
    if (op >= ncclNumOps) {
        const struct host_userop *user = userop(c, op);
        if (user->dtype != call->dtype)
            return host_fail(ncclInvalidArgument,
                "Data type supplied to user-created ncclRedOp_t does not match type given to reduction "
                "operation");
        call->op = user->op;
        call->scalar = user->scalar;
    }
    call->op.nranks = c->nranks;
    if (op == ncclAvg)
        host_scale_for_avg(call->dtype, &call->op);
    return ncclSuccess;
}

ncclResult_t host_api_check_stream(const char *name, cudaStream_t stream) {
    if (!host_is_queue((uintptr_t)stream) || host_queue_exists((uintptr_t)stream))
        return ncclSuccess;
    return host_fail(ncclInvalidArgument,
        "%s : unknown stream %p; the host library knows 0, 1 (legacy), 2 (per thread) and what "
        "pyncclHostStreamCreate has made", name, (void *)stream);
}

static ncclResult_t check_call(struct ncclComm *c, struct host_call *call, int op, cudaStream_t stream) {
    ncclResult_t code = check_arguments(c, call, op);
    if (code || (call->count == 0 && !is_message(call)))
        return code;
    if (HOST_ROWS[call->kind].reduces)
        code = set_operation(c, call, op);
    if (!code && call->count)
        code = check_pointers(c, call);
    call->stream = (uintptr_t)stream;
    return code ? code : host_api_check_stream(name_of(call), stream);
}

ncclResult_t host_api_stick(struct ncclComm *c, ncclResult_t code) {
    if (code && c->nonblocking) { /* whatever it was */
        host_comm_forget_told(c);
        host_comm_break(c, code, host_fail_text(), host_fail_text());
    }
    return code;
}

static ncclResult_t check(struct ncclComm *c, struct host_call *call, int op, cudaStream_t stream) {
    ncclResult_t code = host_comm_check(c, name_of(call));
    if (!code)
        code = host_comm_ensure(c, name_of(call));
    if (code)
        return code;
    return host_api_stick(c, check_call(c, call, op, stream));
}

static ncclResult_t check_message(struct ncclComm *c, const struct host_call *call) {
    if (call->root == c->rank && !host_group_open())
        return host_fail(ncclInvalidUsage,
            "%s : rank %d exchanges with itself outside of a group; put the send and its receive between "
            "ncclGroupStart and ncclGroupEnd", name_of(call), c->rank);
    return ncclSuccess;
}

static void log_call(struct ncclComm *c, const struct host_call *call, int op, cudaStream_t stream) {
    host_log(HOST_LOG_INFO,
        "%s: opCount %llx sendbuff %p recvbuff %p count %zu datatype %d op %d root %d comm %p [nranks=%d] "
        "stream %p", name_of(call), (unsigned long long)host_peek(&c->seq), call->send, call->recv, call->count,
        call->dtype, op, call->root, (const void *)c, c->nranks, (void *)stream);
}

ncclResult_t host_api_call(
    struct ncclComm *comm, struct host_call *call, int datatype, int op, cudaStream_t stream) {
    call->dtype = datatype & ~FORTRAN_BIT;
    call->fortran = (datatype & FORTRAN_BIT) != 0;
    ncclResult_t code = check(comm, call, op, stream);
    if (code)
        return host_group_poison(code);
    if (host_log_on(HOST_LOG_INFO))
        log_call(comm, call, op, stream);
    if (is_message(call)) {
        if ((code = check_message(comm, call)) != ncclSuccess)
            return host_group_poison(code);
    } else if (call->count == 0) {
        return ncclSuccess;
    }
    call->nbytes = call->count * host_dtype_size(call->dtype);
    struct host_work local, *w = host_group_work(&local);
    if (!w)
        return ncclSystemError;
    host_work_set(w,
        call->kind == HOST_SEND ? HOST_WORK_SEND : call->kind == HOST_RECV ? HOST_WORK_RECV : HOST_WORK_COLLECTIVE,
        comm, call);
    return host_group_submit(w);
}

/* ---- the functions --------------------------------------------------------------------------------- */

ncclResult_t pncclAllReduce(const void *sendbuff, void *recvbuff, size_t count, ncclDataType_t datatype,
    ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream) {
    struct host_call call = {.kind = HOST_ALL_REDUCE, .send = sendbuff, .recv = recvbuff, .count = count};
    return host_api_call(comm, &call, (int)datatype, (int)op, stream);
}
HOST_EXPORT(ncclAllReduce);

ncclResult_t pncclReduce(const void *sendbuff, void *recvbuff, size_t count, ncclDataType_t datatype,
    ncclRedOp_t op, int root, ncclComm_t comm, cudaStream_t stream) {
    struct host_call call = {
        .kind = HOST_REDUCE, .send = sendbuff, .recv = recvbuff, .count = count, .root = root};
    return host_api_call(comm, &call, (int)datatype, (int)op, stream);
}
HOST_EXPORT(ncclReduce);

ncclResult_t pncclBroadcast(const void *sendbuff, void *recvbuff, size_t count, ncclDataType_t datatype,
    int root, ncclComm_t comm, cudaStream_t stream) {
    struct host_call call = {
        .kind = HOST_BROADCAST, .send = sendbuff, .recv = recvbuff, .count = count, .root = root};
    return host_api_call(comm, &call, (int)datatype, ncclSum, stream);
}
HOST_EXPORT(ncclBroadcast);

ncclResult_t pncclBcast(
    void *buff, size_t count, ncclDataType_t datatype, int root, ncclComm_t comm, cudaStream_t stream) {
    return pncclBroadcast(buff, buff, count, datatype, root, comm, stream);
}
HOST_EXPORT(ncclBcast);

ncclResult_t pncclAllGather(const void *sendbuff, void *recvbuff, size_t sendcount, ncclDataType_t datatype,
    ncclComm_t comm, cudaStream_t stream) {
    struct host_call call = {.kind = HOST_ALL_GATHER, .send = sendbuff, .recv = recvbuff, .count = sendcount};
    return host_api_call(comm, &call, (int)datatype, ncclSum, stream);
}
HOST_EXPORT(ncclAllGather);

ncclResult_t pncclReduceScatter(const void *sendbuff, void *recvbuff, size_t recvcount,
    ncclDataType_t datatype, ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream) {
    struct host_call call = {
        .kind = HOST_REDUCE_SCATTER, .send = sendbuff, .recv = recvbuff, .count = recvcount};
    return host_api_call(comm, &call, (int)datatype, (int)op, stream);
}
HOST_EXPORT(ncclReduceScatter);

ncclResult_t pncclAlltoAll(const void *sendbuff, void *recvbuff, size_t count, ncclDataType_t datatype,
    ncclComm_t comm, cudaStream_t stream) {
    struct host_call call = {.kind = HOST_ALL_TO_ALL, .send = sendbuff, .recv = recvbuff, .count = count};
    return host_api_call(comm, &call, (int)datatype, ncclSum, stream);
}
HOST_EXPORT(ncclAlltoAll);

ncclResult_t pncclGather(const void *sendbuff, void *recvbuff, size_t count, ncclDataType_t datatype,
    int root, ncclComm_t comm, cudaStream_t stream) {
    struct host_call call = {
        .kind = HOST_GATHER, .send = sendbuff, .recv = recvbuff, .count = count, .root = root};
    return host_api_call(comm, &call, (int)datatype, ncclSum, stream);
}
HOST_EXPORT(ncclGather);

ncclResult_t pncclScatter(const void *sendbuff, void *recvbuff, size_t count, ncclDataType_t datatype,
    int root, ncclComm_t comm, cudaStream_t stream) {
    struct host_call call = {
        .kind = HOST_SCATTER, .send = sendbuff, .recv = recvbuff, .count = count, .root = root};
    return host_api_call(comm, &call, (int)datatype, ncclSum, stream);
}
HOST_EXPORT(ncclScatter);

ncclResult_t pncclSend(const void *sendbuff, size_t count, ncclDataType_t datatype, int peer, ncclComm_t comm,
    cudaStream_t stream) {
    struct host_call call = {.kind = HOST_SEND, .send = sendbuff, .count = count, .root = peer};
    return host_api_call(comm, &call, (int)datatype, ncclSum, stream);
}
HOST_EXPORT(ncclSend);

ncclResult_t pncclRecv(
    void *recvbuff, size_t count, ncclDataType_t datatype, int peer, ncclComm_t comm, cudaStream_t stream) {
    struct host_call call = {.kind = HOST_RECV, .recv = recvbuff, .count = count, .root = peer};
    return host_api_call(comm, &call, (int)datatype, ncclSum, stream);
}
HOST_EXPORT(ncclRecv);
