/* What the exported functions share: visibility, and the checks before a call becomes work. */
#ifndef PYNCCL_HOST_API_H
#define PYNCCL_HOST_API_H

#include "group.h"
#include "queue.h"

/* Every function of NCCL exists twice: pncclX, and ncclX as a weak alias of it, so that a profiler can put
 * its own ncclX in front and call pncclX. */
#define HOST_DECLARE(ret, name, version, args) \
    __attribute__((visibility("default"))) ret name args; \
    __attribute__((visibility("default"))) ret p##name args;
#define HOST_DECLARE_EXTENSION(ret, name, version, args) __attribute__((visibility("default"))) ret name args;
NCCL_SYMBOLS(HOST_DECLARE)
HOST_SYMBOLS(HOST_DECLARE_EXTENSION)

#define HOST_EXPORT(name) \
    extern __typeof__(p##name) name __attribute__((weak, alias("p" #name), visibility("default")))

/* How long a call that must empty a communicator waits for those inside. */
#define HOST_DRAIN_NS UINT64_C(5000000000)

struct host_creation {
    int device;
    struct host_traits traits;
};

/* Was this id made by the host library? */
ncclResult_t host_api_check_id(const char *what, const ncclUniqueId *id);
/* Create a communicator whose arguments have been checked, now or with the open group. */
ncclResult_t host_api_create(const struct host_creation *how, ncclComm_t *newcomm, int nranks, int rank,
    int nids, const ncclUniqueId *ids);

/* Index of a user's operation in c's table, or -1 if c has no such operation. */
int host_op_index(const struct ncclComm *c, int op);

/* An error in the arguments of an operation stays with a nonblocking communicator, as in NCCL. Returns it. */
ncclResult_t host_api_stick(struct ncclComm *c, ncclResult_t code);

/* 0, 1, 2, or a stream of this process. */
ncclResult_t host_api_check_stream(const char *name, cudaStream_t stream);

/* The arguments of a collective or message in NCCL's order of checks, then run or queue it. `op` counts only
 * for kinds that reduce. */
ncclResult_t host_api_call(
    struct ncclComm *comm, struct host_call *call, int datatype, int op, cudaStream_t stream);

#endif
