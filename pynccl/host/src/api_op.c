/* User-made reduction operations (ncclRedOpCreatePreMulSum).
 *
 * A handle is ncclNumOps plus the index in its communicator's table, with the communicator's serial mixed in
 * above, so that a handle is unknown to every other communicator. The table belongs to whoever may use the
 * communicator; operations are not thread-safe, as in NCCL.
 */
#include <stdlib.h>
#include <string.h>

#include "api.h"

enum { INDEX_BITS = 14, SERIAL_BITS = 16 };

static int handle_of(const struct ncclComm *c, int index) {
    return ncclNumOps + (int)((c->serial & ((1u << SERIAL_BITS) - 1)) << INDEX_BITS) + index;
}

int host_op_index(const struct ncclComm *c, int op) {
    int index = (op - ncclNumOps) & ((1 << INDEX_BITS) - 1);
    return op >= ncclNumOps && index < c->nops && handle_of(c, index) == op && c->ops[index].live ? index : -1;
}

static int free_index(struct ncclComm *c) {
    for (int i = 0; i < c->nops; i++)
        if (!c->ops[i].live)
            return i;
    int more = c->nops ? 2 * c->nops : 8;
    struct host_userop *ops =
        more <= 1 << INDEX_BITS ? realloc(c->ops, (size_t)more * sizeof *ops) : NULL;
    if (!ops)
        return -1;
    memset(ops + c->nops, 0, (size_t)(more - c->nops) * sizeof *ops);
    int index = c->nops;
    c->ops = ops;
    c->nops = more;
    return index;
}

ncclResult_t pncclRedOpCreatePreMulSum(ncclRedOp_t *op, void *scalar, ncclDataType_t datatype,
    ncclScalarResidence_t residence, ncclComm_t comm) {
    ncclResult_t code = host_comm_check(comm, "ncclRedOpCreatePreMulSum");
    if (!code)
        code = host_comm_ensure(comm, "ncclRedOpCreatePreMulSum");
    if (code)
        return code;
    if (!op || !scalar)
        return host_fail(ncclInvalidArgument, "ncclRedOpCreatePreMulSum : %s argument is NULL",
            op ? "scalar" : "op");
    if ((unsigned)datatype >= ncclNumTypes) /* NCCL's own code for it */
        return host_fail(ncclInternalError, "ncclRedOpCreatePreMulSum : invalid type %d", (int)datatype);
    int index = free_index(comm);
    if (index < 0)
        return host_fail(ncclSystemError, "ncclRedOpCreatePreMulSum : too many operations");
    struct host_userop *user = &comm->ops[index];
    *user = (struct host_userop){.live = 1, .dtype = (int)datatype, .op = {.kind = HOST_OP_PREMUL}};
    if (residence == ncclScalarHostImmediate)
        memcpy(user->op.scalar, scalar, host_dtype_size((int)datatype));
    else
        user->scalar = scalar;
    *op = (ncclRedOp_t)handle_of(comm, index);
    return ncclSuccess;
}
HOST_EXPORT(ncclRedOpCreatePreMulSum);

ncclResult_t pncclRedOpDestroy(ncclRedOp_t op, ncclComm_t comm) {
    if ((int)op >= 0 && (int)op < ncclNumOps)
        return host_fail(ncclInvalidArgument, "ncclRedOpDestroy : operator is a NCCL builtin.");
    if ((int)op < 0)
        return host_fail(ncclInvalidArgument, "ncclRedOpDestroy :  operator is garbage.");
    if (!comm)
        return host_fail(ncclInvalidArgument, "ncclRedOpDestroy : invalid communicator passed.");
    ncclResult_t code = host_comm_check(comm, "ncclRedOpDestroy");
    if (code)
        return code;
    int index = host_op_index(comm, (int)op);
    if (index < 0)
        return host_fail(ncclInvalidArgument, "ncclRedOpDestroy : operator unknown to this communicator.");
    comm->ops[index].live = 0;
    return ncclSuccess;
}
HOST_EXPORT(ncclRedOpDestroy);
